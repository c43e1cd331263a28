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

from .dispatch import MAX_SAMPLED
from .ptx import (
    SIMULATED,
    THREADS,
    WARPS,
    bits_float,
    cuda,
    kernel,
    load4,
    load_fresh,
    onward,
    prefetch,
    warp_kth_largest,
    warp_min,
)
from .reference import BLOCK
from .settle import HIST, settle
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

LOG_STRIDE = 3 if SIMULATED else 5  # one score of 32 is in the sample
LOG_RUN = 2  # 4 loads of 4 scores stand side by side in the sample: 64 bytes, as memory likes to be read
LOG_WARPS = WARPS.bit_length() - 1
SAMPLE_LOADS = 4  # at most, a thread
SPARE = 4 if SIMULATED else 16  # samples over the expected number, so that too few passing is rare
SPLITS = 4 if SIMULATED else 16  # blocks of threads a query of a window


@cuda.jit(device=True)
def _load(row, load, loads):
    """Load number `load` of a row, four scores; NaN, which reaches no bound, past the end."""
    if load < loads:
        return load4(row, u(BLOCK * load))
    return np.float32(np.nan), np.float32(np.nan), np.float32(np.nan), np.float32(np.nan)


@cuda.jit(device=True)
def _hits(x, bound):
    """Bit j is set where x[j] reaches the bound."""
    low = np.int32(x[0] >= bound) | np.int32(x[1] >= bound) << 1
    return u(low | np.int32(x[2] >= bound) << 2 | np.int32(x[3] >= bound) << 3)


@cuda.jit(device=True)
def _largest(x):
    """The largest of four scores that is not NaN, or -inf."""
    top = np.float32(-np.inf)
    for j in range(4):
        if x[j] > top:
            top = x[j]
    return top


@cuda.jit(device=True)
def _score_of(key):
    """The score that has a key."""
    return bits_float(key ^ u(0x80000000) if key >= u(0x80000000) else ~key)


@cuda.jit(device=True)
def _sampled(number, log):
    """Which load of the row is number `number` of the sample: runs of 4, one of every 2^log."""
    return np.int32((number >> LOG_RUN << LOG_RUN + log) + (number & 3))


@cuda.jit(device=True)
def _list_samples(row, log, loads, bound, a, b, c, d, pool, ws):
    """List the keys of the samples that reach `bound` in `pool`, as long as it has room for one a thread."""
    hits = u(_hits(a, bound) | _hits(b, bound) << u(4) | _hits(c, bound) << u(8) | _hits(d, bound) << u(12))
    while hits != 0:
        bit = np.int32(cuda.ffs(hits) - 1)
        hits = u(hits & (hits - u(1)))
        load = _sampled(cuda.threadIdx.x + (bit >> 2) * THREADS, log)
        place = cuda.atomic.add(ws, LISTED, u(1))
        if place < THREADS:
            pool[place] = key_of(row[u(BLOCK * load + (bit & 3))])


@cuda.jit(device=True)
def _rank_samples(wanted, log, pool, ws):
    """`ws[RESULT]` gets the key of the `wanted`-th largest listed sample, `ws[TOP]` that of an eighth of it.

    `ws[RESULT]` stays 0 where so many samples reach that key that the blocks that do will not fit.
    """
    thread = cuda.threadIdx.x
    listed = np.int32(ws[LISTED])
    if thread < listed <= THREADS:
        mine = pool[u(thread)]
        above, same = np.int32(0), np.int32(0)
        for i in range(listed):
            above = np.int32(above + np.int32(pool[u(i)] > mine))
            same = np.int32(same + np.int32(pool[u(i)] == mine))
        if above < wanted <= above + same and above + same << log <= CANDIDATES:
            ws[RESULT] = mine
        if above < wanted // 8 <= above + same:
            ws[TOP] = mine


