"""What happens to one row between the matrix products: embedding, norm, block sums, rotation, append to the cells."""

from __future__ import annotations

import numpy as np

from ...jit import njit
from ...rows import Float32
from .attention import CHUNK
from .layout import BASE, BF16, BLOCK, BLOCKS, CODES, F16, FORMAT, HALF, OFFSETS, Q4, Q8, RECORD, TILE
from .matmul import scale_pair
from .simd import add, fma, lane_sum, load, load_codes, mul, splat, store, store_one

_ZERO = np.float32(0.0)


def norm_reference(x: Float32, weight: Float32, eps: float) -> Float32:
    """RMS norm of rows [n, width] in float64 (Zhang and Sennrich, 2019)."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rope_reference(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotate adjacent pairs of the leading 2 * len(cos) dimensions of x [.., dim] (Su et al., 2021)."""
    out, half = x.copy(), len(cos)
    even, odd = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    out[..., 0 : 2 * half : 2] = even * cos - odd * sin
    out[..., 1 : 2 * half : 2] = even * sin + odd * cos
    return out


@njit(nogil=True)
def _embed_from(codes, size, weights, matrix, token, x, at, column):
    blocks, block, record = matrix[BLOCKS], matrix[BLOCK], matrix[RECORD]
    step = matrix[CODES] // (block * size)
    lane = token % TILE
    byte = matrix[BASE] + (token // TILE) * blocks * record
    for b in range(blocks):
        for k in range(block):
            low, high = load_codes(codes, byte // size + k * step)
            if matrix[FORMAT] <= Q8:
                s0, s1 = scale_pair(weights, matrix[HALF], byte + matrix[CODES])
                o0 = o1 = splat(_ZERO)
                if matrix[OFFSETS]:
                    o0, o1 = scale_pair(weights, matrix[HALF], byte + ((matrix[CODES] + record) >> 1))
                low, high = fma(s0, low, o0), fma(s1, high, o1)
            store(column, 0, low)
            store(column, 16, high)
            x[at + b * block + k] = column[lane]
        byte += record


@njit(nogil=True)
def embed(weights, matrix, token, x, at, column):
    """x[at : at + cols] = row `token` of a matrix, dequantised. `column`: float32 [32] scratch."""
    kind = matrix[FORMAT]
    if kind == Q4:
        _embed_from(weights.u8, 1, weights, matrix, token, x, at, column)
    elif kind == Q8:
        _embed_from(weights.i8, 1, weights, matrix, token, x, at, column)
    elif kind == F16:
        _embed_from(weights.u16, 2, weights, matrix, token, x, at, column)
    elif kind == BF16:
        _embed_from(weights.i16, 2, weights, matrix, token, x, at, column)
    else:
        _embed_from(weights.f32, 4, weights, matrix, token, x, at, column)


@njit(nogil=True)
def norm(x, at, weight, w_at, out, out_at, ld, width, eps):
    """out[0:ld] = RMS norm of x[0:ld], whose first `width` elements count; the rest are zero. ld: a multiple of 32."""
    total = splat(_ZERO)
    for i in range(0, ld, 16):
        value = load(x, at + i)
        total = fma(value, value, total)
    factor = np.float32(1.0) / np.sqrt(lane_sum(total) / np.float32(width) + eps)
    scale = splat(factor)
    for i in range(0, ld, 16):
        store(out, out_at + i, mul(mul(load(x, at + i), scale), load(weight, w_at + i)))


@njit(nogil=True)
def block_sums(x, at, ld, sums, sums_at):
    """sums[b] = sum of x[32 b : 32 b + 32] for the ld / 32 blocks of a row."""
    for b in range(ld // TILE):
        i = at + b * TILE
        sums[sums_at + b] = lane_sum(add(load(x, i), load(x, i + 16)))


@njit(nogil=True)
def _rotate(x, at, cos, sin, t, half, scale, head_dim):
    """Rotate one head in place by the angles at `t`, times `scale`."""
    for i in range(half):
        even, odd = x[at + 2 * i] * scale, x[at + 2 * i + 1] * scale
        x[at + 2 * i] = even * cos[t + i] - odd * sin[t + i]
        x[at + 2 * i + 1] = even * sin[t + i] + odd * cos[t + i]
    for d in range(2 * half, head_dim):
        x[at + d] *= scale


@njit(nogil=True)
def rotate_queries(qkv, at, heads, head_dim, cos, sin, t, half, scale):
    """Rotate a row's query heads in place and scale them by `scale` (1 / sqrt(head_dim))."""
    for head in range(heads):
        _rotate(qkv, at + head * head_dim, cos, sin, t, half, scale, head_dim)


@njit(nogil=True)
def append_cell(qkv, k_at, v_at, head_dim, value_dim, cos, sin, t, half, keys, values, run, cell):
    """Rotate one kv head's key and write key and value to cell `cell` of the run of 64 cells that is the `run`-th."""
    _rotate(qkv, k_at, cos, sin, t, half, np.float32(1.0), head_dim)
    k = run * CHUNK * head_dim + cell
    v = (run * CHUNK + cell) * value_dim
    for d in range(head_dim):
        store_one(keys, k + d * CHUNK, qkv[k_at + d])
        store_one(values, v + d, qkv[v_at + d])
