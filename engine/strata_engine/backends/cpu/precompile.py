"""Compile the CPU kernels into the disk cache in a process of its own.

A compiler leaves some 300 MB behind in the process that used it. So a first start lets a child compile, and loads the
result like every later start. Where nothing can be cached, or the child fails, the engine compiles for itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numba
import numpy as np

from ...jit import kernel_cache
from ...sampling.cpu import CpuSampler
from .forward import Buffers, Sizes, run_step

CELL_TYPES = {"f32": np.float32, "f16": np.uint16}


def ensure_compiled(kv: str) -> None:
    """Return when the kernels for cells of type `kv` are in the cache, or cannot be."""
    mark = kernel_cache() / f"cpu-{kv}"
    if mark.exists() or not os.access(mark.parent, os.W_OK):
        return
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-m", __name__, kv], env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode == 0:
        with suppress(OSError):  # a full disk: the kernels are not there either
            mark.touch()


def compile_all(kv: str) -> None:
    """Compile every kernel for the types, not the values, that a backend calls it with."""
    numbers: Any = [0] * len(Sizes._fields)
    sizes = Sizes(*numbers)._replace(rms_eps=np.float32(0), q_scale=np.float32(0))
    floats, ints = np.zeros(0, np.float32), np.zeros(0, np.int32)
    cells = np.zeros(0, CELL_TYPES[kv])
    buffers = Buffers(*[floats] * len(Buffers._fields))._replace(
        u8=np.zeros(0, np.uint8),
        i8=np.zeros(0, np.int8),
        u16=np.zeros(0, np.uint16),
        i16=np.zeros(0, np.int16),
        matrices=np.zeros(0, np.int64),
        keys=cells,
        values=cells,
    )
    arguments = (0, 1, np.zeros(0, np.int64), sizes, buffers, ints, ints, ints, ints, np.zeros((0, 2), np.int32))
    run_step.compile(tuple(numba.typeof(argument) for argument in arguments))
    CpuSampler(1).warm_up()


if __name__ == "__main__":
    compile_all(sys.argv[1])
