"""Steps that the selection kernels share: keys, step records, the search of a histogram.

A block of THREADS threads runs each step together. Shared memory comes from the kernel: `pool` uint32 [POOL],
`hist` uint32 [HIST], `ws` uint32 [WORKSPACE] (sums of warps, counters and results, at the names below).
"""

# mypy: disable-error-code="arg-type, assignment"

from __future__ import annotations

import numpy as np

from .ptx import SIMULATED, THREADS, cuda, float_bits, onward, sum_above
from .reference import BLOCK, CELLS, TAIL_BONUS, WIDTH

CANDIDATES = 256 if SIMULATED else 4096  # blocks that shared memory can hold
WIDE_BITS = 8 if SIMULATED else 13  # key bits a step over all scores
WIDE_EACH = (1 << WIDE_BITS) // THREADS  # bins a thread
POOL = max(2 * CANDIDATES, (WIDE_EACH + 1) * THREADS)

RESULT, LISTED, COUNT, GATHERED, LAST, TOP = 32, 36, 37, 38, 39, 40  # places in `ws` after the warps' sums
WORKSPACE = 41

STEP = np.int32(THREADS)  # of a loop that all threads share
ONE = np.int32(1)
u = np.uint32  # an index of this type cannot be negative, which spares a test at each access


@cuda.jit(device=True)
def key_of(x):
    """The order-preserving uint32 key of a float32: -0 equals +0, NaN is the lowest. Twin: `reference.keys_of`.

    numba widens what comes of two uint32 to 64 bits; results are narrowed by hand.
    """
    bits = float_bits(x + np.float32(0))  # + 0 turns -0 into +0
    key = u(bits | u(0x80000000)) if bits < u(0x80000000) else u(~bits)
    return key if x == x else u(0)


@cuda.jit(device=True)
def tail_key(row, full, tail):
    """The key of a query's tail block, its score raised; 0 where it has none."""
    if tail == 0:
        return np.uint32(0)
    x = row[u(full)]
    # NaN and both infinities fail this test; each becomes the bonus
    raised = x + np.float32(TAIL_BONUS) if abs(x) <= np.float32(3.4028235e38) else np.float32(TAIL_BONUS)
    return key_of(raised)


@cuda.jit(device=True)
def read_record(records, active, max_blocks, cap, query):
    """(cells, width) of a query, int32, bounded by what its rows of scores and ids hold."""
    record = records[u(query)]
    cells = min(record[CELLS], BLOCK * min(max_blocks, active[0]))
    return np.int32(cells), np.int32(min(record[WIDTH], cap))


@cuda.jit(device=True)
def pad(i, each):
    """Where entry i of an array lies whose every `each` entries are read by one thread: off its neighbours' banks."""
    return i + i // each


@cuda.jit(device=True)
def in_range(key, start, bits):
    """True if start <= key < start + 2^bits, for bits = 0..32."""
    return key >= start and (bits == 32 or u(u(key - start) >> u(bits)) == u(0))


@cuda.jit(device=True)
def find_bin(hist, each, need, tail_bin, tail, ws):
    """The highest bin down to which `need` cells are held: (bin, cells above it, cells in it).

    hist: blocks by bin, `each` bins a thread, padded where that is more than one; complete, behind a barrier.
    tail_bin, tail: the bin of the tail block and its cells; -1 where it is not among the bins.
    All threads get the result; the histogram may be overwritten at once.
    """
    first = np.int32(cuda.threadIdx.x * each)
    base = np.int32(first + cuda.threadIdx.x if each > 1 else first)
    total = np.int32(0)
    for j in range(each):
        total = np.int32(total + BLOCK * np.int32(hist[u(base + j)]))
    if first <= tail_bin < first + each:
        total = np.int32(total + tail)
    acc = np.int32(sum_above(total, ws))
    if acc < need <= acc + total:
        for k in range(each):
            j = np.int32(each - 1 - k)
            held = np.int32(BLOCK * np.int32(hist[u(base + j)]) + (tail if first + j == tail_bin else 0))
            if acc < need <= acc + held:
                ws[RESULT] = first + j
                ws[RESULT + 1] = acc
                ws[RESULT + 2] = held
            acc = np.int32(acc + held)
    cuda.syncthreads()
    return np.int32(ws[RESULT]), np.int32(ws[RESULT + 1]), np.int32(ws[RESULT + 2])


@cuda.jit(device=True)
def write_all_cells(out, cells, first, step):
    """Ids 0..cells-1: the query sees no more cells than it may select."""
    slot = first
    while slot < cells:
        out[u(slot)] = slot
        slot = onward(slot, step)
