"""The parity script, and that its fixtures and cases notice what is broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strata_engine.params import GenParams
from strata_engine.rows import Choice, Draw
from strata_engine.sampling import cpu, fixtures
from strata_engine.sampling.cpu import CpuSampler

ROOT = Path(__file__).parents[2]


def run_script(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/sampler_parity.py", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def choose_on_cpu(logits, draws):
    return CpuSampler(logits.shape[1]).choose(logits, draws)


def altered_cases(path, alter):
    cases = json.loads((ROOT / "tests/data/sampler.json").read_text())["cases"][:3]
    alter(cases)
    path.write_text(json.dumps({"cases": cases}))
    return path


def test_selftest_passes():
    done = run_script("--selftest")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "36 of 36 cases match"


@pytest.mark.parametrize("field", ["token", "kept", "u"])
def test_a_wrong_answer_in_the_cases_is_a_mismatch(tmp_path, field):
    path = altered_cases(tmp_path / "cases.json", lambda cases: cases[0].update({field: 0.5 if field == "u" else 1}))
    done = run_script("--cases", path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "2 of 3 cases match"


@pytest.mark.parametrize("arguments", [("--cases", "missing.json"), ("--device", "tpu"), ("extra",), ("--vocab", "0")])
def test_bad_arguments_exit_2(arguments):
    assert run_script(*arguments).returncode == 2


def test_a_file_without_cases_exits_2(tmp_path):
    assert run_script("--cases", altered_cases(tmp_path / "cases.json", list.clear)).returncode == 2


@pytest.mark.parametrize(
    "change",
    [
        {"params": {"draw": 0, "top_k": 0}},
        {"params": {"draw": 0, "temperature": "hot"}},
        {"params": {"draw": 0, "temperature": 1.0}},
        {"params": {"draw": -1}},
        {"params": {"draw": 0, "unknown": 1}},
        {"history": [8]},
    ],
)
def test_a_damaged_case_is_refused(change):
    case = {"vocab": 8, "logits_seed": 1, "scale": 1.0, "params": {"draw": 0}, "token": 1}
    assert fixtures.Case.parse(case).token == 1
    with pytest.raises((LookupError, TypeError, ValueError)):
        fixtures.Case.parse(case | change)


def test_a_damaged_case_exits_2(tmp_path):
    done = run_script("--cases", altered_cases(tmp_path / "cases.json", lambda cases: cases[1].update(history=[-1])))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sampler_parity: --cases") and "Traceback" not in done.stderr


@pytest.mark.parametrize("fixture", fixtures.FIXTURES, ids=lambda fixture: fixture.name)
def test_fixture_matches_on_the_cpu(fixture):
    assert fixture.run(choose_on_cpu) == ""


@pytest.mark.parametrize("fixture", fixtures.FIXTURES, ids=lambda fixture: fixture.name)
def test_fixture_refuses_a_constant_token(fixture):
    def constant(logits, draws):
        return [Choice(2, -1.0, ()) for _ in draws]

    assert fixture.run(constant) != ""


def test_a_fixture_that_sees_nothing_is_blind():
    blind = fixtures.Fixture("blind", lambda choose: "", (fixtures.reference,))
    assert blind.run(fixtures.reference).startswith("blind")


WRONG_KERNELS = {
    "keep": lambda values, count, *_: count,
    "pick": lambda *_: 0,
    "penalise": lambda *_: 0,
    "uniform": lambda *_: 0.5,
    "top_k": lambda *_: 0,
}


@pytest.fixture
def python_kernels(monkeypatch):
    """The kernels of the chain as plain Python, so that one can be replaced."""
    for name, kernel in vars(cpu).copy().items():
        if hasattr(kernel, "py_func"):
            monkeypatch.setattr(cpu, name, kernel.py_func)
    return monkeypatch


def mixed_rows():
    params = GenParams(temperature=0.9, top_p=0.8, min_p=0.05, penalty_present=2.0, seed=1)
    logits = fixtures.noise(1, 20, 50) * np.float32(2)
    return logits, [Draw(params, i, np.arange(25, dtype=np.int32)) for i in range(20)]


def test_python_kernels_match(python_kernels):
    assert fixtures.like_reference(choose_on_cpu, *mixed_rows()) == ""


@pytest.mark.parametrize("kernel", WRONG_KERNELS)
def test_a_broken_kernel_is_noticed(kernel, python_kernels):
    python_kernels.setattr(cpu, kernel, WRONG_KERNELS[kernel])
    assert fixtures.like_reference(choose_on_cpu, *mixed_rows()) != ""
