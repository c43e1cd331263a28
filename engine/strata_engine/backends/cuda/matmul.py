"""The matmul family: y[row, feature] = sum over k of x[row, k] W[feature, k], for 1 to 512 rows.

Tensor-core instructions m16n8k16 multiply 16 features (operand A: integer codes, exact in half precision) by 8 rows
(operand B: activations as a high and a low half). Each block of 32 (or 16) inputs starts a sum of its own, which is
then scaled in float32: total += scale * sum. K is cut into `slices`, fixed for a matrix; slices are added in order.

Two kernels compute exactly these operations in exactly this order, so they give the same bits:

- `slice_kernel`: one warp a slice, for few rows, where the weights are read once and all that counts is memory;
- `tile_kernel`: slices one after another with the activations staged in shared memory, for many rows.

An *epilogue* takes four finished sums of a lane (features a and b of two neighbouring rows) and does what would be the
next pass: rotate and append to the cache, SwiGLU, add to the residual. See epilogue.py.

Activations: words [row, 2, pitch / 2], the high halves of a row's K values and then the low ones; pitch is K padded to
64, the padding is zero. Source of the bias trick (1024 + code as a half): Kim et al. 2022, "Who says elephants can't
run".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    i32,
    inlined,
    let_next_start,
    load_shared1,
    load_shared4,
    macro,
    mul,
    store_shared1,
    wait_for_previous,
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


def _norm_factors() -> Any:
    """Macro: 1 / root mean square of rows first .. first + 7, one a lane (lanes 0 to 7), by a whole warp.

    Each lane adds every 32nd sum of squares of every row, then the lanes are added as a tree: one order for all rows.
    """

    @macro(f32)
    def factors(
        e: Emitter, squares: Any, index: Any, first: Any, rows: Any, tiles: Any, inverse: Any, epsilon: Any, lane: Any
    ) -> Any:
        b, starts = e.b, []
        for i in range(8):
            row = _row_at(e, index, b.add(first, e.u32(i)), rows)
            starts.append(b.add(b.mul(row, tiles), lane))
        totals = _lane_sums(e, squares, starts, tiles, lane)
        for step in (16, 8, 4, 2, 1):
            totals = [e.add(total, e.butterfly(total, step)) for total in totals]
        mine = totals[0]
        for i in range(1, 8):
            mine = b.select(b.icmp_unsigned("==", lane, e.u32(i)), totals[i], mine)
        root = e.asm("sqrt.rn.f32 $0, $1;", mine.type, "=f,f", e.fma(mine, inverse, epsilon))
        return e.asm("rcp.rn.f32 $0, $1;", mine.type, "=f,f", root)

    return factors


def _row_at(e: Emitter, index: Any, place: Any, rows: Any) -> Any:
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


class _Ring:
    """A warp's ring of weights in shared memory, inside a macro: copies run `stages` - 1 steps ahead of their use.

    Every lane copies just what it reads itself, so that no lane waits for another. A step is one unit of `mt` tiles.
    """

    def __init__(self, e: Emitter, form: Format, shape: SliceShape, args: _SliceArgs) -> None:
        b, self.e, self.form, self.shape, self.args = e.b, e, form, shape, args
        lane = args.lane
        self.codes = e.opaque(b.gep(args.codes, [e.i64(b.shl(lane, e.u32(2)))]))
        group = b.mul(b.lshr(lane, e.u32(2)), e.u32(form.scale_words))
        self.scales = e.opaque(b.gep(args.scales, [e.i64(group)]))
        self.own = [b.shl(lane, e.u32(4)), b.mul(lane, e.u32(4 * min(4, form.scale_words)))]
        self.length = e.u32(shape.stages * shape.slot_bytes(form))
        self.end = b.add(args.ring, self.length)
        self.slot, self.next_slot = e.variable(args.ring), e.variable(args.ring)
        self.tile, self.unit = e.variable(args.tile), e.variable(args.first)
        self.at = e.variable(b.add(b.mul(args.tile, args.units), args.first))
        # from the last unit of a slice to the first of the warp's next tile
        self.jump = b.sub(b.mul(args.stride, args.units), b.sub(b.sub(args.end, args.first), e.u32(1)))

    def _advance_slot(self, cell: Any) -> Any:
        """The slot in `cell`, which moves on."""
        e, b = self.e, self.e.b
        slot = b.load(cell)
        following = b.add(slot, e.u32(self.shape.slot_bytes(self.form)))
        b.store(b.select(b.icmp_unsigned("==", following, self.end), self.args.ring, following), cell)
        return slot

    def copy(self) -> None:
        """Start the next step's copies, if there is one, and move on."""
        e, b, form = self.e, self.e.b, self.form
        slot, at, tile = self._advance_slot(self.next_slot), b.load(self.at), b.load(self.tile)
        with b.if_then(b.icmp_signed("<", tile, self.args.tiles)):
            for m in range(self.shape.mt):
                row = e.i64(at if m == 0 else b.add(at, b.mul(self.args.units, e.u32(m))))
                base = b.add(slot, e.u32(m * self.shape.unit_bytes(form)))
                source = b.gep(self.codes, [b.mul(row, e.i64(e.u32(32 * form.code_words)))])
                for v in range(form.vectors):
                    e.copy_async(b.add(b.add(base, self.own[0]), e.u32(512 * v)), source, e.u32(128 * v))
                source = b.gep(self.scales, [b.mul(row, e.i64(e.u32(8 * form.scale_words)))])
                for v in range(0, form.scale_words, 4):
                    target = b.add(b.add(base, self.own[1]), e.u32(512 * form.vectors + 128 * v))
                    e.copy_async(target, source, e.u32(v), min(4, form.scale_words))
        e.copy_commit()
        unit = b.add(b.load(self.unit), e.u32(1))
        wraps = b.icmp_signed("==", unit, self.args.end)
        b.store(b.select(wraps, self.args.first, unit), self.unit)
        b.store(b.add(at, b.select(wraps, self.jump, e.u32(1))), self.at)
        b.store(b.add(tile, b.select(wraps, self.args.stride, e.u32(0))), self.tile)

    def take(self) -> tuple[list[Any], list[Any]]:
        """(code words [mt, ..], scale words [mt, ..]) of the oldest step, once it is there."""
        e, b, form = self.e, self.e.b, self.form
        e.copy_wait(self.shape.stages - 1)
        slot = self._advance_slot(self.slot)
        codes, scales = [], []
        for m in range(self.shape.mt):
            base = b.add(slot, e.u32(m * self.shape.unit_bytes(form)))
            for v in range(form.vectors):
                codes += e.load_shared(b.add(b.add(base, self.own[0]), e.u32(512 * v)), 4)
            for v in range(0, form.scale_words, 4):
                source = b.add(b.add(base, self.own[1]), e.u32(512 * form.vectors + 128 * v))
                scales += e.load_shared(source, min(4, form.scale_words))
        return codes, scales


