"""Which kernel runs which call."""

import pytest

from strata_engine.selection import dispatch

LONG = 131072  # blocks


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.delenv("STRATA_TOPK_SAMPLE", raising=False)


def test_prompt_calls_sample():
    assert dispatch.choose(256, LONG, LONG) == "sample"


def test_long_windows_are_spread():
    assert dispatch.choose(8, LONG, LONG) == "window"


def test_short_windows_are_not():
    assert dispatch.choose(8, 1000, LONG) == "sample"


def test_the_capacity_bounds_the_active_blocks():
    assert dispatch.choose(1, LONG, 1000) == "sample"


def test_the_switch_keeps_wide_for_prompt_calls_only(monkeypatch):
    monkeypatch.setenv("STRATA_TOPK_SAMPLE", "0")
    assert dispatch.choose(64, LONG, LONG) == "wide"
    assert dispatch.choose(8, LONG, LONG) == "window"


def test_rows_too_long_to_sample_run_wide():
    assert dispatch.choose(256, 1 << 19, 1 << 19) == "wide"


@pytest.mark.parametrize("queries", [1, 8, 9, 256])
@pytest.mark.parametrize(("blocks", "kernel"), [(4096, "sample"), (4097, "wide"), (8191, "wide"), (8192, "sample")])
def test_where_the_bound_is_loose_wide_runs(queries, blocks, kernel):
    assert dispatch.choose(queries, blocks, LONG) == kernel


def test_a_window_is_spread_only_where_that_pays():
    assert dispatch.choose(8, 32767, LONG) == "sample"
    assert dispatch.choose(8, 32768, LONG) == "window"
    assert dispatch.choose(9, 32768, LONG) == "sample"
