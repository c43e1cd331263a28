"""scripts/topk_parity.py: its last line and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "data" / "block_topk.json"


def parity(*args, **environment):
    """(exit status, last line of stdout) of the script."""
    command = [sys.executable, str(ROOT / "scripts" / "topk_parity.py"), *map(str, args)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    return done.returncode, (done.stdout.splitlines() or [""])[-1]


def test_a_prompt_call_matches():
    assert parity(5001, 16, 1, "--prompt", "--device", "cpu") == (0, "8 of 8 cases match")


def test_mixed_contexts_in_a_large_capacity_match():
    assert parity(3000, 8, 1, 9000, "--device", "cpu") == (0, "8 of 8 cases match")


def test_recorded_cases_match():
    assert parity("--cases", CASES, "--device", "cpu") == (0, "49 of 49 cases match")


def test_a_wrong_recorded_answer_is_a_mismatch(tmp_path):
    entry = json.loads(CASES.read_text())["cases"][20] | {"sha256": "0" * 64}
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [entry]}))
    assert parity("--cases", tmp_path / "cases.json", "--device", "cpu") == (1, "0 of 1 cases match")


def test_bad_arguments_exit_with_2():
    assert parity()[0] == 2
    assert parity(0)[0] == 2
    assert parity(100, 1, 1, 50)[0] == 2
    assert parity("--cases", "/nonexistent.json")[0] == 2
    assert parity("--selftest", "--prompt")[0] == 2


@pytest.mark.parametrize("text", ['{"cases": []}', "[1]"])
def test_a_damaged_file_of_cases_exits_with_2(tmp_path, text):
    (tmp_path / "cases.json").write_text(text)
    assert parity("--cases", tmp_path / "cases.json", "--device", "cpu") == (2, "")


@pytest.mark.parametrize("change", [{"n_kv": "many"}, {"width": -5}, {"n_kv": 100}])
def test_a_damaged_case_exits_with_2(tmp_path, change):
    entry = json.loads(CASES.read_text())["cases"][20] | change
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [entry]}))
    assert parity("--cases", tmp_path / "cases.json", "--device", "cpu") == (2, "")


@pytest.mark.parametrize("arguments", [(100,), ("--cases", CASES)])
def test_a_missing_gpu_exits_with_2(arguments):
    assert parity(*arguments, "--device", "cuda", CUDA_VISIBLE_DEVICES="") == (2, "")
