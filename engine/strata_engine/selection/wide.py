"""`wide`: exact block top-k for any context, one block of threads a query, five reads of the scores.

Three histogram steps (13 + 13 + 6 key bits) find the threshold; then each warp counts what it will select in its
part of the row, and writes it in order.
"""

# mypy: disable-error-code="arg-type, assignment"

from __future__ import annotations

import numpy as np

from .ptx import THREADS, WARPS, anchored, cuda, kernel, load4, onward, warp_scan
from .reference import BLOCK
from .steps import (
    ONE,
    POOL,
    STEP,
    WIDE_BITS,
    WIDE_EACH,
    WORKSPACE,
    find_bin,
    key_of,
    pad,
    read_record,
    tail_key,
    u,
    write_all_cells,
)

UNROLLED = np.int32(4)


@cuda.jit(device=True)
def _tally(x, start, span, shift, pool):
    """Count a block whose key lies in start..start + span (a power of two less one, start a multiple of it)."""
    offset = u(key_of(x) ^ start)
    if offset <= span:
        b = u(offset >> shift)
        cuda.atomic.add(pool, u(pad(b, u(WIDE_EACH))), u(1))


@cuda.jit(device=True)
def _tally4(x, start, span, shift, pool):
    _tally(x[0], start, span, shift, pool)
    _tally(x[1], start, span, shift, pool)
    _tally(x[2], start, span, shift, pool)
    _tally(x[3], start, span, shift, pool)


@cuda.jit(device=True)
def _histogram(row, full, start, span, shift, pool):
    """Count the full blocks with keys in the range by their next bits; ends in a barrier."""
    thread = cuda.threadIdx.x
    i = thread
    while i < (WIDE_EACH + 1) * THREADS:
        pool[u(i)] = 0
        i = onward(i, STEP)
    cuda.syncthreads()
    loads = np.int32(full >> 2)
    v = thread
    while v + 3 * THREADS < loads:
        a, b = load4(row, u(4 * v)), load4(row, u(4 * (v + THREADS)))
        c, d = load4(row, u(4 * (v + 2 * THREADS))), load4(row, u(4 * (v + 3 * THREADS)))
        _tally4(a, start, span, shift, pool)
        _tally4(b, start, span, shift, pool)
        _tally4(c, start, span, shift, pool)
        _tally4(d, start, span, shift, pool)
        v = np.int32(v + 4 * THREADS)
    while v < loads:
        _tally4(load4(row, u(4 * v)), start, span, shift, pool)
        v = onward(v, STEP)
    if thread < (full & 3):
        _tally(row[u(4 * loads + thread)], start, span, shift, pool)
    cuda.syncthreads()


@cuda.jit(device=True)
def _threshold(row, full, tail, key_of_tail, width, pool, ws):
    """(threshold key, cells of blocks above it)."""
    start = u(0)
    above = np.int32(0)
    bits = np.int32(32)
    while bits > 0:
        shift = np.int32(max(bits - WIDE_BITS, 0))
        span = u(0xFFFFFFFF) >> u(32 - bits)
        _histogram(row, full, start, u(span), u(shift), pool)
        tail_bin = np.int32(-1)
        if tail > 0 and u(key_of_tail ^ start) <= span:
            tail_bin = np.int32(u(key_of_tail ^ start) >> u(shift))
        b, higher, _ = find_bin(pool, WIDE_EACH, np.int32(width - above), tail_bin, tail, ws)
        above = np.int32(above + higher)
        start = u(start | (u(b) << u(shift)))
        bits = shift
    return start, above


@cuda.jit(device=True)
def _classify(x, threshold):
    """1 for a block above the threshold, 65,536 for one at it, else 0: their sums hold both counts."""
    key = key_of(x)
    if key > threshold:
        return np.int32(1)
    return np.int32(65536) if key == threshold else np.int32(0)


@cuda.jit(device=True)
def _classify4(x, v, loads, threshold):
    """The sum over the four blocks of load v; 0 past the end."""
    if v >= loads:
        return np.int32(0)
    first, second = _classify(x[0], threshold) + _classify(x[1], threshold), _classify(x[2], threshold)
    return np.int32(first + second + _classify(x[3], threshold))


@cuda.jit(device=True)
def _load(row, v, loads):
    if v < loads:
        return load4(row, u(4 * v))
    return np.float32(0), np.float32(0), np.float32(0), np.float32(0)


@cuda.jit(device=True)
def _marks(x, v, loads, threshold):
    """Bit j is set where block j of load v is above the threshold, bit 4 + j where it is at it; 0 past the end."""
    marks = u(0)
    if v < loads:
        for j in range(4):
            key = key_of(x[j])
            marks = u(marks | (u(1 << j) if key > threshold else u(0)) | (u(16 << j) if key == threshold else u(0)))
    return marks


@cuda.jit(device=True)
def _write(out, slot, first, count):
    """Ids first, first + 1, ... to slots slot, slot + 1, ...; at most a block of them."""
    for cell in range(BLOCK):
        if cell < count:
            out[u(slot + cell)] = first + cell


