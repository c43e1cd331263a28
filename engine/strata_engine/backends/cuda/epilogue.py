"""What happens to the finished sums of a matmul, while they are still in registers.

An epilogue is called by every lane of a warp with four sums: features a and b (places g and g + 8 of a tile, see
layout.feature_order) of rows `row` and `row + 1`. `inside` is false past the last tile; rows >= `rows` are padding.
Each has a NamedTuple of arguments, and the numba type of that tuple under `.numba_type`.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, types

from .emit import F32Ptr, I32Ptr, U16Ptr, U32Ptr, add, exp2, f32, fma, i32, inlined, mul, reciprocal, split_pair
from .shapes import CELLS, Heads, Logits, Residual, Swiglu

LOG2_E = 1.4426950408889634


def _typed(cls: Any, *kinds: Any) -> Any:
    return types.NamedTuple(kinds, cls)


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
def logits_epilogue(out, a0, a1, b0, b1, tile, inside, row, rows, lane):
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
def swiglu_epilogue(out, a0, a1, b0, b1, tile, inside, row, rows, lane):
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
def store_stream(out, a, b, row, feature):
    """Store a pair of the stream's new values and the next norm's input; give back the sum of their squares."""
    at = row * out.width + feature
    out.stream[at] = a
    out.stream[at + 1] = b
    high, low = split_pair(mul(a, out.gain[feature]), mul(b, out.gain[feature + 1]))
    word = row * 2 * out.half_pitch + feature // 2
    out.split[word] = high
    out.split[word + out.half_pitch] = low
    return fma(b, b, mul(a, a))


@inlined
def residual_epilogue(out, a0, a1, b0, b1, tile, inside, row, rows, lane):
    """stream += sums; then what the next matmul needs: stream * gain in halves, and sums of squares."""
    feature = tile * 16 + (lane >> 2) * 2
    first = types.float32(0.0)
    second = types.float32(0.0)
    ok = inside and feature < out.width
    if ok and row < rows:
        at = row * out.width + feature
        first = store_stream(out, add(out.stream[at], a0), add(out.stream[at + 1], b0), row, feature)
    if ok and row + 1 < rows:
        at = (row + 1) * out.width + feature
        second = store_stream(out, add(out.stream[at], a1), add(out.stream[at + 1], b1), row + 1, feature)
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
def store_head_pair(out, a, b, feature, row):
    """Rotate the pair (feature, feature + 1) of a row and store it: a query to its buffer, the rest to the cache."""
    position = out.position[row]
    head = feature // out.head_dim
    inner = feature % out.head_dim
    is_value = head >= out.heads + out.kv_heads
    if position < 0:
        return
    if inner < out.rope_dims and not is_value:
        at = (position * (out.rope_dims // 2) + inner // 2) * 2
        cosine = out.rope[at]
        sine = out.rope[at + 1]
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
    plane = types.int64(out.cell[row] // CELLS * out.kv_heads + kv_head) * out.parts * (CELLS * out.cell_dim)
    cell = out.cell[row] % CELLS
    for part in range(out.parts):
        word = low if part else high
        base = plane + part * CELLS * out.cell_dim
        if is_value:
            out.values[base + inner * CELLS + cell] = word & 0xFFFF
            out.values[base + (inner + 1) * CELLS + cell] = word >> 16
        else:
            out.keys[(base + cell * out.cell_dim + inner) // 2] = word


@inlined
def heads_epilogue(out, a0, a1, b0, b1, tile, inside, row, rows, lane):
    """Features are [query heads | key heads | value heads]; the matrix holds those from `first` on."""
    feature = out.first + tile * 16 + (lane >> 2) * 2
    if inside and row < rows:
        store_head_pair(out, a0, b0, feature, row)
    if inside and row + 1 < rows:
        store_head_pair(out, a1, b1, feature, row + 1)


# name -> (device function, type of its arguments, whether the matmul's input is normed)
EPILOGUES = {
    "logits": (logits_epilogue, LOGITS, True),
    "swiglu": (swiglu_epilogue, SWIGLU, True),
    "residual": (residual_epilogue, RESIDUAL, False),
    "heads": (heads_epilogue, HEADS, True),
}
