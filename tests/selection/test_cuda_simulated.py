"""The CUDA selection kernels in numba's simulator: their logic, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")

KERNELS = ("wide", "sample", "window")
ALL_KEPT = 1024  # cells up to which every block is a candidate
HARD = [  # kind, cells, width, the tail block's score
    "rivals,3,2,nan",
    "rivals,203,103,-1e9",
    "rivals,202,201,-9e9",  # the tail block is the last choice, and one of its cells is chosen
    "rivals,1023,500,-3e9",
    "rivals,1027,103,-2e9",
    "rivals,1030,103,-2e9",
    "negative,1027,103,-inf",
    "negative,1100,500,0",
    "zeros,203,150,-1e9",
    "zeros,1027,400,nan",
    "adversarial,1027,400,inf",
    "gaps,203,150,0",
    "gaps,1030,103,0",  # few reach the bound
    "ascending,1039,103,0",  # the odd blocks after the last whole load are the best
    "ascending,4015,300,nan",
    "descending,1020,103,0",
    "descending,4015,103,0",
    "normal,8015,40,0",
    "normal,36500,103,0",  # more than a round of a window's loads, and more cells than there are scores
    "normal,4001,0,0",  # left out
    "normal,4001,700,0",  # more than a row of ids holds
    "equal,4103,2,-9e9",  # the tail block alone would do, but it is not the best
    "kept,8503,103,-9e9",  # what reaches the bound and the tail block would do, which does not reach it
]


def simulate(kernel, cases):
    """What simulate.py prints for the cases, as dicts."""
    env = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("simulate.py")), kernel, *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_are_the_references(kernel):
    kinds, lengths = ("levels", "equal", "adversarial"), (5, 103, 1027, 1030, 4001)
    results = simulate(kernel, [f"{kind},{cells},103,0" for kind in kinds for cells in lengths])
    assert len(results) == 15
    assert [r for r in results if not r["same"]] == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_of_hard_cases_are_the_references_and_short_ones_are_settled_without_wide(kernel):
    cases = [case for case in HARD if kernel != "wide" or int(case.split(",")[1]) < 2000]  # `wide` takes long
    results = simulate(kernel, cases)
    assert len(results) == len(cases)
    assert [r for r in results if not r["same"]] == []
    assert [r for r in results if r["case"][1] < ALL_KEPT + 4 and r["flag"]] == []


@pytest.mark.parametrize("kernel", ["sample", "window"])
def test_equal_scores_fall_back_to_wide_and_scattered_ones_do_not(kernel):
    equal, *scattered = simulate(kernel, ["equal,30003,103,0", "normal,30003,103,0", "negative,4012,103,0"])
    assert (equal["flag"], [r["flag"] for r in scattered]) == (1, [0, 0])
    assert all(r["same"] for r in (equal, *scattered))
