"""The matmul kernels against float64, and against each other with ==."""

from __future__ import annotations

import numpy as np
import pytest

from strata_engine.backends.cuda.layout import Format, arrange, arrange_scales, restore
from strata_engine.backends.cuda.linear import run_slice, run_tile, slice_spec, tile_spec
from strata_engine.backends.cuda.shapes import Logits, SliceShape, TileShape
from strata_engine.backends.cuda.weights import Weights

FEATURES, INPUTS, ROWS, TILES = 224, 320, 512, 14
SLICES = 3
FORMS = {
    "Q4_0": Format("q4", "f16", False, 8),
    "Q4_1": Format("q4", "f16", True),
    "Q4_K": Format("q4", "f32", True),
    "Q6_K": Format("q8", "f32", False, 128, 16),
    "Q8_0": Format("q8", "f16", False, 128),
    "F16": Format("f16", "none"),
    "BF16": Format("f16", "f32"),
}
SHAPES = [
    SliceShape(SLICES, 1, 1, 2),
    SliceShape(SLICES, 2, 1, 5),
    SliceShape(SLICES, 1, 2, 3),
    SliceShape(SLICES, 1, 4, 4),
    SliceShape(SLICES, 1, 1, 2, few=True),
    SliceShape(SLICES, 2, 1, 3, few=True),
    TileShape(SLICES, 2, 2, 2, 2, 2),
    TileShape(SLICES, 2, 4, 4, 2, 3),
    TileShape(SLICES, 4, 4, 2, 2, 2),
    TileShape(SLICES, 2, 4, 4, 1, 4),
    TileShape(SLICES, 2, 2, 4, 1, 4),
]


STEPS = [SliceShape(SLICES, 1, 1, 2, few, chunk, chunk == 4) for few in (False, True) for chunk in (1, 2, 4)] + [
    SliceShape(SLICES, 2, 1, 3, True, 2),
    SliceShape(SLICES, 2, 1, 2, True, 4, True),
]  # of slices of four units


def random_matrix(device, form: Format, rng: np.random.Generator, inputs: int = INPUTS) -> tuple[Weights, np.ndarray]:
    """Weights on the device and their values in float64."""
    if form.codes == "f16":
        codes = rng.normal(size=(FEATURES, inputs)).astype(np.float16)
    else:
        codes = rng.integers(0, 16 if form.codes == "q4" else 256, (FEATURES, inputs)).astype(np.uint8)
    parts = [rng.normal(size=(FEATURES, inputs // form.block)).astype(np.float16).astype(np.float32) for _ in range(2)]
    scales = arrange_scales(parts[0], parts[1] if form.offset else None, form) if form.scale != "none" else None
    words = arrange(codes, form.codes)
    values = restore(words, scales, form, "pairs", codes.shape)
    on_device = device.upload(scales if scales is not None else np.zeros(1, np.uint32))
    return Weights(form, FEATURES, inputs, device.upload(words), on_device), values.astype(np.float64)


def split(x: np.ndarray) -> np.ndarray:
    """float32 [rows, K] -> halves [rows, 2, K]: high and low parts."""
    high = x.astype(np.float16)
    return np.stack([high, (x - high.astype(np.float32)).astype(np.float16)], axis=1)


def run(device, shape, weights: Weights, rows: int, x, index, norm) -> np.ndarray:
    logits = device.upload(np.full((ROWS, FEATURES), np.nan, np.float32))
    top, best = device.allocate(ROWS * TILES * 4), device.allocate(ROWS * TILES * 4)
    out = Logits(logits, top, best, FEATURES, TILES)
    small = isinstance(shape, SliceShape)
    spec = slice_spec(weights.form, shape, "logits", 1) if small else tile_spec(weights.form, shape, "logits")
    (run_slice if small else run_tile)(device, spec, shape, weights, rows, x, index, norm, out)
    values = device.read(logits, (ROWS, FEATURES), np.float32)
    for buffer in (logits, top, best):
        device.free(buffer)
    return values


@pytest.mark.parametrize("name", FORMS)
def test_close_to_float64_and_the_same_bits_in_any_shape(device, name: str) -> None:
    rng = np.random.default_rng()
    weights, values = random_matrix(device, FORMS[name], rng)
    parts = split(rng.normal(size=(ROWS, INPUTS)).astype(np.float32))
    x, index = device.upload(parts), device.upload(np.arange(ROWS, dtype=np.int32))
    squares = rng.uniform(1, 20, (ROWS, 20)).astype(np.float32)
    norm = (device.upload(squares), 20, 1 / INPUTS, 1e-5)
    factor = 1 / np.sqrt(squares.astype(np.float64).sum(1) / INPUTS + 1e-5)
    expected = parts.astype(np.float64).sum(1) @ values.T * factor[:, None]
    first: np.ndarray | None = None
    for shape in SHAPES:
        for rows in (1, 5, 13, 40, ROWS):
            got = run(device, shape, weights, rows, x, index, norm)
            assert np.isnan(got[rows:]).all(), "padding rows are not written"
            error = np.linalg.norm(got[:rows] - expected[:rows]) / np.linalg.norm(expected[:rows])
            assert error < 1e-5, (shape, rows)
            first = run(device, shape, weights, ROWS, x, index, norm) if first is None else first
            assert np.array_equal(got[:rows], first[:rows]), (shape, rows)


@pytest.mark.parametrize("name", FORMS)
def test_steps_of_several_units_give_the_same_bits(device, name: str) -> None:
    inputs, rng = 64 * 4 * SLICES, np.random.default_rng()
    weights, values = random_matrix(device, FORMS[name], rng, inputs)
    parts = split(rng.normal(size=(ROWS, inputs)).astype(np.float32))
    x, index = device.upload(parts), device.upload(np.arange(ROWS, dtype=np.int32))
    norm = (device.upload(np.full((ROWS, 20), inputs / 20, np.float32)), 20, 1 / inputs, 0.0)
    expected = parts.astype(np.float64).sum(1) @ values.T
    first = run(device, TileShape(SLICES, 2, 2, 2, 2, 2), weights, ROWS, x, index, norm)
    assert np.linalg.norm(first - expected) < 1e-5 * np.linalg.norm(expected)
    for shape in STEPS:
        for rows in (1, 3, 8, 21):
            assert np.array_equal(run(device, shape, weights, rows, x, index, norm)[:rows], first[:rows]), (shape, rows)


def test_the_index_picks_rows(device) -> None:
    rng = np.random.default_rng()
    weights, _ = random_matrix(device, FORMS["Q4_0"], rng)
    x = device.upload(split(rng.normal(size=(ROWS, INPUTS)).astype(np.float32)))
    norm = (device.upload(rng.uniform(1, 20, (ROWS, 20)).astype(np.float32)), 20, 1 / INPUTS, 1e-5)
    all_rows = run(device, SHAPES[0], weights, 8, x, device.upload(np.arange(8, dtype=np.int32)), norm)
    picked = run(device, SHAPES[0], weights, 3, x, device.upload(np.array([6, 0, 6], np.int32)), norm)
    assert np.array_equal(picked[:3], all_rows[[6, 0, 6]])
