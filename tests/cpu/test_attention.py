"""Attention over chunks and segments of cells against float64."""

import numpy as np
import pytest
from cpu_kernels import appended, attend

from strata_engine.backends.cpu.attention import CHUNK, SEGMENT, attention_reference
from strata_engine.backends.cpu.elementwise import rope_reference

pytestmark = pytest.mark.xdist_group("cpu")
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 70]
DIMS = [8, 32, 40, 64, 80, 96, 128]


def random_cells(cells, dim, spread=1.0):
    rng = np.random.default_rng([cells, dim])
    q = rng.normal(0, spread, dim).astype(np.float32)
    return q, *rng.normal(0, 1, (2, cells, dim)).astype(np.float32)


def exact(q, keys, values):
    return attention_reference(q[None], keys[:, None], values[:, None])[0]


@pytest.mark.parametrize("cells", LENGTHS)
@pytest.mark.parametrize("dim", [64, 80])
def test_any_number_of_cells(cells, dim):
    q, keys, values = random_cells(cells, dim)
    assert attend(q, keys, values) == pytest.approx(exact(q, keys, values), abs=2e-6)


@pytest.mark.parametrize("cells", [65, SEGMENT + 1])
@pytest.mark.parametrize("dim", DIMS)
def test_any_head_size(cells, dim):
    q, keys, values = random_cells(cells, dim)
    assert attend(q, keys, values) == pytest.approx(exact(q, keys, values), abs=2e-6)


@pytest.mark.parametrize("cells", [1, 65, SEGMENT + 1])
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_cells_of_halves(cells, dim):
    q, keys, values = random_cells(cells, dim)
    keys, values = (a.astype(np.float16).astype(np.float32) for a in (keys, values))
    assert attend(q, keys, values, np.uint16) == pytest.approx(exact(q, keys, values), abs=2e-6)


@pytest.mark.parametrize("spread", [30.0, 1000.0])
@pytest.mark.parametrize("order", [1, -1])
def test_scores_far_apart(spread, order):
    """The running maximum rises or falls over the chunks; weights underflow to 0 and none is NaN."""
    q, keys, values = random_cells(300, 64, spread)
    by_score = np.argsort(keys @ q)[::order]
    keys, values = keys[by_score], values[by_score]
    assert attend(q, keys, values) == pytest.approx(exact(q, keys, values), abs=2e-4)


def test_equal_scores_are_a_mean():
    _, keys, values = random_cells(SEGMENT + 5, 32)
    found = attend(np.zeros(32, np.float32), keys, values)
    assert found == pytest.approx(values.astype(np.float64).mean(axis=0), abs=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("cell", [0, 1, CHUNK - 1])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (80, 40), (128, 32)])
def test_a_cell_holds_the_rotated_key_and_the_value(dtype, cell, dim, half):
    rng = np.random.default_rng(dim)
    key, value = rng.normal(0, 1, (2, dim)).astype(np.float32)
    angle = rng.uniform(0, 6, half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    keys, values = appended(key, value, cos, sin, cell, dtype)
    error = 0 if dtype == np.float32 else 2e-3
    assert keys[:, cell] == pytest.approx(rope_reference(key, cos, sin), abs=1e-6 + error)
    assert values[cell, :dim] == pytest.approx(value, abs=error)
    keys[:, cell] = values[cell] = 0.0
    assert not keys.any() and not values.any()
