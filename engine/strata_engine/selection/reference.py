"""Block top-k in plain NumPy: the definition that every kernel is compared with.

A context is cut into blocks of 4 cells. A query at position p sees n_kv = p + 1 cells: n_kv // 4 full blocks and,
where n_kv % 4 != 0, a tail block of the rest. Scores rank the blocks; the selection is exactly `width` cells.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
UInt32 = NDArray[np.uint32]

BLOCK = 4  # cells a block
BUDGET = 2048  # cells a query, by default
TAIL_BONUS = np.float32(1e9)  # the tail block holds the newest cells: its score is raised by this

# Columns of a step record, int32 [queries, 4]. A width of 0 leaves the query out.
POSITION, CELLS, FULL_BLOCKS, WIDTH = range(4)


def step_records(positions: Int32 | list[int], budget: int | Int32 | list[int] = BUDGET) -> Int32:
    """The step records of queries at `positions`: int32 [queries, 4] of (position, cells, full blocks, width).

    `budget` is in cells, one for all queries or one each.
    """
    position = np.asarray(positions, dtype=np.int32)
    cells = position + 1
    width = np.minimum(cells, np.asarray(budget, dtype=np.int32) + BLOCK - 1)
    return np.stack([position, cells, cells // BLOCK, width], axis=1).astype(np.int32)


def keys_of(scores: Float32) -> UInt32:
    """Map float32 scores to uint32 keys of the same order: -0 equals +0, NaN is the lowest key."""
    bits = (scores + np.float32(0.0)).view(np.uint32)  # + 0 turns -0 into +0
    negative = (bits >> np.uint32(31)).astype(bool)
    keys = np.where(negative, ~bits, bits | np.uint32(0x80000000))
    return np.where(np.isnan(scores), np.uint32(0), keys)


def raise_tail(score: np.float32) -> np.float32:
    """The tail block's score with its bonus; one that is not finite becomes the bonus itself."""
    return np.float32(score + TAIL_BONUS) if np.isfinite(score) else TAIL_BONUS


def select(scores: Float32, cells: int, width: int) -> Int32:
    """The `width` selected cell ids of one query, ascending, int32.

    Args:
        scores: float32 [max_blocks]; what lies past the query's last block is not read.
        cells: n_kv, the cells that the query sees.
        width: ids to select; at most `cells` are.
    """
    if cells <= width:
        return np.arange(cells, dtype=np.int32)
    full, tail = divmod(cells, BLOCK)
    counts = np.full(full + (tail > 0), BLOCK)
    used = scores[: len(counts)].copy()
    if tail:
        counts[-1] = tail
        used[-1] = raise_tail(used[-1])
    keys = keys_of(used)

    order = np.argsort(keys)[::-1]
    threshold = keys[order[np.searchsorted(np.cumsum(counts[order]), width)]]
    above = int(counts[keys > threshold].sum())
    cell_keys = np.repeat(keys, counts)  # one key a cell, in cell order
    ties = np.flatnonzero(cell_keys == threshold)[: width - above]
    return np.sort(np.concatenate([np.flatnonzero(cell_keys > threshold), ties])).astype(np.int32)


def select_rows(scores: Float32, records: Int32, ids: Int32, active: int | None = None) -> None:
    """Select for every query: row q of `ids` int32 [queries, cap] gets its cells; slots past them stay untouched.

    Args:
        scores: float32 [queries, max_blocks].
        records: int32 [queries, 4], see `step_records`.
        active: blocks of a row that hold scores; None is all of them.
    """
    for row, record, out in zip(scores, records, ids, strict=True):
        cells = min(int(record[CELLS]), BLOCK * (len(row) if active is None else active))
        chosen = select(row, cells, min(int(record[WIDTH]), len(out)))
        out[: len(chosen)] = chosen
