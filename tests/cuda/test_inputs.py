"""What a step tells the device."""

from __future__ import annotations

import numpy as np
import pytest

from strata_engine.backends.cuda.inputs import (
    CHAINED,
    HEADER,
    MAX_ROWS,
    MOST_WORDS,
    PLACE,
    Layout,
    bucket_of,
    pack,
    query_tiles,
)
from strata_engine.backends.cuda.plan import slices_of
from strata_engine.rows import Rows


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_tile_never_spans_slots_or_gaps() -> None:
    slot, position = ints(0, 0, 0, 1, 1, 1), ints(5, 6, 7, 0, 1, 9)
    assert query_tiles(slot, position, 8).tolist() == [[0, 3], [3, 2], [5, 1]]


def test_long_runs_are_cut() -> None:
    assert query_tiles(np.zeros(7, np.int32), np.arange(7, dtype=np.int32), 3).tolist() == [[0, 3], [3, 3], [6, 1]]


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 512])
def test_any_split_fits_the_tile_table(rows: int) -> None:
    layout = Layout(bucket_of(rows), 5, slots=4)
    slot = np.sort(np.arange(rows, dtype=np.int32) % 4)
    position = np.concatenate([np.arange((slot == s).sum()) for s in range(4)]).astype(np.int32)
    assert len(query_tiles(slot, position, 5)) <= layout.most_tiles


def test_rows_past_the_last_are_padding() -> None:
    layout = Layout(4, 5, slots=2)
    out = np.full(layout.words, 77, np.int32)
    pages = np.arange(8, dtype=np.int32).reshape(2, 4)
    pack(Rows(ints(1, 1, 1), ints(63, 64, 65), ints(10, 11, -3), ints(2)), layout, pages, out, 512, True)

    def part(name: str, count: int) -> list[int]:
        return out[layout.offset(name) // 4 :][:count].tolist()

    assert part("wanted", 2) == [2, 0]
    assert part("token", 4) == [10, 11, -3, 0]
    assert (out[PLACE], out[CHAINED]) == (512, 1)
    assert part("position", 4) == [63, 64, 65, -1]
    assert part("cell", 3) == [4 * 64 + 63, 5 * 64, 5 * 64 + 1]
    assert part("tiles", 4) == [0, 3, 0, 0]
    assert not (out == 77).any()


def test_the_largest_step_ends_where_the_requests_may_begin() -> None:
    assert max(Layout(MAX_ROWS, 1, slots).words for slots in (1, 64, 512)) == MOST_WORDS


def test_parts_do_not_overlap() -> None:
    layout = Layout(16, 4, slots=8)
    starts = [layout.offset(name) // 4 for name in ("wanted", "token", "position", "cell", "slot", "tiles")]
    assert starts[0] == HEADER and np.diff(starts).tolist() == [MAX_ROWS, 16, 16, 16, 16]
    assert layout.words % 4 == 0 and layout.words - starts[-1] >= 2 * layout.most_tiles


@pytest.mark.parametrize("tiles, units", [(60, 9), (36, 24), (192, 32), (256, 224), (8016, 64), (17, 1)])
def test_every_slice_has_work(tiles: int, units: int) -> None:
    assert 1 <= slices_of(units) <= min(16, units)


@pytest.mark.parametrize("seed", range(20))
def test_the_packed_tiles_are_those_of_the_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [(slot, int(rng.integers(0, 60)), int(rng.integers(1, 20))) for slot in rng.permutation(6)]
    slot = np.concatenate([np.full(count, s, np.int32) for s, _, count in runs])
    position = np.concatenate([np.arange(at, at + count, dtype=np.int32) for _, at, count in runs])
    layout = Layout(bucket_of(len(slot)), int(rng.integers(1, 9)), slots=6)
    out = np.full(layout.words, 77, np.int32)
    pages = rng.permutation(12).astype(np.int32).reshape(6, 2)
    pack(Rows(slot, position, position + 100, ints(0)), layout, pages, out)
    tiles = query_tiles(slot, position, layout.tile_rows)
    packed = out[layout.offset("tiles") // 4 :][: 2 * layout.most_tiles].reshape(-1, 2)
    assert np.array_equal(packed[: len(tiles)], tiles) and not packed[len(tiles) :].any()
    cells = out[layout.offset("cell") // 4 :][: len(slot)]
    assert np.array_equal(cells, pages[slot, position // 64] * 64 + position % 64)
