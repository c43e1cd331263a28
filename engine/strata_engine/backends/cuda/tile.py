"""The matmul kernel for many rows: weights unpacked once for many, activations in shared memory. See matmul.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from ...gpu.emit import (
    Emitter,
    constants,
    copy_commit,
    copy_wait,
    i32,
    let_next_start,
    load_shared1,
    load_shared4,
    macro,
    mul,
    store_shared1,
    wait_for_previous,
)
from .layout import UNIT, Format
from .matmul import first_unit, norm_factors, row_at, unit_step
from .shapes import TileShape


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
            row = row_at(e, index, b.add(first_row, b.lshr(chunk, e.u32(4))), rows)
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

        def load_x(n: int, half: int) -> list[list[Any]]:
            at = b.add(halves[half], e.u32(1024 * n))
            return [e.load_shared(at, 4), e.load_shared(b.add(at, e.u32(plane)), 4)]

        return unit_step(e, form, mt, nt, acc, codes, scales, load_x, lane)

    return step


@macro(lambda totals, sums: totals)
def _add_all(e: Emitter, totals: Any, sums: Any) -> Any:
    return [e.add(total, own) for total, own in zip(totals, sums, strict=True)]


def _store_all(parts: int, threads: int) -> Any:
    """Macro: totals [parts, 4] to shared memory [part, thread, 4], where a loop can index them."""

    @macro(None)
    def store(e: Emitter, totals: Any, offset: Any) -> None:
        for i in range(parts):
            at = e.b.add(offset, e.u32(16 * threads * i))
            e.store_shared(at, [e.bits(value) for value in totals[4 * i : 4 * i + 4]])

    return store


def tile_kernel(form: Format, shape: TileShape, prepare: Any, finish: Any, normed: bool) -> Any:
    """A kernel for many rows: the same operations as `slice_kernel`, slice after slice in each warp.

    Grid: (blocks of `shape.rows` rows, blocks of `shape.features` features): neighbours share weights in L2. Shared
    memory: norm factors [rows], then `stages` stages of one unit; at the end the totals [part, thread, 4] instead.
    """
    slices, mt, nt, stages, threads = shape.slices, shape.mt, shape.nt, shape.stages, shape.threads
    rows_a_block, parts, warps, across = shape.rows, shape.mt * shape.nt, shape.threads // 32, shape.across
    copies = Copies(form, shape)
    sources, stage, step = _sources(copies), _stage(copies), _shared_step(form, shape)
    store_all, zero, nothing = _store_all(parts, threads), constants(4 * parts, 0.0), constants(4 * parts, -0.0)
    wait, factors_of = copy_wait(stages - 2), norm_factors()
    ring = 4 * rows_a_block
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
                factor = factors_of(squares, index, first_row + i, rows, norm_tiles, inverse, epsilon, lane)
                if lane < 8:
                    store_shared1(4 * (i + lane), factor)
        totals = nothing()  # -0: adding to it changes no bit
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
            totals = _add_all(totals, acc)
        cuda.syncthreads()
        store_all(totals, ring + 16 * thread)
        for i in range(parts):
            a0, a1, b0, b1 = load_shared4(ring + (i * threads + thread) * 16)
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
