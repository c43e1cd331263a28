"""`sample` and `window`: block top-k with one read of the scores.

A sample of the scores gives a lower bound that about three times as many blocks pass as are needed. One pass keeps
those in shared memory; the threshold, the ties and the order are then settled among them. The bound is a guess: too
few or too many blocks may pass. Such a query is flagged and selected by `wide` in the same launch.

`sample` gives a query to one block of threads; `window`, for few queries, spreads one over SPLITS of them, and the
last to finish settles. Twin of both: `reference.select_rows`.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .ptx import (
    SIMULATED,
    THREADS,
    WARPS,
    bits_float,
    kernel,
    load4,
    load_fresh,
    prefetch,
    reserve,
    sum_below,
    warp_kth_largest,
)
from .reference import BLOCK
from .steps import (
    CANDIDATES,
    COUNT,
    GATHERED,
    HIST,
    HIST_BITS,
    LAST,
    LISTED,
    MAX_BLOCKS,
    MAX_WIDTH,
    POOL,
    RESULT,
    TOP,
    WORKSPACE,
    find_bin,
    in_range,
    key_of,
    read_record,
    tail_key,
    write_all_cells,
)
from .wide import select_wide

LOG_STRIDE = 3 if SIMULATED else 5  # one score of 32 is in the sample
LOG_RUN = 2  # 4 loads of 4 scores stand side by side in the sample: 64 bytes, as memory likes to be read
RUN = 1 << LOG_RUN
LOG_WARPS = WARPS.bit_length() - 1
SPARE = 4 if SIMULATED else 16  # samples over the expected number, so that too few passing is rare
SPLITS = 4 if SIMULATED else 16  # blocks of threads a query of a window
FEW = 32  # blocks that are ranked by comparing each with each
NOTHING, TIE = 0xFFFFFFFF, 0x80000000  # marks in place of a block number, and on top of one


@cuda.jit(device=True)
def _count_from(x, bound):
    """How many of four scores have a key that reaches `bound`."""
    first, second = (key_of(x[0]) >= bound) + (key_of(x[1]) >= bound), (key_of(x[2]) >= bound)
    return first + second + (key_of(x[3]) >= bound)


@cuda.jit(device=True)
def _list_samples(x, bound, place, pool):
    """Write the keys of four samples that reach `bound` to the list in `pool`; the place after them."""
    for j in range(4):
        key = key_of(x[j])
        if key >= bound:
            if place < THREADS:
                pool[place] = key
            place += 1
    return place


@cuda.jit(device=True)
def _largest_key(x):
    return max(max(key_of(x[0]), key_of(x[1])), max(key_of(x[2]), key_of(x[3])))


@cuda.jit(device=True)
def _rank_samples(wanted, log, pool, ws):
    """Rank the listed samples: `ws[RESULT]` gets the key of the `wanted`-th largest, `ws[TOP]` that of an eighth of it.

    `ws[RESULT]` stays 0 where so many samples equal that key that the blocks over it will not fit.
    """
    thread = cuda.threadIdx.x
    listed = np.int32(ws[LISTED])
    if thread < listed <= THREADS:
        mine = pool[thread]
        above, same = 0, 0
        for i in range(listed):
            above += pool[i] > mine
            same += pool[i] == mine
        if above < wanted <= above + same and above + same << log <= CANDIDATES:
            ws[RESULT] = mine
        if above < wanted // 8 <= above + same:
            ws[TOP] = mine


@cuda.jit(device=True)
def _lower_bound(row, full, width, first, step, pool, ws):
    """A key that about twice the blocks needed and SPARE * 32 reach, from a sample; 0 if it cannot tell.

    The sample is RUN loads side by side of every 32 * RUN (more in rows past 131,072 blocks). The r-th largest lane
    maximum of a warp, r * warps >= wanted, is reached by r samples there, so the lowest of all warps' is reached by
    `wanted` in all; those few are ranked. Meanwhile the first loads (first, first + step, ...) travel to L2.
    """
    thread = cuda.threadIdx.x
    vecs = full >> 2
    log = LOG_STRIDE
    while vecs >> (LOG_RUN + log) << LOG_RUN > 2 * THREADS:
        log += 1
    loads = vecs >> (LOG_RUN + log) << LOG_RUN
    wanted = (2 * ((width + BLOCK - 1) // BLOCK) >> log) + SPARE
    x = y = (np.float32(np.nan), np.float32(np.nan), np.float32(np.nan), np.float32(np.nan))
    if thread < loads:
        x = load4(row, 4 * ((thread >> LOG_RUN << LOG_RUN + log) + (thread & RUN - 1)))
    if thread + THREADS < loads:
        other = thread + THREADS
        y = load4(row, 4 * ((other >> LOG_RUN << LOG_RUN + log) + (other & RUN - 1)))
    line = first - thread + thread * 8 // THREADS * step + thread * 8 % THREADS
    if line < vecs:
        prefetch(row, 4 * line)
    if thread == 0:
        ws[LISTED], ws[COUNT], ws[RESULT], ws[TOP] = 0, 0, 0, 0
    bound = np.uint32(1)
    log_warps = LOG_WARPS
    while log_warps > 0 and 32 << log_warps > loads:
        log_warps -= 1
    rounds = (wanted + (1 << log_warps) - 1) >> log_warps
    if 4 * loads > THREADS and rounds <= 32:
        kth = warp_kth_largest(max(_largest_key(x), _largest_key(y)), rounds)
        if thread & 31 == 0:
            pool[THREADS + (thread >> 5)] = kth
        cuda.syncthreads()
        bound = max(bound, pool[THREADS])
        for w in range(1, 1 << log_warps):
            bound = min(bound, max(np.uint32(1), pool[THREADS + w]))
    else:
        cuda.syncthreads()
    place = reserve(ws, LISTED, _count_from(x, bound) + _count_from(y, bound))
    _list_samples(y, bound, _list_samples(x, bound, place, pool), pool)
    cuda.syncthreads()
    _rank_samples(wanted, log, pool, ws)
    cuda.syncthreads()
    return ws[RESULT]


@cuda.jit(device=True)
def _keep(x, block, bound, pool, ws):
    """Append a block that reaches the bound to the candidates: its key, and CANDIDATES further on its number."""
    if x >= bound:
        place = cuda.atomic.add(ws, COUNT, np.uint32(1))
        if place < CANDIDATES:
            pool[place] = key_of(x)
            pool[CANDIDATES + place] = block


@cuda.jit(device=True)
def _keep4(x, v, bound, pool, ws):
    _keep(x[0], 4 * v, bound, pool, ws)
    _keep(x[1], 4 * v + 1, bound, pool, ws)
    _keep(x[2], 4 * v + 2, bound, pool, ws)
    _keep(x[3], 4 * v + 3, bound, pool, ws)


@cuda.jit(device=True)
def _collect(row, full, width, first, step, pool, ws):
    """Keep the candidates among loads first, first + step, ...; returns the bound's key, 0 if there is none.

    The next loads are under way while the last are looked at. `ws[COUNT]` is the number of candidates, past
    CANDIDATES if they did not fit; a barrier must follow.
    """
    low = _lower_bound(row, full, width, first, step, pool, ws)
    if low == 0:
        return low
    bound = bits_float(low & np.uint32(0x7FFFFFFF) if low >= np.uint32(0x80000000) else ~low)
    vecs = full >> 2
    v = first
    a = b = c = d = (np.float32(0), np.float32(0), np.float32(0), np.float32(0))
    whole = v + 3 * step < vecs
    if whole:
        a, b = load4(row, 4 * v), load4(row, 4 * (v + step))
        c, d = load4(row, 4 * (v + 2 * step)), load4(row, 4 * (v + 3 * step))
    while whole:
        now = v
        v += 4 * step
        whole = v + 3 * step < vecs and ws[COUNT] <= CANDIDATES
        p, q, r, s = a, b, c, d
        if whole:
            a, b = load4(row, 4 * v), load4(row, 4 * (v + step))
            c, d = load4(row, 4 * (v + 2 * step)), load4(row, 4 * (v + 3 * step))
        _keep4(p, now, bound, pool, ws)
        _keep4(q, now + step, bound, pool, ws)
        _keep4(r, now + 2 * step, bound, pool, ws)
        _keep4(s, now + 3 * step, bound, pool, ws)
    while v < vecs and ws[COUNT] <= CANDIDATES:
        _keep4(load4(row, 4 * v), v, bound, pool, ws)
        v += step
    if first < (full & 3):
        block = 4 * vecs + first
        _keep(row[block], block, bound, pool, ws)
    return low


@cuda.jit(device=True)
def _keep_all(row, full, pool, ws):
    """Every block of a short row is a candidate; a barrier must follow."""
    for block in range(cuda.threadIdx.x, full, THREADS):
        pool[block] = key_of(row[block])
        pool[CANDIDATES + block] = block
    if cuda.threadIdx.x == 0:
        ws[COUNT], ws[TOP] = full, 0xFFFFFFFF


@cuda.jit(device=True)
def _rank_few(count, start, bits, key_of_tail, tail, need, pool, hist, ws):
    """The threshold among at most FEW blocks with keys in the range: (threshold, cells of them above it).

    `ws[GATHERED]` is 0 at the call; `hist` takes the keys and, FEW + 1 further on, the cells.
    """
    thread = cuda.threadIdx.x
    for i in range(thread, count, THREADS):
        if in_range(pool[i], start, bits):
            place = cuda.atomic.add(ws, GATHERED, np.uint32(1))
            hist[place] = pool[i]
            hist[FEW + 1 + place] = BLOCK
    if thread == 0 and tail > 0 and in_range(key_of_tail, start, bits):
        place = cuda.atomic.add(ws, GATHERED, np.uint32(1))
        hist[place] = key_of_tail
        hist[FEW + 1 + place] = tail
    cuda.syncthreads()
    few = np.int32(ws[GATHERED])
    if thread < few:
        mine = hist[thread]
        above, same = 0, 0
        for i in range(few):
            cells = np.int32(hist[FEW + 1 + i])
            if hist[i] > mine:
                above += cells
            elif hist[i] == mine:
                same += cells
        if above < need <= above + same:
            ws[RESULT] = mine
            ws[RESULT + 1] = above
    cuda.syncthreads()
    return ws[RESULT], np.int32(ws[RESULT + 1])


@cuda.jit(device=True)
def _threshold(count, low, tail, key_of_tail, width, pool, hist, ws):
    """(threshold, cells above it) over `count` candidates with keys from `low` on, and the tail block.

    The bins of the first step reach from `low` to `ws[TOP]`, and the last one on to the largest key.
    """
    thread = cuda.threadIdx.x
    last = (1 << HIST_BITS) - 1
    above = np.int32(0)
    start = low
    bits = 32  # the range looked at is start <= key < start + 2^bits
    shift = max(32 - np.int32(cuda.clz(np.uint32(max(ws[TOP], low) - low))) - HIST_BITS, 0)
    while True:
        hist[thread] = 0
        if thread == 0:
            ws[GATHERED] = 0
        cuda.syncthreads()
        for i in range(thread, count, THREADS):
            if in_range(pool[i], start, bits):
                cuda.atomic.add(hist, min((pool[i] - start) >> np.uint32(shift), np.uint64(last)), np.uint32(1))
        tail_bin = np.int32(-1)
        if tail > 0 and in_range(key_of_tail, start, bits):
            tail_bin = np.int32(min((key_of_tail - start) >> np.uint32(shift), np.uint64(last)))
        cuda.syncthreads()
        b, higher, held = find_bin(hist, 1, width - above, tail_bin, tail, ws)
        above = np.int32(above + higher)
        start = np.uint32(start + (np.uint32(b) << np.uint32(shift)))
        if bits < 32 or b < last:
            bits = shift
        shift = max(bits - HIST_BITS, 0)
        if bits == 0 or held <= BLOCK * FEW:
            break
    if bits == 0:
        return start, above
    threshold, higher = _rank_few(count, start, bits, key_of_tail, tail, width - above, pool, hist, ws)
    return threshold, np.int32(above + higher)


@cuda.jit(device=True)
def _order(count, threshold, full, fill, pool, hist, ws):
    """List the selected full blocks, ascending, from pool[CANDIDATES] on; (cells they give, first slot after a cut).

    Blocks at the threshold count until they hold `fill` cells; the last of them may be cut. A counting sort: as many
    ranges of blocks as there are threads, then each block is compared with the others of its range. Counts of both
    sorts of blocks travel in one word: above the threshold, and 65,536 times those at it.
    """
    thread = cuda.threadIdx.x
    shift = np.uint32(0)
    while (full - 1) >> shift >= THREADS:
        shift += np.uint32(1)
    hist[thread] = 0
    if thread == 0:
        ws[LISTED] = 0x7FFFFFFF
    cuda.syncthreads()
    for i in range(thread, count, THREADS):
        key, mark = pool[i], np.uint32(NOTHING)
        if key >= threshold:
            mark = pool[CANDIDATES + i]
            cuda.atomic.add(hist, mark >> shift, np.uint32(65536 if key == threshold else 1))
            if key == threshold:
                mark |= np.uint32(TIE)
        pool[CANDIDATES + i] = mark
    cuda.syncthreads()
    held = np.int32(hist[thread])
    before = np.int32(sum_below(held, ws))
    hist[thread] = before
    hist[THREADS + thread] = (before & 65535) + (before >> 16)
    if thread == THREADS - 1:
        ws[GATHERED] = before + held
    cuda.syncthreads()
    for i in range(thread, count, THREADS):
        mark = pool[CANDIDATES + i]
        if mark != np.uint32(NOTHING):
            bucket = np.uint32(THREADS) + ((mark & np.uint32(0x7FFFFFFF)) >> shift)
            pool[cuda.atomic.add(hist, bucket, np.uint32(1))] = mark
    cuda.syncthreads()
    total = np.int32(ws[GATHERED])
    needed = (fill + BLOCK - 1) // BLOCK
    for e in range(thread, (total & 65535) + (total >> 16), THREADS):
        mark = pool[e]
        block = mark & np.uint32(0x7FFFFFFF)
        packed = np.int32(hist[block >> shift])
        above, ties = packed & 65535, packed >> 16
        for i in range(above + ties, np.int32(hist[np.uint32(THREADS) + (block >> shift)])):
            other = pool[i]
            if (other & np.uint32(0x7FFFFFFF)) < block:
                above += other < np.uint32(TIE)
                ties += other >= np.uint32(TIE)
        if mark < np.uint32(TIE):
            pool[CANDIDATES + above + min(ties, needed)] = block
        elif ties < needed:
            pool[CANDIDATES + above + ties] = block
            if ties == needed - 1:
                ws[LISTED] = BLOCK * above + fill
    cuda.syncthreads()
    return BLOCK * (total & 65535) + min(BLOCK * (total >> 16), fill), np.int32(ws[LISTED])


@cuda.jit(device=True)
def _settle(count, low, full, tail, key_of_tail, width, out, pool, hist, ws):
    """Select among the candidates; False, with nothing written, where they do not decide."""
    if (low == 0 and full > CANDIDATES) or count > CANDIDATES:
        return False
    counted_tail = tail if key_of_tail >= low else 0
    if BLOCK * count + counted_tail < width:
        return False
    threshold, above = _threshold(count, low, counted_tail, key_of_tail, width, pool, hist, ws)
    fill = width - above
    listed, cut = _order(count, threshold, full, fill, pool, hist, ws)
    skipped = -fill & (BLOCK - 1)  # cells that a cut block does not give
    for slot in range(cuda.threadIdx.x, width, THREADS):
        if slot < listed:
            place = slot + skipped if slot >= cut else slot
            out[slot] = BLOCK * np.int32(pool[CANDIDATES + (place >> 2)]) + (place & 3)
        else:
            out[slot] = BLOCK * full + slot - listed
    return True


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
    row, out = scores[query], ids[query]
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
    if thread == 0:
        flags[query] = 0
    if cells <= width:
        write_all_cells(out, cells, thread, THREADS)
        return
    if width <= 0:
        return
    full, tail = cells >> 2, cells & 3
    if tail > 0:
        prefetch(row, full)
    decided = False
    if full <= MAX_BLOCKS and width <= MAX_WIDTH:
        low = np.uint32(0)
        if full <= CANDIDATES:
            _keep_all(row, full, pool, ws)
        else:
            low = _collect(row, full, width, thread, THREADS, pool, ws)
        cuda.syncthreads()
        key_of_tail = tail_key(row, full, tail)
        decided = _settle(np.int32(ws[COUNT]), low, full, tail, key_of_tail, width, out, pool, hist, ws)
    if not decided:
        if thread == 0:
            flags[query] = 1
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
        for i in range(thread, count, THREADS):
            part[i] = pool[i]
            part[CANDIDATES + i] = pool[CANDIDATES + i]
    if thread == 0:
        counts[cuda.blockIdx.x] = count
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
    if thread < SPLITS:
        ws[thread] = load_fresh(counts, thread)
    cuda.syncthreads()
    total = 0
    for s in range(SPLITS):
        total += np.int32(ws[s])
    if total <= CANDIDATES:
        place = 0
        for s in range(SPLITS):
            count = np.int32(ws[s])
            if s % WARPS == thread >> 5:
                part = parts[s]
                for i in range(thread & 31, count, 32):
                    key, block = load_fresh(part, i), load_fresh(part, CANDIDATES + i)
                    pool[place + i] = key
                    pool[CANDIDATES + place + i] = block
            place += count
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
    query, thread = cuda.blockIdx.y, cuda.threadIdx.x
    first = cuda.blockIdx.x * THREADS + thread
    row, out = scores[query], ids[query]
    cells, width = read_record(records, active, scores.shape[1], ids.shape[1], query)
    if first == 0:
        flags[query] = 0
    if cells <= width:
        write_all_cells(out, cells, first, SPLITS * THREADS)
        return
    if width <= 0:
        return
    full, tail = cells >> 2, cells & 3
    if tail > 0:
        prefetch(row, full)
    low = np.uint32(0)
    if full <= CANDIDATES and width <= MAX_WIDTH:  # too short to share
        if cuda.blockIdx.x == 0:
            _keep_all(row, full, pool, ws)
            cuda.syncthreads()
            _settle(full, low, full, tail, tail_key(row, full, tail), width, out, pool, hist, ws)
        return
    if full <= MAX_BLOCKS and width <= MAX_WIDTH:
        low = _collect(row, full, width, first, SPLITS * THREADS, pool, ws)
    cuda.syncthreads()
    if not _publish(low, parts[query, cuda.blockIdx.x], counts[query], done[query], pool, ws):
        return
    count = _fetch(parts[query], counts[query], pool, ws)
    if not _settle(count, low, full, tail, tail_key(row, full, tail), width, out, pool, hist, ws):
        if thread == 0:
            flags[query] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, tail_key(row, full, tail), width, out, pool, ws)