@cuda.jit(device=True)
def _lower_bound(row, loads, width, first, step, pool, ws):
    """A key that about twice the blocks needed and SPARE * 32 reach, from a sample; 0 if it cannot tell.

    One of 32 runs of loads is sampled (fewer in rows past 131,072 blocks). The r-th largest lane maximum of a warp,
    r * warps >= wanted, is reached by r samples there, so the lowest of all warps' is reached by `wanted` in all;
    those few are ranked. Meanwhile the first loads (first, first + step, ...) travel to L2.
    """
    thread = cuda.threadIdx.x
    log = np.int32(LOG_STRIDE)
    while loads >> (LOG_RUN + log) << LOG_RUN > SAMPLE_LOADS * THREADS:
        log = np.int32(log + 1)
    samples = np.int32(loads >> (LOG_RUN + log) << LOG_RUN)
    wanted = np.int32((2 * ((width + BLOCK - 1) // BLOCK) >> log) + SPARE)
    end = _sampled(samples, log)  # the first load past the last run that is sampled
    a = _load(row, _sampled(thread, log), end)
    b = _load(row, _sampled(thread + THREADS, log), end)
    c = _load(row, _sampled(thread + 2 * THREADS, log), end)
    d = _load(row, _sampled(thread + 3 * THREADS, log), end)
    line = np.int32(first - thread + thread * 8 // THREADS * step + thread * 8 % THREADS)
    if line < loads:
        prefetch(row, u(BLOCK * line))
    if thread == 0:
        ws[LISTED], ws[COUNT], ws[RESULT], ws[TOP] = 0, 0, 0, 0
    log_warps = np.int32(LOG_WARPS)
    while log_warps > 0 and 32 << log_warps > samples:
        log_warps = np.int32(log_warps - 1)
    rounds = np.int32((wanted + (1 << log_warps) - 1) >> log_warps)
    bound = np.float32(-np.inf)
    few = BLOCK * samples <= THREADS or rounds > 32  # all can be listed
    if not few:
        kth = warp_kth_largest(key_of(max(max(_largest(a), _largest(b)), max(_largest(c), _largest(d)))), rounds)
        if thread & 31 == 0:
            pool[u(thread >> 5)] = kth
    cuda.syncthreads()
    if not few:
        lane = thread & 31
        bound = _score_of(warp_min(pool[u(lane)] if lane < 1 << log_warps else u(0xFFFFFFFF)))
        cuda.syncthreads()
    _list_samples(row, log, loads, bound, a, b, c, d, pool, ws)
    cuda.syncthreads()
    _rank_samples(wanted, log, pool, ws)
    cuda.syncthreads()
    return ws[RESULT]


@cuda.jit(device=True)
def _keep(row, block, pool, ws):
    """Append a block to the candidates: its key, and CANDIDATES further on its number."""
    place = cuda.atomic.add(ws, COUNT, u(1))
    if place < CANDIDATES:
        pool[place] = key_of(row[u(block)])
        pool[place + u(CANDIDATES)] = block


@cuda.jit(device=True)
def _collect(row, full, width, first, step, pool, ws):
    """Keep the candidates among loads first, first + step, ...; returns the bound's key, 0 if there is none.

    Eight loads a thread are in flight; what reaches the bound in them is marked in one word and read again from L1.
    `ws[COUNT]` is the number of candidates, past CANDIDATES if they did not fit; a barrier must follow.
    """
    loads = np.int32(full >> 2)
    low = _lower_bound(row, loads, width, first, step, pool, ws)
    if low == 0:
        return low
    bound = _score_of(low)
    v = np.int32(first)
    while v < loads and ws[COUNT] <= CANDIDATES:
        a, b = _load(row, v, loads), _load(row, v + step, loads)
        c, d = _load(row, v + 2 * step, loads), _load(row, v + 3 * step, loads)
        e, f = _load(row, v + 4 * step, loads), _load(row, v + 5 * step, loads)
        g, h = _load(row, v + 6 * step, loads), _load(row, v + 7 * step, loads)
        hits = _hits(a, bound) | _hits(b, bound) << u(4) | _hits(c, bound) << u(8) | _hits(d, bound) << u(12)
        more = _hits(e, bound) | _hits(f, bound) << u(4) | _hits(g, bound) << u(8) | _hits(h, bound) << u(12)
        hits = u(hits | more << u(16))
        while hits != 0:
            bit = np.int32(cuda.ffs(hits) - 1)
            hits = u(hits & (hits - u(1)))
            _keep(row, np.int32(BLOCK * (v + (bit >> 2) * step) + (bit & 3)), pool, ws)
        v = np.int32(v + 8 * step)
    odd = np.int32(BLOCK * loads + first)
    if odd < full and row[u(odd)] >= bound:
        _keep(row, odd, pool, ws)
    return low


@cuda.jit(device=True)
def _keep_all(row, full, pool, ws):
    """Every block of a short row is a candidate; a barrier must follow."""
    block = cuda.threadIdx.x
    while block < full:
        pool[u(block)] = key_of(row[u(block)])
        pool[u(block + CANDIDATES)] = block
        block = onward(block, STEP)
    if cuda.threadIdx.x == 0:
        ws[COUNT], ws[TOP] = full, 0xFFFFFFFF


@kernel
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
    row, out = scores[u(query)], ids[u(query)]
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
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
        _keep_all(row, full, pool, ws)
    elif full <= MAX_SAMPLED:
        low = _collect(row, full, width, thread, STEP, pool, ws)
    cuda.syncthreads()
    if not settle(np.int32(ws[COUNT]), low, row, full, tail, width, out, pool, hist, ws):
        if thread == 0:
            flags[u(query)] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)


@cuda.jit(device=True)
def _publish(low, part, counts, done, pool, ws):
    """Hand this block's candidates to the query's last block; True in that one.

    part: uint32 [2 * CANDIDATES] of global memory, laid out as in `pool`; counts: int32 [SPLITS] of the query;
    done: int32 [1] of it.
    """
    thread = cuda.threadIdx.x
    count = np.int32(ws[COUNT]) if low != 0 else np.int32(CANDIDATES + 1)
    if count <= CANDIDATES:
        i = thread
        while i < count:
            part[u(i)] = pool[u(i)]
            part[u(i + CANDIDATES)] = pool[u(i + CANDIDATES)]
            i = onward(i, STEP)
    if thread == 0:
        counts[u(cuda.blockIdx.x)] = count
    cuda.threadfence()
    cuda.syncthreads()
    if thread == 0:
        arrived = cuda.atomic.add(done, 0, 1)
        if arrived == SPLITS - 1:
            done[0] = 0  # for the next replay
        ws[LAST] = arrived == SPLITS - 1
    cuda.syncthreads()
    return ws[LAST] != 0


@cuda.jit(device=True)
def _fetch(parts, counts, pool, ws):
    """Bring all blocks' candidates into `pool`; returns their number, past CANDIDATES if they do not fit.

    parts: uint32 [SPLITS, 2 * CANDIDATES]; a warp copies every WARPS-th block's.
    """
    thread = cuda.threadIdx.x
    lane, warp = thread & 31, thread >> 5
    if thread < SPLITS:
        ws[u(thread)] = load_fresh(counts, u(thread))
    cuda.syncthreads()
    total = np.int32(0)
    for s in range(SPLITS):
        total = np.int32(total + np.int32(ws[u(s)]))
    if total <= CANDIDATES:
        place = np.int32(0)
        s = np.int32(0)
        while s < SPLITS:
            count = np.int32(ws[u(s)])
            if s % WARPS == warp:
                part = parts[u(s)]
                i = lane
                while i < count:
                    key, block = load_fresh(part, u(i)), load_fresh(part, u(i + CANDIDATES))
                    pool[u(place + i)] = key
                    pool[u(place + i + CANDIDATES)] = block
                    i = onward(i, np.int32(32))
            place = np.int32(place + count)
            s = onward(s, ONE)
    cuda.syncthreads()
    return np.int32(min(total, CANDIDATES + 1))


@kernel
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
    query, split, thread = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
    first = np.int32(split * STEP + thread)
    row, out = scores[u(query)], ids[u(query)]
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
    if first == 0:
        flags[u(query)] = 0
    if cells <= width:
        write_all_cells(out, cells, first, np.int32(SPLITS * THREADS))
        return
    if width <= 0:
        return
    full, tail = np.int32(cells >> 2), np.int32(cells & 3)
    if tail > 0:
        prefetch(row, u(full))
    low = u(0)
    if full <= CANDIDATES:  # too short to share
        if split > 0:
            return
        _keep_all(row, full, pool, ws)
        cuda.syncthreads()
        count = np.int32(full)
    else:
        if full <= MAX_SAMPLED:
            low = _collect(row, full, width, first, np.int32(SPLITS * THREADS), pool, ws)
        cuda.syncthreads()
        if not _publish(low, parts[u(query), u(split)], counts[u(query)], done[u(query)], pool, ws):
            return
        count = _fetch(parts[u(query)], counts[u(query)], pool, ws)
    if not settle(count, low, row, full, tail, width, out, pool, hist, ws):
        if thread == 0:
            flags[u(query)] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)
