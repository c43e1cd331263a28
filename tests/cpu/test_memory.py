"""The resident size."""

import subprocess
import sys
from pathlib import Path

import pytest

DROP = """
import re, numba
from strata_engine.backends.cpu.memory import drop_compiler_code

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

numba.njit(lambda x: x + 1)(1)
before = resident()
drop_compiler_code()
after = resident()
assert numba.njit(lambda x: x + 2)(1) == 3, "the compiler still works"
print(before - after)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_the_compilers_code_is_let_go_and_comes_back():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", DROP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000, "kilobytes"
