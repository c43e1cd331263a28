"""Matrix times activations, one kernel family for 1 to any number of rows.

Every output is computed the same way whatever runs beside it: over each block of columns the integer codes times the
activations are summed in column order, then scale * sum and offset * (sum of the block's activations) are added, block
after block. All of it in float32 with fused multiply-adds. Rows are taken four at a time, so that a column of codes is
unpacked once for four; the last one or two have routes of their own. All do the same operations in the same order for
a row, so they give the same bits. The plain twin is `matmul_reference`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...jit import njit
from ...model import Matrix
from ...rows import Float32
from .layout import BASE, BF16, BLOCK, BLOCKS, CODES, F16, F32, FORMAT, HALF, OFFSETS, Q4, Q8, RECORD, TILE
from .simd import add, broadcast, div, exp, fma, load, load_codes, mul, splat, store, sub

GROUP = 4  # rows that share one unpacked column


class Weights(NamedTuple):
    """Pointers to the arena of packed matrices, once for each type that its bytes are read as."""

    u8: Any
    i8: Any
    u16: Any
    i16: Any
    f32: Any


class Input(NamedTuple):
    """Activations: pointers to float32 x [rows, ld] and sums [rows, blocks], sums of each 32 columns of x.

    Rows up to the next multiple of 4 must exist; columns past the matrix's are zero.
    """

    x: Any
    ld: Any
    sums: Any
    blocks: Any


def matmul_reference(matrix: Matrix, x: Float32) -> NDArray[np.float64]:
    """x [n, cols] times the matrix transposed, [n, rows], in float64."""
    return x.astype(np.float64) @ matrix.dequantize().astype(np.float64).T


@njit(nogil=True)
def scale_pair(weights, half, byte):
    """32 scales or offsets stored from `byte` on, as a pair of vectors."""
    if half:
        return load(weights.u16, byte >> 1), load(weights.u16, (byte >> 1) + 16)
    return load(weights.f32, byte >> 2), load(weights.f32, (byte >> 2) + 16)


@njit(nogil=True)
def _one_row(codes, size, weights, matrix, tile, input, row, y):
    """The tile's 32 outputs of one row, into y[row]."""
    blocks, block, record = matrix[BLOCKS], matrix[BLOCK], matrix[RECORD]
    step = matrix[CODES] // (block * size)
    byte = matrix[BASE] + tile * blocks * record
    y0 = y1 = splat(np.float32(0.0))
    i, j = row * input.ld, row * input.blocks
    for _ in range(blocks):
        a0 = a1 = splat(np.float32(0.0))
        c = byte // size
        for _ in range(block):
            low, high = load_codes(codes, c)
            value = broadcast(input.x, i)
            a0, a1 = fma(low, value, a0), fma(high, value, a1)
            c += step
            i += 1
        if matrix[FORMAT] <= Q8:
            s0, s1 = scale_pair(weights, matrix[HALF], byte + matrix[CODES])
            y0, y1 = fma(s0, a0, y0), fma(s1, a1, y1)
            if matrix[OFFSETS]:
                o0, o1 = scale_pair(weights, matrix[HALF], byte + ((matrix[CODES] + record) >> 1))
                total = broadcast(input.sums, j)
                y0, y1 = fma(o0, total, y0), fma(o1, total, y1)
        else:
            y0, y1 = add(y0, a0), add(y1, a1)
        byte += record
        j += 1
    store(y, row * TILE, y0)
    store(y, row * TILE + 16, y1)


@njit(nogil=True)
def _two_rows(codes, size, weights, matrix, tile, input, row, y):
    """The tile's 32 outputs of rows `row` and `row` + 1, into y[row : row + 2]."""
    blocks, block, record = matrix[BLOCKS], matrix[BLOCK], matrix[RECORD]
    step = matrix[CODES] // (block * size)
    byte = matrix[BASE] + tile * blocks * record
    p0 = q0 = p1 = q1 = splat(np.float32(0.0))
    x, ld, sums, sld = input.x, input.ld, input.sums, input.blocks
    i, j = row * ld, row * sld
    for _ in range(blocks):
        a0 = b0 = a1 = b1 = splat(np.float32(0.0))
        c = byte // size
        for _ in range(block):
            low, high = load_codes(codes, c)
            value = broadcast(x, i)
            a0, b0 = fma(low, value, a0), fma(high, value, b0)
            value = broadcast(x, i + ld)
            a1, b1 = fma(low, value, a1), fma(high, value, b1)
            c += step
            i += 1
        if matrix[FORMAT] <= Q8:
            s0, s1 = scale_pair(weights, matrix[HALF], byte + matrix[CODES])
            p0, q0 = fma(s0, a0, p0), fma(s1, b0, q0)
            p1, q1 = fma(s0, a1, p1), fma(s1, b1, q1)
            if matrix[OFFSETS]:
                o0, o1 = scale_pair(weights, matrix[HALF], byte + ((matrix[CODES] + record) >> 1))
                total = broadcast(sums, j)
                p0, q0 = fma(o0, total, p0), fma(o1, total, q0)
                total = broadcast(sums, j + sld)
                p1, q1 = fma(o0, total, p1), fma(o1, total, q1)
        else:
            p0, q0 = add(p0, a0), add(q0, b0)
            p1, q1 = add(p1, a1), add(q1, b1)
        byte += record
        j += 1
    out = row * TILE
    store(y, out, p0)
    store(y, out + 16, q0)
    store(y, out + 32, p1)
    store(y, out + 48, q1)