class _SliceArgs(NamedTuple):
    """What a worker warp of the slice kernel knows."""

    codes: Any
    scales: Any
    units: Any
    tiles: Any
    tile: Any  # the first of this warp's tiles
    stride: Any  # tiles from one to the next
    first: Any  # the slice's units
    end: Any
    ring: Any  # byte offset in shared memory
    lane: Any


def _work(form: Format, shape: SliceShape) -> Any:
    """Macro: all that a worker warp does: its slice of each of its tiles, the sums left in shared memory.

    One loop written in LLVM: in 32-bit arithmetic and without a repeated address it takes half the
    instructions that numba's 64-bit integers would, and the number of instructions is what limits its speed.
    """
    mt, nt = shape.mt, shape.nt

    def load_x(e: Emitter, rows: list[tuple[Any, Any]], unit: Any) -> list[Any]:
        """The activations of a unit: words [nt, half unit, high or low, 4]."""
        along = e.i64(e.b.shl(unit, e.u32(5)))
        places = [[e.b.gep(part, [along]) for part in row] for row in rows]
        return [w for row in places for half in (0, 1) for part in row for w in e.load(part, e.u32(16 * half), 4)]

    @macro(None)
    def work(
        e: Emitter, codes: Any, scales: Any, x: Any, index: Any, first_row: Any, rows: Any, units: Any, tiles: Any,
        tile: Any, stride: Any, first: Any, end: Any, ring: Any, sums: Any, lane: Any,
    ) -> None:  # fmt: skip
        b = e.b
        args = _SliceArgs(codes, scales, units, tiles, tile, stride, first, end, ring, lane)
        weights = _Ring(e, form, shape, args)
        for _ in range(shape.stages - 1):
            weights.copy()
        x_rows = _x_rows(e, nt, x, index, first_row, rows, units, lane)
        e.wait_for_previous()
        place = e.variable(sums)
        acc = [e.variable(e.f32(0.0)) for _ in range(4 * mt * nt)]
        ahead = [e.variable(word) for word in load_x(e, x_rows, first)] if nt == 1 else []
        with e.loop(tile, tiles, stride):
            for cell in acc:
                b.store(e.f32(0.0), cell)
            with e.loop(first, end, 1) as unit:
                weights.copy()
                now = [b.load(cell) for cell in ahead] or load_x(e, x_rows, unit)
                if ahead:
                    following = b.add(unit, e.u32(1))
                    following = b.select(b.icmp_signed("<", following, end), following, first)
                    for cell, word in zip(ahead, load_x(e, x_rows, following), strict=True):
                        b.store(word, cell)
                parts = [now[4 * i : 4 * i + 4] for i in range(4 * nt)]
                pick = _picker(parts)
                sums_now = unit_step(e, form, mt, nt, [b.load(c) for c in acc], *weights.take(), pick, lane)
                for cell, value in zip(acc, sums_now, strict=True):
                    b.store(value, cell)
            at = b.load(place)
            for i in range(mt * nt):
                target = b.add(at, e.u32(512 * shape.slices * i))
                e.store_shared(target, [e.bits(b.load(c)) for c in acc[4 * i : 4 * i + 4]])
            b.store(b.xor(at, e.u32(shape.set_bytes)), place)
            e.barrier()

    return work


