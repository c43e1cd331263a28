"""Settle a selection among candidates in shared memory: the threshold, the ties, the order of the ids.

`pool` holds the candidates' keys, and CANDIDATES further on their block numbers. `hist` uint32 [HIST] and `ws` are
work space of the block.
"""

# mypy: disable-error-code="arg-type, assignment"

from __future__ import annotations

import numpy as np

from .ptx import THREADS, cuda, onward, sum_below
from .reference import BLOCK
from .steps import CANDIDATES, GATHERED, LISTED, ONE, RESULT, STEP, TOP, find_bin, in_range, tail_key, u

HIST_BITS = THREADS.bit_length() - 1  # key bits a step: a bin a thread
LAST_BIN = np.int32((1 << HIST_BITS) - 1)
HIST = 2 * THREADS
MAX_WIDTH = 2 * CANDIDATES  # cells that are chosen among candidates: half of them
FEW = np.int32(32)  # blocks that are ranked by comparing each with each
NOTHING, TIE = 0xFFFFFFFF, 0x80000000  # marks in place of a block number, and on top of one


@cuda.jit(device=True)
def _rank_few(count, start, bits, key_of_tail, tail, need, pool, hist, ws):
    """The threshold among at most FEW blocks with keys in the range: (threshold, cells of them above it).

    `ws[GATHERED]` is 0 at the call; `hist` takes the keys and, FEW + 1 further on, the cells.
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
    if thread < few:
        mine = hist[u(thread)]
        above, same = np.int32(0), np.int32(0)
        i = np.int32(0)
        while i < few:
            cells = np.int32(hist[u(i + FEW + 1)])
            above = np.int32(above + (cells if hist[u(i)] > mine else 0))
            same = np.int32(same + (cells if hist[u(i)] == mine else 0))
            i = onward(i, ONE)
        if above < need <= above + same:
            ws[RESULT] = mine
            ws[RESULT + 1] = above
    cuda.syncthreads()
    return ws[RESULT], np.int32(ws[RESULT + 1])


@cuda.jit(device=True)
def _bin(key, start, shift):
    """The bin of a key in the range; the last bin takes what lies past it."""
    return np.int32(min((key - start) >> shift, np.uint64(LAST_BIN)))


@cuda.jit(device=True)
def _threshold(count, low, tail, key_of_tail, width, pool, hist, ws):
    """(threshold, cells above it) over `count` candidates with keys from `low` on, and the tail block.

    The bins of the first step reach from `low` to `ws[TOP]`, and the last one on to the largest key.
    """
    thread = cuda.threadIdx.x
    above = np.int32(0)
    start = low
    bits = np.int32(32)  # the range looked at is start <= key < start + 2^bits
    shift = np.int32(max(32 - np.int32(cuda.clz(u(max(ws[TOP], low) - low))) - HIST_BITS, 0))
    while True:
        hist[u(thread)] = 0
        if thread == 0:
            ws[GATHERED] = 0
        cuda.syncthreads()
        i = thread
        while i < count:
            key = pool[u(i)]
            if in_range(key, start, bits):
                cuda.atomic.add(hist, u(_bin(key, start, u(shift))), u(1))
            i = onward(i, STEP)
        tail_bin = np.int32(-1)
        if tail > 0 and in_range(key_of_tail, start, bits):
            tail_bin = _bin(key_of_tail, start, u(shift))
        cuda.syncthreads()
        b, higher, held = find_bin(hist, 1, np.int32(width - above), tail_bin, tail, ws)
        above = np.int32(above + higher)
        start = u(start + (u(b) << u(shift)))
        if bits < 32 or b < LAST_BIN:
            bits = shift
        shift = np.int32(max(bits - HIST_BITS, 0))
        if bits == 0 or held <= BLOCK * FEW:
            break
    if bits == 0:
        return start, above
    need = np.int32(width - above)
    threshold, higher = _rank_few(count, start, bits, key_of_tail, tail, need, pool, hist, ws)
    return threshold, np.int32(above + higher)


@cuda.jit(device=True)
def _count_ranges(count, threshold, shift, pool, hist, ws):
    """Sort the candidates into ranges of 2^shift blocks, one a thread; the counts of all selected.

    Counts of both sorts of blocks travel in one word: above the threshold, and 65,536 times those at it. In `pool`
    the selected blocks, those at the threshold marked TIE, stand range by range; hist[range] is the count before the
    range, hist[THREADS + range] the place where it ends.
    """
    thread = cuda.threadIdx.x
    hist[u(thread)] = 0
    cuda.syncthreads()
    i = thread
    while i < count:
        key, mark = pool[u(i)], u(NOTHING)
        if key >= threshold:
            mark = pool[u(i + CANDIDATES)]
            tie = key == threshold
            cuda.atomic.add(hist, u(mark >> shift), u(65536 if tie else 1))
            mark = u(mark | (u(TIE) if tie else u(0)))
        pool[u(i + CANDIDATES)] = mark
        i = onward(i, STEP)
    cuda.syncthreads()
    held = np.int32(hist[u(thread)])
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
def _order(count, threshold, full, fill, pool, hist, ws):
    """List the selected full blocks, ascending, from pool[CANDIDATES] on; (cells they give, first slot after a cut).

    Blocks at the threshold count until they hold `fill` cells; the last of them may be cut. A counting sort by
    ranges, then each block is compared with the others of its range.
    """
    thread = cuda.threadIdx.x
    shift = u(0)
    while (full - 1) >> shift >= THREADS:
        shift = u(shift + u(1))
    if thread == 0:
        ws[LISTED] = 0x7FFFFFFF
    total = _count_ranges(count, threshold, shift, pool, hist, ws)
    needed = np.int32((fill + BLOCK - 1) // BLOCK)
    e = thread
    while e < np.int32((total & 65535) + (total >> 16)):
        mark = pool[u(e)]
        block = u(mark & u(0x7FFFFFFF))
        packed = np.int32(hist[u(block >> shift)])
        above, ties = np.int32(packed & 65535), np.int32(packed >> 16)
        i = np.int32(above + ties)
        while i < np.int32(hist[u((block >> shift) + u(THREADS))]):
            other = pool[u(i)]
            if u(other & u(0x7FFFFFFF)) < block:
                above = np.int32(above + np.int32(other < u(TIE)))
                ties = np.int32(ties + np.int32(other >= u(TIE)))
            i = onward(i, ONE)
        if mark < u(TIE) or ties < needed:
            pool[u(above + min(ties, needed) + CANDIDATES)] = block
            if mark >= u(TIE) and ties == needed - 1:
                ws[LISTED] = BLOCK * above + fill
        e = onward(e, STEP)
    cuda.syncthreads()
    return np.int32(BLOCK * (total & 65535) + min(BLOCK * (total >> 16), fill)), np.int32(ws[LISTED])


@cuda.jit(device=True)
def settle(count, low, row, full, tail, width, out, pool, hist, ws):
    """Select among the candidates; False, with nothing written, where they do not decide.

    Args:
        count: how many there are; past CANDIDATES if they did not fit.
        low: the key that all blocks reach that are candidates; 0 if all blocks of a short row are.
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
    listed, cut = _order(count, threshold, full, fill, pool, hist, ws)
    skipped = np.int32(-fill & (BLOCK - 1))  # cells that a cut block does not give
    slot = cuda.threadIdx.x
    while slot < width:
        cell = np.int32(BLOCK * full + slot - listed)
        if slot < listed:
            place = np.int32(slot + skipped if slot >= cut else slot)
            cell = np.int32(BLOCK * pool[u((place >> 2) + CANDIDATES)] + (place & 3))
        out[u(slot)] = cell
        slot = onward(slot, STEP)
    return True
