"""Where compiled kernels are kept."""

import os
import subprocess
import sys

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
