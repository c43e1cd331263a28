"""What happens to the finished sums of a matmul, while they are still in registers.

An epilogue has two halves. `prepare` loads what it will need, while the sums are still being made; `finish` gets that
and four sums of a lane: features a and b (places g and g + 8 of a tile, see layout.feature_order) of rows `row` and
`row + 1`. All lanes of a warp call both. `inside` is false past the last tile; rows >= `rows` are padding. The
arguments are a NamedTuple of shapes.py.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, types

from ...gpu.emit import F32Ptr, I32Ptr, U16Ptr, U32Ptr, add, exp2, f32, fma, i32, inlined, mul, reciprocal, split_pair
from .shapes import CELLS, Heads, Logits, Residual, Swiglu

LOG2_E = 1.4426950408889634


def _typed(cls: Any, *kinds: Any) -> Any:
    return types.NamedTuple(kinds, cls)


@inlined
def prepare_nothing(out, tile, row, rows, lane):
    return types.float32(0.0)


# -- logits


LOGITS = _typed(Logits, F32Ptr, F32Ptr, I32Ptr, i32, i32)


@inlined
def better(a, i, b, j):
    """The larger of two values with its index; the lower index if they are equal."""
    if b > a or (b == a and j < i):
        return b, j
    return a, i


@inlined
def _best_of_pair(a, b, feature, vocab):
    """The larger of two neighbours with its index; NaN and what lies past the vocabulary count as -inf."""
    low = types.float32(-float("inf"))
    a = a if a == a and feature < vocab else low
    b = b if b == b and feature + 1 < vocab else low
    return better(a, types.int32(feature), b, types.int32(feature + 1))


@inlined
def finish_logits(out, ready, a0, a1, b0, b1, tile, inside, row, rows, lane):
    """Store the sums, and the largest of each tile for the arg-max."""
    feature = tile * 16 + (lane >> 2) * 2
    for i in range(2):
        a = a1 if i else a0
        b = b1 if i else b0
        if inside and row + i < rows:
            at = types.int64(row + i) * out.vocab + feature
            if feature < out.vocab:
                out.logits[at] = a
            if feature + 1 < out.vocab:
                out.logits[at + 1] = b
        top, best = _best_of_pair(a, b, feature, out.vocab)
        for step in (4, 8, 16):
            other = cuda.shfl_xor_sync(0xFFFFFFFF, top, step)
            top, best = better(top, best, other, cuda.shfl_xor_sync(0xFFFFFFFF, best, step))
        if inside and row + i < rows and lane < 4:
            out.top[(row + i) * out.tiles + tile] = top
            out.best[(row + i) * out.tiles + tile] = best


# -- gate and up -> SwiGLU


SWIGLU = _typed(Swiglu, U16Ptr, i32)


@inlined
def silu_times(gate, up):
    """gate / (1 + exp(-gate)) * up."""
    power = exp2(mul(gate, types.float32(-LOG2_E)))
    return mul(mul(gate, reciprocal(add(power, types.float32(1.0)))), up)


@inlined
def finish_swiglu(out, ready, a0, a1, b0, b1, tile, inside, row, rows, lane):
    """a is the gate, b the up projection of feature 8 tile + g; order "halves"."""
    feature = tile * 8 + (lane >> 2)
    high, low = split_pair(silu_times(a0, b0), silu_times(a1, b1))
    if not inside:
        return
    for i in range(2):
        if row + i < rows:
            at = (row + i) * 2 * out.pitch + feature
            out.split[at] = (high >> (16 * i)) & 0xFFFF
            out.split[at + out.pitch] = (low >> (16 * i)) & 0xFFFF


# -- residual add, and the next norm's input


RESIDUAL = _typed(Residual, F32Ptr, F32Ptr, U32Ptr, F32Ptr, i32, i32, i32)


@inlined
def store_stream(out, a, b, gain_a, gain_b, row, feature):
    """Store a pair of the stream's new values and the next norm's input; give back the sum of their squares."""
    at = row * out.width + feature
    out.stream[at] = a
    out.stream[at + 1] = b
    high, low = split_pair(mul(a, gain_a), mul(b, gain_b))
    word = row * 2 * out.half_pitch + feature // 2
    out.split[word] = high
    out.split[word + out.half_pitch] = low
    return fma(b, b, mul(a, a))


@inlined
def prepare_residual(out, tile, row, rows, lane):
    """The stream's old values (a and b of both rows) and the two gains."""
    feature = tile * 16 + (lane >> 2) * 2
    zero = types.float32(0.0)
    if feature >= out.width:
        return zero, zero, zero, zero, zero, zero
    last = rows - 1
    first = min(row, last) * out.width + feature
    second = min(row + 1, last) * out.width + feature
    stream, gain = out.stream, out.gain
    return stream[first], stream[first + 1], stream[second], stream[second + 1], gain[feature], gain[feature + 1]


