"""Settle a selection among candidates in shared memory: the threshold, the ties, the order of the ids.

`pool` holds the candidates' keys, and CANDIDATES further on their block numbers. `hist` uint32 [HIST] and `ws` are
work space of the block. Whoever stores the candidates counts their keys by bins in hist[0..THREADS) on the way, with
`store`; hist[THREADS..) is 0 at the call.
"""

# mypy: disable-error-code="arg-type, assignment"

from __future__ import annotations

import numpy as np

from .ptx import SIMULATED, THREADS, cuda, onward, sum_below, warp_any, warp_get, warp_pick
from .reference import BLOCK
from .steps import CANDIDATES, GATHERED, ONE, STEP, TOP, find_bin, in_range, key_of, tail_key, u

HIST_BITS = THREADS.bit_length() - 1  # key bits a step: a bin a thread
LAST_BIN = np.int32((1 << HIST_BITS) - 1)
HIST = 2 * THREADS
MAX_WIDTH = 2 * CANDIDATES  # cells that are chosen among candidates: half of them
FEW = np.int32(16 if SIMULATED else 32)  # blocks that are ranked by comparing each with each: a lane each
NOTHING, TIE = 0xFFFFFFFF, 0x80000000  # marks in place of a block number, and on top of one


@cuda.jit(device=True)
def first_shift(low, ws):
    """The key bits below those that the first step's bins tell apart: they reach from `low` to `ws[TOP]`."""
    return np.int32(max(32 - np.int32(cuda.clz(u(max(ws[TOP], low) - low))) - HIST_BITS, 0))


@cuda.jit(device=True)
def _bin(key, start, shift):
    """The bin of a key in the range; the last bin takes what lies past it."""
    return np.int32(min(u(u(key - start) >> shift), u(LAST_BIN)))


@cuda.jit(device=True)
def store(place, key, block, low, shift, pool, hist):
    """Make a block candidate number `place`, and count its key; past the room for candidates nothing happens."""
    if place < CANDIDATES:
        pool[u(place)] = key
        pool[u(place + CANDIDATES)] = block
        cuda.atomic.add(hist, u(_bin(key, low, u(shift))), u(1))


@cuda.jit(device=True)
def store_block(row, place, block, low, shift, pool, hist):
    """`store` a block of the row."""
    store(place, key_of(row[u(block)]), u(block), low, shift, pool, hist)


@cuda.jit(device=True)
def _count_bins(count, start, bits, shift, pool, hist):
    """Count the candidates with keys in the range by bins; a barrier must follow."""
    hist[u(cuda.threadIdx.x)] = 0
    cuda.syncthreads()
    i = cuda.threadIdx.x
    while i < count:
        key = pool[u(i)]
        if in_range(key, start, bits):
            cuda.atomic.add(hist, u(_bin(key, start, u(shift))), u(1))
        i = onward(i, STEP)


@cuda.jit(device=True)
def _rank_few(count, start, bits, key_of_tail, tail, need, pool, hist, ws):
    """The threshold among at most FEW blocks with keys in the range: (threshold, cells of them above it).

    `ws[GATHERED]` is 0 at the call; `hist` takes the keys and, FEW + 1 further on, the cells. Every warp ranks them
    for itself, a lane a block.
    """
    thread = cuda.threadIdx.x
    i = thread
    while i < count:
        key = pool[u(i)]
        if in_range(key, start, bits):
            place = cuda.atomic.add(ws, GATHERED, u(1))
            hist[place] = key
            hist[place + u(FEW + 1)] = BLOCK
        i = onward(i, STEP)
    if thread == 0 and tail > 0 and in_range(key_of_tail, start, bits):
        place = cuda.atomic.add(ws, GATHERED, u(1))
        hist[place] = key_of_tail
        hist[place + u(FEW + 1)] = tail
    cuda.syncthreads()
    few = np.int32(ws[GATHERED])
    mine = hist[u(min(thread & 31, few - 1))]
    above, same = np.int32(0), np.int32(0)
    i = np.int32(0)
    while i < few:
        cells = np.int32(hist[u(i + FEW + 1)])
        above = np.int32(above + (cells if hist[u(i)] > mine else 0))
        same = np.int32(same + (cells if hist[u(i)] == mine else 0))
        i = onward(i, ONE)
    found = above < need <= above + same
    return warp_pick(found, mine), np.int32(warp_pick(found, u(above)))


@cuda.jit(device=True)
def _threshold(count, low, tail, key_of_tail, width, pool, hist, ws):
    """(threshold, cells above it) over `count` candidates with keys from `low` on, and the tail block."""
    above = np.int32(0)
    start = low
    bits = np.int32(32)  # the range looked at is start <= key < start + 2^bits
    shift = first_shift(low, ws)
    if cuda.threadIdx.x == 0:
        ws[GATHERED] = 0
    while True:
        tail_bin = np.int32(-1)
        if tail > 0 and in_range(key_of_tail, start, bits):
            tail_bin = _bin(key_of_tail, start, u(shift))
        b, higher, held = find_bin(hist, 1, np.int32(width - above), tail_bin, tail, ws)
        above = np.int32(above + higher)
        start = u(start + (u(b) << u(shift)))
        if bits < 32 or b < LAST_BIN:
            bits = shift
        shift = np.int32(max(bits - HIST_BITS, 0))
        if bits == 0 or held <= BLOCK * FEW:
            break
        _count_bins(count, start, bits, shift, pool, hist)
        cuda.syncthreads()
    if bits == 0:
        return start, above
    need = np.int32(width - above)
    threshold, higher = _rank_few(count, start, bits, key_of_tail, tail, need, pool, hist, ws)
    return threshold, np.int32(above + higher)


