"""The matmul kernel for few rows: a warp a slice of K, weights read once at the speed of memory. See matmul.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, types

from .emit import Emitter, add, let_next_start, load_shared4, macro, mul, wait_for_previous
from .layout import Format
from .matmul import first_unit, norm_factors, row_at, unit_step
from .shapes import SliceShape


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
        row = row_at(e, index, b.add(b.add(first, group), e.u32(8 * n)), rows)
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
    work, factors_of = _work(form, shape), norm_factors()
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
                factor = factors_of(squares, index, first_row + n * 8, rows, norm_tiles, inverse, epsilon, lane)
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