def _picker(parts: list[list[Any]]) -> Callable[[int, int], tuple[list[Any], list[Any]]]:
    """(row group, half unit) -> (high, low) words, from parts [nt, half unit, high or low]."""
    return lambda n, half: (parts[4 * n + 2 * half], parts[4 * n + 2 * half + 1])


def _x_rows(
    e: Emitter, nt: int, x: Any, index: Any, first: Any, rows: Any, units: Any, lane: Any
) -> list[tuple[Any, Any]]:
    """Pointers to this lane's high and low halves of unit 0, for each row group; rows past the last repeat it."""
    b, out = e.b, []
    group, t4 = b.lshr(lane, e.u32(2)), b.shl(b.and_(lane, e.u32(3)), e.u32(2))
    for n in range(nt):
        row = _row_at(e, index, b.add(b.add(first, group), e.u32(8 * n)), rows)
        high = b.add(b.mul(row, b.shl(units, e.u32(6))), t4)
        low = b.add(high, b.shl(units, e.u32(5)))
        out.append((e.opaque(b.gep(x, [e.i64(high)])), e.opaque(b.gep(x, [e.i64(low)]))))
    return out


def slice_kernel(form: Format, shape: SliceShape, prepare: Any, finish: Any, normed: bool) -> Any:
    """A kernel for few rows: each of `slices` warps multiplies its slice of K, then the sums are added in order.

    Blocks stay and walk over the tiles; while the finishing warps add the sums of one set of tiles and run the
    epilogue, the others already multiply the next. Each warp keeps `stages` copies of weights under way into a ring of
    its own in shared memory, across tiles: that many bytes in flight is what reading at full speed takes. What does not
    depend on the kernel before (weights, row indexes) is read before waiting for it.

    Grid: (blocks that share the tiles, blocks of `shape.rows` rows); block: `shape.threads`; shared memory: two sets of
    sums [part, slice, lane, 4], then a ring a warp. Arguments: codes, scales (layout.py); x, index [rows]
    (which row of x; the identity but for the head), rows, units, tiles; norm (see NORM); out: the epilogue's own tuple.
    Twin: `layout.restore` and a float64 product.
    """
    slices, mt, nt = shape.slices, shape.mt, shape.nt
    work, norm_factors = _work(form, shape), _norm_factors()
    set_bytes, ring_bytes = shape.set_bytes, shape.stages * shape.slot_bytes(form)
    own_tiles = shape.finishing // nt  # finishing warps that share the tiles of a row group

    def kernel(codes, scales, x, index, rows, units, tiles, norm, out):
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        first_row = cuda.blockIdx.y * (8 * nt)
        stride = cuda.gridDim.x * mt
        base = cuda.blockIdx.x * mt
        let_next_start()
        if warp < slices:
            first = first_unit(warp, units, slices)
            end = first_unit(warp + 1, units, slices)
            ring = 2 * set_bytes + warp * ring_bytes
            sums = warp * 512 + lane * 16
            work(
                codes, scales, x, index, first_row, rows, units, tiles, base, stride, first, end, ring, sums, lane
            )  # fmt: skip
            return
        n = (warp - slices) % nt
        m = (warp - slices) // nt
        row = first_row + n * 8 + (lane & 3) * 2
        r0 = types.float32(1.0)
        r1 = types.float32(1.0)
        wait_for_previous()
        if normed:
            squares, norm_tiles, inverse, epsilon = norm
            if first_row + n * 8 < rows:
                factor = norm_factors(squares, index, first_row + n * 8, rows, norm_tiles, inverse, epsilon, lane)
                r0 = cuda.shfl_sync(0xFFFFFFFF, factor, (lane & 3) * 2)
                r1 = cuda.shfl_sync(0xFFFFFFFF, factor, (lane & 3) * 2 + 1)
        at = lane * 16
        while base < tiles:
            ready = prepare(out, base + m, row, rows, lane)
            cuda.syncthreads()
            for tile in range(m, mt, own_tiles):
                if tile > m:
                    ready = prepare(out, base + tile, row, rows, lane)
                part = at + (tile * nt + n) * (slices * 512)
                a0, a1, b0, b1 = load_shared4(part)
                for s in range(1, slices):
                    more = load_shared4(part + s * 512)
                    a0, a1 = add(a0, more[0]), add(a1, more[1])
                    b0, b1 = add(b0, more[2]), add(b1, more[3])
                if normed:
                    a0, b0 = mul(a0, r0), mul(b0, r0)
                    a1, b1 = mul(a1, r1), mul(b1, r1)
                finish(out, ready, a0, a1, b0, b1, base + tile, True, row, rows, lane)
            at ^= set_bytes
            base += stride

    return kernel


