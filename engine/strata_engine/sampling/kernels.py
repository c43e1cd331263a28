"""The kernels of the GPU sampler, put together from their stages, and what it takes to compile them.

The chain is two launches, `candidates` and `merge`. `arg_max` is one, for rows that are greedy and have neither
penalties nor biases nor log-probabilities. All take the same arguments.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from .candidates import ALL_ONES, LOWEST, candidate_stage, id_of, join, key_of
from .merge import merge_stage
from .ptx import (
    SIMULATED,
    WARP,
    cuda,
    inlined,
    let_next_start,
    logit_macros,
    ordered,
    take_ticket,
    wait_for_previous,
    warp_max,
)
from .tables import HEAD, Outcome, Requests, Scratch, Shape


@inlined
def is_last(tickets, row, blocks, flag):
    """True in the last block of a row to come here, for all threads; what all others wrote is then seen."""
    cuda.threadfence()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        flag[0] = 1 if take_ticket(tickets, row) == blocks - 1 else 0
    cuda.syncthreads()
    if flag[0] == 1:
        cuda.threadfence()
        if cuda.threadIdx.x == 0:
            tickets[row] = 0
    return flag[0] == 1


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


def arg_max_kernel(shape: Shape) -> Callable[..., None]:
    """The id of the largest logit of each row, ties to the lowest, 0 if all are -inf or NaN.

    Grid: (blocks, rows); block: shape.threads. The block of each row that is done last compares what they found.
    Reads no `requests`. Twin: numpy.argmax.
    """
    macros = logit_macros(shape.threads, shape.vectors, shape.wide)
    load, largest, above = macros.load, macros.largest, macros.above
    threads, segment = shape.threads, shape.segment
    warps = threads // WARP

    @inlined
    def warp_best(x, first):
        """The warp's best candidate, in every lane; 0 if there is none."""
        top = largest(x)
        key = warp_max(ordered(top))
        token = ALL_ONES
        if ordered(top) == key and top >= LOWEST:
            i = np.int32(cuda.ffs(above(x, top))) - 1
            token = np.uint32(first + 4 * (i // 4 * threads + cuda.threadIdx.x) + i % 4)
        reverse = warp_max(np.uint32(ALL_ONES - token))
        if reverse == 0:
            return np.uint64(0)
        return join(key, np.uint32(ALL_ONES - reverse))

    @inlined
    def best_of(values, count):
        best = values[0]
        for i in range(1, count):
            best = max(best, values[i])
        return best

    def kernel(logits, vocab, requests, scratch, outcome):
        thread, block, row, blocks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x
        parts = cuda.shared.array(warps, np.uint64)
        flag = cuda.shared.array(1, np.int32)
        let_next_start()
        wait_for_previous()
        first = block * segment
        best = warp_best(load(logits, row * vocab, first, thread, vocab), first)
        if thread % WARP == 0:
            parts[thread // WARP] = best
        cuda.syncthreads()
        if thread == 0:
            scratch.candidates[row * blocks + block] = best_of(parts, warps)
        if is_last(scratch.tickets, row, blocks, flag):
            best = np.uint64(0)
            for i in range(thread, blocks, threads):
                best = max(best, scratch.candidates[row * blocks + i])
            key = warp_max(key_of(best))
            reverse = warp_max(np.uint32(best & np.uint64(ALL_ONES)) if key_of(best) == key else np.uint32(0))
            if thread % WARP == 0:
                parts[thread // WARP] = np.uint64(np.uint64(key) << np.uint64(32)) | np.uint64(reverse)
            cuda.syncthreads()
            if thread == 0:
                best = best_of(parts, warps)
                token = id_of(best) if best > 0 else 0
                outcome.tokens[row] = token
                outcome.heads[row * HEAD] = token
                outcome.heads[row * HEAD + 1] = 1
                outcome.heads[row * HEAD + 2] = 0

    return kernel


KERNELS: dict[str, Callable[[Shape], Callable[..., None]]] = {
    "candidates": candidates_kernel,
    "merge": merge_kernel,
    "arg_max": arg_max_kernel,
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
        types.NamedTuple([f64s, f32s, i32s, i32s], Requests),
        types.NamedTuple([u64s, i32s, f32s, i32s], Scratch),
        types.NamedTuple([i32s, i32s, i32s, f64s], Outcome),
    )


def kernel_spec(name: str, shape: Shape) -> Any:
    """What `device.Device.load` compiles or loads; `name` of KERNELS, `shape` of how rows are cut."""
    from ..backends.cuda.device import KernelSpec

    shape = shape.merging if name == "merge" else shape
    full = f"sample_{name}_{shape.name}_{_sources()}"
    return KernelSpec(full, partial(_build, name, shape), shape.threads, blocks=THREADS_RESIDENT // shape.threads)


def simulated(name: str, shape: Shape) -> Any:
    """A kernel for numba's simulator."""
    from numba import cuda as simulator

    assert SIMULATED, "set NUMBA_ENABLE_CUDASIM=1 before numba is imported"
    return simulator.jit(KERNELS[name](shape.merging if name == "merge" else shape))
