"""`sample` and `window`: block top-k with one read of the scores.

A sample of the scores gives a lower bound that about three times as many blocks reach as are needed. One pass keeps
those in shared memory; the threshold, the ties and the order are then settled among them (`settle`). The bound is a
guess: too few or too many blocks may reach it. Such a query is flagged and selected by `wide` in the same launch.

`sample` gives a query to one block of threads; `window`, for few queries, spreads one over SPLITS of them, and the
last to finish settles. Twin of both: `reference.select_rows`.
"""

# mypy: disable-error-code="arg-type, assignment"

from __future__ import annotations

import numpy as np

from .bound import LOG_STRIDE, load_sample, lower_bound, sample_log, sampled, score_of
from .dispatch import MAX_SAMPLED
from .ptx import (
    SIMULATED,
    THREADS,
    WARPS,
    anchored,
    cuda,
    kernel,
    load8,
    load_fresh,
    onward,
    prefetch,
    reach,
    warp_get,
    warp_max,
)
from .reference import BLOCK
from .settle import HIST, first_shift, settle, store, store_block
from .steps import (
    CANDIDATES,
    COUNT,
    LAST,
    LISTED,
    ONE,
    POOL,
    RESULT,
    STEP,
    TOP,
    WORKSPACE,
    key_of,
    read_record,
    tail_key,
    u,
    write_all_cells,
)
from .wide import select_wide

SPLITS = 4 if SIMULATED else 16  # blocks of threads a query of a window
LOG_STEP = np.int32(THREADS.bit_length() - 1)  # loads of a round of a block of threads
LOG_SPLIT_STEP = np.int32((SPLITS * THREADS).bit_length() - 1)  # and of all that share a query
AT_ONCE = 4  # candidates of a split that a lane fetches before it knows how many there are
ALONE = np.int32(128 if SIMULATED else 512)  # candidates of a split that one warp fetches


@cuda.jit(device=True)
def _keep8(row, v, log_step, loads, x, low, shift, tallied, keys, hist, ws):
    """Append the blocks of loads v, v + 2^log_step, ..., eight of them, that reach the bound to the candidates.

    x: what `load8` gave. What reaches the bound is marked in one word and read again from L1. `tallied`: `store` them
    and count them in `hist`.
    """
    there = np.int32(np.int32(loads - v + (1 << log_step) - 1) >> log_step)  # of the eight loads, or more
    if there <= 0:
        return
    hits = u(reach(x, score_of(low)) & u(u(0xFFFFFFFF) >> u(max(np.int32(32 - BLOCK * there), np.int32(0)))))
    if hits == 0:
        return
    place = np.int32(cuda.atomic.add(ws, COUNT, u(cuda.popc(hits))))
    while hits != 0:
        bit = np.int32(cuda.ffs(hits) - 1)
        hits = u(hits & (hits - u(1)))
        block = np.int32(BLOCK * (v + (bit >> 2 << log_step)) + (bit & 3))
        _keep(row, block, place, low, shift, tallied, keys, hist)
        place = np.int32(place + 1)


@cuda.jit(device=True)
def _keep(row, block, place, low, shift, tallied, keys, hist):
    """Make a block candidate number `place`: its key, and CANDIDATES further on its number."""
    if tallied:
        store_block(row, place, block, low, shift, keys, hist)
    elif place < CANDIDATES:
        keys[u(place)] = key_of(row[u(block)])
        keys[u(place + CANDIDATES)] = block


@cuda.jit(device=True)
def _keep_odd(row, full, first, low, shift, tallied, keys, hist, ws):
    """Keep the blocks past the last whole load that reach the bound; `first`: the thread's number in the query."""
    odd = np.int32((full & ~3) + first)
    if odd < full and row[u(odd)] >= score_of(low):
        _keep(row, odd, np.int32(cuda.atomic.add(ws, COUNT, u(1))), low, shift, tallied, keys, hist)