# -- many rows


@dataclass(frozen=True, slots=True)
class Copies:
    """How the threads of a tile kernel share the copying of one unit: 16-byte chunks, `threads` at a time."""

    form: Format
    shape: TileShape
    plane = property(lambda self: self.shape.rows * UNIT * 2)  # bytes of the high (or low) halves of a stage
    tiles = property(lambda self: self.shape.mt * self.shape.across)
    code_chunks = property(lambda self: 8 * self.form.code_words)  # of a tile
    scale_chunks = property(lambda self: 2 * self.form.scale_words)
    counts = property(
        lambda self: (self.shape.rows * 16, self.tiles * self.code_chunks, self.tiles * self.scale_chunks)
    )

    def passes(self, count: int) -> int:
        """How many chunks a thread copies of `count`, the last perhaps not."""
        return -(-count // self.shape.threads)

    @property
    def total(self) -> int:
        return sum(self.passes(count) for count in self.counts)


def _sources(copies: Copies) -> Any:
    """Macro: word offsets, for unit 0, of everything this thread will copy: [activations | codes | scales]."""
    threads = copies.shape.threads

    @macro(types.UniTuple(i32, copies.total))
    def sources(
        e: Emitter, index: Any, first_row: Any, rows: Any, tile: Any, tiles: Any, units: Any, thread: Any
    ) -> Any:
        b, out, last = e.b, [], e.b.sub(tiles, e.u32(1))
        for p in range(copies.passes(copies.counts[0])):
            chunk = b.add(thread, e.u32(p * threads))
            row = _row_at(e, index, b.add(first_row, b.lshr(chunk, e.u32(4))), rows)
            low, column = b.and_(b.lshr(chunk, e.u32(3)), e.u32(1)), b.and_(chunk, e.u32(7))
            word = b.mul(b.add(b.shl(row, e.u32(1)), low), b.shl(units, e.u32(5)))
            out.append(b.add(word, b.shl(column, e.u32(2))))
        for count, chunks in zip(copies.counts[1:], (copies.code_chunks, copies.scale_chunks), strict=True):
            for p in range(copies.passes(count)):
                chunk = b.add(thread, e.u32(p * threads))
                at = b.add(tile, b.udiv(chunk, e.u32(chunks)))
                at = b.select(b.icmp_signed("<", at, last), at, last)
                word = b.mul(b.mul(at, units), e.u32(4 * chunks))
                out.append(b.add(word, b.shl(b.urem(chunk, e.u32(chunks)), e.u32(2))))
        return out

    return sources


def _stage(copies: Copies) -> Any:
    """Macro: start copying one unit (activations, codes, scales) to shared memory at a byte offset.

    Activations lie as [high or low][row][8 chunks of 16 bytes], odd rows with their halves swapped, so that the 16-byte
    reads of two neighbouring rows touch different banks.
    """
    threads, plane = copies.shape.threads, copies.plane
    steps = (2 * UNIT // 4, 4 * copies.code_chunks, 4 * copies.scale_chunks)  # words from unit to unit
    starts = (0, 2 * plane, 2 * plane + 16 * copies.counts[1])

    @macro(None)
    def stage(e: Emitter, offset: Any, x: Any, codes: Any, scales: Any, sources: Any, unit: Any, thread: Any) -> None:
        b = e.b
        row, column = b.lshr(thread, e.u32(4)), b.and_(thread, e.u32(7))
        low = b.and_(b.lshr(thread, e.u32(3)), e.u32(1))
        swapped = b.xor(column, b.shl(b.and_(row, e.u32(1)), e.u32(2)))
        x_at = b.add(b.mul(low, e.u32(plane)), b.add(b.shl(row, e.u32(7)), b.shl(swapped, e.u32(4))))
        left = list(sources)
        for count, step, start, pointer in zip(copies.counts, steps, starts, (x, codes, scales), strict=True):
            along = b.mul(unit, e.u32(step))
            for p in range(copies.passes(count)):
                source = b.add(left.pop(0), along)
                at = b.add(x_at, e.u32(p * threads * 8)) if start == 0 else b.shl(thread, e.u32(4))
                target = b.add(b.add(offset, at), e.u32(0 if start == 0 else start + p * threads * 16))
                if (p + 1) * threads <= count:
                    e.copy_async(target, pointer, source)
                    continue
                with b.if_then(b.icmp_unsigned("<", b.add(thread, e.u32(p * threads)), e.u32(count))):
                    e.copy_async(target, pointer, source)

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


def tile_kernel(form: Format, shape: TileShape, prepare: Any, finish: Any, normed: bool) -> Any:
    """A kernel for many rows: the same operations as `slice_kernel`, slice after slice in each warp.

    Grid: (blocks of `shape.rows` rows, blocks of `shape.features` features): neighbours share weights in L2. Shared
    memory: norm factors [rows], totals [part, thread, 4], then `stages` stages of one unit.
    """
    slices, mt, nt, stages, threads = shape.slices, shape.mt, shape.nt, shape.stages, shape.threads
    rows_a_block, parts, warps, across = shape.rows, shape.mt * shape.nt, shape.threads // 32, shape.across
    copies = Copies(form, shape)
    sources, stage, step = _sources(copies), _stage(copies), _shared_step(form, shape)
    add_sums, zero, wait, norm_factors = (
        _add_sums(parts, threads),
        zeros(4 * parts),
        copy_wait(stages - 2),
        _norm_factors(),
    )
    totals = 4 * rows_a_block
    ring = totals + 16 * parts * threads
    stage_bytes = shape.stage_bytes(form)

    def kernel(codes, scales, x, index, rows, units, tiles, norm, out):
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        first_row = cuda.blockIdx.x * rows_a_block
        tile = cuda.blockIdx.y * (mt * across)
        let_next_start()
        source = sources(index, first_row, rows, tile, tiles, units, thread)
        wait_for_previous()
        for ahead in range(stages - 1):
            if ahead < units:
                stage(ring + ahead * stage_bytes, x, codes, scales, source, ahead, thread)
            copy_commit()
        if normed:
            squares, norm_tiles, inverse, epsilon = norm
            for i in range(8 * warp, min(rows_a_block, rows - first_row), 8 * warps):
                factor = norm_factors(squares, index, first_row + i, rows, norm_tiles, inverse, epsilon, lane)
                if lane < 8:
                    store_shared1(4 * (i + lane), factor)
        for s in range(slices):
            acc = zero()
            for unit in range(first_unit(s, units, slices), first_unit(s + 1, units, slices)):
                wait()
                cuda.syncthreads()
                ahead = unit + stages - 1
                if ahead < units:
                    stage(ring + ahead % stages * stage_bytes, x, codes, scales, source, ahead, thread)
                copy_commit()
                acc = step(acc, ring + unit % stages * stage_bytes, warp, lane)
            add_sums(acc, totals + 16 * thread, 1 if s == 0 else 0)
        for i in range(parts):
            a0, a1, b0, b1 = load_shared4(totals + (i * threads + thread) * 16)
            column = (warp // across) * (8 * nt) + (i % nt) * 8 + (lane & 3) * 2
            if normed:
                r0 = load_shared1(4 * column)
                r1 = load_shared1(4 * column + 4)
                a0, b0 = mul(a0, r0), mul(b0, r0)
                a1, b1 = mul(a1, r1), mul(b1, r1)
            at = tile + (warp % across) * mt + i // nt
            ready = prepare(out, min(at, tiles - 1), first_row + column, rows, lane)
            finish(out, ready, a0, a1, b0, b1, at, at < tiles, first_row + column, rows, lane)

    return kernel


def signature(out: Any) -> Any:
    """The numba signature of both kernels for an epilogue with arguments of type `out`."""
    return types.void(U32Ptr, U32Ptr, U32Ptr, I32Ptr, i32, i32, i32, NORM, out)
