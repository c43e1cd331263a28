"""What a step tells the device: one array of int32, copied in a single transfer before the graph runs.

    header [HEADER] | wanted [MAX_ROWS] | token, position, cell, slot [bucket each] | tiles [most tiles, 2] | requests

Header and `wanted` stand at the same place in every step, so that the graphs of the head serve all buckets. `bucket` is
the step's row count rounded up; rows past the last have position -1 and are not seen by attention. A *tile* is a run of
neighbouring rows of one slot that attention takes together. `requests` is what the sampling chain reads, if it runs:
behind the parts of the step's bucket where all rows are wanted, else behind those of the largest (`MOST_WORDS`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...jit import njit
from ...rows import Int32, Rows
from .shapes import CELLS

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_ROWS = BUCKETS[-1]
HEADER = 4
PLACE, CHAINED = 0, 1  # header words: where the step's choices go in the host's memory; 1 if the chain makes them
_PARTS = ("token", "position", "cell", "slot")
_FIXED = HEADER + MAX_ROWS
MOST_WORDS = _FIXED + 6 * MAX_ROWS  # of a step without requests; a multiple of 4


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds `rows`."""
    return next(bucket for bucket in BUCKETS if bucket >= rows)


@dataclass(frozen=True, slots=True)
class Layout:
    """Word offsets of the parts for one bucket."""

    bucket: int
    tile_rows: int  # rows that fit a query tile
    slots: int  # of the engine

    @property
    def most_tiles(self) -> int:
        """Tiles of the worst split: each slot may leave one tile unfilled."""
        return min(self.bucket, -(-self.bucket // self.tile_rows) + min(self.bucket, self.slots))

    @property
    def words(self) -> int:
        """Without requests; a multiple of 4, so that they are aligned."""
        return -(-(_FIXED + 4 * self.bucket + 2 * self.most_tiles) // 4) * 4

    def offset(self, part: str) -> int:
        """Byte offset of a part."""
        if part == "wanted":
            return 4 * HEADER
        return 4 * (_FIXED + self.bucket * (4 if part == "tiles" else _PARTS.index(part)))


def query_tiles(slot: Int32, position: Int32, tile_rows: int) -> Int32:
    """int32 [tiles, 2]: first row and count of runs of at most `tile_rows` rows that follow one another in a slot."""
    joined = (slot[1:] == slot[:-1]) & (position[1:] == position[:-1] + 1)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    ends = np.append(starts[1:], len(slot))
    if (ends - starts).max() > tile_rows:
        pairs = [np.arange(a, b, tile_rows) for a, b in zip(starts, ends, strict=True)]
        starts, last = np.concatenate(pairs), np.repeat(ends, [len(p) for p in pairs])
        ends = np.minimum(starts + tile_rows, last)
    return np.stack([starts, ends - starts], axis=1).astype(np.int32)


@njit(nogil=True, cache=True)
def _fill(slot, position, token, wanted, pages, bucket, tile_rows, place, chained, out):
    """`pack` in one compiled call."""
    n, tile = len(token), _FIXED + 4 * bucket
    out[:] = 0
    out[PLACE], out[CHAINED] = place, chained
    for i in range(len(wanted)):
        out[HEADER + i] = wanted[i]
    first = 0  # of the tile at hand
    for i in range(n):
        at = _FIXED + i
        out[at], out[at + bucket] = token[i], position[i]
        out[at + 2 * bucket] = pages[slot[i], position[i] // CELLS] * CELLS + position[i] % CELLS
        out[at + 3 * bucket] = slot[i]
        joined = i + 1 < n and slot[i + 1] == slot[i] and position[i + 1] == position[i] + 1
        if not joined or i + 1 - first == tile_rows:
            out[tile], out[tile + 1] = first, i + 1 - first
            first, tile = i + 1, tile + 2
    for i in range(n, bucket):
        out[_FIXED + bucket + i] = -1


def pack(rows: Rows, layout: Layout, pages: Int32, out: Int32, place: int = 0, chained: bool = False) -> None:
    """Fill `out` [layout.words] for a step; pages [slots, pages a slot]. The twin of its tiles is `query_tiles`."""
    parts = rows.slot, rows.position, rows.token, rows.wanted
    _fill(*parts, pages, layout.bucket, layout.tile_rows, place, int(chained), out)