@cuda.jit(device=True)
def _scan(row, full, v, log_step, low, shift, tallied, keys, hist, ws):
    """Keep the candidates among loads v, v + 2^log_step, ... of the row; a barrier must follow.

    `ws[COUNT]` is the number of candidates, past CANDIDATES if they did not fit.
    """
    loads = np.int32(full >> 2)
    while v < loads and ws[COUNT] <= CANDIDATES:
        x = load8(row, v, np.int32(1 << log_step), loads)
        _keep8(row, v, log_step, loads, x, low, shift, tallied, keys, hist, ws)
        v = np.int32(v + (8 << log_step))


@cuda.jit(device=True)
def _prefetch8(row, split, step, loads):
    """Start bringing a block's first eight rounds of loads to L2, a line of 128 bytes a thread."""
    thread = cuda.threadIdx.x
    line = np.int32(split * STEP + (u(thread) >> u(LOG_STEP - 3)) * step + (u(8 * thread) & u(THREADS - 1)))
    if line < loads:
        prefetch(row, u(BLOCK * line))


@cuda.jit(device=True)
def _clear(hist, ws):
    """Set the counters to 0; a barrier must follow."""
    thread = cuda.threadIdx.x
    hist[u(thread)] = 0
    hist[u(thread + THREADS)] = 0
    if thread == 0:
        ws[LISTED], ws[COUNT], ws[RESULT], ws[TOP] = 0, 0, 0, 0


@cuda.jit(device=True)
def _collect(row, full, width, pool, hist, ws):
    """Keep a long row's candidates in `pool`; returns the bound's key, 0 if there is none. A barrier must follow."""
    loads = np.int32(full >> 2)
    log = sample_log(loads)
    x = load_sample(row, loads, log)
    _prefetch8(row, np.int32(0), STEP, loads)  # while the bound is sought
    low = lower_bound(row, loads, width, log, x, pool, ws)
    if low != 0:
        first, shift = np.int32(cuda.threadIdx.x), first_shift(low, ws)
        _keep_odd(row, full, first, low, shift, True, pool, hist, ws)
        _scan(row, full, first, LOG_STEP, low, shift, True, pool, hist, ws)
    return low


@cuda.jit(device=True)
def _span(row, full, tail, ws):
    """`ws[TOP]` gets the largest key of a short row, `ws[LISTED]` the complement of the smallest, tail block included.

    They are 0 at the call; starts and ends with a barrier.
    """
    highest = tail_key(row, full, tail)
    lowest = highest if tail > 0 else u(0xFFFFFFFF)
    last = np.int32(max(np.int32(full - 1), np.int32(0)))
    for j in range(CANDIDATES // THREADS):  # all in flight at once
        key = key_of(row[u(min(np.int32(cuda.threadIdx.x + j * THREADS), last))])
        highest, lowest = u(max(highest, key)), u(min(lowest, key))
    highest, lowest = warp_max(highest), warp_max(u(~lowest))
    cuda.syncthreads()
    if cuda.threadIdx.x & 31 == 0:
        cuda.atomic.max(ws, TOP, highest)
        cuda.atomic.max(ws, LISTED, lowest)
    cuda.syncthreads()


@cuda.jit(device=True)
def _keep_all(row, full, tail, pool, hist, ws):
    """Every block of a short row is a candidate; returns the smallest key. A barrier must follow."""
    _span(row, full, tail, ws)
    low = u(~ws[LISTED])
    shift = first_shift(low, ws)
    if cuda.threadIdx.x == 0:
        ws[COUNT] = full
    block = cuda.threadIdx.x
    while block < full:
        store_block(row, block, block, low, shift, pool, hist)
        block = onward(block, STEP)
    return low


@kernel(2)
def sample(scores, records, active, ids, flags):
    """Block top-k with one read, a query a block of threads. Grid [queries], block [THREADS].

    Args:
        scores, records, active, ids: as for `wide`.
        flags: int32 [queries], 1 where the candidates did not decide and `wide` selected, else 0.
    """
    pool = cuda.shared.array(POOL, np.uint32)
    hist = cuda.shared.array(HIST, np.uint32)
    ws = cuda.shared.array(WORKSPACE, np.uint32)
    query, thread = cuda.blockIdx.x, cuda.threadIdx.x
    row, out = anchored(scores[u(query)]), anchored(ids[u(query)])
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
    _clear(hist, ws)
    if thread == 0:
        flags[u(query)] = 0
    if cells <= width:
        write_all_cells(out, cells, thread, STEP)
        return
    if width <= 0:
        return
    full, tail = np.int32(cells >> 2), np.int32(cells & 3)
    if tail > 0:
        prefetch(row, u(full))
    low = u(0)
    if full <= CANDIDATES:
        low = _keep_all(row, full, tail, pool, hist, ws)
    elif full <= MAX_SAMPLED:
        low = _collect(row, full, width, pool, hist, ws)
    cuda.syncthreads()
    if not settle(np.int32(ws[COUNT]), low, row, full, tail, width, out, pool, hist, ws):
        if thread == 0:
            flags[u(query)] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)


