"""The matmul kernel for few rows: a warp a slice of K, weights read once at the speed of memory. See matmul.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda, types

from ...gpu.emit import Emitter, add, let_next_start, load_shared4, macro, mul, u32, wait_for_previous
from .layout import Format
from .matmul import first_unit, norm_factors, row_at, unit_step
from .shapes import SliceShape


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


class _Ring:
    """A warp's ring of weights in shared memory, inside a macro: copies run `stages` - 1 steps ahead of their use.

    A step is `chunk` units of `mt` tiles: for each tile the codes of its units, then their scales. Lanes copy the codes
    that they read themselves, and of the scales a part.
    """

    def __init__(self, e: Emitter, form: Format, shape: SliceShape, args: _SliceArgs) -> None:
        b, self.e, self.form, self.shape, self.args = e.b, e, form, shape, args
        lane = args.lane
        self.codes = e.opaque(b.gep(args.codes, [e.i64(b.shl(lane, e.u32(2)))]))
        self.width, self.copies = _scale_copies(form, shape.chunk)
        self.scales = e.opaque(b.gep(args.scales, [e.i64(b.mul(lane, e.u32(self.width)))]))
        self.own_codes, self.own_scales = b.shl(lane, e.u32(4)), b.mul(lane, e.u32(4 * self.width))
        self.group_scales = b.mul(b.lshr(lane, e.u32(2)), e.u32(4 * form.scale_words))
        self.slot_bytes = shape.slot_bytes(form)
        self.end = b.add(args.ring, e.u32(shape.stages * self.slot_bytes))
        self.tile, self.unit = e.variable(args.tile), e.variable(args.first)
        self.at = e.variable(b.add(b.mul(args.tile, args.units), args.first))
        # from the last step of a slice to the first of the warp's next tile
        back = b.sub(b.sub(args.end, args.first), e.u32(shape.chunk))
        self.jump = b.sub(b.mul(args.stride, args.units), back)
        for stage in range(shape.stages - 1):
            self._copy(b.add(args.ring, e.u32(stage * self.slot_bytes)))
        self.slot = e.variable(args.ring)
        self.free = e.variable(b.add(args.ring, e.u32((shape.stages - 1) * self.slot_bytes)))

    def _copy(self, slot: Any) -> None:
        """Start the next step's copies to a slot, if there is one, and move on."""
        e, b, form, chunk = self.e, self.e.b, self.form, self.shape.chunk
        at, tile = b.load(self.at), b.load(self.tile)
        with b.if_then(b.icmp_signed("<", tile, self.args.tiles)):
            for m in range(self.shape.mt):
                row = e.i64(at if m == 0 else b.add(at, b.mul(self.args.units, e.u32(m))))
                codes = b.gep(self.codes, [b.mul(row, e.i64(32 * form.code_words))])
                scales = b.gep(self.scales, [b.mul(row, e.i64(8 * form.scale_words))])
                self._copy_tile(b.add(slot, e.u32(m * self.shape.tile_bytes(form))), codes, scales)
        e.copy_commit()
        if self.shape.whole:
            b.store(b.add(at, self.jump), self.at)
            b.store(b.add(tile, self.args.stride), self.tile)
            return
        unit = b.add(b.load(self.unit), e.u32(chunk))
        wraps = b.icmp_signed("==", unit, self.args.end)
        b.store(b.select(wraps, self.args.first, unit), self.unit)
        b.store(b.add(at, b.select(wraps, self.jump, e.u32(chunk))), self.at)
        b.store(b.add(tile, b.select(wraps, self.args.stride, e.u32(0))), self.tile)

    def _copy_tile(self, base: Any, codes: Any, scales: Any) -> None:
        """Start copying a step's units of one tile."""
        e, b, count = self.e, self.e.b, self.shape.chunk * self.form.vectors
        target = b.add(base, self.own_codes)
        for i in range(count):
            e.copy_async(b.add(target, e.u32(512 * i)), codes, 128 * i)
        target, words = b.add(base, self.own_scales), self.shape.chunk * 8 * self.form.scale_words
        for i in range(self.copies):
            lanes = words // self.width - 32 * i  # that have something to copy
            at, source = b.add(target, e.u32(512 * count + 128 * self.width * i)), 32 * self.width * i
            if lanes >= 32:
                e.copy_async(at, scales, source, self.width)
                continue
            with b.if_then(b.icmp_unsigned("<", self.args.lane, e.u32(lanes))):
                e.copy_async(at, scales, source, self.width)

    def turn(self) -> Any:
        """Start copying the step `stages` - 1 ahead; the slot of the oldest, once that is there."""
        e, b = self.e, self.e.b
        if self.width:
            e.warp_barrier()  # all lanes have read what is overwritten now
        self._copy(b.load(self.free))
        slot = b.load(self.slot)
        b.store(slot, self.free)
        following = b.add(slot, e.u32(self.slot_bytes))
        b.store(b.select(b.icmp_unsigned("==", following, self.end), self.args.ring, following), self.slot)
        e.copy_wait(self.shape.stages - 1)
        if self.width:
            e.warp_barrier()  # the scales that other lanes copied
        return slot

    def take(self, slot: Any, c: int) -> tuple[list[Any], list[Any]]:
        """(code words [mt, ..], scale words [mt, ..]) of unit `c` of the step in a slot."""
        e, b, form, chunk = self.e, self.e.b, self.form, self.shape.chunk
        codes, scales = [], []
        for m in range(self.shape.mt):
            base = b.add(slot, e.u32(m * self.shape.tile_bytes(form)))
            for v in range(form.vectors):
                codes += e.load_shared(b.add(b.add(base, self.own_codes), e.u32(512 * (c * form.vectors + v))), 4)
            first = 512 * chunk * form.vectors + 32 * c * form.scale_words
            for v in range(0, form.scale_words, 4):
                source = b.add(b.add(base, self.group_scales), e.u32(first + 4 * v))
                scales += e.load_shared(source, min(4, form.scale_words))
        return codes, scales


