"""The CPU kernels as functions over NumPy arrays, for tests. All are compiled here, once, and cached on disk."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from strata_engine.backends.cpu.attention import (
    CHUNK,
    DIMS,
    SEGMENT,
    STATE,
    attend_chunk,
    clear_partial,
    combine,
)
from strata_engine.backends.cpu.elementwise import append_cell, block_sums, embed, norm, rotate_queries
from strata_engine.backends.cpu.layout import TILE, Arena, pad, tiles
from strata_engine.backends.cpu.matmul import GROUP, Input, Weights, put, tile_outputs
from strata_engine.backends.cpu.simd import pointer
from strata_engine.jit import njit
from strata_engine.model import Matrix

Float32 = NDArray[np.float32]


@njit(cache=True)
def _weights(arena):
    return Weights(
        pointer(arena), pointer(arena.view(np.int8)), pointer(arena.view(np.uint16)), pointer(arena.view(np.int16)),
        pointer(arena.view(np.float32)),
    )  # fmt: skip


@njit(cache=True)
def _matmul(arena, matrix, x, sums, rows, count, y, out):
    input = Input(pointer(x), x.shape[1], pointer(sums), sums.shape[1])
    for row in range(rows):
        block_sums(pointer(x), row * x.shape[1], x.shape[1], pointer(sums), row * sums.shape[1])
    for tile in range(count):
        tile_outputs(_weights(arena), pointer(matrix), tile, input, rows, pointer(y))
        put(pointer(y), rows, pointer(out), tile * TILE, out.shape[1])


@njit(cache=True)
def _embed(arena, matrix, token, out, column):
    embed(_weights(arena), pointer(matrix), token, pointer(out), 0, pointer(column))


@njit(cache=True)
def _attend(q, keys, values, dim, padded, cells, partial, scores, out):
    size, segments = padded + STATE, (cells - 1) // SEGMENT + 1
    p = pointer(partial)
    for s in range(segments):
        clear_partial(p, s * size, padded)
        for start in range(s * SEGMENT, min((s + 1) * SEGMENT, cells), CHUNK):
            attend_chunk(
                pointer(q), 0, pointer(keys), start * dim, pointer(values), start * padded, dim, padded,
                min(CHUNK, cells - start), p, s * size, pointer(scores),
            )  # fmt: skip
    combine(p, 0, segments, dim, padded, pointer(out), 0)


@njit(cache=True)
def _norm(x, weight, out, width, eps):
    norm(pointer(x), 0, pointer(weight), 0, pointer(out), 0, len(x), width, eps)


@njit(cache=True)
def _rotate(x, heads, dim, cos, sin, half, scale):
    rotate_queries(pointer(x), 0, heads, dim, pointer(cos), pointer(sin), 0, half, scale)


@njit(cache=True)
def _append(kv, dim, padded, cos, sin, half, keys, values, run, cell):
    append_cell(
        pointer(kv), 0, dim, dim, padded, pointer(cos), pointer(sin), 0, half, pointer(keys), pointer(values), run, cell
    )


def _padded(x: Float32, rows: int, cols: int) -> Float32:
    out = np.zeros((rows, cols), np.float32)
    out[: len(x), : x.shape[1]] = x
    return out


def _packed(matrix: Matrix) -> tuple[NDArray, NDArray]:
    arena = Arena()
    descriptor = arena.add(matrix)
    return arena.join(), descriptor


def matmul(matrix: Matrix, x: Float32) -> Float32:
    """x [n, cols] times the matrix transposed: [n, rows]."""
    rows, ld, count = len(x), pad(matrix.cols, TILE), tiles(matrix.rows)
    inputs = _padded(x, pad(rows, GROUP), ld)
    sums, y = np.zeros((len(inputs), ld // TILE), np.float32), np.zeros((len(inputs), TILE), np.float32)
    out = np.zeros((rows, count * TILE), np.float32)
    _matmul(*_packed(matrix), inputs, sums, rows, count, y, out)
    return out[:, : matrix.rows]


def embedded(matrix: Matrix) -> Float32:
    """Every row of the matrix, dequantised by the kernel."""
    packed = _packed(matrix)
    out, column = np.zeros((matrix.rows, pad(matrix.cols, TILE)), np.float32), np.zeros(TILE, np.float32)
    for token in range(matrix.rows):
        _embed(*packed, token, out[token], column)
    return out[:, : matrix.cols]


def attend(q: Float32, keys: Float32, values: Float32, dtype: type = np.float32) -> Float32:
    """One head's attention: q [dim] over keys and values [cells, dim] kept as float32 or as halves (np.uint16).

    Whatever lies behind the last cell in its chunk is NaN: it must not be read.
    """
    cells, dim = keys.shape
    padded, room = pad(dim, DIMS), pad(cells, CHUNK)
    k, v = np.full((room, dim), np.nan, np.float32), np.full((room, padded), np.nan, np.float32)
    k[:cells], v[:cells, :dim], v[:cells, dim:] = keys, values, 0.0
    k = k.reshape(-1, CHUNK, dim).transpose(0, 2, 1).copy()
    if dtype == np.uint16:
        k, v = (a.astype(np.float16).view(np.uint16) for a in (k, v))
    partial = np.full((-(-cells // SEGMENT), padded + STATE), np.nan, np.float32)
    out, scores = np.zeros(dim, np.float32), np.zeros(CHUNK, np.float32)
    scaled = (q * np.float32(1 / math.sqrt(dim))).astype(np.float32)
    _attend(scaled, k.reshape(-1), v.reshape(-1), dim, padded, cells, partial.reshape(-1), scores, out)
    return out


def normed(x: Float32, weight: Float32, eps: float) -> Float32:
    """RMS norm of one row [width]."""
    width, ld = len(x), pad(len(x), TILE)
    row, w = _padded(x[None], 1, ld)[0], _padded(weight[None], 1, ld)[0]
    out = np.full(ld, np.nan, np.float32)
    _norm(row, w, out, width, np.float32(eps))
    assert not out[width:].any(), "columns past the width must be zero: the products read them"
    return out[:width]


def rotated(x: Float32, cos: Float32, sin: Float32, scale: float) -> Float32:
    """Heads [heads, dim] rotated by one position's angles [half] and scaled."""
    out = x.copy()
    _rotate(out.reshape(-1), *x.shape, cos, sin, len(cos), np.float32(scale))
    return out


def appended(key: Float32, value: Float32, cos: Float32, sin: Float32, cell: int, dtype: type) -> tuple[Float32, ...]:
    """Keys [dim, 64] and values [64, padded] of the second of two runs, both zero before, after one append."""
    dim, padded = len(key), pad(len(key), DIMS)
    keys, values = np.zeros((2, dim, CHUNK), dtype), np.zeros((2, CHUNK, padded), dtype)
    kv = np.concatenate([key, value])
    _append(kv, dim, padded, cos, sin, len(cos), keys.reshape(-1), values.reshape(-1), 1, cell)
    assert not keys[0].any() and not values[0].any()
    return tuple((a.view(np.float16) if dtype == np.uint16 else a)[1].astype(np.float32) for a in (keys, values))
