"""`wide`: exact block top-k for any context, one block of threads a query, five reads of the scores.

Three histogram steps (13 + 13 + 6 key bits) find the threshold; then each warp counts what it will select in its
part of the row, and writes it in order.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .ptx import THREADS, WARPS, kernel, load4, warp_scan
from .reference import BLOCK
from .steps import (
    POOL,
    WIDE_BITS,
    WIDE_EACH,
    WORKSPACE,
    find_bin,
    in_range,
    key_of,
    pad,
    read_record,
    tail_key,
    write_all_cells,
)


@cuda.jit(device=True)
def _tally(x, start, bits, shift, pool):
    key = key_of(x)
    if in_range(key, start, bits):
        cuda.atomic.add(pool, pad((key - start) >> np.uint32(shift), np.uint32(WIDE_EACH)), np.uint32(1))


@cuda.jit(device=True)
def _tally4(x, start, bits, shift, pool):
    _tally(x[0], start, bits, shift, pool)
    _tally(x[1], start, bits, shift, pool)
    _tally(x[2], start, bits, shift, pool)
    _tally(x[3], start, bits, shift, pool)


@cuda.jit(device=True)
def _histogram(row, full, start, bits, shift, pool):
    """Count the full blocks with keys in the range by their next bits; ends in a barrier."""
    thread = cuda.threadIdx.x
    for i in range(thread, (WIDE_EACH + 1) * THREADS, THREADS):
        pool[i] = 0
    cuda.syncthreads()
    vecs = full >> 2
    v = thread
    while v + 3 * THREADS < vecs:
        a = load4(row, 4 * v)
        b = load4(row, 4 * (v + THREADS))
        c = load4(row, 4 * (v + 2 * THREADS))
        d = load4(row, 4 * (v + 3 * THREADS))
        _tally4(a, start, bits, shift, pool)
        _tally4(b, start, bits, shift, pool)
        _tally4(c, start, bits, shift, pool)
        _tally4(d, start, bits, shift, pool)
        v += 4 * THREADS
    while v < vecs:
        _tally4(load4(row, 4 * v), start, bits, shift, pool)
        v += THREADS
    if thread < (full & 3):
        _tally(row[4 * vecs + thread], start, bits, shift, pool)
    cuda.syncthreads()


@cuda.jit(device=True)
def _threshold(row, full, tail, key_of_tail, width, pool, ws):
    """(threshold key, cells of blocks above it)."""
    start = np.uint32(0)
    above = np.int32(0)
    bits = 32
    while bits > 0:
        shift = max(bits - WIDE_BITS, 0)
        _histogram(row, full, start, bits, shift, pool)
        tail_bin = np.int32(-1)
        if tail > 0 and in_range(key_of_tail, start, bits):
            tail_bin = np.int32((key_of_tail - start) >> np.uint32(shift))
        b, higher, _ = find_bin(pool, WIDE_EACH, width - above, tail_bin, tail, ws)
        above = np.int32(above + higher)
        start = np.uint32(start + (np.uint32(b) << np.uint32(shift)))
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
def _classify4(x, v, vecs, threshold):
    """The sum over the four blocks of load v; 0 past the end."""
    if v >= vecs:
        return np.int32(0)
    first, second = _classify(x[0], threshold) + _classify(x[1], threshold), _classify(x[2], threshold)
    return np.int32(first + second + _classify(x[3], threshold))


@cuda.jit(device=True)
def _load(row, v, vecs):
    if v < vecs:
        return load4(row, 4 * v)
    return np.float32(0), np.float32(0), np.float32(0), np.float32(0)


@cuda.jit(device=True)
def _put(out, block, x, threshold, fill, above, ties):
    """Write a block's cells if it is selected; (above, ties) count the blocks before it, and with it afterwards."""
    key = key_of(x)
    if key > threshold:
        slot = BLOCK * above + min(BLOCK * ties, fill)
        for cell in range(BLOCK):
            out[slot + cell] = BLOCK * block + cell
        above += 1
    elif key == threshold:
        slot = BLOCK * above + BLOCK * ties
        for cell in range(min(BLOCK, fill - BLOCK * ties)):
            out[slot + cell] = BLOCK * block + cell
        ties += 1
    return above, ties


