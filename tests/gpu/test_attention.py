"""The attention kernels against float64, and against each other with ==."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from strata_engine.backends.cuda.attention import attend_rows
from strata_engine.backends.cuda.inputs import query_tiles
from strata_engine.backends.cuda.plan import AttentionPlan
from strata_engine.backends.cuda.shapes import CELLS, Cells

KV_HEADS, PAGES = 2, 20
CONTEXT = PAGES * CELLS
LAST = (0, 1, 62, 63, 64, 255, 256, 257, 511, 700, 1023, CONTEXT - 1)


@dataclass
class Setting:
    """Cells of one slot, in pages out of order, and a query for each position."""

    device: object
    heads: int
    dim: int
    parts: int
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        heads = self.heads * KV_HEADS
        self.queries = rng.normal(size=(CONTEXT, heads, self.dim)).astype(np.float32) * 0.3
        keys, values = (rng.normal(size=(CONTEXT, KV_HEADS, self.dim)).astype(np.float32) for _ in range(2))
        self.pages = rng.permutation(PAGES).astype(np.int32)
        key_parts, value_parts = (self._parts(cells) for cells in (keys, values))
        self.keys, self.values = (sum(p.astype(np.float64) for p in parts) for parts in (key_parts, value_parts))
        place = [self._paged(parts) for parts in (key_parts, value_parts)]
        self.on_device = [
            self.device.upload(place[0]),
            self.device.upload(np.ascontiguousarray(place[1].swapaxes(-1, -2))),
        ]

    def _parts(self, cells: np.ndarray) -> list[np.ndarray]:
        high = cells.astype(np.float16)
        return [high, (cells - high.astype(np.float32)).astype(np.float16)][: self.parts]

    def _paged(self, parts: list[np.ndarray]) -> np.ndarray:
        """[part][cell, kv head, dim] -> halves [page, kv head, part, cell of the page, dim]."""
        out = np.empty((PAGES, KV_HEADS, self.parts, CELLS, self.dim), np.float16)
        for part, cells in enumerate(parts):
            out[self.pages, :, part] = cells.reshape(PAGES, CELLS, KV_HEADS, self.dim).swapaxes(1, 2)
        return out

    def run(self, first: int, count: int, bucket: int) -> np.ndarray:
        """Attention of the rows at positions first .. first + count - 1, as a step of `bucket` rows would do it."""
        device, heads = self.device, self.heads * KV_HEADS
        groups = -(-PAGES // 4)
        plan = AttentionPlan(self.heads, self.dim, self.parts, groups)
        spec, shape, shares = plan.choose(bucket)
        x = self.queries[first : first + count].reshape(count, -1)
        high = x.astype(np.float16)
        queries = np.stack([high, (x - high.astype(np.float32)).astype(np.float16)], axis=1)
        position = np.arange(first, first + count, dtype=np.int32)
        slot = np.zeros(count, np.int32)
        tiles = query_tiles(slot, position, shape.rows)
        half_pitch = heads * self.dim // 2
        buffers = [device.upload(v) for v in (queries, position, slot, self.pages[None], tiles)]
        out = device.upload(np.full((count, 2, 2 * half_pitch), np.nan, np.float16))
        scratch = device.allocate(len(tiles) * KV_HEADS * plan.scratch_bytes)
        tickets = device.allocate(4 * len(tiles) * KV_HEADS)
        args = Cells(
            buffers[0], *self.on_device, buffers[1], buffers[2], buffers[3], buffers[4], out, scratch, tickets,
            heads, KV_HEADS, self.dim, PAGES, half_pitch, groups,
        )  # fmt: skip
        device.launch(device.load(spec), (len(tiles), heads // shape.heads, shares), args)
        halves = device.read(out, (count, 2, heads, self.dim), np.float16)
        assert not device.read(tickets, len(tiles) * KV_HEADS, np.int32).any()
        for buffer in (*buffers, out, scratch, tickets):
            device.free(buffer)
        return halves


@pytest.mark.parametrize("heads, dim", [(3, 64), (4, 128), (1, 64)])
@pytest.mark.parametrize("parts", [1, 2])
def test_close_to_float64_and_the_same_bits_in_any_step(device, heads: int, dim: int, parts: int) -> None:
    setting = Setting(device, heads, dim, parts)
    whole = np.concatenate(
        [setting.run(first, 512, 512) for first in (0, 512)] + [setting.run(1024, CONTEXT - 1024, 256)]
    )
    position = np.array(LAST, np.int32)
    expected = attend_rows(setting.queries[position].astype(np.float64), setting.keys, setting.values, position)
    got = whole[position].astype(np.float64).sum(1)
    assert np.linalg.norm(got - expected) < 2e-5 * np.linalg.norm(expected)
    for last in LAST:
        assert np.array_equal(setting.run(last, 1, 1)[0], whole[last]), last
    for first, count in ((60, 8), (250, 8), (700, 7), (1000, 25)):
        assert np.array_equal(setting.run(first, count, 8 if count <= 8 else 32), whole[first : first + count]), first