@cuda.jit(device=True)
def _put4(out, x, v, loads, threshold, fill, above, ties):
    """Write the selected ones of the four blocks of each lane's load; the warp's blocks so far: (above, ties).

    Takes the counts before them and gives the counts after them. Few lanes write, so their code is one small loop.
    """
    marks = _marks(x, v, loads, threshold)
    if BLOCK * ties >= fill:
        marks = u(marks & u(15))  # no tie is taken from here on
    before, total = warp_scan(np.int32(cuda.popc(u(marks & u(15))) + (cuda.popc(u(marks >> u(4))) << 16)))
    a, t = np.int32(above + (before & 65535)), np.int32(ties + (before >> 16))
    while marks != 0:
        j = np.int32(cuda.ffs(u((marks | marks >> u(4)) & u(15))) - 1)
        tie = np.int32(marks >> u(j + 4) & u(1))
        cells = np.int32(fill - BLOCK * t if tie != 0 else BLOCK)
        _write(out, np.int32(BLOCK * a + min(BLOCK * t, fill)), np.int32(BLOCK * (4 * v + j)), cells)
        a, t = np.int32(a + 1 - tie), np.int32(t + tie)
        marks = u(marks & ~u(u(17) << u(j)))
    return np.int32(above + (total & 65535)), np.int32(ties + (total >> 16))


@cuda.jit(device=True)
def _count_before(row, loads, first, rounds, threshold, ws):
    """(blocks above the threshold, blocks at it) in the parts of the warps before this one."""
    thread = cuda.threadIdx.x
    if thread < 2 * WARPS:
        ws[u(thread)] = 0
    cuda.syncthreads()
    found = np.int32(0)
    j = np.int32(0)
    while j < rounds:
        v = np.int32(first + 32 * j)
        a, b = _load(row, v, loads), _load(row, v + 32, loads)
        c, d = _load(row, v + 64, loads), _load(row, v + 96, loads)
        found = np.int32(found + _classify4(a, v, loads, threshold) + _classify4(b, v + 32, loads, threshold))
        found = np.int32(found + _classify4(c, v + 64, loads, threshold) + _classify4(d, v + 96, loads, threshold))
        j = onward(j, UNROLLED)
    cuda.atomic.add(ws, u(thread >> 5), u(found & 65535))
    cuda.atomic.add(ws, u((thread >> 5) + WARPS), u(found >> 16))
    cuda.syncthreads()
    above, ties = np.int32(0), np.int32(0)
    for w in range(thread >> 5):
        above = np.int32(above + np.int32(ws[u(w)]))
        ties = np.int32(ties + np.int32(ws[u(w + WARPS)]))
    return above, ties


@cuda.jit(device=True)
def _emit(row, full, tail, threshold, fill, width, out, ws):
    """Write the ids of all blocks above the threshold and of the first `fill` cells at it, in order."""
    loads = np.int32(full >> 2)
    rounds = np.int32((loads + 4 * THREADS - 1) // (4 * THREADS) * 4)  # of 32 loads a warp: its part of the row
    first = np.int32((cuda.threadIdx.x >> 5) * rounds * 32 + (cuda.threadIdx.x & 31))
    above, ties = _count_before(row, loads, first, rounds, threshold, ws)
    j = np.int32(0)
    while j < rounds:
        v = np.int32(first + 32 * j)
        a, b = _load(row, v, loads), _load(row, v + 32, loads)
        c, d = _load(row, v + 64, loads), _load(row, v + 96, loads)
        above, ties = _put4(out, a, v, loads, threshold, fill, above, ties)
        above, ties = _put4(out, b, v + 32, loads, threshold, fill, above, ties)
        above, ties = _put4(out, c, v + 64, loads, threshold, fill, above, ties)
        above, ties = _put4(out, d, v + 96, loads, threshold, fill, above, ties)
        j = onward(j, UNROLLED)
    if cuda.threadIdx.x == THREADS - 32:  # the last warp has counted every full block but the odd ones at the end
        block = np.int32(4 * loads)
        while block < full:
            key = key_of(row[u(block)])
            slot = np.int32(BLOCK * above + min(BLOCK * ties, fill))
            if key > threshold:
                _write(out, slot, np.int32(BLOCK * block), BLOCK)
                above = np.int32(above + 1)
            elif key == threshold:
                _write(out, slot, np.int32(BLOCK * block), np.int32(fill - BLOCK * ties))
                ties = np.int32(ties + 1)
            block = onward(block, ONE)
        slot = np.int32(BLOCK * above + min(BLOCK * ties, fill))
        _write(out, slot, np.int32(BLOCK * full), np.int32(min(tail, width - slot)))


@cuda.jit(device=True)
def select_wide(row, full, tail, key_of_tail, width, out, pool, ws):
    """Select for one query with more cells than `width`; any size. Twin: `reference.select`."""
    threshold, above = _threshold(row, full, tail, key_of_tail, width, pool, ws)
    _emit(row, full, tail, threshold, np.int32(width - above), width, out, ws)


@kernel(2)
def wide(scores, records, active, ids):
    """Block top-k, a query a block of threads. Grid [queries], block [THREADS]. Twin: `reference.select_rows`.

    Args:
        scores: float32 [queries, max_blocks], rows 16-byte aligned.
        records: int32 [queries, 4], see `reference.step_records`.
        active: int32 [1], the blocks of a row that hold scores.
        ids: int32 [queries, cap], written up to each query's width.
    """
    pool = cuda.shared.array(POOL, np.uint32)
    ws = cuda.shared.array(WORKSPACE, np.uint32)
    query = cuda.blockIdx.x
    row, out = anchored(scores[u(query)]), anchored(ids[u(query)])
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
    if cells <= width:
        write_all_cells(out, cells, cuda.threadIdx.x, STEP)
        return
    if width <= 0:
        return
    full, tail = np.int32(cells >> 2), np.int32(cells & 3)
    select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)
