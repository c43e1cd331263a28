"""Where compiled kernels are kept."""

import os
import resource
import subprocess
import sys

import pytest

SAY = """
import numba.core.config as c, strata_engine.jit as j
print(c.CACHE_DIR)
print(j.njit(cache=True)(lambda: 1)())
"""


def say(**environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    env.pop("NUMBA_CACHE_DIR", None)
    return subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, text=True, timeout=60)


def test_kernels_lie_in_the_users_cache(tmp_path):
    done = say(XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith(str(tmp_path / "strata" / "kernels")), done.stderr


def test_a_cache_that_cannot_be_written_costs_time_not_the_start(tmp_path):
    done = say(XDG_CACHE_HOME="/proc/nowhere")
    assert done.returncode == 0 and done.stdout.split()[-1] == "1", done.stderr
    assert "compiled at every start" in done.stderr


ADD = """
import sys, logging
sys.path.insert(0, sys.argv[1])
logging.basicConfig(format="%(levelname)s %(message)s")
from kernels import add
print(add(1, 2), sum(add.stats.cache_hits.values()))
"""
KERNELS = """
from strata_engine.jit import njit

@njit(nogil=True, cache=True)
def add(a, b):
    return a + b
"""


@pytest.fixture
def add(tmp_path):
    """Call a cached kernel in a process of its own; `most`: how large a file may become, in bytes."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("NUMBA_CACHE_DIR", None)

    def run(most: int | None = None) -> subprocess.CompletedProcess[str]:
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))) if most else None
        command = [sys.executable, "-c", ADD, str(tmp_path)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, preexec_fn=limit)

    return run


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80\x05 no pickle", None])
def test_a_damaged_cache_is_compiled_anew_and_replaced(add, tmp_path, ending, content):
    assert add().stdout == "3 0\n"
    (path,) = (tmp_path / "strata" / "kernels").rglob(f"*.{ending}")
    path.write_bytes(path.read_bytes()[:-20] if content is None else content)
    done = add()
    assert done.stdout == "3 0\n", done.stderr
    assert "compiled anew" in done.stderr
    done = add()
    assert (done.stdout, done.stderr) == ("3 1\n", "")


def test_a_full_disk_costs_time_not_the_start(add):
    done = add(most=100)
    assert done.stdout == "3 0\n", done.stderr
    assert "cannot be cached" in done.stderr
