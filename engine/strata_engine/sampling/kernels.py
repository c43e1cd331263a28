"""The kernels of the GPU sampler, put together from their stages, and what it takes to compile them.

The chain is two launches, `candidates` and `merge`, which take the same arguments. A row that is greedy runs through
both, too: where every row of a step is, and none is penalised or biased or wants log-probabilities, the backend's
arg-max is all there is to run.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from .candidates import candidate_stage
from .merge import merge_stage
from .ptx import SIMULATED
from .tables import Outcome, Requests, Scratch, Shape


def candidates_kernel(shape: Shape) -> Callable[..., None]:
    """The candidate stage of the chain. Grid: (blocks, rows); block: shape.threads. See candidates.py."""
    stage = candidate_stage(shape)

    def kernel(logits, vocab, requests, scratch, outcome):
        stage(logits, vocab, requests, scratch)

    return kernel


def merge_kernel(shape: Shape) -> Callable[..., None]:
    """The merge stage of the chain. Grid: rows; block: shape.threads. See merge.py."""
    stage = merge_stage(shape)

    def kernel(logits, vocab, requests, scratch, outcome):
        stage(logits, vocab, requests, scratch, outcome)

    return kernel


KERNELS: dict[str, Callable[[Shape], Callable[..., None]]] = {
    "candidates": candidates_kernel,
    "merge": merge_kernel,
}


THREADS_RESIDENT = 1024  # a multiprocessor, at least: 64 registers each


@cache
def _sources() -> str:
    """A digest of the kernels' sources, which goes into their names and so into those of the compiled files."""
    digest = hashlib.sha256()
    for name in ("candidates", "kernels", "merge", "philox", "ptx", "tables"):
        digest.update(pathlib.Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def _build(name: str, shape: Shape) -> tuple[Callable[..., None], Any]:
    return KERNELS[name](shape), _signature()


def _signature() -> Any:
    from numba import types

    i32, i32s, f32s = types.int32, types.CPointer(types.int32), types.CPointer(types.float32)
    u64s, f64s = types.CPointer(types.uint64), types.CPointer(types.float64)
    return types.void(
        f32s,
        i32,
        types.NamedTuple([f64s, f32s, i32s, i32, i32s], Requests),
        types.NamedTuple([u64s, i32s, f32s], Scratch),
        types.NamedTuple([i32s, i32s, f64s], Outcome),
    )


def kernel_spec(name: str, shape: Shape) -> Any:
    """What `device.Device.load` compiles or loads; `name` of KERNELS, `shape` of how rows are cut."""
    from ..gpu.compiled import KernelSpec

    shape = shape.merging if name == "merge" else shape
    full = f"sample_{name}_{shape.name}_{_sources()}"
    return KernelSpec(full, partial(_build, name, shape), shape.threads, blocks=THREADS_RESIDENT // shape.threads)


def simulated(name: str, shape: Shape) -> Any:
    """A kernel for numba's simulator."""
    from numba import cuda as simulator

    assert SIMULATED, "set NUMBA_ENABLE_CUDASIM=1 before numba is imported"
    return simulator.jit(KERNELS[name](shape.merging if name == "merge" else shape))
