"""The CUDA selection kernels on a GPU: the same ids as the CPU, whatever the scores, the shape and the kernel."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from strata_engine.selection import cpu, reference, scores

cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
if not cuda.is_available():
    pytest.skip("no GPU answers", allow_module_level=True)

from strata_engine.selection import launch  # noqa: E402

CASES = json.loads((Path(__file__).parents[1] / "data" / "block_topk.json").read_text())["cases"]
KERNELS = ("wide", "sample", "window")
UNTOUCHED = -7
# around the width, around CANDIDATES blocks (16,384 cells), around the dispatch bounds, and up to the longest
BOUNDS = (1, 2, 5, 2047, 2051, 2052, 2056, 16383, 16387, 16390, 32768, 65539, 131073, 262144, 409602, 524288)


def table_of(kind, queries, cells, seed=0):
    """Scores float32 [queries, max_blocks] for queries that see up to `cells` cells; all past them is +inf."""
    blocks = -(-cells // 4)
    base = scores.make(kind, blocks + queries, seed + cells)
    table = np.full((queries, blocks + 5), np.inf, dtype=np.float32)
    for q in range(queries):
        table[q, :blocks] = base[q : q + blocks]
    return table


def assert_same(table, records, kernel=None, active=None, cap=None):
    """The GPU's ids equal the CPU's, and nothing else was written; returns the flags."""
    shape = (len(records), cap or int(records[:, reference.WIDTH].max()) + 9)
    ids, expected = (np.full(shape, UNTOUCHED, dtype=np.int32) for _ in range(2))
    cpu.select_rows(table, records, expected, active)
    flags = launch.select_rows(table, records, ids, active, kernel)
    np.testing.assert_array_equal(ids, expected)
    return flags


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kind']}-{c['n_kv']}")
def test_recorded_ids(case, kernel):
    row = scores.make_row(case["kind"], case["n_kv"], case["seed"])
    ids = np.full((1, case["width"]), UNTOUCHED, dtype=np.int32)
    record = np.array([[case["n_kv"] - 1, case["n_kv"], case["n_kv"] // 4, case["width"]]], dtype=np.int32)
    launch.select_rows(row[None], record, ids, kernel=kernel)
    assert hashlib.sha256(ids[0].astype("<i4").tobytes()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("cells", BOUNDS)
def test_windows_of_every_tail(kind, cells):
    table = table_of(kind, 8, cells + 7)
    records = reference.step_records(list(range(cells - 1, cells + 7)))
    for kernel in KERNELS:
        assert_same(table, records, kernel)


@pytest.mark.parametrize("queries", range(1, 9))
def test_window_sizes(queries):
    table = table_of("normal", queries, 300001)
    assert_same(table, reference.step_records(list(range(300001 - queries, 300001))))


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("queries", [64, 256])
def test_prompt_calls(kind, queries):
    table = table_of(kind, queries, 70000)
    records = reference.step_records(list(range(70000 - queries, 70000)))
    for kernel in ("wide", "sample"):
        assert_same(table, records, kernel)


@pytest.mark.parametrize("kernel", ["wide", "sample"])
def test_mixed_widths_and_contexts_in_one_call(kernel):
    rng = np.random.default_rng(2)
    positions = rng.integers(0, 200000, 256)
    records = reference.step_records(list(positions), rng.integers(1, 5000, 256).astype(np.int32))
    assert_same(table_of("normal", 256, 200000), records, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_width_of_zero_leaves_the_query_out(kernel):
    records = reference.step_records([50000, 50001])
    records[0, reference.WIDTH] = 0
    assert_same(table_of("normal", 2, 50002), records, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_active_blocks_bound_what_is_read(kernel):
    table = table_of("normal", 4, 100000)
    table[:, 5001:] = np.inf
    assert_same(table, reference.step_records([30000, 19000, 20003, 99999]), kernel, active=5001)


@pytest.mark.parametrize("kernel", ["sample", "window"])
def test_equal_scores_fall_back_to_wide(kernel):
    table = table_of("equal", 8, 100000)
    assert assert_same(table, reference.step_records([99999] * 8), kernel).tolist() == [1] * 8


@pytest.mark.parametrize("kernel", ["sample", "window"])
def test_normal_scores_are_decided_in_one_read(kernel):
    table = table_of("normal", 8, 400000)
    assert not assert_same(table, reference.step_records([399999] * 8), kernel).any()


@pytest.mark.parametrize("kind", ["ascending", "descending"])
@pytest.mark.parametrize("kernel", ["sample", "window"])
def test_scores_that_are_all_high_in_one_place_are_decided_in_one_read(kernel, kind):
    table = table_of(kind, 8, 400000)
    assert not assert_same(table, reference.step_records([399999] * 8), kernel).any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_replays_over_other_contexts(kernel):
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    table = table_of("relu", 8, 250001)[:, :62500]
    device_scores, active = cuda.to_device(np.ascontiguousarray(table)), cuda.to_device(np.array([62500], np.int32))
    records = cuda.to_device(reference.step_records([0] * 8))
    ids = cuda.to_device(np.zeros((8, 2060), dtype=np.int32))
    topk = launch.BlockTopK(8, 62500)
    topk.launch(device_scores, records, ids, active, kernel=kernel)
    graph = launch.capture(stream, lambda s: topk.launch(device_scores, records, ids, active, kernel=kernel, stream=s))
    for cells in (100, 2050, 3000, 16400, 100000, 249999, 60000, 2052, 7):
        host = reference.step_records(list(range(cells - 1, cells + 7)))
        expected = np.full((8, 2060), UNTOUCHED, dtype=np.int32)
        records.copy_to_device(host)
        ids.copy_to_device(expected)
        cuda.synchronize()
        graph.launch(stream)
        stream.sync()
        cpu.select_rows(table, host, expected)
        np.testing.assert_array_equal(ids.copy_to_host(), expected)


def test_a_buffer_that_does_not_fit_is_refused():
    topk = launch.BlockTopK(2, 64)
    arrays = [cuda.to_device(a) for a in (np.zeros((3, 64), np.float32), np.zeros((3, 4), np.int32))]
    with pytest.raises(ValueError, match="at most 2"):
        topk.launch(*arrays, cuda.to_device(np.zeros((3, 8), np.int32)))
