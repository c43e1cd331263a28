"""The matmul family: y[row, feature] = sum over k of x[row, k] W[feature, k], for 1 to 512 rows.

Tensor-core instructions m16n8k16 multiply 16 features (operand A: integer codes, exact in half precision) by 8 rows
(operand B: activations as a high and a low half). Each block of 32 (or 16) inputs starts a sum of its own, which is
then scaled in float32: total += scale * sum. K is cut into `slices`, fixed for a matrix; slices are added in order.

Two kernels compute exactly these operations in exactly this order, so they give the same bits:

- `slice_kernel`: one warp a slice, for few rows, where the weights are read once and all that counts is memory;
- `tile_kernel`: slices one after another with the activations staged in shared memory, for many rows.

An *epilogue* takes four finished sums of a lane (features a and b of two neighbouring rows) and does what would be the
next pass: scale by the norm, rotate and append to the cache, SwiGLU, add to the residual. See epilogue.py.

Activations: words [row, 2, pitch / 2], the high halves of a row's K values and then the low ones; pitch is K padded to
64, the padding is zero. Source of the bias trick (1024 + code as a half): Kim et al. 2022, "Who says elephants can't
run".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from .emit import (
    Emitter,
    F32Ptr,
    I32Ptr,
    U32Ptr,
    add,
    copy_commit,
    copy_wait,
    f32,
    fma,
    i32,
    inlined,
    let_next_start,
    load_shared1,
    load_shared4,
    macro,
    mul,
    reciprocal_root,
    store_shared1,
    wait_for_previous,
    words,
    zeros,
)
from .layout import UNIT, Format
from .shapes import SliceShape, TileShape

ONES = 0x3C003C00  # two halves of 1.0
BIAS = 0x64006400  # two halves of 1024.0: a code in the low bits adds itself


def _half_bits(value: float) -> int:
    """Two copies of a half in one word."""
    import numpy as np

    return int(np.float16(value).view(np.uint16)) * 0x10001


# -- one unit of K: what both kernels do


def _unpack4(e: Emitter, word: Any, zero: int) -> list[Any]:
    """Eight 4-bit codes -> four words of halves (code - zero)."""
    low_bias, high_bias = e.u32(_half_bits(1024 + zero)), e.u32(_half_bits(-64 - zero))
    pairs = []
    for w in (word, e.b.lshr(word, e.u32(8))):
        low = e.b.or_(e.b.and_(w, e.u32(0x000F000F)), e.u32(BIAS))
        high = e.b.or_(e.b.and_(w, e.u32(0x00F000F0)), e.u32(BIAS))
        pairs += [e.sub_h2(low, low_bias), e.fma_h2(high, e.u32(_half_bits(1 / 16)), high_bias)]
    return pairs


def _unpack8(e: Emitter, low: Any, high: Any, zero: int) -> list[Any]:
    """Eight 8-bit codes (two words) -> four words of halves (code - zero)."""
    bias, pairs = e.u32(_half_bits(1024 + zero)), []
    for word in (low, high):
        for select in (0x4140, 0x4342):
            spread = e.asm(f"prmt.b32 $0, $1, $2, {select};", word.type, "=r,r,r", word, e.u32(0x64646464))
            pairs.append(e.sub_h2(spread, bias))
    return pairs


def _operand(e: Emitter, form: Format, codes: list[Any], half: int) -> list[Any]:
    """Operand A of a half unit, two instructions long: [8] words, place g and g + 8 in turn."""
    if form.codes == "q4":
        low, high = (_unpack4(e, codes[2 * half + place], form.zero) for place in (0, 1))
    elif form.codes == "q8":
        low, high = (_unpack8(e, *codes[4 * half + 2 * place :][:2], form.zero) for place in (0, 1))
    else:
        low, high = (codes[8 * half + 4 * place :][:4] for place in (0, 1))
    return [word for pair in zip(low, high, strict=True) for word in pair]


def _scales(e: Emitter, form: Format, raw: list[Any]) -> list[Any]:
    """Scale words of a lane -> float32, in the order of layout.py."""
    if form.scale == "f16":
        return [e.half(word, upper) for word in raw for upper in (0, 1)]
    return [e.real(word) for word in raw]


def _product(e: Emitter, c: list[Any], a: list[Any], high: list[Any], low: list[Any]) -> list[Any]:
    """c + a (high + low) over a half unit, always in this order."""
    for part in (high, low):
        c = e.mma(c, a[:4], part[:2])
        c = e.mma(c, a[4:], part[2:])
    return c


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
    load_x: Callable[[int, int], tuple[list[Any], list[Any]]],
    lane: Any,
) -> list[Any]:
    """Add one unit of K to acc [mt, nt, 4]; codes [mt, code_words], raw_scales [mt, scale_words]."""
    acc = list(acc)
    cw, sw, parts = form.code_words, form.scale_words, 32 // form.block
    scales = [_scales(e, form, raw_scales[m * sw : (m + 1) * sw]) for m in range(mt)]
    ones = [e.u32(ONES)] * 8
    for half in range(2):
        full = [_operand(e, form, codes[m * cw : (m + 1) * cw], half) for m in range(mt)]
        for part in range(parts):
            a = full if parts == 1 else [_only(e, word, lane, part) for word in full]
            block = half * parts + part
            for n in range(nt):
                high, low = load_x(n, half)
                if form.offset:
                    one = ones if parts == 1 else _only(e, ones, lane, part)
                    x_sum = _product(e, e.zeros(4), one, high, low)
                for m in range(mt):
                    at = 4 * (m * nt + n)
                    if form.scale == "none":
                        acc[at : at + 4] = _product(e, acc[at : at + 4], a[m], high, low)
                        continue
                    total = _product(e, e.zeros(4), a[m], high, low)
                    for i in range(4):
                        value = e.fma(scales[m][2 * block + i // 2], total[i], acc[at + i])
                        if form.offset:
                            value = e.fma(scales[m][len(scales[m]) // 2 + 2 * block + i // 2], x_sum[i], value)
                        acc[at + i] = value
    return acc


# -- the parts the kernels share


@inlined
def first_unit(slice_, units, slices):
    """The first unit of a slice; slice `slices` starts at `units`."""
    return slice_ * units // slices


@inlined
def norm_factor(squares, row, tiles, inverse, epsilon, lane):
    """1 / root mean square of a row, from its sums of squares [row, tiles]; all lanes of a warp, one order of adding."""
    total = types.float32(0.0)
    for i in range(lane, tiles, 32):
        total = add(total, squares[row * tiles + i])
    for step in (16, 8, 4, 2, 1):
        total = add(total, cuda.shfl_xor_sync(0xFFFFFFFF, total, step))
    return reciprocal_root(fma(total, inverse, epsilon))


NORM = types.Tuple((F32Ptr, i32, f32, f32))  # squares [row, tiles], tiles, 1 / K, epsilon


def _fetch(form: Format, mt: int, depth: int) -> Any:
    """Macro: the codes and scales of `depth` units from `unit` on, zeros from `end` on."""
    cw, sw, vectors = form.code_words, form.scale_words, form.vectors

    @macro(words(depth * mt * (cw + sw)))
    def fetch(
        e: Emitter, codes: Any, scales: Any, tile: Any, tiles: Any, units: Any, unit: Any, end: Any, lane: Any
    ) -> Any:
        out = []
        last = e.b.sub(tiles, e.u32(1))
        group = e.b.lshr(lane, e.u32(2))
        for d in range(depth):
            at = e.b.add(unit, e.u32(d))
            valid = e.b.icmp_signed("<", at, end)
            at = e.b.select(valid, at, e.b.sub(end, e.u32(1)))
            for m in range(mt):
                row = e.b.add(tile, e.u32(m))
                row = e.b.select(e.b.icmp_signed("<", row, last), row, last)
                base = e.i64(e.b.add(e.b.mul(row, units), at))
                word = e.b.add(e.b.mul(base, e.i64(32 * cw)), e.i64(e.b.shl(lane, e.u32(2))))
                got = [v for i in range(vectors) for v in e.load_once(codes, e.b.add(word, e.i64(128 * i)), 4)]
                if form.scale == "none":
                    out += [e.b.select(valid, v, e.u32(0)) for v in got]
                    continue
                step = min(4, sw)
                word = e.b.add(e.b.mul(base, e.i64(8 * sw)), e.i64(e.b.mul(group, e.u32(sw))))
                raw = [v for i in range(0, sw, step) for v in e.load_once(scales, e.b.add(word, e.i64(i)), step)]
                out += got + [e.b.select(valid, v, e.u32(0)) for v in raw]
        return out

    return fetch


def _global_step(form: Format, mt: int, nt: int, depth: int) -> Any:
    """Macro: add `depth` fetched units to acc, activations from global memory at word offsets `x_at` [nt]."""
    each = form.code_words + form.scale_words

    @macro(lambda acc, *rest: acc)
    def step(
        e: Emitter, acc: Any, fetched: Any, x: Any, x_at: Any, half_pitch: Any, unit: Any, end: Any, lane: Any
    ) -> Any:
        for d in range(depth):
            at = e.b.add(unit, e.u32(d))
            at = e.b.select(e.b.icmp_signed("<", at, end), at, e.b.sub(end, e.u32(1)))
            offset = e.b.shl(at, e.u32(5))

            def load_x(n: int, half: int, offset: Any = offset) -> tuple[list[Any], list[Any]]:
                word = e.b.add(e.b.add(x_at[n], offset), e.u32(16 * half))
                return e.load(x, word, 4), e.load(x, e.b.add(word, half_pitch), 4)

            own = fetched[d * mt * each : (d + 1) * mt * each]
            codes = [w for m in range(mt) for w in own[m * each : m * each + form.code_words]]
            scales = [w for m in range(mt) for w in own[m * each + form.code_words : (m + 1) * each]]
            acc = unit_step(e, form, mt, nt, acc, codes, scales, load_x, lane)
        return acc

    return step


def _x_offsets(nt: int) -> Any:
    """Macro: word offset of each row group's activations for this lane; rows past the last repeat it."""

    @macro(types.UniTuple(i32, nt))
    def offsets(e: Emitter, index: Any, first: Any, rows: Any, pitch: Any, lane: Any) -> Any:
        group, t = e.b.lshr(lane, e.u32(2)), e.b.and_(lane, e.u32(3))
        out = []
        for n in range(nt):
            row = e.b.add(e.b.add(first, group), e.u32(8 * n))
            row = e.b.select(e.b.icmp_signed("<", row, rows), row, e.b.sub(rows, e.u32(1)))
            row = e.load(index, row, 1)[0]
            out.append(e.b.add(e.b.mul(row, pitch), e.b.shl(t, e.u32(2))))
        return out

    return offsets


