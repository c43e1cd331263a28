"""Block top-k on the CPU: the reference against recorded answers, the kernel against the reference."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from strata_engine.selection import cpu, reference, scores

CASES = json.loads((Path(__file__).parents[1] / "data" / "block_topk.json").read_text())["cases"]
SELECTORS = {"reference": reference.select_rows, "cpu": cpu.select_rows}
UNTOUCHED = -7


def chosen(select, row, cells, width, cap=None, active=None):
    """The ids row that `select` leaves for one query, its unused slots poisoned before."""
    ids = np.full((1, cap or width), UNTOUCHED, dtype=np.int32)
    record = np.array([[cells - 1, cells, cells // 4, width]], dtype=np.int32)
    select(row[None], record, ids, active)
    return ids[0]


def definition(row, cells, width):
    """The selection by the words of its contract, cell by cell: blocks ranked by key, then index."""
    if cells <= width:
        return list(range(cells))
    ranked = sorted(range(-(-cells // 4)), key=lambda b: (-int(reference.keys_of(row[b : b + 1])[0]), b))
    ranked_cells = [c for b in ranked for c in range(4 * b, min(4 * b + 4, cells))]
    return sorted(ranked_cells[:width])


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kind']}-{c['n_kv']}")
def test_recorded_ids(case, name):
    row = scores.make_row(case["kind"], case["n_kv"], case["seed"])
    ids = chosen(SELECTORS[name], row, case["n_kv"], case["width"])
    assert ids[:4].tolist() == case["first"] and ids[-4:].tolist() == case["last"]
    assert hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("cells", [1, 5, 30, 31, 32, 33, 100, 101, 102, 103])
def test_small_contexts_follow_the_definition(name, kind, cells):
    row = scores.make_row(kind, cells, cells)
    for width in (1, 3, 4, 30, 31):
        assert chosen(SELECTORS[name], row, cells, min(width, cells)).tolist() == definition(row, cells, width)


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("cells", [2047, 2051, 2052, 2053, 16383, 16384, 16385, 16386, 70003])
def test_kernel_equals_reference(kind, cells):
    row = scores.make_row(kind, cells, 7 + cells)
    width = min(cells, 2051)
    expected = chosen(reference.select_rows, row, cells, width)
    np.testing.assert_array_equal(chosen(cpu.select_rows, row, cells, width), expected)


def test_queries_of_mixed_widths_in_one_call():
    rng = np.random.default_rng(1)
    records = reference.step_records(list(rng.integers(0, 9000, 64)), rng.integers(1, 2048, 64).astype(np.int32))
    table = rng.standard_normal((64, 2256)).astype(np.float32)
    ids, expected = (np.full((64, 2060), UNTOUCHED, dtype=np.int32) for _ in range(2))
    cpu.select_rows(table, records, ids)
    reference.select_rows(table, records, expected)
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("name", SELECTORS)
def test_slots_past_the_width_stay_untouched(name):
    row = scores.make_row("normal", 9001, 3)
    ids = chosen(SELECTORS[name], row, 9001, 2051, cap=2100)
    assert (ids[2051:] == UNTOUCHED).all() and (ids[:2051] >= 0).all()


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("cells", [9000, 9001])
def test_scores_past_the_last_block_are_never_read(name, cells):
    row = scores.make_row("normal", cells, 4)[: -(-cells // 4)]
    poisoned = np.concatenate([row, np.full(100, np.inf, dtype=np.float32)])
    expected = chosen(reference.select_rows, row, cells, 2051)
    np.testing.assert_array_equal(chosen(SELECTORS[name], poisoned, cells, 2051), expected)


@pytest.mark.parametrize("name", SELECTORS)
def test_active_blocks_bound_what_is_read(name):
    row = scores.make_row("normal", 9000, 5)
    row[2000:] = np.inf
    expected = chosen(reference.select_rows, row[:2000], 8000, 2051)
    np.testing.assert_array_equal(chosen(SELECTORS[name], row, 9000, 2051, active=2000), expected)


@pytest.mark.parametrize("name", SELECTORS)
def test_the_tail_block_is_raised_by_the_selection(name):
    row = scores.make("normal", 2251, 6)
    row[-1] = -50.0
    assert chosen(SELECTORS[name], row, 9002, 2051)[-2:].tolist() == [9000, 9001]


def test_step_records_name_cells_blocks_and_width():
    records = reference.step_records([0, 2049, 9000])
    assert records.tolist() == [[0, 1, 0, 1], [2049, 2050, 512, 2050], [9000, 9001, 2250, 2051]]
