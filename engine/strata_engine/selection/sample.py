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
    block_max,
    kernel,
    load4,
    load_shared_by_all,
    sum_below,
    warp_kth_largest,
)
from .reference import BLOCK
from .steps import (
    BITMAP,
    CANDIDATES,
    COUNT,
    GATHERED,
    HIST,
    HIST_BITS,
    HIST_EACH,
    LAST,
    LISTED,
    MAX_BLOCKS,
    MAX_WIDTH,
    POOL,
    RESULT,
    WORDS,
    WORKSPACE,
    find_bin,
    in_range,
    key_of,
    pad,
    read_record,
    tail_key,
    write_all_cells,
)
from .wide import select_wide

STRIDE = 8 if SIMULATED else 32  # one score of so many is in the sample
SPARE = 4 if SIMULATED else 16  # samples over the expected number, so that too few passing is rare
SPLITS = 4 if SIMULATED else 16  # blocks of threads a query of a window
EACH = CANDIDATES // THREADS  # candidates a thread
FEW = 32  # blocks that are ranked by comparing each with each
NOTHING, TIE = 0xFFFFFFFF, 0x80000000  # marks beside a block number


@cuda.jit(device=True)
def _list_samples(x, bound, pool, ws):
    """Append the keys of four samples that reach `bound` to the list in `pool`."""
    for j in range(4):
        key = key_of(x[j])
        if key >= bound:
            place = cuda.atomic.add(ws, LISTED, np.uint32(1))
            if place < THREADS:
                pool[place] = key


