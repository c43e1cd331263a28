"""Attention of rows over the cells of their slots, in chunks and segments aligned to absolute positions.

Cells lie in chunks of 64 positions, and all of a slot's first 64 positions before its next: memory is touched only as
far as a context goes. Within a chunk a (layer, kv head) has its keys as [dimension, 64], so that 16 cells' scores fill
a vector, and its values as [64, padded dimension].

A query walks its chunks from position 0 up with a running maximum and sum (Milakov and Gimelshein, 2018; Dao et al.,
2022). Every 32 chunks form a segment with a partial result of its own, so that a long context can be shared among
threads; partial results are combined in order. Where chunks and segments begin depends on the position alone, hence a
row's result does not depend on what runs beside it.

The plain twin is `attention_reference`.
"""

from __future__ import annotations

import math

import numpy as np

from ...jit import njit
from ...rows import Float32
from .simd import (
    add,
    broadcast,
    exp,
    first_lane,
    fma,
    keep_first,
    lane_max,
    lane_sum,
    load,
    maximum,
    mul,
    shifted,
    splat,
    store,
)

CHUNK = 64  # cells a chunk
SEGMENT = 2048  # cells a segment
DIMS = 64  # values are padded to a multiple of this
STATE = 16  # floats behind the values of a partial result: maximum, sum, padding
SPAN = 8  # most rows a task takes together

_LOWEST = np.float32(-np.inf)
_ZERO = np.float32(0.0)


def attention_reference(q: Float32, keys: Float32, values: Float32) -> Float32:
    """Softmax attention in float64: q [heads, dim] over keys and values [cells, kv_heads, dim] -> [heads, dim]."""
    repeat = q.shape[0] // keys.shape[1]
    keys = np.repeat(keys.astype(np.float64), repeat, axis=1)
    values = np.repeat(values.astype(np.float64), repeat, axis=1)
    scores = np.einsum("hd,chd->hc", q.astype(np.float64), keys) / math.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hc,chd->hd", weights / weights.sum(axis=1, keepdims=True), values)


@njit(nogil=True)
def _scores(q, q_at, keys, k_at, dim, valid, scores):
    """q . key of a chunk's 64 cells into scores[0:64], -inf past the first `valid`; returns the largest."""
    s0 = s1 = s2 = s3 = splat(_ZERO)
    k = k_at
    for d in range(dim):
        value = broadcast(q, q_at + d)
        s0 = fma(load(keys, k), value, s0)
        s1 = fma(load(keys, k + 16), value, s1)
        s2 = fma(load(keys, k + 32), value, s2)
        s3 = fma(load(keys, k + 48), value, s3)
        k += CHUNK
    if valid < CHUNK:
        s0, s1 = keep_first(s0, valid, _LOWEST), keep_first(s1, valid - 16, _LOWEST)
        s2, s3 = keep_first(s2, valid - 32, _LOWEST), keep_first(s3, valid - 48, _LOWEST)
    store(scores, 0, s0)
    store(scores, 16, s1)
    store(scores, 32, s2)
    store(scores, 48, s3)
    return lane_max(maximum(maximum(s0, s1), maximum(s2, s3)))


