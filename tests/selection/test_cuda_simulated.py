"""The CUDA selection kernels in numba's simulator: their logic, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")


def simulate(kernel, kinds, cells):
    """What simulate.py prints for the cases, as dicts."""
    env = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("simulate.py")), kernel, kinds, cells]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kernel", ["wide", "sample", "window"])
def test_ids_are_the_references(kernel):
    results = simulate(kernel, "levels,equal,adversarial", "5,103,1027,1030,4001")
    assert len(results) == 15
    assert [r for r in results if not r["same"]] == []


@pytest.mark.parametrize("kernel", ["sample", "window"])
def test_equal_scores_fall_back_to_wide_and_normal_ones_do_not(kernel):
    equal, normal = simulate(kernel, "equal,normal", "30003")
    assert (equal["flag"], normal["flag"]) == (1, 0)
    assert equal["same"] and normal["same"]
