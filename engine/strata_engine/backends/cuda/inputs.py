"""What a step tells the device: one array of int32, copied in a single transfer before the graph runs.

    wanted [MAX_ROWS] | token, position, cell, slot [bucket each] | tiles [most tiles, 2]

`wanted` stands at the same place in every step, so that the graphs of the head serve all buckets. `bucket` is the
step's row count rounded up; rows past the last have position -1 and are not seen by attention. A *tile* is a run of
neighbouring rows of one slot that attention takes together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...jit import njit
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
    slots: int  # of the engine

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
    joined = (slot[1:] == slot[:-1]) & (position[1:] == position[:-1] + 1)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    ends = np.append(starts[1:], len(slot))
    if (ends - starts).max() > tile_rows:
        pairs = [np.arange(a, b, tile_rows) for a, b in zip(starts, ends, strict=True)]
        starts, last = np.concatenate(pairs), np.repeat(ends, [len(p) for p in pairs])
        ends = np.minimum(starts + tile_rows, last)
    return np.stack([starts, ends - starts], axis=1).astype(np.int32)


@njit(nogil=True, cache=True)
def _fill(slot, position, token, wanted, pages, bucket, tile_rows, out):
    """`pack` in one compiled call: it stands between two steps of the GPU, which waits for it."""
    n, tile = len(token), MAX_ROWS + 4 * bucket
    out[:] = 0
    for i in range(len(wanted)):
        out[i] = wanted[i]
    first = 0  # of the tile at hand
    for i in range(n):
        at = MAX_ROWS + i
        out[at], out[at + bucket] = token[i], position[i]
        out[at + 2 * bucket] = pages[slot[i], position[i] // CELLS] * CELLS + position[i] % CELLS
        out[at + 3 * bucket] = slot[i]
        joined = i + 1 < n and slot[i + 1] == slot[i] and position[i + 1] == position[i] + 1
        if not joined or i + 1 - first == tile_rows:
            out[tile], out[tile + 1] = first, i + 1 - first
            first, tile = i + 1, tile + 2
    for i in range(n, bucket):
        out[MAX_ROWS + bucket + i] = -1


def pack(rows: Rows, layout: Layout, pages: Int32, out: Int32) -> None:
    """Fill `out` [layout.words] for a step; pages [slots, pages a slot]. The twin of its tiles is `query_tiles`."""
    _fill(rows.slot, rows.position, rows.token, rows.wanted, pages, layout.bucket, layout.tile_rows, out)