def _store_sums(mt: int, nt: int) -> Any:
    """Macro: acc [mt, nt, 4] -> shared memory [part, lane, 4] from a byte offset on, `stride` bytes a part."""

    @macro(None)
    def store(e: Emitter, acc: Any, offset: Any, stride: int) -> None:
        for i in range(mt * nt):
            at = e.b.add(offset, e.b.mul(stride, e.u32(i)))
            e.store_shared(at, [e.bits(v) for v in acc[4 * i : 4 * i + 4]])

    return store


def slice_kernel(form: Format, shape: SliceShape, epilogue: Any) -> Any:
    """A kernel for few rows: each of `slices` warps multiplies its slice of K, then the sums are added in order.

    Grid: (blocks of `shape.features` features, blocks of `shape.rows` rows); block: `shape.threads`; shared memory:
    sums [slice, part, lane, 4] and norm factors [rows]. Arguments: codes, scales (layout.py); x, index [rows] (which
    row of x; the identity but for the head), rows, units; norm (see NORM; squares of length 0 tiles: no norm); out:
    the epilogue's own tuple. Twin: `layout.restore` and a float64 product.
    """
    slices, mt, nt, groups, depth = shape.slices, shape.mt, shape.nt, shape.groups, shape.depth
    fetch, step, store = _fetch(form, mt, depth), _global_step(form, mt, nt, depth), _store_sums(mt, nt)
    offsets, zero = _x_offsets(nt), zeros(4 * mt * nt)
    parts, warps = mt * nt, slices * groups
    factors = 512 * warps * parts  # byte offset of the norm factors

    def kernel(codes, scales, x, index, rows, units, tiles, norm, out):
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        slice_ = warp % slices
        group = warp // slices
        tile = (cuda.blockIdx.x * groups + group) * mt
        first_row = cuda.blockIdx.y * (8 * nt)
        unit = first_unit(slice_, units, slices)
        end = first_unit(slice_ + 1, units, slices)
        acc = zero()
        ahead = fetch(codes, scales, tile, tiles, units, unit, end, lane)
        let_next_start()
        wait_for_previous()
        x_at = offsets(index, first_row, rows, units * 64, lane)
        while unit + depth < end:
            now = ahead
            ahead = fetch(codes, scales, tile, tiles, units, unit + depth, end, lane)
            acc = step(acc, now, x, x_at, units * 32, unit, end, lane)
            unit += depth
        acc = step(acc, ahead, x, x_at, units * 32, unit, end, lane)
        store(acc, ((group * parts) * slices + slice_) * 512 + lane * 16, slices * 512)
        squares, norm_tiles, inverse, epsilon = norm
        if norm_tiles > 0:
            for i in range(warp, min(8 * nt, rows - first_row), warps):
                factor = norm_factor(squares, index[first_row + i], norm_tiles, inverse, epsilon, lane)
                store_shared1(factors + 4 * i, factor)
        cuda.syncthreads()
        for i in range(warp, groups * parts, warps):
            total = load_shared4((i * slices) * 512 + lane * 16)
            a0, a1, b0, b1 = total
            for s in range(1, slices):
                more = load_shared4((i * slices + s) * 512 + lane * 16)
                a0, a1 = add(a0, more[0]), add(a1, more[1])
                b0, b1 = add(b0, more[2]), add(b1, more[3])
            column = (i % nt) * 8 + (lane & 3) * 2
            if norm_tiles > 0:
                r0 = load_shared1(factors + 4 * column)
                r1 = load_shared1(factors + 4 * column + 4)
                a0, b0 = mul(a0, r0), mul(b0, r0)
                a1, b1 = mul(a1, r1), mul(b1, r1)
            at = (cuda.blockIdx.x * groups + i // parts) * mt + (i % parts) // nt
            epilogue(out, a0, a1, b0, b1, at, at < tiles, first_row + column, rows, lane)

    return kernel


# -- many rows


def _stage(form: Format, shape: TileShape) -> Any:
    """Macro: start copying one unit (activations, codes, scales) to shared memory at a byte offset.

    Activations lie as [high or low][row][8 chunks of 16 bytes], odd rows with their halves swapped, so that the 16-byte
    reads of two neighbouring rows touch different banks.
    """
    threads, plane = shape.threads, shape.rows * UNIT * 2
    tiles, code_chunks, scale_chunks = shape.mt * shape.across, 8 * form.code_words, 2 * form.scale_words

    def each(e: Emitter, thread: Any, count: int, copy: Callable[[Any], None]) -> None:
        """`copy(i)` for the i of this thread among `count`."""
        for start in range(0, count, threads):
            i = e.b.add(thread, e.u32(start))
            if start + threads <= count:
                copy(i)
                continue
            with e.b.if_then(e.b.icmp_unsigned("<", i, e.u32(count))):
                copy(i)

    @macro(None)
    def stage(
        e: Emitter, offset: Any, codes: Any, scales: Any, x: Any, x_rows: Any, tile: Any, tiles_all: Any, units: Any,
        unit: Any, thread: Any,
    ) -> None:  # fmt: skip
        b, last = e.b, e.b.sub(tiles_all, e.u32(1))

        def copy_x(i: Any) -> None:
            row, chunk = b.lshr(i, e.u32(4)), b.and_(i, e.u32(15))
            low, column = b.lshr(chunk, e.u32(3)), b.and_(chunk, e.u32(7))
            place = b.xor(column, b.shl(b.and_(row, e.u32(1)), e.u32(2)))
            target = b.add(b.mul(low, e.u32(plane)), b.add(b.shl(row, e.u32(7)), b.shl(place, e.u32(4))))
            base = e.load_shared(b.add(x_rows, b.shl(row, e.u32(2))), 1)[0]
            word = b.add(b.mul(b.add(b.shl(base, e.u32(1)), low), b.shl(units, e.u32(5))), b.shl(unit, e.u32(5)))
            e.copy_async(b.add(offset, target), x, b.add(word, b.shl(column, e.u32(2))))

        def copy_part(pointer: Any, chunks: int, start: int) -> Callable[[Any], None]:
            def copy(i: Any) -> None:
                of, chunk = b.udiv(i, e.u32(chunks)), b.urem(i, e.u32(chunks))
                at = b.add(tile, of)
                at = b.select(b.icmp_signed("<", at, last), at, last)
                base = e.i64(b.add(b.mul(at, units), unit))
                word = b.add(b.mul(base, e.i64(4 * chunks)), e.i64(b.shl(chunk, e.u32(2))))
                e.copy_async(b.add(offset, b.add(e.u32(start), b.shl(i, e.u32(4)))), pointer, word)

            return copy

        each(e, thread, shape.rows * 16, copy_x)
        each(e, thread, tiles * code_chunks, copy_part(codes, code_chunks, 2 * plane))
        if scale_chunks:
            start = 2 * plane + tiles * code_chunks * 16
            each(e, thread, tiles * scale_chunks, copy_part(scales, scale_chunks, start))

    return stage


def _shared_step(form: Format, shape: TileShape) -> Any:
    """Macro: add the unit staged at a byte offset to acc."""
    mt, nt, plane = shape.mt, shape.nt, shape.rows * UNIT * 2
    cw, sw = form.code_words, form.scale_words
    scales_at = 2 * plane + mt * shape.across * 128 * cw

    @macro(lambda acc, *rest: acc)
    def step(e: Emitter, acc: Any, offset: Any, warp: Any, lane: Any) -> Any:
        b = e.b
        tile = b.mul(b.urem(warp, e.u32(shape.across)), e.u32(mt))
        row = b.add(b.mul(b.udiv(warp, e.u32(shape.across)), e.u32(8 * nt)), b.lshr(lane, e.u32(2)))
        swap, t = b.and_(b.lshr(lane, e.u32(2)), e.u32(1)), b.and_(lane, e.u32(3))
        x_at = b.add(offset, b.add(b.shl(row, e.u32(7)), b.shl(t, e.u32(4))))
        halves = [b.add(x_at, b.shl(b.xor(swap, e.u32(half)), e.u32(6))) for half in (0, 1)]
        codes, scales = [], []
        for m in range(mt):
            at = b.add(offset, b.mul(b.add(tile, e.u32(m)), e.u32(128 * cw)))
            at = b.add(at, b.add(e.u32(2 * plane), b.shl(lane, e.u32(4))))
            for i in range(form.vectors):
                codes += e.load_shared(b.add(at, e.u32(512 * i)), 4)
            if sw:
                at = b.add(b.mul(b.add(tile, e.u32(m)), e.u32(32 * sw)), b.mul(b.lshr(lane, e.u32(2)), e.u32(4 * sw)))
                for i in range(0, sw, min(4, sw)):
                    scales += e.load_shared(b.add(offset, b.add(at, e.u32(scales_at + 4 * i))), min(4, sw))

        def load_x(n: int, half: int) -> tuple[list[Any], list[Any]]:
            at = b.add(halves[half], e.u32(1024 * n))
            return e.load_shared(at, 4), e.load_shared(b.add(at, e.u32(plane)), 4)

        return unit_step(e, form, mt, nt, acc, codes, scales, load_x, lane)

    return step


def _add_sums(parts: int, threads: int) -> Any:
    """Macro: add acc [parts, 4] to the totals in shared memory [part, thread, 4]; `first`: store it."""

    @macro(None)
    def add(e: Emitter, acc: Any, offset: Any, first: Any) -> None:
        fresh = e.b.icmp_unsigned("!=", first, e.u32(0))
        for i in range(parts):
            at = e.b.add(offset, e.u32(16 * threads * i))
            own = acc[4 * i : 4 * i + 4]
            old = e.load_shared(at, 4)
            sums = [e.b.select(fresh, v, e.add(e.real(o), v)) for o, v in zip(old, own, strict=True)]
            e.store_shared(at, [e.bits(v) for v in sums])

    return add


def tile_kernel(form: Format, shape: TileShape, epilogue: Any) -> Any:
    """A kernel for many rows: the same operations as `slice_kernel`, slice after slice in each warp.

    Grid: (blocks of `shape.rows` rows, blocks of `shape.features` features): neighbours share weights in L2. Shared
    memory: rows of x and norm factors [rows], totals [part, thread, 4], then `stages` stages of one unit.
    """
    slices, mt, nt, stages, threads = shape.slices, shape.mt, shape.nt, shape.stages, shape.threads
    rows_a_block, parts, warps = shape.rows, shape.mt * shape.nt, shape.threads // 32
    stage, step, add_sums = _stage(form, shape), _shared_step(form, shape), _add_sums(parts, threads)
    zero, wait = zeros(4 * parts), copy_wait(stages - 2)
    totals = 4 * rows_a_block
    ring = totals + 16 * parts * threads
    stage_bytes = shape.stage_bytes(form)
    across = shape.across

    def kernel(codes, scales, x, index, rows, units, tiles, norm, out):
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        first_row = cuda.blockIdx.x * rows_a_block
        tile = cuda.blockIdx.y * (mt * across)
        let_next_start()
        wait_for_previous()
        for i in range(thread, rows_a_block, threads):
            _store_index(4 * i, index[min(first_row + i, rows - 1)])
        cuda.syncthreads()
        for ahead in range(stages - 1):
            if ahead < units:
                stage(ring + ahead * stage_bytes, codes, scales, x, 0, tile, tiles, units, ahead, thread)
            copy_commit()
        for s in range(slices):
            acc = zero()
            for unit in range(first_unit(s, units, slices), first_unit(s + 1, units, slices)):
                wait()
                cuda.syncthreads()
                ahead = unit + stages - 1
                if ahead < units:
                    at = ring + ahead % stages * stage_bytes
                    stage(at, codes, scales, x, 0, tile, tiles, units, ahead, thread)
                copy_commit()
                acc = step(acc, ring + unit % stages * stage_bytes, warp, lane)
            add_sums(acc, totals + 16 * thread, 1 if s == 0 else 0)
        squares, norm_tiles, inverse, epsilon = norm
        if norm_tiles > 0:
            cuda.syncthreads()
            for i in range(warp, min(rows_a_block, rows - first_row), warps):
                factor = norm_factor(squares, index[first_row + i], norm_tiles, inverse, epsilon, lane)
                store_shared1(4 * i, factor)
        cuda.syncthreads()
        for i in range(parts):
            a0, a1, b0, b1 = load_shared4(totals + (i * threads + thread) * 16)
            column = (warp // across) * (8 * nt) + (i % nt) * 8 + (lane & 3) * 2
            if norm_tiles > 0:
                r0 = load_shared1(4 * column)
                r1 = load_shared1(4 * column + 4)
                a0, b0 = mul(a0, r0), mul(b0, r0)
                a1, b1 = mul(a1, r1), mul(b1, r1)
            at = tile + (warp % across) * mt + i // nt
            epilogue(out, a0, a1, b0, b1, at, at < tiles, first_row + column, rows, lane)

    return kernel


@macro(None)
def _store_index(e: Emitter, offset: Any, value: Any) -> None:
    e.store_shared(offset, [value])


def signature(out: Any) -> Any:
    """The numba signature of both kernels for an epilogue with arguments of type `out`."""
    return types.void(U32Ptr, U32Ptr, U32Ptr, I32Ptr, i32, i32, i32, NORM, out)
