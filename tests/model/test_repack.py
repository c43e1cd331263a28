"""Repacked weights against the library's own dequantisation."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tiny_model import AFFINE, OTHERS, Tiny, random_blocks, write_model

from strata_engine.model import load_model
from strata_engine.model.repack import readable, repack


def random_matrix(kind: str, rows: int = 7, cols: int = 512):
    """A repacked matrix and what the library makes of the same bytes."""
    data = random_blocks(np.random.default_rng(len(kind)), Type[kind], rows, cols)
    return repack("w", Type[kind], data, cols), gguf.quants.dequantize(data, Type[kind])


@pytest.mark.parametrize("kind", AFFINE)
def test_every_weight_is_exact(kind):
    matrix, expected = random_matrix(kind)
    assert np.array_equal(matrix.dequantize(), expected)


@pytest.mark.parametrize("kind", OTHERS)
def test_types_that_are_not_affine_become_halves(kind):
    matrix, expected = random_matrix(kind)
    assert matrix.format == "f16"
    assert np.array_equal(matrix.dequantize(), expected.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "format", "low", "high"),
    [
        ("Q4_0", "q4", 0, 15), ("Q4_1", "q4", 0, 15), ("Q4_K", "q4", 0, 15), ("Q5_0", "q8", -16, 15),
        ("Q5_1", "q8", 0, 31), ("Q5_K", "q8", 0, 31), ("Q6_K", "q8", -32, 31), ("Q8_0", "q8", -127, 127),
    ],
)  # fmt: skip
def test_codes_are_the_small_integers_of_their_type(kind, format, low, high):
    matrix, _ = random_matrix(kind, rows=64)
    assert matrix.format == format
    assert matrix.codes.dtype == (np.uint8 if format == "q4" else np.int8)
    assert low <= matrix.codes.min() and matrix.codes.max() <= high


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0", "Q6_K"])
def test_types_around_zero_have_no_offsets(kind):
    assert random_matrix(kind)[0].offset is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_shape_and_block_are_the_types(kind):
    matrix, _ = random_matrix(kind, rows=3, cols=768)
    block = 16 if kind == "Q6_K" else 32
    assert (matrix.rows, matrix.cols, matrix.block) == (3, 768, block)
    assert matrix.scale is not None and matrix.scale.shape == (3, 768 // block)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_need_no_whole_blocks(kind):
    matrix, expected = random_matrix(kind, cols=37)
    assert np.array_equal(matrix.dequantize(), expected)


@pytest.mark.parametrize(("kind", "expected"), [("F32", True), ("IQ4_XS", True), ("I8", False), ("F64", False)])
def test_readable_types_hold_weights(kind, expected):
    assert readable(Type[kind]) is expected


@pytest.mark.parametrize(("kind", "told"), [("Q4_1", False), ("BF16", False), ("Q2_K", True), ("IQ4_XS", True)])
def test_weights_that_are_rounded_are_told(tmp_path, caplog, kind, told):
    load_model(write_model(tmp_path / "m.gguf", Tiny(kind=kind, width=256, ff=256, heads=4, kv_heads=2, head_dim=64)))
    assert (f"{kind} are rounded to half precision" in caplog.text) is told