@njit(nogil=True)
def _four_rows(codes, size, weights, matrix, tile, input, row, y):
    """The tile's 32 outputs of rows `row` .. `row` + 3, into y[row : row + 4]."""
    blocks, block, record = matrix[BLOCKS], matrix[BLOCK], matrix[RECORD]
    step = matrix[CODES] // (block * size)
    byte = matrix[BASE] + tile * blocks * record
    p0 = q0 = p1 = q1 = p2 = q2 = p3 = q3 = splat(np.float32(0.0))
    x, ld, sums, sld = input.x, input.ld, input.sums, input.blocks
    i = row * ld
    j = row * sld
    for _ in range(blocks):
        a0 = b0 = a1 = b1 = a2 = b2 = a3 = b3 = splat(np.float32(0.0))
        c = byte // size
        for _ in range(block):
            low, high = load_codes(codes, c)
            value = broadcast(x, i)
            a0, b0 = fma(low, value, a0), fma(high, value, b0)
            value = broadcast(x, i + ld)
            a1, b1 = fma(low, value, a1), fma(high, value, b1)
            value = broadcast(x, i + 2 * ld)
            a2, b2 = fma(low, value, a2), fma(high, value, b2)
            value = broadcast(x, i + 3 * ld)
            a3, b3 = fma(low, value, a3), fma(high, value, b3)
            c += step
            i += 1
        if matrix[FORMAT] <= Q8:
            s0, s1 = scale_pair(weights, matrix[HALF], byte + matrix[CODES])
            p0, q0 = fma(s0, a0, p0), fma(s1, b0, q0)
            p1, q1 = fma(s0, a1, p1), fma(s1, b1, q1)
            p2, q2 = fma(s0, a2, p2), fma(s1, b2, q2)
            p3, q3 = fma(s0, a3, p3), fma(s1, b3, q3)
            if matrix[OFFSETS]:
                o0, o1 = scale_pair(weights, matrix[HALF], byte + ((matrix[CODES] + record) >> 1))
                total = broadcast(sums, j)
                p0, q0 = fma(o0, total, p0), fma(o1, total, q0)
                total = broadcast(sums, j + sld)
                p1, q1 = fma(o0, total, p1), fma(o1, total, q1)
                total = broadcast(sums, j + 2 * sld)
                p2, q2 = fma(o0, total, p2), fma(o1, total, q2)
                total = broadcast(sums, j + 3 * sld)
                p3, q3 = fma(o0, total, p3), fma(o1, total, q3)
        else:
            p0, q0 = add(p0, a0), add(q0, b0)
            p1, q1 = add(p1, a1), add(q1, b1)
            p2, q2 = add(p2, a2), add(q2, b2)
            p3, q3 = add(p3, a3), add(q3, b3)
        byte += record
        j += 1
    out = row * TILE
    store(y, out, p0)
    store(y, out + 16, q0)
    store(y, out + 32, p1)
    store(y, out + 48, q1)
    store(y, out + 64, p2)
    store(y, out + 80, q2)
    store(y, out + 96, p3)
    store(y, out + 112, q3)


@njit(nogil=True)
def _tile(codes, size, weights, matrix, tile, input, rows, y):
    """y [rows, 32] = the tile's outputs; `codes` is the arena as the matrix's code type, of `size` bytes an element."""
    row = 0
    while rows - row > 2:
        _four_rows(codes, size, weights, matrix, tile, input, row, y)
        row += GROUP
    if rows - row == 2:
        _two_rows(codes, size, weights, matrix, tile, input, row, y)
    elif rows - row == 1:
        _one_row(codes, size, weights, matrix, tile, input, row, y)


@njit(nogil=True)
def tile_outputs(weights, matrix, tile, input, rows, y):
    """Outputs 32 * tile .. 32 * tile + 31 of a matrix for `rows` rows of activations.

    weights  Weights
    matrix   pointer to the int64 descriptor (layout.py)
    input    Input
    y        pointer to float32 [rows up to the next multiple of 4, 32]: the result
    """
    kind = matrix[FORMAT]
    if kind == Q4:
        _tile(weights.u8, 1, weights, matrix, tile, input, rows, y)
    elif kind == Q8:
        _tile(weights.i8, 1, weights, matrix, tile, input, rows, y)
    elif kind == F16:
        _tile(weights.u16, 2, weights, matrix, tile, input, rows, y)
    elif kind == BF16:
        _tile(weights.i16, 2, weights, matrix, tile, input, rows, y)
    elif kind == F32:
        _tile(weights.f32, 4, weights, matrix, tile, input, rows, y)


@njit(nogil=True)
def put(y, rows, out, at, ld):
    """out[r, at : at + 32] = y[r] for every row."""
    for r in range(rows):
        store(out, at + r * ld, load(y, r * TILE))
        store(out, at + r * ld + 16, load(y, r * TILE + 16))


@njit(nogil=True)
def put_added(y, rows, out, at, ld):
    """out[r, at : at + 32] += y[r] for every row: the residual."""
    for r in range(rows):
        for h in range(0, TILE, 16):
            store(out, at + r * ld + h, add(load(out, at + r * ld + h), load(y, r * TILE + h)))


@njit(nogil=True)
def put_gated(gate, up, rows, out, at, ld):
    """out[r, at : at + 32] = silu(gate[r]) * up[r] for every row (SwiGLU; Shazeer, 2020)."""
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    for r in range(rows):
        for h in range(0, TILE, 16):
            g = load(gate, r * TILE + h)
            silu = div(g, add(one, exp(sub(zero, g))))
            store(out, at + r * ld + h, mul(silu, load(up, r * TILE + h)))