@cuda.jit(device=True)
def _sort_ranges(count, threshold, shift, pool, hist, ws):
    """Sort the selected candidates into ranges of 2^shift blocks, one a thread; the counts of all of them.

    Counts of both sorts of blocks travel in one word: above the threshold, and 65,536 times those at it. In `pool`
    the selected blocks, those at the threshold marked TIE, stand range by range; hist[range] is the count before the
    range, hist[THREADS + range] the place where it ends. Ends in a barrier.
    """
    thread = cuda.threadIdx.x
    i = thread
    while i < count:
        key, mark = pool[u(i)], u(NOTHING)
        if key >= threshold:
            mark = pool[u(i + CANDIDATES)]
            tie = key == threshold
            cuda.atomic.add(hist, u((mark >> shift) + u(THREADS)), u(65536 if tie else 1))
            mark = u(mark | (u(TIE) if tie else u(0)))
        pool[u(i + CANDIDATES)] = mark
        i = onward(i, STEP)
    cuda.syncthreads()
    held = np.int32(hist[u(thread + THREADS)])
    before = np.int32(sum_below(held, ws))
    hist[u(thread)] = before
    hist[u(thread + THREADS)] = (before & 65535) + (before >> 16)
    if thread == THREADS - 1:
        ws[GATHERED] = before + held
    cuda.syncthreads()
    i = thread
    while i < count:
        mark = pool[u(i + CANDIDATES)]
        if mark != u(NOTHING):
            place = cuda.atomic.add(hist, u(((mark & u(0x7FFFFFFF)) >> shift) + u(THREADS)), u(1))
            pool[place] = mark
        i = onward(i, STEP)
    cuda.syncthreads()
    return np.int32(ws[GATHERED])


@cuda.jit(device=True)
def _slot_of(e, shift, fill, pool, hist):
    """Of selected block `e`: (its first slot, 8 times its number plus the cells that it gives).

    It is compared with the others of its range. Blocks at the threshold give cells until they have given `fill`.
    """
    mark = pool[u(e)]
    block = u(mark & u(0x7FFFFFFF))
    before = np.int32(hist[u(block >> shift)])
    if mark >= u(TIE) and BLOCK * (before >> 16) >= fill:
        return np.int32(0), np.int32(0)  # earlier ties have given all
    end = np.int32(hist[u((block >> shift) + u(THREADS))])
    i = np.int32((before & 65535) + (before >> 16))
    while i < end:
        other = pool[u(i)]
        if u(other & u(0x7FFFFFFF)) < block:
            before = np.int32(before + (1 if other < u(TIE) else 65536))
        i = np.int32(i + 1)
    above, ties = np.int32(before & 65535), np.int32(before >> 16)
    cells = np.int32(min(BLOCK, max(fill - BLOCK * ties, 0)) if mark >= u(TIE) else BLOCK)
    return np.int32(BLOCK * above + min(BLOCK * ties, fill)), np.int32(8 * np.int32(block) + cells)


@cuda.jit(device=True)
def _write_blocks(slot, block, out):
    """Write the ids of each lane's block: what `_slot_of` gives, of which each quad of lanes takes one at a time."""
    lane = cuda.threadIdx.x & 31
    for j in range(BLOCK):
        source = np.int32(8 * j + (lane >> 2))
        its_slot, its_block = warp_get(slot, source), warp_get(block, source)
        if lane & 3 < its_block & 7:
            out[u(its_slot + (lane & 3))] = BLOCK * (its_block >> 3) + (lane & 3)


@cuda.jit(device=True)
def _emit(total, shift, fill, out, pool, hist):
    """Write the ids of the selected full blocks; a quad of lanes writes a block, so that a warp's ids stand together.

    total: their counts, packed.
    """
    thread = cuda.threadIdx.x
    lane = thread & 31
    blocks = np.int32((total & 65535) + (total >> 16))
    done = np.int32(0)
    ahead = np.int32(0 if SIMULATED else thread - lane)  # a warp stops where the blocks do
    while done + ahead < blocks:
        slot, block = np.int32(0), np.int32(0)
        if done + thread < blocks:
            slot, block = _slot_of(done + thread, shift, fill, pool, hist)
        if warp_any(block & 7 != 0):  # of ties that are not taken nothing is written
            _write_blocks(slot, block, out)
        done = onward(done, STEP)


@cuda.jit(device=True)
def settle(count, low, row, full, tail, width, out, pool, hist, ws):
    """Select among the candidates; False, with nothing written, where they do not decide.

    Args:
        count: how many there are; past CANDIDATES if they did not fit.
        low: the key that all blocks reach that are candidates; of a short row all are, and its tail block reaches it.
        row, full, tail, width, out: the query's scores, full blocks, cells of its tail block, ids to write, ids.
    """
    if (low == 0 and full > CANDIDATES) or count > CANDIDATES or width > MAX_WIDTH:
        return False
    key_of_tail = tail_key(row, full, tail)
    if key_of_tail < low:
        key_of_tail = u(0)
    counted = np.int32(tail if key_of_tail >= low else 0)
    if BLOCK * count + counted < width:
        return False
    threshold, above = _threshold(count, low, counted, key_of_tail, width, pool, hist, ws)
    fill = np.int32(width - above)
    shift = u(0)
    while (full - 1) >> shift >= THREADS:
        shift = u(shift + u(1))
    total = _sort_ranges(count, threshold, shift, pool, hist, ws)
    _emit(total, shift, fill, out, pool, hist)
    listed = np.int32(BLOCK * (total & 65535) + min(BLOCK * (total >> 16), fill))
    if listed + cuda.threadIdx.x < width:  # the rest are of the tail block
        out[u(listed + cuda.threadIdx.x)] = BLOCK * full + cuda.threadIdx.x
    return True
