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
    quad_sum,
    warp_get,
    warp_kth_largest,
    warp_pick,
)
from .reference import BLOCK
from .settle import HIST, first_shift, settle, store, store_block
from .steps import (
    CANDIDATES,
    COUNT,
    LAST,
    LISTED,
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
SAMPLE_LOADS = 4  # at most, a thread
SPARE = 4 if SIMULATED else 16  # samples over the expected number, so that too few passing is rare
LOOSE = max(WARPS // 4, 1)  # of the warps' bounds the one that lists a third too many samples, and rarely too few
MOST_LISTED = THREADS // 2  # samples that are ranked; scattered scores list 100 at most, sorted ones 250
QUADS = np.int32(THREADS // 4)
SPLITS = 4 if SIMULATED else 16  # blocks of threads a query of a window
AT_ONCE = 4  # candidates of a split that a lane fetches before it knows how many there are


@cuda.jit(device=True)
def _load(row, load, loads):
    """Load number `load` of a row, four scores; NaN, which reaches no bound, past the end."""
    if load < loads:
        return load4(row, u(BLOCK * load))
    return np.float32(np.nan), np.float32(np.nan), np.float32(np.nan), np.float32(np.nan)


@cuda.jit(device=True)
def _load8(row, v, step, loads):
    """Loads v, v + step, ... of a row, eight of them: all in flight together."""
    a, b = _load(row, v, loads), _load(row, v + step, loads)
    c, d = _load(row, v + 2 * step, loads), _load(row, v + 3 * step, loads)
    e, f = _load(row, v + 4 * step, loads), _load(row, v + 5 * step, loads)
    return a, b, c, d, e, f, _load(row, v + 6 * step, loads), _load(row, v + 7 * step, loads)


@cuda.jit(device=True)
def _hits(x, bound):
    """Bit j is set where x[j] reaches the bound."""
    low = np.int32(x[0] >= bound) | np.int32(x[1] >= bound) << 1
    return u(low | np.int32(x[2] >= bound) << 2 | np.int32(x[3] >= bound) << 3)


@cuda.jit(device=True)
def _hits4(a, b, c, d, bound):
    """The `_hits` of four loads, 16 bits."""
    return u(_hits(a, bound) | _hits(b, bound) << u(4) | _hits(c, bound) << u(8) | _hits(d, bound) << u(12))


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
def _sampled(j, log):
    """The load of the row that is the thread's j-th of the sample: runs of 4, one of 2^log, dealt to the warps."""
    thread = cuda.threadIdx.x
    run = np.int32((8 * j + ((thread & 31) >> 2)) * WARPS + (thread >> 5))
    return np.int32((run << LOG_RUN + log) + (thread & 3))


@cuda.jit(device=True)
def _sample_log(loads):
    """The logarithm of how many runs there are for each that is sampled: SAMPLE_LOADS loads a thread must do."""
    log = np.int32(LOG_STRIDE)
    while loads >> (LOG_RUN + log) << LOG_RUN > SAMPLE_LOADS * THREADS:
        log = np.int32(log + 1)
    return log


@cuda.jit(device=True)
def _load_sample(row, loads, log):
    """The thread's loads of the sample, four."""
    end = np.int32(loads >> (LOG_RUN + log) << (LOG_RUN + log))  # past it stands no whole stride
    a, b = _load(row, _sampled(0, log), end), _load(row, _sampled(1, log), end)
    return a, b, _load(row, _sampled(2, log), end), _load(row, _sampled(3, log), end)


@cuda.jit(device=True)
def _list_samples(row, log, hits, pool, ws):
    """List the keys of the samples marked in `hits` in `pool`, up to MOST_LISTED of them."""
    if hits == 0:
        return
    place = np.int32(cuda.atomic.add(ws, LISTED, u(cuda.popc(hits))))
    while hits != 0 and place < MOST_LISTED:
        bit = np.int32(cuda.ffs(hits) - 1)
        hits = u(hits & (hits - u(1)))
        pool[u(place)] = key_of(row[u(BLOCK * _sampled(bit >> 2, log) + (bit & 3))])
        place = np.int32(place + 1)


@cuda.jit(device=True)
def _rank_samples(wanted, log, pool, ws):
    """`ws[RESULT]` gets the key of the `wanted`-th largest listed sample, `ws[TOP]` that of an eighth of it.

    `ws[RESULT]` stays 0 where so many samples reach that key that the blocks that do will not fit. A quad of lanes
    compares a sample with the others.
    """
    thread = cuda.threadIdx.x
    listed = np.int32(ws[LISTED])
    if listed > MOST_LISTED:
        return
    wanted = np.int32(min(wanted, listed))
    done = np.int32(0)
    ahead = np.int32(0 if SIMULATED else thread >> 5 << 3)  # a warp stops where the samples do
    while done + ahead < listed:
        e = np.int32(done + (thread >> 2))
        counts = np.int32(0)  # samples above, and 65,536 times those as large
        mine = u(0)
        if e < listed:
            mine = pool[u(e)]
            i = np.int32(thread & 3)
            while i < listed:
                other = pool[u(i)]
                counts = np.int32(counts + (1 if other > mine else 0) + (65536 if other == mine else 0))
                i = np.int32(i + 4)
        counts = quad_sum(counts)
        above, reached = np.int32(counts & 65535), np.int32((counts & 65535) + (counts >> 16))
        if above < wanted <= reached and reached << log <= CANDIDATES:
            ws[RESULT] = mine
        if above < wanted // 8 <= reached:
            ws[TOP] = mine
        done = np.int32(done + QUADS)


@cuda.jit(device=True)
def _lower_bound(row, loads, width, log, a, b, c, d, pool, ws):
    """A key that about twice the blocks needed and SPARE * 32 reach, from the sample a..d; 0 if it cannot tell.

    One of 32 runs of loads is sampled (fewer in rows past 131,072 blocks). The r-th largest lane maximum of a warp,
    r * warps >= wanted, is reached by about wanted / warps samples there or more; the lowest but a few of all warps'
    is reached by more than `wanted` in all; those few are ranked. `ws[LISTED]`, `[COUNT]`, `[RESULT]` and `[TOP]` are
    0 at the call; ends in a barrier.
    """
    thread = cuda.threadIdx.x
    samples = np.int32(loads >> (LOG_RUN + log) << LOG_RUN)
    wanted = np.int32((2 * ((width + BLOCK - 1) // BLOCK) >> log) + SPARE)
    rounds = np.int32((wanted + WARPS - 1) // WARPS)
    bound = np.float32(-np.inf)
    few = samples < rounds * WARPS or rounds > 32  # all are listed
    if not few:
        kth = warp_kth_largest(key_of(max(max(_largest(a), _largest(b)), max(_largest(c), _largest(d)))), rounds)
        if thread & 31 == 0:
            ws[u(thread >> 5)] = kth
    cuda.syncthreads()
    if not few:
        lane = np.int32(thread & 31)
        mine = ws[u(lane & (WARPS - 1))]
        lower, same = np.int32(0), np.int32(0)
        for w in range(WARPS):
            other = ws[u(w)]
            lower = np.int32(lower + (1 if other < mine or (other == mine and w < lane) else 0))
            same = np.int32(same + (1 if other == mine else 0))
        if same == WARPS:  # so many scores are equal that the blocks that reach them will not fit
            return u(0)
        bound = _score_of(warp_pick(lower == LOOSE - 1 and lane < WARPS, mine))
    _list_samples(row, log, u(_hits4(a, b, c, d, bound)), pool, ws)
    cuda.syncthreads()
    _rank_samples(wanted, log, pool, ws)
    cuda.syncthreads()
    return ws[RESULT]


@cuda.jit(device=True)
def _keep8(row, v, step, x, low, shift, tallied, keys, hist, ws):
    """Append the blocks of the eight loads `x` that reach the bound to the candidates in `keys`.

    What reaches it is marked in one word and read again from L1. `tallied`: `store` them and count them in `hist`.
    """
    bound = _score_of(low)
    hits = u(_hits4(x[0], x[1], x[2], x[3], bound) | _hits4(x[4], x[5], x[6], x[7], bound) << u(16))
    if hits == 0:
        return
    place = np.int32(cuda.atomic.add(ws, COUNT, u(cuda.popc(hits))))
    while hits != 0:
        bit = np.int32(cuda.ffs(hits) - 1)
        hits = u(hits & (hits - u(1)))
        _keep(row, np.int32(BLOCK * (v + (bit >> 2) * step) + (bit & 3)), place, low, shift, tallied, keys, hist)
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
    if odd < full and row[u(odd)] >= _score_of(low):
        _keep(row, odd, np.int32(cuda.atomic.add(ws, COUNT, u(1))), low, shift, tallied, keys, hist)


@cuda.jit(device=True)
def _scan(row, full, v, step, low, shift, tallied, keys, hist, ws):
    """Keep the candidates among loads v, v + step, ... of the row; a barrier must follow.

    `ws[COUNT]` is the number of candidates, past CANDIDATES if they did not fit.
    """
    loads = np.int32(full >> 2)
    while v < loads and ws[COUNT] <= CANDIDATES:
        _keep8(row, v, step, _load8(row, v, step, loads), low, shift, tallied, keys, hist, ws)
        v = np.int32(v + 8 * step)


@cuda.jit(device=True)
def _prefetch8(row, split, step, loads):
    """Start bringing a block's first eight rounds of loads to L2, a line of 128 bytes a thread."""
    thread = cuda.threadIdx.x
    line = np.int32(split * STEP + thread * 8 // THREADS * step + thread * 8 % THREADS)
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
    log = _sample_log(loads)
    a, b, c, d = _load_sample(row, loads, log)
    _prefetch8(row, np.int32(0), STEP, loads)  # while the bound is sought
    low = _lower_bound(row, loads, width, log, a, b, c, d, pool, ws)
    if low != 0:
        first, shift = np.int32(cuda.threadIdx.x), first_shift(low, ws)
        _keep_odd(row, full, first, low, shift, True, pool, hist, ws)
        _scan(row, full, first, STEP, low, shift, True, pool, hist, ws)
    return low


@cuda.jit(device=True)
def _keep_all(row, full, pool, hist, ws):
    """Every block of a short row is a candidate; starts with a barrier, and one must follow."""
    if cuda.threadIdx.x == 0:
        ws[COUNT], ws[TOP] = full, 0xFFFFFFFF
    cuda.syncthreads()
    shift = first_shift(u(0), ws)
    block = cuda.threadIdx.x
    while block < full:
        store_block(row, block, block, u(0), shift, pool, hist)
        block = onward(block, STEP)


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
    row, out = scores[u(query)], ids[u(query)]
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
        _keep_all(row, full, pool, hist, ws)
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
        load = _sampled(j, np.int32(LOG_STRIDE))
        if thread & 3 == 0 and load < loads:
            prefetch(row, u(BLOCK * load))
    _prefetch8(row, split, np.int32(SPLITS * THREADS), loads)


@cuda.jit(device=True)
def _collect_split(row, full, width, split, part, hist, pool, ws):
    """Keep a split's candidates in `part`, as `_collect` does in `pool`; the bound is the same in all splits."""
    loads = np.int32(full >> 2)
    step = np.int32(SPLITS * THREADS)
    first = np.int32(split * STEP + cuda.threadIdx.x)
    log = _sample_log(loads)
    a, b, c, d = _load_sample(row, loads, log)
    x = _load8(row, first, step, loads)
    low = _lower_bound(row, loads, width, log, a, b, c, d, pool, ws)
    if low != 0:
        _keep_odd(row, full, first, low, np.int32(0), False, part, hist, ws)
        _keep8(row, first, step, x, low, np.int32(0), False, part, hist, ws)
        _scan(row, full, np.int32(first + 8 * step), step, low, np.int32(0), False, part, hist, ws)
    return low


@cuda.jit(device=True)
def _arrive(counts, done, ws):
    """Hand this block's candidates to the query's last block; True in that one, with `ws[COUNT]` 0.

    counts: int32 [SPLITS] of the query; done: int32 [1] of it. The candidates are in global memory already.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        counts[u(cuda.blockIdx.x)] = np.int32(ws[COUNT])
        ws[COUNT] = 0
        cuda.threadfence()
        arrived = cuda.atomic.add(done, 0, 1)
        if arrived == SPLITS - 1:
            done[0] = 0  # for the next replay
        ws[LAST] = arrived == SPLITS - 1
    cuda.syncthreads()
    return ws[LAST] != 0


@cuda.jit(device=True)
def _fetch(parts, counts, low, shift, pool, hist, ws):
    """Bring all splits' candidates into `pool`, in any order; a barrier must follow.

    parts: uint32 [SPLITS, 2 * CANDIDATES]; a warp copies every WARPS-th split's. `ws[COUNT]` is 0 at the call and
    their number afterwards, past CANDIDATES if they do not fit.
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
        while i < min(count, CANDIDATES):
            key, block = load_fresh(part, u(i)), load_fresh(part, u(i + CANDIDATES))
            store(place + i - lane, key, block, low, shift, pool, hist)
            i = onward(i, np.int32(32))
        s = np.int32(s + WARPS)


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
    row, out = scores[u(query)], ids[u(query)]
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
        _keep_all(row, full, pool, hist, ws)
    cuda.syncthreads()
    if not settle(np.int32(ws[COUNT]), low, row, full, tail, width, out, pool, hist, ws):
        if thread == 0:
            flags[u(query)] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)
