"""Every kernel shape that a plan can choose fits a multiprocessor and the matrix it is for."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("numba.cuda", reason="needs the cuda extra")

from strata_engine.backends.cuda.inputs import BUCKETS
from strata_engine.backends.cuda.layout import Format
from strata_engine.backends.cuda.plan import AttentionPlan, Limits, slice_shape, slices_of, takes_slices, tile_shape
from strata_engine.backends.cuda.shapes import THREADS

GPUS = {  # by compute capability: a laptop's or a small card of each
    "7.5": Limits(40, 64 << 10, 64 << 10, 0, 1024),
    "8.0": Limits(108, 163 << 10, 164 << 10),
    "8.6": Limits(20, 99 << 10, 100 << 10, threads=1536),
    "8.9": Limits(128, 99 << 10, 100 << 10, threads=1536),
    "9.0": Limits(),
    "12.0": Limits(170, 99 << 10, 100 << 10, threads=1536),
}
FORMS = [
    Format("q4", "f16", False, 8),
    Format("q4", "f32", True),
    Format("q8", "f16", False, 128),
    Format("q8", "f32", True, 128, 16),
    Format("f16", "none"),
    Format("f16", "f32"),
]
MATRICES = [(36, 9), (192, 9), (3072, 9), (36, 24), (128, 32), (1024, 32), (8016, 32), (1792, 64), (256, 224)]
MATRICES += [(1, 1), (7, 5), (133, 43), (688, 172), (131, 40), (4096, 128), (33, 300), (81, 10)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("limits", GPUS.values(), ids=GPUS.keys())
def test_shapes_of_matmuls_fit(form: Format, limits: Limits) -> None:
    for tiles, units in MATRICES:
        slices = slices_of(units)
        for rows in BUCKETS:
            if takes_slices(tiles, rows, limits):
                shape, blocks = slice_shape(form, slices, tiles, units, rows, limits)
                assert tiles % shape.mt == 0
                own = units // slices
                assert shape.chunk == 1 if units % slices else own % shape.chunk == 0
                assert not shape.whole or units % slices == 0 and shape.chunk == own and rows <= 8
                assert not shape.few or rows <= 4
            else:
                shape, blocks = tile_shape(form, slices, tiles, rows, limits)  # type: ignore[assignment]
            where = (tiles, units, rows, shape)
            assert limits.fits(blocks, shape.shared_bytes(form)), where
            assert blocks * shape.threads <= limits.threads, where


@pytest.mark.parametrize(
    "tiles, rows, block_rows",
    [
        (128, 128, 16),
        (128, 256, 32),
        (128, 512, 32),
        (1792, 128, 32),
        (1024, 64, 32),
        (1024, 512, 64),
        (8016, 16, 16),
        (8016, 32, 32),
        (8016, 64, 64),
    ],
)
def test_the_tile_shape_fills_the_gpu_and_wastes_no_rows(tiles: int, rows: int, block_rows: int) -> None:
    assert not takes_slices(tiles, rows, Limits())
    shape, _ = tile_shape(FORMS[0], 8, tiles, rows, Limits())
    assert shape.rows == block_rows


@pytest.mark.parametrize("limits", GPUS.values(), ids=GPUS.keys())
def test_steps_divide_the_slices_of_every_matrix(limits: Limits) -> None:
    for units in range(1, 200):
        slices = slices_of(units)
        for tiles in (1, limits.processors, *(blocks * limits.processors - 1 for blocks in (2, 3, 4))):
            for form, rows in itertools.product(FORMS[1:4], (1, 8)):
                shape, _ = slice_shape(form, slices, tiles, units, rows, limits)
                assert shape.chunk == 1 or units % (slices * shape.chunk) == 0, (tiles, units, rows, shape)
                assert not shape.whole or units == slices * shape.chunk, (tiles, units, rows, shape)


@pytest.mark.parametrize("heads", range(1, 33))
@pytest.mark.parametrize("dim, parts", [(64, 1), (64, 2), (128, 1), (128, 2), (256, 2)])
def test_shapes_of_attention_fit(heads: int, dim: int, parts: int) -> None:
    for bucket in BUCKETS:
        spec, shape, shares = AttentionPlan(heads, dim, parts, 8).choose(bucket)
        assert heads % shape.heads == 0 and shape.rows >= 1
        assert shape.quads * THREADS * 2 * shape.own == shape.queries * dim  # every output has its thread
        assert 1 <= shares <= 8  # blocks without a group of chunks would idle
        room = [limits for name, limits in GPUS.items() if dim < 256 or name != "7.5"]
        assert all(limits.fits(1, shape.shared_bytes) for limits in room)
