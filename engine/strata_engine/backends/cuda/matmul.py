"""The matmul family: y[row, feature] = sum over k of x[row, k] W[feature, k], for 1 to 512 rows.

Tensor-core instructions m16n8k16 multiply 16 features (operand A: integer codes, exact in half precision) by 8 rows
(operand B: activations as a high and a low half). Each block of 32 (or 16) inputs starts two sums of its own, of the
high and of the low halves, which are added and then scaled in float32: total += scale * (high + low). K is cut into
`slices`, fixed for a matrix; slices are added in order.

Up to 4 rows, the halves of a row stand side by side in operand B, so that one instruction makes both sums.

Two kernels compute exactly these operations in exactly this order, so they give the same bits:

- slice.py: one warp a slice, for few rows, where the weights are read once and all that counts is memory;
- tile.py: slices one after another with the activations staged in shared memory, for many rows.

An *epilogue* takes four finished sums of a lane (features a and b of two neighbouring rows) and does what would be the
next pass: rotate and append to the cache, SwiGLU, add to the residual. See epilogue.py.

Activations: words [row, 2, pitch / 2], the high halves of a row's K values and then the low ones; pitch is K padded to
64, the padding is zero. Source of the bias trick (1024 + code as a half): Kim et al. 2022, "Who says elephants can't
run".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ...gpu.emit import Emitter, F32Ptr, I32Ptr, U32Ptr, f32, i32, inlined, macro
from .layout import Format

ONES = 0x3C003C00  # two halves of 1.0
BIAS = 0x64006400  # two halves of 1024.0: a code in the low bits adds itself


def _half_bits(value: float) -> int:
    """Two copies of a half in one word."""
    return int(np.float16(value).view(np.uint16)) * 0x10001


# -- one unit of K: what both kernels do


def _unpack4(e: Emitter, word: Any, zero: int) -> list[Any]:
    """Eight 4-bit codes -> four words of halves (code - zero)."""
    low_bias, high_bias = e.u32(_half_bits(1024 + zero)), e.u32(_half_bits(-64 - zero))
    pairs = []
    for w in (word, e.b.lshr(word, e.u32(8))):
        low = e.and_or(w, 0x000F000F, e.u32(BIAS))
        high = e.and_or(w, 0x00F000F0, e.u32(BIAS))
        pairs += [e.sub_h2(low, low_bias), e.fma_h2(high, e.u32(_half_bits(1 / 16)), high_bias)]
    return pairs


def _unpack8(e: Emitter, words: list[Any], zero: int) -> list[Any]:
    """Eight 8-bit codes (two words) -> four words of halves (code - zero)."""
    bias, pairs = e.u32(_half_bits(1024 + zero)), []
    for word in words:
        for select in (0x4140, 0x4342):
            spread = e.asm(f"prmt.b32 $0, $1, $2, {select};", word.type, "=r,r,r", word, e.u32(0x64646464))
            pairs.append(e.sub_h2(spread, bias))
    return pairs


def _operand(e: Emitter, form: Format, codes: list[Any], half: int) -> list[Any]:
    """Operand A of a half unit, two instructions long: [8] words, place g and g + 8 in turn."""
    if form.codes == "q4":
        low, high = (_unpack4(e, codes[2 * half + place], form.zero) for place in (0, 1))
    elif form.codes == "q8":
        low, high = (_unpack8(e, codes[4 * half + 2 * place :][:2], form.zero) for place in (0, 1))
    else:
        low, high = (codes[8 * half + 4 * place :][:4] for place in (0, 1))
    return [word for pair in zip(low, high, strict=True) for word in pair]


def _scales(e: Emitter, form: Format, raw: list[Any]) -> list[Any]:
    """Scale words of a lane -> float32, in the order of layout.py."""
    if form.scale == "f16":
        return [e.half(word, upper) for word in raw for upper in (0, 1)]
    return [e.real(word) for word in raw]


def _product(e: Emitter, a: list[Any], x: list[list[Any]]) -> list[Any]:
    """a (high + low) over a half unit, the sum of the high halves and that of the low ones made apart.

    x: [high, low] -> 4 sums; or [both in neighbouring columns] -> 2 sums, with the same bits.
    """
    sums = [e.mma(e.mma(e.zeros(4), a[:4], part[:2]), a[4:], part[2:]) for part in x]
    if len(sums) == 1:
        ((high_a, low_a, high_b, low_b),) = sums
        return [e.add(high_a, low_a), e.add(high_b, low_b)]
    return [e.add(high, low) for high, low in zip(*sums, strict=True)]


def _only(e: Emitter, a: list[Any], lane: Any, part: int) -> list[Any]:
    """Operand A of a 16-input block: the lanes that hold the other half of the 32 inputs give zeros."""
    mine = e.b.icmp_unsigned("==", e.b.and_(lane, e.u32(2)), e.u32(2 * part))
    return [e.b.select(mine, word, e.u32(0)) for word in a]


def unit_step(
    e: Emitter,
    form: Format,
    mt: int,
    nt: int,
    acc: list[Any],
    codes: list[Any],
    raw_scales: list[Any],
    load_x: Callable[[int, int], list[list[Any]]],
    lane: Any,
) -> list[Any]:
    """Add one unit of K to acc [mt, nt, 4 or 2]; codes [mt, code_words], raw_scales [mt, scale_words].

    load_x(n, half unit): operand B as `_product` takes it; with both halves of a row in one, acc has 2 values a tile.
    """
    acc = list(acc)
    values = len(acc) // (mt * nt)
    cw, sw, parts = form.code_words, form.scale_words, 32 // form.block
    scales = [_scales(e, form, raw_scales[m * sw : (m + 1) * sw]) for m in range(mt)]
    ones = [e.u32(ONES)] * 8
    for half in range(2):
        full = [_operand(e, form, codes[m * cw : (m + 1) * cw], half) for m in range(mt)]
        for part in range(parts):
            a = full if parts == 1 else [_only(e, word, lane, part) for word in full]
            block = half * parts + part
            for n in range(nt):
                x = load_x(n, half)
                if form.offset:
                    one = ones if parts == 1 else _only(e, ones, lane, part)
                    x_sum = _product(e, one, x)[: values // 2]  # the same for both places
                for m in range(mt):
                    at = values * (m * nt + n)
                    for i, total in enumerate(_product(e, a[m], x)):
                        place = 2 * i // values
                        if form.scale == "none":
                            acc[at + i] = e.add(acc[at + i], total)
                            continue
                        value = e.fma(scales[m][2 * block + place], total, acc[at + i])
                        if form.offset:
                            value = e.fma(
                                scales[m][len(scales[m]) // 2 + 2 * block + place], x_sum[i % len(x_sum)], value
                            )
                        acc[at + i] = value
    return acc


# -- what else the kernels share


@inlined
def first_unit(slice_, units, slices):
    """The first unit of a slice; slice `slices` starts at `units`."""
    return slice_ * units // slices


def norm_factors(count: int = 8) -> Any:
    """Macro: 1 / root mean square of rows first .. first + count - 1, one a lane (lanes 0 on), by a whole warp.

    Each lane adds every 32nd sum of squares of every row, then the lanes are added as a tree: one order for all rows.
    """

    @macro(f32)
    def factors(
        e: Emitter, squares: Any, index: Any, first: Any, rows: Any, tiles: Any, inverse: Any, epsilon: Any, lane: Any
    ) -> Any:
        b, starts = e.b, []
        for i in range(count):
            row = row_at(e, index, b.add(first, e.u32(i)), rows)
            starts.append(b.add(b.mul(row, tiles), lane))
        totals = _lane_sums(e, squares, starts, tiles, lane)
        for step in (16, 8, 4, 2, 1):
            totals = [e.add(total, e.butterfly(total, step)) for total in totals]
        mine = totals[0]
        for i in range(1, count):
            mine = b.select(b.icmp_unsigned("==", lane, e.u32(i)), totals[i], mine)
        root = e.asm("sqrt.rn.f32 $0, $1;", mine.type, "=f,f", e.fma(mine, inverse, epsilon))
        return e.asm("rcp.rn.f32 $0, $1;", mine.type, "=f,f", root)

    return factors


def row_at(e: Emitter, index: Any, place: Any, rows: Any) -> Any:
    """index[place], where places past the last row repeat it."""
    last = e.b.sub(rows, e.u32(1))
    return e.load(index, e.b.select(e.b.icmp_signed("<", place, last), place, last), 1)[0]


def _lane_sums(e: Emitter, squares: Any, starts: list[Any], tiles: Any, lane: Any) -> list[Any]:
    """For each row the sum of squares[start], [start + 32], ... below the row's end, in that order."""
    b = e.b
    cells = [e.variable(e.f32(0.0)) for _ in starts]
    with e.loop(lane, tiles, 32) as i:
        step = b.sub(i, lane)
        for cell, start in zip(cells, starts, strict=True):
            value = e.real(e.load(b.bitcast(squares, e.word_pointer), b.add(start, step), 1)[0])
            b.store(e.add(b.load(cell), value), cell)
    return [b.load(cell) for cell in cells]


NORM = types.Tuple((F32Ptr, i32, f32, f32))  # squares [row, tiles], tiles, 1 / K, epsilon


def signature(out: Any) -> Any:
    """The numba signature of both kernels for an epilogue with arguments of type `out`."""
    return types.void(U32Ptr, U32Ptr, U32Ptr, I32Ptr, i32, i32, i32, NORM, out)
