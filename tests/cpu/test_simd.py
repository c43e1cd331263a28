"""The vector functions, lane by lane."""

import numpy as np
import pytest

from strata_engine.backends.cpu.simd import (
    atomic_add,
    atomic_load,
    exp,
    first_lane,
    keep_first,
    lane_max,
    lane_sum,
    load,
    maximum,
    pointer,
    store,
)
from strata_engine.jit import njit

pytestmark = pytest.mark.xdist_group("cpu")
FILL = np.float32(-7.0)


@njit(cache=True)
def _exp(x, out):
    for i in range(0, len(x), 16):
        store(pointer(out), i, exp(load(pointer(x), i)))


@njit(cache=True)
def _lanes(x, y, count, kept, larger):
    v = load(pointer(x), 0)
    store(pointer(kept), 0, keep_first(v, count, np.float32(-7.0)))
    store(pointer(larger), 0, maximum(v, load(pointer(y), 0)))
    return lane_sum(v), lane_max(v), first_lane(v)


@njit(cache=True)
def _convert(source, target):
    for i in range(0, len(source), 16):
        store(pointer(target), i, load(pointer(source), i))


@njit(cache=True)
def _count(counters):
    before = atomic_add(pointer(counters), 1, 5)
    return before, atomic_load(pointer(counters), 1)


def exp_of(x):
    out = np.empty_like(x)
    _exp(x, out)
    return out


def lanes(x, y=None, count=16):
    """kept, larger, (sum, max, first)"""
    kept, larger = np.zeros(16, np.float32), np.zeros(16, np.float32)
    return kept, larger, _lanes(x, x if y is None else y, count, kept, larger)


@pytest.fixture
def vector():
    return np.random.default_rng(3).normal(0, 5, 16).astype(np.float32)


def test_exp_is_within_two_units_in_the_last_place():
    x = np.linspace(-87.2, 88.2, 160_000).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exp_of(x) - exact) / np.spacing(exact.astype(np.float32))).max() <= 2.0


def test_exp_at_its_edges():
    x = np.array([0.0, -0.0, -87.4, -1e30, -np.inf, 88.3, 200.0, np.inf] * 2, np.float32)
    found = exp_of(x)[:8]
    assert found[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert np.isfinite(found[5:]).all() and (found[5:] > 2e38).all()


def test_lane_sum_adds_halves(vector):
    halves = vector
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    assert lanes(vector)[2][0] == halves[0]


def test_lane_max_and_first_lane(vector):
    assert lanes(vector)[2][1:] == (vector.max(), vector[0])


def test_lane_max_of_nothing_but_minus_infinity():
    assert lanes(np.full(16, -np.inf, np.float32))[2][1] == -np.inf


@pytest.mark.parametrize("count", [-40, 0, 1, 15, 16, 64])
def test_keep_first(vector, count):
    inside = np.arange(16) < count
    assert np.array_equal(lanes(vector, count=count)[0], np.where(inside, vector, FILL))


def test_maximum(vector):
    other = vector[::-1].copy()
    assert np.array_equal(lanes(vector, other)[1], np.maximum(vector, other))


def test_every_finite_half_is_read_and_written_exactly():
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    wide, back = np.empty(len(bits), np.float32), np.empty_like(bits)
    _convert(bits, wide)
    _convert(wide, back)
    assert np.array_equal(wide, bits.view(np.float16).astype(np.float32))
    assert np.array_equal(back, bits)


def test_floats_are_rounded_to_the_nearest_half():
    x = np.random.default_rng(0).normal(0, 100, 1600).astype(np.float32)
    out = np.empty(len(x), np.uint16)
    _convert(x, out)
    assert np.array_equal(out.view(np.float16), x.astype(np.float16))


def test_atomic_add_gives_what_was_there():
    counters = np.array([1, 2, 3], np.int64)
    assert _count(counters) == (2, 7)
    assert counters.tolist() == [1, 7, 3]