@cuda.jit(device=True)
def _put4(out, x, v, vecs, threshold, fill, above, ties):
    """`_put` for the four blocks of each lane's load; (above, ties) count the warp's blocks before and after."""
    found = _classify4(x, v, vecs, threshold)
    if BLOCK * ties >= fill:
        found &= 65535  # no tie is taken from here on
    before, total = warp_scan(found)
    if found != 0:
        a, t = above + (before & 65535), ties + (before >> 16)
        a, t = _put(out, 4 * v, x[0], threshold, fill, a, t)
        a, t = _put(out, 4 * v + 1, x[1], threshold, fill, a, t)
        a, t = _put(out, 4 * v + 2, x[2], threshold, fill, a, t)
        _put(out, 4 * v + 3, x[3], threshold, fill, a, t)
    return above + (total & 65535), ties + (total >> 16)


@cuda.jit(device=True)
def _count_before(row, vecs, first, rounds, threshold, ws):
    """(blocks above the threshold, blocks at it) in the parts of the warps before this one."""
    warp = cuda.threadIdx.x >> 5
    if cuda.threadIdx.x < 2 * WARPS:
        ws[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    found = 0
    for j in range(0, rounds, 4):
        v = first + 32 * j
        a, b = _load(row, v, vecs), _load(row, v + 32, vecs)
        c, d = _load(row, v + 64, vecs), _load(row, v + 96, vecs)
        found += _classify4(a, v, vecs, threshold) + _classify4(b, v + 32, vecs, threshold)
        found += _classify4(c, v + 64, vecs, threshold) + _classify4(d, v + 96, vecs, threshold)
    cuda.atomic.add(ws, warp, np.uint32(found & 65535))
    cuda.atomic.add(ws, WARPS + warp, np.uint32(found >> 16))
    cuda.syncthreads()
    above, ties = 0, 0
    for w in range(WARPS):
        if w < warp:
            above += np.int32(ws[w])
            ties += np.int32(ws[WARPS + w])
    return above, ties


@cuda.jit(device=True)
def _emit(row, full, tail, threshold, fill, width, out, ws):
    """Write the ids of all blocks above the threshold and of the first `fill` cells at it, in order."""
    vecs = full >> 2
    rounds = (vecs + 4 * THREADS - 1) // (4 * THREADS) * 4  # of 32 loads a warp: its part of the row
    first = (cuda.threadIdx.x >> 5) * rounds * 32 + (cuda.threadIdx.x & 31)
    above, ties = _count_before(row, vecs, first, rounds, threshold, ws)
    for j in range(0, rounds, 4):
        v = first + 32 * j
        a, b = _load(row, v, vecs), _load(row, v + 32, vecs)
        c, d = _load(row, v + 64, vecs), _load(row, v + 96, vecs)
        above, ties = _put4(out, a, v, vecs, threshold, fill, above, ties)
        above, ties = _put4(out, b, v + 32, vecs, threshold, fill, above, ties)
        above, ties = _put4(out, c, v + 64, vecs, threshold, fill, above, ties)
        above, ties = _put4(out, d, v + 96, vecs, threshold, fill, above, ties)
    if cuda.threadIdx.x == THREADS - 32:  # the last warp has counted every full block but the odd ones at the end
        for block in range(4 * vecs, full):
            above, ties = _put(out, block, row[block], threshold, fill, above, ties)
        slot = BLOCK * above + min(BLOCK * ties, fill)
        for cell in range(min(tail, width - slot)):
            out[slot + cell] = BLOCK * full + cell


@cuda.jit(device=True)
def select_wide(row, full, tail, key_of_tail, width, out, pool, ws):
    """Select for one query with more cells than `width`; any size. Twin: `reference.select`."""
    threshold, above = _threshold(row, full, tail, key_of_tail, width, pool, ws)
    _emit(row, full, tail, threshold, width - above, width, out, ws)


@kernel
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
    row, out = scores[query], ids[query]
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
    if cells <= width:
        write_all_cells(out, cells, cuda.threadIdx.x, THREADS)
        return
    if width <= 0:
        return
    full, tail = cells >> 2, cells & 3
    select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)