@njit(nogil=True)
def _scores_of_two(q, a_at, b_at, keys, k_at, dim, scores):
    """The same for two queries that see all 64 cells, into scores[0:64] and scores[64:128]."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(_ZERO)
    k = k_at
    for d in range(dim):
        a, b = broadcast(q, a_at + d), broadcast(q, b_at + d)
        key = load(keys, k)
        a0, b0 = fma(key, a, a0), fma(key, b, b0)
        key = load(keys, k + 16)
        a1, b1 = fma(key, a, a1), fma(key, b, b1)
        key = load(keys, k + 32)
        a2, b2 = fma(key, a, a2), fma(key, b, b2)
        key = load(keys, k + 48)
        a3, b3 = fma(key, a, a3), fma(key, b, b3)
        k += CHUNK
    store(scores, 0, a0)
    store(scores, 16, a1)
    store(scores, 32, a2)
    store(scores, 48, a3)
    store(scores, 64, b0)
    store(scores, 80, b1)
    store(scores, 96, b2)
    store(scores, 112, b3)
    highest_a = lane_max(maximum(maximum(a0, a1), maximum(a2, a3)))
    return highest_a, lane_max(maximum(maximum(b0, b1), maximum(b2, b3)))


@njit(nogil=True)
def _weigh(scores, highest):
    """scores[0:64] = exp(scores - highest); returns their sum."""
    top = splat(-highest)
    p0, p1 = exp(add(load(scores, 0), top)), exp(add(load(scores, 16), top))
    p2, p3 = exp(add(load(scores, 32), top)), exp(add(load(scores, 48), top))
    store(scores, 0, p0)
    store(scores, 16, p1)
    store(scores, 32, p2)
    store(scores, 48, p3)
    return lane_sum(add(add(p0, p1), add(p2, p3)))


@njit(nogil=True)
def _accumulate(weights, values, v_at, padded, valid, shrink, out, o_at):
    """out[o_at : o_at + padded] = out * shrink + sum of weights[c] * values[c] over the first `valid` cells."""
    factor = splat(shrink)
    for d in range(0, padded, DIMS):
        o = o_at + d
        o0, o1 = mul(load(out, o), factor), mul(load(out, o + 16), factor)
        o2, o3 = mul(load(out, o + 32), factor), mul(load(out, o + 48), factor)
        v = v_at + d
        for c in range(valid):
            weight = broadcast(weights, c)
            o0, o1 = fma(load(values, v), weight, o0), fma(load(values, v + 16), weight, o1)
            o2, o3 = fma(load(values, v + 32), weight, o2), fma(load(values, v + 48), weight, o3)
            v += padded
        store(out, o, o0)
        store(out, o + 16, o1)
        store(out, o + 32, o2)
        store(out, o + 48, o3)


@njit(nogil=True)
def _accumulate_two(weights, values, v_at, padded, shrink_a, shrink_b, out, a_at, b_at):
    """The same for two queries that see all 64 cells, with weights[0:64] and weights[64:128]."""
    factor_a, factor_b = splat(shrink_a), splat(shrink_b)
    for d in range(0, padded, DIMS):
        a, b = a_at + d, b_at + d
        a0, a1 = mul(load(out, a), factor_a), mul(load(out, a + 16), factor_a)
        a2, a3 = mul(load(out, a + 32), factor_a), mul(load(out, a + 48), factor_a)
        b0, b1 = mul(load(out, b), factor_b), mul(load(out, b + 16), factor_b)
        b2, b3 = mul(load(out, b + 32), factor_b), mul(load(out, b + 48), factor_b)
        v = v_at + d
        for c in range(CHUNK):
            weight_a, weight_b = broadcast(weights, c), broadcast(weights, CHUNK + c)
            value = load(values, v)
            a0, b0 = fma(value, weight_a, a0), fma(value, weight_b, b0)
            value = load(values, v + 16)
            a1, b1 = fma(value, weight_a, a1), fma(value, weight_b, b1)
            value = load(values, v + 32)
            a2, b2 = fma(value, weight_a, a2), fma(value, weight_b, b2)
            value = load(values, v + 48)
            a3, b3 = fma(value, weight_a, a3), fma(value, weight_b, b3)
            v += padded
        store(out, a, a0)
        store(out, a + 16, a1)
        store(out, a + 32, a2)
        store(out, a + 48, a3)
        store(out, b, b0)
        store(out, b + 16, b1)
        store(out, b + 32, b2)
        store(out, b + 48, b3)


@njit(nogil=True)
def _take_in(partial, p_at, padded, highest, scores):
    """Bring a partial result's maximum and sum up to date with 64 scores, which become weights; returns by what the
    values so far shrink. `highest`: the largest of the scores."""
    before = partial[p_at + padded]
    highest = max(before, highest)
    shrink = first_lane(exp(splat(before - highest)))
    partial[p_at + padded] = highest
    partial[p_at + padded + 1] = partial[p_at + padded + 1] * shrink + _weigh(scores, highest)
    return shrink


@njit(nogil=True)
def attend_chunk(q, q_at, keys, k_at, values, v_at, dim, padded, valid, partial, p_at, scores):
    """Take one chunk into the partial result at `p_at`: float32 [padded] values, then maximum and sum.

    q       pointer to float32; [dim] at q_at, already scaled by 1 / sqrt(dim)
    keys    pointer to float32 or uint16 halves; [dim, 64] at k_at
    values  the same type; [64, padded] at v_at
    valid   1..64: how many of the chunk's cells the query sees
    scores  pointer to float32 [64], scratch
    """
    highest = _scores(q, q_at, keys, k_at, dim, valid, scores)
    shrink = _take_in(partial, p_at, padded, highest, scores)
    _accumulate(scores, values, v_at, padded, valid, shrink, partial, p_at)


@njit(nogil=True)
def attend_chunk_twice(q, a_at, b_at, keys, k_at, values, v_at, dim, padded, partial, pa_at, pb_at, scores):
    """attend_chunk for two queries that see the whole chunk: the same operations, each key and value loaded once.

    scores: pointer to float32 [128], scratch
    """
    highest_a, highest_b = _scores_of_two(q, a_at, b_at, keys, k_at, dim, scores)
    shrink_a = _take_in(partial, pa_at, padded, highest_a, scores)
    shrink_b = _take_in(partial, pb_at, padded, highest_b, shifted(scores, CHUNK))
    _accumulate_two(scores, values, v_at, padded, shrink_a, shrink_b, partial, pa_at, pb_at)


@njit(nogil=True)
def clear_partial(partial, p_at, padded):
    """Partial result of no cells."""
    for d in range(0, padded, 16):
        store(partial, p_at + d, splat(_ZERO))
    partial[p_at + padded] = _LOWEST
    partial[p_at + padded + 1] = _ZERO


@njit(nogil=True)
def combine(partial, p_at, segments, dim, padded, out, o_at):
    """out[o_at : o_at + dim] = the attention of `segments` partial results that follow one another at `p_at`."""
    size = padded + STATE
    highest = _LOWEST
    for s in range(segments):
        highest = max(highest, partial[p_at + s * size + padded])
    total = _ZERO
    for s in range(segments):
        at = p_at + s * size + padded
        partial[at] = first_lane(exp(splat(partial[at] - highest)))
        total += partial[at + 1] * partial[at]
    for d in range(dim):
        value = _ZERO
        for s in range(segments):
            value += partial[p_at + s * size + d] * partial[p_at + s * size + padded]
        out[o_at + d] = value / total
