"""The scripts refuse what they cannot do before they work, in a line that names it; status 2."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import arguments  # noqa: E402

from strata_engine.backends import why_no_cuda  # noqa: E402

GPU = why_no_cuda() is None
NO_GPU = "no NVIDIA GPU answers"


def run(script: str, *args: object) -> tuple[int, str]:
    """(status, stderr) of a script."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(SCRIPTS / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "script, args, text",
    [
        ("bench_engine.py", ["nofile.gguf"], "nofile.gguf"),
        ("bench_engine.py", ["x.gguf", "--requests", "0"], "'0' is not a whole number from 1 to 512"),
        ("bench_engine.py", ["x.gguf", "--prompts=-1"], "'-1' is not a whole number of 1 or more"),
        ("bench_engine.py", ["x.gguf", "--json", "/nonexistent/x.json"], "/nonexistent/x.json cannot be written"),
        ("bench_engine.py", ["x.gguf", "--beside", "nofile.json"], "nofile.json holds no figures"),
        ("bench_daemon.py", ["--tokens", "1"], "'1' is not a whole number of 2 or more"),
        ("bench_sampler.py", ["--rows", "x"], "'x' is not a whole number of 1 or more"),
        ("topk_parity.py", ["1000", "8", "2", "0"], "'0' is not a whole number from 1 to 536870911"),
        ("topk_parity.py", ["1000", "8", "2", "999"], "CONTEXT 1000 is more than CAPACITY 999"),
        ("topk_parity.py", ["--cases", ""], "cannot read the cases of ''"),
        ("sampler_parity.py", ["--jobs", "100000"], "'100000' is not a whole number from 1 to 1024"),
    ],
)
def test_bad_arguments_are_named(script: str, args: list[str], text: str) -> None:
    status, errors = run(script, *args)
    assert status == 2
    assert text in errors and "Traceback" not in errors


@pytest.mark.skipif(GPU, reason="a GPU answers here")
@pytest.mark.parametrize(
    "script, args",
    [
        ("bench_sampler.py", ["--device", "cuda"]),
        ("bench_topk.py", []),
        ("topk_parity.py", ["1000", "--device", "cuda"]),
        ("sampler_parity.py", ["--device", "cuda"]),
    ],
)
def test_without_a_gpu_one_line_says_so(script: str, args: list[str]) -> None:
    pytest.importorskip("cuda.core", reason="needs the cuda extra")
    status, errors = run(script, *args)
    assert status == 2
    assert NO_GPU in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize("change", [{"u": "x"}, {"vocab": None}, {"logits_seed": None}, {"token": "x"}, {"kept": []}])
def test_a_damaged_sampler_case_is_no_mismatch(tmp_path, change: dict) -> None:
    cases = json.loads((SCRIPTS.parent / "tests" / "data" / "sampler.json").read_text())["cases"]
    case = next(case for case in cases if "u" in case) | change
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [case]}))
    status, errors = run("sampler_parity.py", "--cases", tmp_path / "cases.json")
    assert status == 2 and next(iter(change)) in errors


@pytest.mark.parametrize("change", [{"width": 1.5}, {"width": True}, {"sha256": None}, {"n_kv": 1 << 40}])
def test_a_damaged_top_k_case_is_no_mismatch(tmp_path, change: dict) -> None:
    case = json.loads((SCRIPTS.parent / "tests" / "data" / "block_topk.json").read_text())["cases"][20] | change
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [case]}))
    status, errors = run("topk_parity.py", "--cases", tmp_path / "cases.json", "--device", "cpu")
    assert status == 2 and "cannot read the cases" in errors


def test_an_engine_that_is_not_there_is_named(monkeypatch, tmp_path) -> None:
    import bench_daemon

    monkeypatch.setattr(bench_daemon, "STARTING_S", 0)
    with pytest.raises(arguments.UsageError, match=r"no engine answers at .*/s .*start it"):
        bench_daemon.await_ready(str(tmp_path / "s"))


@pytest.mark.parametrize("fault, text", [(MemoryError("a lot"), "a lot"), (arguments.UsageError("why"), "why")])
def test_a_known_fault_ends_in_one_line(monkeypatch, capsys, fault: Exception, text: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tool.py"])

    def main(_: object) -> None:
        raise fault

    with pytest.raises(SystemExit, match="2"):
        arguments.run(main)
    errors = capsys.readouterr().err
    assert errors.startswith("tool: ") and text in errors and len(errors.splitlines()) == 1


def test_a_fault_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        arguments.run(lambda _: 1 // 0)


def test_files_are_checked_before_the_work(tmp_path) -> None:
    assert arguments.out_file(str(tmp_path / "x")) == tmp_path / "x"
    for bad in (tmp_path, tmp_path / "no" / "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            arguments.out_file(str(bad))
