"""Norm and rotation against their plain twins."""

import numpy as np
import pytest
from cpu_kernels import normed, rotated

from strata_engine.backends.cpu.elementwise import norm_reference, rope_reference

pytestmark = pytest.mark.xdist_group("cpu")


@pytest.mark.parametrize("width", [1, 31, 32, 33, 576])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_norm(width, size):
    x, weight = np.random.default_rng(width).normal(0, 1, (2, width)).astype(np.float32)
    x *= np.float32(size)
    assert normed(x, weight, 1e-5) == pytest.approx(norm_reference(x, weight, 1e-5), rel=1e-5, abs=1e-7)


def test_norm_of_zeros_is_zero():
    assert not normed(np.zeros(40, np.float32), np.ones(40, np.float32), 1e-6).any()


@pytest.mark.parametrize(("heads", "dim", "half"), [(1, 8, 4), (9, 64, 32), (3, 80, 40), (2, 128, 16)])
def test_queries_are_rotated_and_scaled(heads, dim, half):
    rng = np.random.default_rng(dim)
    x, angle = rng.normal(0, 1, (heads, dim)).astype(np.float32), rng.uniform(0, 6, half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    assert rotated(x, cos, sin, 0.125) == pytest.approx(0.125 * rope_reference(x, cos, sin), abs=1e-6)