@inlined
def finish_residual(out, ready, a0, a1, b0, b1, tile, inside, row, rows, lane):
    """stream += sums; then what the next matmul needs: stream * gain in halves, and sums of squares."""
    feature = tile * 16 + (lane >> 2) * 2
    old_a0, old_b0, old_a1, old_b1, gain_a, gain_b = ready
    first = types.float32(0.0)
    second = types.float32(0.0)
    ok = inside and feature < out.width
    if ok and row < rows:
        first = store_stream(out, add(old_a0, a0), add(old_b0, b0), gain_a, gain_b, row, feature)
    if ok and row + 1 < rows:
        second = store_stream(out, add(old_a1, a1), add(old_b1, b1), gain_a, gain_b, row + 1, feature)
    for step in (4, 8, 16):
        first = add(first, cuda.shfl_xor_sync(0xFFFFFFFF, first, step))
        second = add(second, cuda.shfl_xor_sync(0xFFFFFFFF, second, step))
    if ok and lane < 4:
        if row < rows:
            out.squares[row * out.tiles + tile] = first
        if row + 1 < rows:
            out.squares[(row + 1) * out.tiles + tile] = second


# -- queries, keys, values: rotate, append


HEADS = _typed(Heads, U32Ptr, U32Ptr, U16Ptr, I32Ptr, I32Ptr, F32Ptr, *[i32] * 7, f32)


@inlined
def _where(out, feature, row):
    """(position, cell, cosine, sine) of a row and feature; no rotation: cosine 1, sine 0."""
    position = out.position[row]
    cell = out.cell[row]
    inner = feature % out.head_dim
    if position < 0 or inner >= out.rope_dims or feature // out.head_dim >= out.heads + out.kv_heads:
        return position, cell, types.float32(1.0), types.float32(0.0)
    at = (position * (out.rope_dims // 2) + inner // 2) * 2
    return position, cell, out.rope[at], out.rope[at + 1]


@inlined
def prepare_heads(out, tile, row, rows, lane):
    """Where the two rows stand and how far their features turn."""
    feature = out.first + tile * 16 + (lane >> 2) * 2
    last = rows - 1
    return _where(out, feature, min(row, last)), _where(out, feature, min(row + 1, last))


@inlined
def store_head_pair(out, where, a, b, feature, row):
    """Rotate the pair (feature, feature + 1) of a row and store it: a query to its buffer, the rest to the cache."""
    position, place, cosine, sine = where
    head = feature // out.head_dim
    inner = feature % out.head_dim
    if position < 0 or head >= out.heads + 2 * out.kv_heads:  # the last tile may have room for more
        return
    if head < out.heads + out.kv_heads:
        a, b = fma(a, cosine, -mul(b, sine)), fma(a, sine, mul(b, cosine))
    if head < out.heads:
        half = out.heads * out.cell_dim // 2
        high, low = split_pair(mul(a, out.scale), mul(b, out.scale))
        at = row * 2 * half + (head * out.cell_dim + inner) // 2
        out.queries[at] = high
        out.queries[at + half] = low
        return
    high, low = split_pair(a, b)
    kv_head = (head - out.heads) % out.kv_heads
    plane = types.int64(place // CELLS * out.kv_heads + kv_head) * out.parts * (CELLS * out.cell_dim)
    cell = place % CELLS
    for part in range(out.parts):
        word = low if part else high
        base = plane + part * CELLS * out.cell_dim
        if head >= out.heads + out.kv_heads:
            out.values[base + inner * CELLS + cell] = word & 0xFFFF
            out.values[base + (inner + 1) * CELLS + cell] = word >> 16
        else:
            out.keys[(base + cell * out.cell_dim + inner) // 2] = word


@inlined
def finish_heads(out, ready, a0, a1, b0, b1, tile, inside, row, rows, lane):
    """Features are [query heads | key heads | value heads]; the matrix holds those from `first` on."""
    feature = out.first + tile * 16 + (lane >> 2) * 2
    first, second = ready
    if inside and row < rows:
        store_head_pair(out, first, a0, b0, feature, row)
    if inside and row + 1 < rows:
        store_head_pair(out, second, a1, b1, feature, row + 1)


# name -> (prepare, finish, type of their arguments, whether the matmul's input is normed)
EPILOGUES = {
    "logits": (prepare_nothing, finish_logits, LOGITS, True),
    "swiglu": (prepare_nothing, finish_swiglu, SWIGLU, True),
    "residual": (prepare_residual, finish_residual, RESIDUAL, False),
    "heads": (prepare_heads, finish_heads, HEADS, True),
}
