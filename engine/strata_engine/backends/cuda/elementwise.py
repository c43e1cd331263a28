"""The kernels that are not matmuls: embedding a token, and the arg-max of a row of logits."""

from __future__ import annotations

from typing import Any

from numba import cuda, types

from ...gpu.emit import (
    F32Ptr,
    I32Ptr,
    U32Ptr,
    add,
    fma,
    from_half,
    i32,
    inlined,
    let_next_start,
    mul,
    wait_for_previous,
    word_as_float,
)
from .epilogue import RESIDUAL, better, store_stream
from .inputs import CHAINED, PLACE
from .layout import Format

ARGMAX_WARPS = 32
ARGMAX_THREADS = 32 * ARGMAX_WARPS


def _scale_reader(form: Format) -> Any:
    """A device function: scale (or offset) number `index` of a lane group's scales at word `base`."""
    if form.scale == "f16":

        @inlined
        def read_half(scales, base, index):
            return from_half(scales[base + index // 2] >> (16 * (index % 2)))

        return read_half

    @inlined
    def read_float(scales, base, index):
        return word_as_float(scales[base + index])

    return read_float


def _code_reader(form: Format) -> Any:
    """A device function: the code of input `k` (within its unit) of a lane order matrix, as float32."""
    kind, vectors, zero = form.codes, form.vectors, form.zero

    @inlined
    def read(codes, unit_at, k, g, half):
        part = k // 32
        lane = 4 * g + k % 32 // 8
        j = k % 8
        if kind == "q4":
            word = codes[(unit_at * 32 + lane) * 4 + part * 2 + half]
            return types.float32(types.int32(word >> (4 * (j // 2) + 16 * (j % 2)) & 15) - zero)
        if kind == "q8":
            word = codes[((unit_at * vectors + part) * 32 + lane) * 4 + half * 2 + j // 4]
            return types.float32(types.int32(word >> (8 * (j % 4)) & 255) - zero)
        word = codes[((unit_at * vectors + part * 2 + half) * 32 + lane) * 4 + j // 2]
        return from_half(word >> (16 * (j % 2)))

    return read


def embed_kernel(form: Format) -> Any:
    """A kernel: one row of a lane order matrix a block -> the residual stream and the first norm's input.

    A token below 0 is number -1 - token of `chosen`, what the step before chose. Grid: rows; block: 256 threads, a
    pair of features each. `out`: epilogue.Residual. Twin: layout.restore.
    """
    read_code, read_scale = _code_reader(form), _scale_reader(form)
    scaled, offset, block = form.scale != "none", form.offset, form.block
    scale_words, half_scales = form.scale_words, form.scale_values // 2

    @inlined
    def value(codes, scales, unit_at, k, g, half):
        code = read_code(codes, unit_at, k, g, half)
        if not scaled:
            return code
        base = (unit_at * 8 + g) * scale_words
        index = 2 * (k // block) + half
        scale = read_scale(scales, base, index)
        if offset:
            return fma(scale, code, read_scale(scales, base, half_scales + index))
        return mul(scale, code)

    def kernel(codes, scales, token, chosen, units, out):
        row = cuda.blockIdx.x
        thread = cuda.threadIdx.x
        let_next_start()
        wait_for_previous()
        feature = token[row]
        if feature < 0:
            feature = chosen[-1 - feature]
        g = feature % 16 // 2
        half = feature % 2
        tile_at = types.int64(feature // 16) * units
        for start in range(0, (out.width + 511) // 512 * 512, 512):
            k = start + 2 * thread
            total = types.float32(0.0)
            if k < out.width:
                unit_at = tile_at + k // 64
                a = value(codes, scales, unit_at, k % 64, g, half)
                b = value(codes, scales, unit_at, k % 64 + 1, g, half)
                total = store_stream(out, a, b, out.gain[k], out.gain[k + 1], row, k)
            for step in (1, 2, 4):
                total = add(total, cuda.shfl_xor_sync(0xFFFFFFFF, total, step))
            if k < out.width and thread % 8 == 0:
                out.squares[row * out.tiles + k // 16] = total

    return kernel


EMBED_SIGNATURE = types.void(U32Ptr, U32Ptr, I32Ptr, I32Ptr, i32, RESIDUAL)


def argmax_kernel() -> Any:
    """A kernel: the index of the largest logit of each row, from the largest of each tile (epilogue.Logits).

    Ties go to the lowest index, NaN counts as -inf. `choices`: the host's memory; `chosen`: for the next step, unless
    the chain is to choose; `header`: of inputs.py. Grid: rows; block: 1024 threads, which read four tiles at a time, as
    one block a row has little else to hide latency behind. Twin: numpy.argmax.
    """

    def kernel(top, best, tiles, header, chosen, choices):
        row = cuda.blockIdx.x
        thread = cuda.threadIdx.x
        values = cuda.shared.array(ARGMAX_WARPS, types.float32)
        indexes = cuda.shared.array(ARGMAX_WARPS, types.int32)
        base, last = row * tiles, tiles - 1
        let_next_start()
        wait_for_previous()
        value = types.float32(-float("inf"))
        index = types.int32(0x7FFFFFFF)  # of a tile; theirs are in the order of the ids
        for i in range(thread, tiles, 4 * ARGMAX_THREADS):
            j = min(i + ARGMAX_THREADS, last)
            k = min(i + 2 * ARGMAX_THREADS, last)
            m = min(i + 3 * ARGMAX_THREADS, last)
            a, b, c, d = top[base + i], top[base + j], top[base + k], top[base + m]
            value, index = better(value, index, a, types.int32(i))
            value, index = better(value, index, b, types.int32(j))
            value, index = better(value, index, c, types.int32(k))
            value, index = better(value, index, d, types.int32(m))
        value, index = _best_of_warp(value, index)
        if thread % 32 == 0:
            values[thread // 32] = value
            indexes[thread // 32] = index
        cuda.syncthreads()
        if thread < 32:
            value, index = _best_of_warp(values[thread], indexes[thread])
            if thread == 0:
                index = best[base + index]
                choices[header[PLACE] + row] = index
                if header[CHAINED] == 0:
                    chosen[row] = index

    return kernel


@inlined
def _best_of_warp(value, index):
    """The largest value of the lanes with its index, in every lane."""
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(0xFFFFFFFF, value, step)
        value, index = better(value, index, other, cuda.shfl_xor_sync(0xFFFFFFFF, index, step))
    return value, index


ARGMAX_SIGNATURE = types.void(F32Ptr, I32Ptr, i32, I32Ptr, I32Ptr, I32Ptr)
