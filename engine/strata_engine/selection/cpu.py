"""Block top-k on the CPU with numba: one histogram pass, one pass over the few blocks at its bound, one to emit.

Twin: `reference.select_rows`. A query is one task; queries run side by side on numba's threads without the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from ..jit import njit
from .reference import BLOCK, CELLS, TAIL_BONUS, WIDTH, Float32, Int32

_BIN_BITS = 11
_BINS = 1 << _BIN_BITS
_SHIFT = 32 - _BIN_BITS


def select_rows(scores: Float32, records: Int32, ids: Int32, active: int | None = None) -> None:
    """Select for every query; arguments and result as `reference.select_rows`."""
    blocks = scores.shape[1] if active is None else min(active, scores.shape[1])
    bits = scores.view(np.uint32)
    if len(records) == 1:
        _select_row(bits[0], blocks, records[0], ids[0])
    else:
        _select_all(bits, blocks, records, ids)


@njit(inline="always")
def _key(bits):
    """The order-preserving key of a score given by its bits: -0 equals +0, NaN is lowest. No branch: it vectorises."""
    magnitude = bits & np.uint32(0x7FFFFFFF)
    signed = np.uint32(0) if magnitude == np.uint32(0) else bits
    flip = np.uint32(0xFFFFFFFF) if signed > np.uint32(0x7FFFFFFF) else np.uint32(0x80000000)
    return np.uint32(0) if magnitude > np.uint32(0x7F800000) else signed ^ flip


@njit(nogil=True, cache=True)
def _keys(bits, full):
    """The keys of the full blocks, uint32 [full]."""
    keys = np.empty(full, dtype=np.uint32)
    for i in range(full):
        keys[i] = _key(bits[i])
    return keys


@njit(nogil=True, cache=True)
def _tail_key(bits):
    """The key of a tail block: its score raised by the bonus, or the bonus where that is not finite."""
    score = np.empty(1, dtype=np.float32)
    raised = score.view(np.uint32)
    raised[0] = bits
    score[0] = score[0] + TAIL_BONUS if np.isfinite(score[0]) else TAIL_BONUS
    return _key(raised[0])


@njit(nogil=True, cache=True)
def _find_bin(histogram, need):
    """The highest bin down to which at least `need` cells are held, and the cells above that bin."""
    above = 0
    for b in range(len(histogram) - 1, -1, -1):
        if above + histogram[b] >= need:
            return b, above
        above += histogram[b]
    return 0, above


@njit(nogil=True, cache=True)
def _histogram(keys):
    """Cells by the top bits of their block's key, int32 [_BINS]."""
    # four copies, so that equal neighbours do not wait for each other's increment
    copies = np.zeros((4, _BINS), dtype=np.int32)
    quads = len(keys) // 4
    for i in range(quads):
        copies[0, keys[4 * i] >> _SHIFT] += BLOCK
        copies[1, keys[4 * i + 1] >> _SHIFT] += BLOCK
        copies[2, keys[4 * i + 2] >> _SHIFT] += BLOCK
        copies[3, keys[4 * i + 3] >> _SHIFT] += BLOCK
    for i in range(4 * quads, len(keys)):
        copies[0, keys[i] >> _SHIFT] += BLOCK
    return copies[0] + copies[1] + copies[2] + copies[3]


@njit(nogil=True, cache=True)
def _refine(keys, counts, need):
    """Threshold among a bin's blocks (their `keys` and cell `counts`), and the cells above it inside the bin."""
    low, above = np.uint32(0), 0
    for shift, width in ((10, 11), (0, 10)):
        histogram = np.zeros(1 << width, dtype=np.int32)
        mask = np.uint32((1 << width) - 1)
        prefix = ~np.uint32((1 << (shift + width)) - 1) & np.uint32((1 << _SHIFT) - 1)
        for i in range(len(keys)):
            if (keys[i] & prefix) == low:
                histogram[(keys[i] >> np.uint32(shift)) & mask] += counts[i]
        b, more = _find_bin(histogram, need - above)
        low |= np.uint32(b) << np.uint32(shift)
        above += more
    return low, above


@njit(nogil=True, cache=True)
def _threshold(keys, tail, tail_key, width):
    """(thr, cells of ties to take): see the module `reference`."""
    histogram = _histogram(keys)
    if tail:
        histogram[tail_key >> _SHIFT] += tail
    b, above = _find_bin(histogram, width)
    blocks = histogram[b] // BLOCK + 1
    inside = np.empty(blocks, dtype=np.uint32)
    counts = np.full(blocks, BLOCK, dtype=np.int32)
    n = 0
    for key in keys:
        inside[n] = key  # overwritten unless it counts: cheaper than a branch that is hard to predict
        n += key >> _SHIFT == b
    if tail and tail_key >> _SHIFT == b:
        inside[n], counts[n] = tail_key, tail
        n += 1
    low_mask = np.uint32((1 << _SHIFT) - 1)
    low, more = _refine(inside[:n] & low_mask, counts[:n], width - above)
    return np.uint32(b << _SHIFT) | low, width - above - more


@njit(nogil=True, cache=True)
def _select_row(bits, blocks, record, out):
    """Select for one query: bits uint32 [>= blocks], record int32 [4], out int32 [cap]."""
    cells = min(record[CELLS], BLOCK * blocks)
    width = min(record[WIDTH], len(out))
    if cells <= width:
        for slot in range(cells):
            out[slot] = slot
        return
    if width <= 0:
        return
    full, tail = cells // BLOCK, cells % BLOCK
    tail_key = _tail_key(bits[full]) if tail else np.uint32(0)
    keys = _keys(bits, full)
    threshold, ties = _threshold(keys, tail, tail_key, width)
    end = width - tail if tail_key > threshold else width
    slot = 0
    for i in range(full):
        if slot >= end:
            break
        key = keys[i]
        if key >= threshold:
            count = BLOCK
            if key == threshold:
                count = min(BLOCK, ties)
                ties -= count
            for cell in range(count):
                out[slot + cell] = BLOCK * i + cell
            slot += count
    for cell in range(width - slot):
        out[slot + cell] = BLOCK * full + cell


@njit(nogil=True, cache=True, parallel=True)
def _select_all(bits, blocks, records, ids):
    """`_select_row` for every query, bits uint32 [queries, max_blocks], ids int32 [queries, cap]."""
    for q in prange(len(records)):
        _select_row(bits[q], blocks, records[q], ids[q])