def _scale_copies(form: Format, chunk: int) -> tuple[int, int]:
    """(words a copy, copies a lane) of a tile's scales of `chunk` units, which lie side by side."""
    total = 8 * form.scale_words * chunk
    if not total:
        return 0, 0
    width = next(words for words in (4, 2, 1) if words == 1 or total >= 32 * words)
    return width, -(-total // (32 * width))


def _x_rows(e: Emitter, shape: SliceShape, x: Any, index: Any, first: Any, rows: Any, units: Any, lane: Any) -> Any:
    """Pointers to what this lane reads of unit 0's activations, for each row group: rows past the last repeat it.

    [nt, 2]: the high and the low halves of row lane / 4; for few rows [1, 1]: those of row lane / 8, by turns.
    """
    b, out = e.b, []
    group, t4 = b.lshr(lane, e.u32(2)), b.shl(b.and_(lane, e.u32(3)), e.u32(2))
    for n in range(shape.nt):
        place = b.lshr(group, e.u32(1)) if shape.few else group
        row = row_at(e, index, b.add(b.add(first, place), e.u32(8 * n)), rows)
        start = b.add(b.mul(row, b.shl(units, e.u32(6))), t4)
        low = b.shl(units, e.u32(5))
        parts = [b.mul(b.and_(group, e.u32(1)), low)] if shape.few else [e.u32(0), low]
        out.append([e.opaque(b.gep(x, [e.i64(b.add(start, part))])) for part in parts])
    return out


def _load_x(e: Emitter, shape: SliceShape, rows: Any, unit: Any) -> list[list[list[Any]]]:
    """The activations of a step from `unit` on: [unit, nt, half unit][part] of 4 words."""
    along = e.i64(e.b.shl(unit, e.u32(5)))
    places = [[e.b.gep(part, [along]) for part in row] for row in rows]
    return [
        [[e.load(part, 32 * c + 16 * half, 4) for part in row] for row in places for half in (0, 1)]
        for c in range(shape.chunk)
    ]


def _work(form: Format, shape: SliceShape) -> Any:
    """Macro: all that a worker warp does: its slice of each of its tiles, the sums left in shared memory.

    One loop written in LLVM: in 32-bit arithmetic and without a repeated address it takes half the
    instructions that numba's 64-bit integers would, and the number of instructions is what limits its speed.
    """
    mt, nt, values = shape.mt, shape.nt, shape.values

    def step(e: Emitter, weights: _Ring, x: list[Any], acc: list[Any]) -> list[Any]:
        slot = weights.turn()
        for c in range(shape.chunk):
            pick = lambda n, half, unit=x[c]: unit[2 * n + half]  # noqa: E731
            acc = unit_step(e, form, mt, nt, acc, *weights.take(slot, c), pick, weights.args.lane)
        return acc

    @macro(None)
    def work(
        e: Emitter, codes: Any, scales: Any, x: Any, index: Any, first_row: Any, rows: Any, units: Any, tiles: Any,
        tile: Any, stride: Any, first: Any, end: Any, ring: Any, sums: Any, lane: Any,
    ) -> None:  # fmt: skip
        b = e.b
        args = _SliceArgs(codes, scales, units, tiles, tile, stride, first, end, ring, lane)
        weights = _Ring(e, form, shape, args)
        x_rows = _x_rows(e, shape, x, index, first_row, rows, units, lane)
        e.wait_for_previous()
        kept = _load_x(e, shape, x_rows, first) if shape.whole else None
        target, turn = e.variable(sums), e.variable(e.u32(0))
        zero = [e.f32(0.0)] * (values * mt * nt)
        with e.loop(tile, tiles, stride):
            if kept is not None:
                acc = step(e, weights, kept, zero)
            else:
                cells = [e.variable(value) for value in zero]
                for cell, value in zip(cells, zero, strict=True):
                    b.store(value, cell)
                with e.loop(first, end, shape.chunk) as unit:
                    acc = step(e, weights, _load_x(e, shape, x_rows, unit), [b.load(cell) for cell in cells])
                    for cell, value in zip(cells, acc, strict=True):
                        b.store(value, cell)
                acc = [b.load(cell) for cell in cells]
            set_ = b.load(turn)
            e.barrier_wait(b.add(set_, e.u32(EMPTY)), shape.threads)
            at = b.load(target)
            for i in range(mt * nt):
                own = [e.bits(value) for value in acc[values * i : values * (i + 1)]]
                e.store_shared(b.add(at, e.u32(128 * values * shape.slices * i)), own)
            e.barrier_arrive(b.add(set_, e.u32(FULL)), shape.threads)
            b.store(b.xor(at, e.u32(shape.set_bytes)), target)
            b.store(b.xor(set_, e.u32(1)), turn)

    return work


# Named barriers of the two sets of sums: FULL, FULL + 1 once all workers have stored, EMPTY, EMPTY + 1 once all
# finishing warps have read. Nobody waits at the other's: workers run up to two sets ahead.
FULL, EMPTY = 1, 3


def _barrier(which: int, wait: bool, threads: int) -> Any:
    """Macro: count this warp in at barrier `which` + set."""

    @macro(None)
    def count_in(e: Emitter, set_: Any) -> None:
        act = e.barrier_wait if wait else e.barrier_arrive
        act(e.b.add(set_, e.u32(which)), threads)

    return count_in


def slice_kernel(form: Format, shape: SliceShape, prepare: Any, finish: Any, normed: bool) -> Any:
    """A kernel for few rows: each of `slices` warps multiplies its slice of K, then the sums are added in order.

    Blocks stay and walk over the tiles; while the finishing warps add the sums of one set of tiles and run the
    epilogue, the others already multiply the next. Each warp keeps `stages` copies of weights under way into a ring of
    its own in shared memory, across tiles: that many bytes in flight is what reading at full speed takes. What does not
    depend on the kernel before (weights, row indexes) is read before waiting for it.

    Grid: (blocks that share the tiles, blocks of `shape.rows` rows); block: `shape.threads`; shared memory: two sets of
    sums [part, slice, lane, `shape.values`], then a ring a warp. Arguments: codes, scales (layout.py); x, index [rows]
    (which row of x; the identity but for the head), rows, units, tiles; norm (see NORM); out: the epilogue's own tuple.
    Twin: `layout.restore` and a float64 product.
    """
    slices, mt, nt, few = shape.slices, shape.mt, shape.nt, shape.few
    work, factors_of = _work(form, shape), norm_factors(4 if few else 8)
    filled, emptied = _barrier(FULL, True, shape.threads), _barrier(EMPTY, False, shape.threads)
    set_bytes, ring_bytes = shape.set_bytes, shape.stages * shape.slot_bytes(form)
    own_tiles = shape.finishing // nt  # finishing warps that share the tiles of a row group
    warp_bytes, block_rows = 128 * shape.values, shape.rows

    def kernel(codes, scales, x, index, rows, units, tiles, norm, out):
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        first_row = cuda.blockIdx.y * block_rows
        end_row = min(rows, first_row + block_rows)
        stride = cuda.gridDim.x * mt
        base = cuda.blockIdx.x * mt
        let_next_start()
        if warp < slices:
            first = first_unit(warp, units, slices)
            end = first_unit(warp + 1, units, slices)
            ring = 2 * set_bytes + warp * ring_bytes
            sums = warp * warp_bytes + lane * (warp_bytes // 32)
            work(
                codes, scales, x, index, first_row, rows, units, tiles, base, stride, first, end, ring, sums, lane
            )  # fmt: skip
            return
        n = (warp - slices) % nt
        m = (warp - slices) // nt
        pair = lane & 3  # of rows
        if base < tiles:
            emptied(0)
        if base + stride < tiles:
            emptied(1)
        row = first_row + n * 8 + pair * 2
        r0 = types.float32(1.0)
        r1 = types.float32(1.0)
        wait_for_previous()
        if normed:
            squares, norm_tiles, inverse, epsilon = norm
            if first_row + n * 8 < rows:
                factor = factors_of(squares, index, first_row + n * 8, rows, norm_tiles, inverse, epsilon, lane)
                r0 = cuda.shfl_sync(0xFFFFFFFF, factor, pair * 2)
                r1 = cuda.shfl_sync(0xFFFFFFFF, factor, pair * 2 + 1)
        # two values a lane and row: rows 4 on do not exist, their lanes read what others do
        at = (lane & -4) * 8 + (pair & 1) * 16 if few else lane * 16
        set_ = u32(0)
        while base < tiles:
            ready = prepare(out, base + m, row, end_row, lane)
            filled(set_)
            for tile in range(m, mt, own_tiles):
                if tile > m:
                    ready = prepare(out, base + tile, row, end_row, lane)
                part = at + (tile * nt + n) * (slices * warp_bytes)
                if few:
                    a0, b0, a1, b1 = load_shared4(part)
                else:
                    a0, a1, b0, b1 = load_shared4(part)
                for s in range(1, slices):
                    more = load_shared4(part + s * warp_bytes)
                    if few:
                        a0, b0 = add(a0, more[0]), add(b0, more[1])
                        a1, b1 = add(a1, more[2]), add(b1, more[3])
                    else:
                        a0, a1 = add(a0, more[0]), add(a1, more[1])
                        b0, b1 = add(b0, more[2]), add(b1, more[3])
                if normed:
                    a0, b0 = mul(a0, r0), mul(b0, r0)
                    a1, b1 = mul(a1, r1), mul(b1, r1)
                finish(out, ready, a0, a1, b0, b1, base + tile, True, row, end_row, lane)
            if base + 2 * stride < tiles:
                emptied(set_)
            at ^= set_bytes
            set_ ^= 1
            base += stride

    return kernel
