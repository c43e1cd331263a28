"""What a step tells the device: one array of int32, copied in a single transfer before the graph runs.

    wanted [MAX_ROWS] | token, position, cell, slot [bucket each] | tiles [most tiles, 2]

`wanted` stands at the same place in every step, so that the graphs of the head serve all buckets. `bucket` is the step's row count rounded up; rows past the last have position -1 and are not seen by attention. A *tile*
is a run of neighbouring rows of one slot that attention takes together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...rows import Int32, Rows
from .shapes import CELLS

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_ROWS = BUCKETS[-1]
_PARTS = ("token", "position", "cell", "slot")


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds `rows`."""
    return next(bucket for bucket in BUCKETS if bucket >= rows)


@dataclass(frozen=True, slots=True)
class Layout:
    """Word offsets of the parts for one bucket."""

    bucket: int
    tile_rows: int  # rows that fit a query tile
    slots: int

    @property
    def most_tiles(self) -> int:
        """Tiles of the worst split: each slot may leave one tile unfilled."""
        return min(self.bucket, -(-self.bucket // self.tile_rows) + min(self.bucket, self.slots))

    @property
    def words(self) -> int:
        return MAX_ROWS + 4 * self.bucket + 2 * self.most_tiles

    def offset(self, part: str) -> int:
        """Byte offset of a part."""
        if part == "wanted":
            return 0
        return 4 * (MAX_ROWS + self.bucket * (4 if part == "tiles" else _PARTS.index(part)))


def query_tiles(slot: Int32, position: Int32, tile_rows: int) -> Int32:
    """int32 [tiles, 2]: first row and count of runs of at most `tile_rows` rows that follow one another in a slot."""
    breaks = np.flatnonzero((np.diff(slot) != 0) | (np.diff(position) != 1)) + 1
    edges = [0, *breaks.tolist(), len(slot)]
    tiles = [
        (start, min(tile_rows, end - start))
        for first, end in zip(edges, edges[1:], strict=False)
        for start in range(first, end, tile_rows)
    ]
    return np.array(tiles, np.int32).reshape(-1, 2)


def pack(rows: Rows, layout: Layout, pages: Int32, out: Int32) -> None:
    """Fill `out` [layout.words] for a step; pages [slots, pages a slot]."""
    n, bucket, count = len(rows), layout.bucket, len(rows.wanted)
    out[:count], out[count:MAX_ROWS] = rows.wanted, 0
    tiles_at = MAX_ROWS + 4 * bucket
    parts = out[MAX_ROWS:tiles_at].reshape(4, bucket)
    parts[:] = 0
    parts[1] = -1
    parts[0, :n], parts[1, :n], parts[3, :n] = rows.token, rows.position, rows.slot
    parts[2, :n] = pages[rows.slot, rows.position // CELLS] * CELLS + rows.position % CELLS
    tiles = query_tiles(rows.slot, rows.position, layout.tile_rows)
    table = out[tiles_at : layout.words].reshape(-1, 2)
    table[: len(tiles)] = tiles
    table[len(tiles) :] = 0