@cuda.jit(device=True)
def _prefetch_window(row, split):
    """Start bringing the sample and a split's loads to L2 before the record says how long the row is.

    That may bring scores past the last block, which nobody reads: waiting for the record costs more.
    """
    thread = cuda.threadIdx.x
    loads = np.int32(len(row) >> 2)
    for j in range(2):
        number = sampled(j, np.int32(LOG_STRIDE))
        if thread & 3 == 0 and number < loads:
            prefetch(row, u(BLOCK * number))
    _prefetch8(row, split, np.int32(SPLITS * THREADS), loads)


@cuda.jit(device=True)
def _collect_split(row, full, width, split, part, hist, pool, ws):
    """Keep a split's candidates in `part`, as `_collect` does in `pool`; the bound is the same in all splits."""
    loads = np.int32(full >> 2)
    first = np.int32(split * STEP + cuda.threadIdx.x)
    log = sample_log(loads)
    samples = load_sample(row, loads, log)
    x = load8(row, first, np.int32(1 << LOG_SPLIT_STEP), loads)
    low = lower_bound(row, loads, width, log, samples, pool, ws)
    if low != 0:
        _keep_odd(row, full, first, low, np.int32(0), False, part, hist, ws)
        after = np.int32(first + (8 << LOG_SPLIT_STEP))
        _keep8(row, first, LOG_SPLIT_STEP, loads, x, low, np.int32(0), False, part, hist, ws)
        _scan(row, full, after, LOG_SPLIT_STEP, low, np.int32(0), False, part, hist, ws)
    return low