@cuda.jit(device=True)
def _lower_bound(row, full, width, pool, ws):
    """The key of about the `wanted`-th largest sample; 0 if the samples cannot tell.

    The sample is 4 neighbours of every 4 * STRIDE scores, one 16-byte load. Each warp's r-th largest lane maximum,
    r = wanted / WARPS rounded up, is a bound that at least `wanted` samples reach; those few are ranked exactly.
    """
    thread = cuda.threadIdx.x
    groups = (full >> 2) // STRIDE
    wanted = 2 * ((width + BLOCK - 1) // BLOCK) // STRIDE + SPARE
    if thread == 0:
        ws[LISTED], ws[COUNT], ws[RESULT] = 0, 0, 0
    top = np.uint32(0)
    for g in range(thread, groups, THREADS):
        x = load4(row, 4 * STRIDE * g)
        top = max(max(top, max(key_of(x[0]), key_of(x[1]))), max(key_of(x[2]), key_of(x[3])))
    kth = warp_kth_largest(top, (wanted + WARPS - 1) // WARPS)
    if thread & 31 == 0:
        pool[THREADS + (thread >> 5)] = kth
    cuda.syncthreads()
    bound = pool[THREADS]
    for w in range(1, WARPS):
        bound = min(bound, pool[THREADS + w])
    bound = max(bound, np.uint32(1))
    for g in range(thread, groups, THREADS):
        _list_samples(load4(row, 4 * STRIDE * g), bound, pool, ws)
    cuda.syncthreads()
    listed = np.int32(ws[LISTED])
    if thread < listed <= THREADS:
        mine = pool[thread]
        above, same = 0, 0
        for i in range(listed):
            above += pool[i] > mine
            same += pool[i] == mine
        if above < wanted <= above + same:
            ws[RESULT] = mine
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

    The first loads are under way while the bound is computed, and the next ones while the last are looked at.
    `ws[COUNT]` is their number, past CANDIDATES if they did not fit; a barrier must follow.
    """
    vecs = full >> 2
    v = first
    a = b = c = d = (np.float32(0), np.float32(0), np.float32(0), np.float32(0))
    whole = v + 3 * step < vecs
    if whole:
        a, b = load4(row, 4 * v), load4(row, 4 * (v + step))
        c, d = load4(row, 4 * (v + 2 * step)), load4(row, 4 * (v + 3 * step))
    low = _lower_bound(row, full, width, pool, ws)
    if low == 0:
        return low
    bound = bits_float(low & np.uint32(0x7FFFFFFF) if low >= np.uint32(0x80000000) else ~low)
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
        ws[COUNT] = full


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
    """(threshold, cells above it) over `count` candidates with keys from `low` on, and the tail block."""
    thread = cuda.threadIdx.x
    largest = low
    for i in range(thread, count, THREADS):
        largest = max(largest, pool[i])
    largest = block_max(largest, ws)
    above = np.int32(0)
    if tail > 0 and key_of_tail > largest:
        above, tail = np.int32(tail), np.int32(0)  # raised over all others, as it nearly always is
    start = low
    bits = 32 - np.int32(cuda.clz(largest - low))
    while True:
        shift = max(bits - HIST_BITS, 0)
        for i in range(thread, HIST, THREADS):
            hist[i] = 0
        if thread == 0:
            ws[GATHERED] = 0
        cuda.syncthreads()
        for i in range(thread, count, THREADS):
            if in_range(pool[i], start, bits):
                cuda.atomic.add(hist, pad((pool[i] - start) >> np.uint32(shift), np.uint32(HIST_EACH)), np.uint32(1))
        tail_bin = np.int32(-1)
        if tail > 0 and in_range(key_of_tail, start, bits):
            tail_bin = np.int32((key_of_tail - start) >> np.uint32(shift))
        cuda.syncthreads()
        b, higher, held = find_bin(hist, HIST_EACH, width - above, tail_bin, tail, ws)
        above = np.int32(above + higher)
        start = start + (np.uint32(b) << np.uint32(shift))
        bits = shift
        if bits == 0 or held <= BLOCK * FEW:
            break
    if bits == 0:
        return start, above
    threshold, higher = _rank_few(count, start, bits, key_of_tail, tail, width - above, pool, hist, ws)
    return threshold, np.int32(above + higher)


@cuda.jit(device=True)
def _mark(count, threshold, full, pool):
    """Turn the candidates in `pool` into two bitmaps of blocks: above the threshold, and BITMAP further on at it."""
    thread = cuda.threadIdx.x
    mine = cuda.local.array(EACH, np.uint32)
    for j in range(EACH):
        i = thread + j * THREADS
        mine[j] = np.uint32(NOTHING)
        if i < count and pool[i] >= threshold:
            mine[j] = pool[CANDIDATES + i] | (np.uint32(TIE) if pool[i] == threshold else np.uint32(0))
    cuda.syncthreads()
    for w in range(thread, (full + 31) >> 5, THREADS):
        pool[pad(w, WORDS)] = 0
        pool[BITMAP + pad(w, WORDS)] = 0
    cuda.syncthreads()
    for j in range(EACH):
        if mine[j] != np.uint32(NOTHING):
            block = mine[j] & np.uint32(0x7FFFFFFF)
            word = pad(block >> np.uint32(5), np.uint32(WORDS))
            if mine[j] != block:
                word += np.uint32(BITMAP)
            cuda.atomic.or_(pool, word, np.uint32(1) << (block & np.uint32(31)))
    cuda.syncthreads()


@cuda.jit(device=True)
def _list_blocks(full, fill, pool, hist, ws):
    """List the selected full blocks in `hist`, ascending; (cells they give, first slot after a cut block).

    Blocks at the threshold count until they hold `fill` cells; the last of them may be cut.
    """
    thread = cuda.threadIdx.x
    words = (full + 31) >> 5
    each = (words + THREADS - 1) // THREADS
    first = min(thread * each, words)
    last = min(first + each, words)
    if thread == 0:
        ws[LISTED] = 0x7FFFFFFF
    found = 0
    for w in range(first, last):
        found += cuda.popc(pool[pad(w, WORDS)]) + (cuda.popc(pool[BITMAP + pad(w, WORDS)]) << 16)
    before = np.int64(sum_below(np.int32(found), ws))
    above, ties = before & 65535, before >> 16
    needed = (fill + BLOCK - 1) // BLOCK
    for w in range(first, last):
        over = pool[pad(w, WORDS)]
        left = over | pool[BITMAP + pad(w, WORDS)]
        while left != 0:
            bit = np.int32(cuda.ffs(left)) - 1
            left &= left - np.uint32(1)
            if (over >> np.uint32(bit)) & np.uint32(1):
                hist[above + min(ties, needed)] = 32 * w + bit
                above += 1
            else:
                if ties < needed:
                    hist[above + ties] = 32 * w + bit
                if ties == needed - 1:
                    ws[LISTED] = BLOCK * (above + ties) + fill - BLOCK * ties
                ties += 1
    if thread == THREADS - 1:
        ws[GATHERED] = BLOCK * above + min(BLOCK * ties, fill)
    cuda.syncthreads()
    return np.int32(ws[GATHERED]), np.int32(ws[LISTED])


@cuda.jit(device=True)
def _settle(count, low, full, tail, key_of_tail, width, out, pool, hist, ws):
    """Select among the candidates; False, with nothing written, where they do not decide."""
    if low == 0 and full > CANDIDATES or count > CANDIDATES:
        return False
    counted_tail = tail if key_of_tail >= low else 0
    if BLOCK * count + counted_tail < width:
        return False
    threshold, above = _threshold(count, low, counted_tail, key_of_tail, width, pool, hist, ws)
    fill = width - above
    _mark(count, threshold, full, pool)
    listed, cut = _list_blocks(full, fill, pool, hist, ws)
    skipped = -fill & (BLOCK - 1)  # cells that a cut block does not give
    for slot in range(cuda.threadIdx.x, width, THREADS):
        if slot < listed:
            place = slot + skipped if slot >= cut else slot
            out[slot] = BLOCK * np.int32(hist[place >> 2]) + (place & 3)
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
    key_of_tail = tail_key(row, full, tail)
    decided = False
    if full <= MAX_BLOCKS and width <= MAX_WIDTH:
        low = np.uint32(0)
        if full <= CANDIDATES:
            _keep_all(row, full, pool, ws)
        else:
            low = _collect(row, full, width, thread, THREADS, pool, ws)
        cuda.syncthreads()
        decided = _settle(np.int32(ws[COUNT]), low, full, tail, key_of_tail, width, out, pool, hist, ws)
    if not decided:
        if thread == 0:
            flags[query] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, key_of_tail, width, out, pool, ws)


@cuda.jit(device=True)
def _publish(low, part, counts, done, pool, ws):
    """Hand this block's candidates to the query's last block; True in that one.

    part: uint32 [2, CANDIDATES] of global memory; counts: int32 [SPLITS] of the query; done: int32 [1] of it.
    """
    thread = cuda.threadIdx.x
    count = np.int32(ws[COUNT]) if low != 0 else np.int32(CANDIDATES + 1)
    if count <= CANDIDATES:
        for i in range(thread, count, THREADS):
            part[0, i] = pool[i]
            part[1, i] = pool[CANDIDATES + i]
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
def _fetch(parts, counts, pool):
    """Bring all blocks' candidates into `pool`; returns their number, past CANDIDATES if they do not fit.

    parts: uint32 [SPLITS, 2, CANDIDATES]; a warp copies every WARPS-th block's.
    """
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    total = 0
    for s in range(SPLITS):
        total += load_shared_by_all(counts, s)
    if total <= CANDIDATES:
        place = 0
        for s in range(SPLITS):
            count = load_shared_by_all(counts, s)
            if s % WARPS == warp:
                for i in range(lane, count, 32):
                    pool[place + i] = load_shared_by_all(parts, (s, 0, i))
                    pool[CANDIDATES + place + i] = load_shared_by_all(parts, (s, 1, i))
            place += count
    cuda.syncthreads()
    return np.int32(min(total, CANDIDATES + 1))


@kernel
def window(scores, records, active, ids, flags, parts, counts, done):
    """Block top-k of a few queries, each spread over SPLITS blocks of threads. Grid [SPLITS, queries].

    Args:
        scores, records, active, ids, flags: as for `sample`.
        parts: uint32 [queries, SPLITS, 2, CANDIDATES], counts: int32 [queries, SPLITS]: scratch.
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
    key_of_tail = tail_key(row, full, tail)
    low = np.uint32(0)
    if full <= CANDIDATES and width <= MAX_WIDTH:  # too short to share
        if cuda.blockIdx.x == 0:
            _keep_all(row, full, pool, ws)
            cuda.syncthreads()
            _settle(full, low, full, tail, key_of_tail, width, out, pool, hist, ws)
        return
    if full <= MAX_BLOCKS and width <= MAX_WIDTH:
        low = _collect(row, full, width, first, SPLITS * THREADS, pool, ws)
    cuda.syncthreads()
    if not _publish(low, parts[query, cuda.blockIdx.x], counts[query], done[query], pool, ws):
        return
    count = _fetch(parts[query], counts[query], pool)
    if not _settle(count, low, full, tail, key_of_tail, width, out, pool, hist, ws):
        if thread == 0:
            flags[query] = 1
        cuda.syncthreads()
        select_wide(row, full, tail, key_of_tail, width, out, pool, ws)
