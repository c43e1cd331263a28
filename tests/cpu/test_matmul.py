"""Matrix products of every format against float64, and the same bits for a row in any company."""

import numpy as np
import pytest
from cpu_kernels import embedded, matmul
from gguf import GGMLQuantizationType as Type
from tiny_model import AFFINE, random_blocks

from strata_engine.backends.cpu.layout import ALIGN, BASE, HALF, Arena, pack
from strata_engine.backends.cpu.matmul import matmul_reference
from strata_engine.model.repack import repack

pytestmark = pytest.mark.xdist_group("cpu")
FLOATS = ("F32", "F16", "BF16")


def random_matrix(kind, rows, cols, seed=0):
    return repack("w", Type[kind], random_blocks(np.random.default_rng(seed), Type[kind], rows, cols), cols)


def random_rows(count, cols):
    return np.random.default_rng(count).normal(0, 1, (count, cols)).astype(np.float32)


def assert_close(matrix, x):
    """Within 1e-6 of the sum of the sizes of all that is added up."""
    sizes = np.abs(matrix.dequantize()).astype(np.float64)
    if matrix.offset is not None:
        sizes += 2 * np.repeat(np.abs(matrix.offset), matrix.block, axis=1)
    error = np.abs(matmul(matrix, x) - matmul_reference(matrix, x))
    assert (error <= 1e-6 * (np.abs(x) @ sizes.T)).all()


@pytest.mark.parametrize("kind", AFFINE)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33])
def test_product_is_the_references(kind, count):
    assert_close(random_matrix(kind, 64, 512), random_rows(count, 512))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 15, 31, 33, 65])
def test_any_number_of_outputs(kind, rows):
    assert_close(random_matrix(kind, rows, 96), random_rows(5, 96))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 577])
def test_any_number_of_columns(kind, cols):
    assert_close(random_matrix(kind, 40, cols), random_rows(6, cols))


@pytest.mark.parametrize("kind", AFFINE)
def test_a_row_has_the_same_bits_in_any_company(kind):
    matrix, x = random_matrix(kind, 96, 768), random_rows(37, 768)
    together = matmul(matrix, x)
    for first, count in [(0, 1), (7, 1), (36, 1), (3, 2), (5, 3), (2, 4), (10, 5), (1, 8), (4, 33)]:
        assert np.array_equal(matmul(matrix, x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("kind", AFFINE)
def test_embedding_rows_are_exact(kind):
    matrix = random_matrix(kind, 45, 256)
    assert np.array_equal(embedded(matrix), matrix.dequantize())


@pytest.mark.parametrize("kind", FLOATS)
def test_embedding_rows_of_any_width(kind):
    matrix = random_matrix(kind, 33, 41)
    assert np.array_equal(embedded(matrix), matrix.dequantize())


@pytest.mark.parametrize(("kind", "half"), [("Q4_1", True), ("Q8_0", True), ("Q4_K", False), ("Q6_K", False)])
def test_scales_are_halves_only_where_that_is_exact(kind, half):
    assert bool(pack(random_matrix(kind, 32, 512))[1][HALF]) is half


def test_matrices_of_an_arena_are_aligned_and_do_not_touch():
    arena, parts = Arena(), [random_matrix(kind, 37, 256, seed) for seed, kind in enumerate(AFFINE)]
    bases = [int(arena.add(part)[BASE]) for part in parts]
    data = arena.join()
    assert data.ctypes.data % ALIGN == 0 and all(base % ALIGN == 0 for base in bases)
    for base, part in zip(bases, parts, strict=True):
        packed = pack(part)[0]
        assert np.array_equal(data[base : base + len(packed)], packed)