@cuda.jit(device=True)
def _arrive(counts, done, ws):
    """Hand this block's candidates to the query's last block; True in that one, with `ws[COUNT]` and `[LISTED]` 0.

    counts: int32 [SPLITS] of the query; done: int32 [1] of it. The candidates are in global memory already.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        counts[u(cuda.blockIdx.x)] = np.int32(ws[COUNT])
        ws[COUNT], ws[LISTED] = 0, 0
        cuda.threadfence()
        arrived = cuda.atomic.add(done, 0, 1)
        if arrived == SPLITS - 1:
            done[0] = 0  # for the next replay
        ws[LAST] = arrived == SPLITS - 1
    cuda.syncthreads()
    return ws[LAST] != 0


@cuda.jit(device=True)
def _fetch_rest(parts, low, shift, pool, hist, ws):
    """Bring what splits hold past their first ALONE candidates: neighbours score alike, and may be many.

    ws: the splits' counts, and SPLITS further on their places in `pool`. Ends in a barrier.
    """
    s = np.int32(0)
    while s < SPLITS:
        count, place = np.int32(ws[u(s)]), np.int32(ws[u(s + SPLITS)])
        i = np.int32(cuda.threadIdx.x + ALONE)
        while i < count:
            key, block = load_fresh(parts[u(s)], u(i)), load_fresh(parts[u(s)], u(i + CANDIDATES))
            store(place + i, key, block, low, shift, pool, hist)
            i = onward(i, STEP)
        s = onward(s, ONE)
    cuda.syncthreads()


@cuda.jit(device=True)
def _fetch(parts, counts, low, shift, pool, hist, ws):
    """Bring all splits' candidates into `pool`, in any order; ends in a barrier.

    parts: uint32 [SPLITS, 2 * CANDIDATES]; a warp copies the first of every WARPS-th split's, AT_ONCE a lane at
    once, and all warps those past ALONE. `ws[COUNT]` and `[LISTED]` are 0 at the call; `ws[COUNT]` is the number of
    candidates afterwards, past CANDIDATES if they do not fit.
    """
    lane = np.int32(cuda.threadIdx.x & 31)
    s = np.int32(cuda.threadIdx.x >> 5)
    for _ in range(SPLITS // WARPS):
        part = parts[u(s)]
        count = load_fresh(counts, u(s))
        k0, b0 = load_fresh(part, u(lane)), load_fresh(part, u(lane + CANDIDATES))
        k1, b1 = load_fresh(part, u(lane + 32)), load_fresh(part, u(lane + 32 + CANDIDATES))
        k2, b2 = load_fresh(part, u(lane + 64)), load_fresh(part, u(lane + 64 + CANDIDATES))
        k3, b3 = load_fresh(part, u(lane + 96)), load_fresh(part, u(lane + 96 + CANDIDATES))
        place = np.int32(0)
        if lane == 0:
            place = np.int32(cuda.atomic.add(ws, COUNT, u(count)))
            ws[u(s)], ws[u(s + SPLITS)] = count, place
            if count > ALONE:
                ws[LISTED] = 1
        place = np.int32(warp_get(place, np.int32(0)) + lane)
        if lane < count:
            store(place, k0, b0, low, shift, pool, hist)
        if lane + 32 < count:
            store(place + 32, k1, b1, low, shift, pool, hist)
        if lane + 64 < count:
            store(place + 64, k2, b2, low, shift, pool, hist)
        if lane + 96 < count:
            store(place + 96, k3, b3, low, shift, pool, hist)
        i = np.int32(lane + 32 * AT_ONCE)
        while i < min(count, ALONE):
            key, block = load_fresh(part, u(i)), load_fresh(part, u(i + CANDIDATES))
            store(place + i - lane, key, block, low, shift, pool, hist)
            i = onward(i, np.int32(32))
        s = np.int32(s + WARPS)
    cuda.syncthreads()
    if ws[LISTED] != 0 and ws[COUNT] <= CANDIDATES:
        _fetch_rest(parts, low, shift, pool, hist, ws)


@kernel(1)
def window(scores, records, active, ids, flags, parts, counts, done):
    """Block top-k of a few queries, each spread over SPLITS blocks of threads. Grid [SPLITS, queries].

    Args:
        scores, records, active, ids, flags: as for `sample`.
        parts: uint32 [queries, SPLITS, 2 * CANDIDATES], counts: int32 [queries, SPLITS]: scratch.
        done: int32 [queries, 1], all 0 before the first launch; every launch leaves it so.
    """
    pool = cuda.shared.array(POOL, np.uint32)
    hist = cuda.shared.array(HIST, np.uint32)
    ws = cuda.shared.array(WORKSPACE, np.uint32)
    query, split, thread = cuda.blockIdx.y, np.int32(cuda.blockIdx.x), cuda.threadIdx.x
    row, out = anchored(scores[u(query)]), anchored(ids[u(query)])
    _prefetch_window(row, split)
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
    _clear(hist, ws)
    if split == 0 and thread == 0:
        flags[u(query)] = 0
    if cells <= width:
        write_all_cells(out, cells, np.int32(split * STEP + thread), np.int32(SPLITS * THREADS))
        return
    if width <= 0:
        return
    full, tail = np.int32(cells >> 2), np.int32(cells & 3)
    if tail > 0:
        prefetch(row, u(full))
    low = u(0)
    if CANDIDATES < full <= MAX_SAMPLED:
        low = _collect_split(row, full, width, split, parts[u(query), u(split)], hist, pool, ws)
    if low != 0:
        if not _arrive(counts[u(query)], done[u(query)], ws):
            return
        _fetch(parts[u(query)], counts[u(query)], low, first_shift(low, ws), pool, hist, ws)
    elif split > 0:  # too short to share, or without a bound: all splits find the same
        return
    elif full <= CANDIDATES:
        low = _keep_all(row, full, tail, pool, hist, ws)
        cuda.syncthreads()
    if not settle(np.int32(ws[COUNT]), low, row, full, tail, width, out, pool, hist, ws):
        if thread == 0:
            flags[u(query)] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)
