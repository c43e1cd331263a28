"""Attention over paged cells, the same bits for a token and for a prompt.

A *chunk* is one page of 64 cells, aligned to positions; four chunks are a *group*. A chunk's result for a query is
(maximum m, sum l of exp2(score - m), output o = sum of exp2(score - m) * value). Chunks of a group are merged in order,
and groups are merged in order, whoever computes them; so what else is in the step, and how the groups are spread over
blocks, does not show in the result. A query's own position bounds what it sees.

One block of four warps takes a *query tile* (8 or 16 queries: neighbouring rows of one slot, times the heads
that share a key-value head) and one group at a time, a chunk a warp. With `spread` the groups of a tile go to several
blocks, which leave their results in scratch memory; the last to finish merges them.

Cells are halves: keys [page, kv head, part, cell, head_dim], values [page, kv head, part, head_dim, cell], so that both
are operand B of the tensor cores in plain 16-byte reads. parts = 2 keeps a high and a low half, float32-like cells.
Online softmax merge: Milakov and Gimelshein 2018. Twin: `attend_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda, types
from numpy.typing import NDArray

from ...gpu.emit import (
    F32,
    I32,
    Emitter,
    F32Ptr,
    I32Ptr,
    U32Ptr,
    i32,
    let_next_start,
    macro,
    wait_for_previous,
)
from .shapes import CELLS, THREADS, WARPS, AttentionShape, Cells
from .states import NEG_INF, chunks_merger, empty_state, exp2, greater, merge_all, states_merger, sub, sums_at


def attend_rows(
    queries: NDArray[np.float64], keys: NDArray[np.float64], values: NDArray[np.float64], position: NDArray[np.int32]
) -> NDArray[np.float64]:
    """The twin: queries [rows, heads, dim], scaled for exp2; keys and values [cells, kv heads, dim] of one slot.

    Gives [rows, heads, dim]; row r sees the cells up to position[r].
    """
    out = np.empty_like(queries)
    shared = queries.shape[1] // keys.shape[1]  # heads that share a key-value head
    for row, last in enumerate(position):
        for head in range(queries.shape[1]):
            scores = keys[: last + 1, head // shared] @ queries[row, head]
            weights = np.exp2(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values[: last + 1, head // shared]
    return out


CELLS_TYPE = types.NamedTuple(
    (U32Ptr, U32Ptr, U32Ptr, I32Ptr, I32Ptr, I32Ptr, I32Ptr, U32Ptr, F32Ptr, I32Ptr, i32, i32, i32, i32, i32, i32),
    Cells,
)
SIGNATURE = types.void(CELLS_TYPE)


# -- one chunk


def _quad_reduce(e: Emitter, value: Any, combine: Any) -> Any:
    """Combine over the four lanes that share a query."""
    for step in (1, 2):
        value = combine(value, e.butterfly(value, step))
    return value


def _attend_chunk(shape: AttentionShape) -> Any:
    """Macro: one warp, one chunk: scores, softmax and outputs of a query tile, left in shared memory.

    q_at [own]: word offset of the lane's queries; limit [own]: their positions; page: index of (page, kv head).
    """
    own, parts, head_dim = shape.own, shape.parts, shape.head_dim
    blocks, plane, features = head_dim // 32, CELLS * head_dim // 2, head_dim // 8

    @macro(None)
    def attend(
        e: Emitter, queries: Any, q_at: Any, q_low: Any, keys: Any, values: Any, page: Any, limit: Any, start: Any,
        warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        b = e.b
        base = b.mul(e.i64(page), e.i64(plane * parts))
        g, t = b.lshr(lane, e.u32(2)), b.and_(lane, e.u32(3))
        t4 = b.shl(t, e.u32(2))
        # column g of score tile j is cell 8 * (g / 2) + g % 2 + 2 j of its 32: lane t then owns cells 8 t .. 8 t + 7
        cell = b.add(b.shl(b.lshr(g, e.u32(1)), e.u32(3)), b.and_(g, e.u32(1)))
        key_row = b.add(base, e.i64(b.add(b.mul(cell, e.u32(head_dim // 2)), t4)))
        value_row = b.add(base, e.i64(b.add(b.mul(g, e.u32(CELLS // 2)), t4)))

        def load_key(tile: int, block: int) -> list[list[Any]]:
            first = 32 * (tile // 4) + 2 * (tile % 4)
            word = b.add(key_row, e.i64(first * (head_dim // 2) + 16 * block))
            return [e.load(keys, b.add(word, e.i64(plane * p)), 4) for p in range(parts)]

        def load_value(feature: int) -> list[list[list[Any]]]:
            word = b.add(value_row, e.i64(feature * 8 * (CELLS // 2)))
            return [
                [e.load(values, b.add(word, e.i64(16 * half + plane * p)), 4) for p in range(parts)] for half in (0, 1)
            ]

        # as many loads on their way at once as registers hold
        many = range(8 if shape.spread and blocks * parts <= 4 else 0)
        loaded = {(tile, block): load_key(tile, block) for block in range(blocks) for tile in many}
        early = [load_value(feature) for feature in range(8 // parts)]
        scores: list[list[Any]] = []
        together = 8 // own  # tiles whose sums are made side by side
        for first in range(0, 8, together):
            tiles = range(first, first + together)
            sums = [_zeros(e, own, parts) for _ in tiles]
            for block in range(blocks):
                q = _query(e, queries, q_at, q_low, block)
                for i, tile in enumerate(tiles):
                    sums[i] = _dot(e, sums[i], q, loaded.get((tile, block)) or load_key(tile, block))
            scores += [_total(e, own, tile_sums) for tile_sums in sums]
        weights, totals = _softmax(e, _mask(e, scores, limit, start, t))
        for q_, (top, total) in enumerate(totals):
            at = b.add(b.mul(warp, e.u32(64 * own)), b.shl(g, e.u32(3)))
            e.store_shared(b.add(at, e.u32(sums_at(shape, 0) + 64 * q_)), [e.bits(top), e.bits(total)])
        for feature in range(features):
            v = early[feature] if feature < len(early) else load_value(feature)
            o = _zeros(e, own, parts)
            for half in range(2):
                o = _dot(e, o, weights[half], v[half])
            at = b.add(b.mul(warp, e.u32(256 * own * features)), b.mul(lane, e.u32(8 * own)))
            at = b.add(at, e.u32(256 * own * feature))
            e.store_shared(at, [e.bits(x) for x in _total(e, own, o)])

    return attend


def _operand(first: list[Any], second: list[Any]) -> list[Any]:
    """Operand A of two instructions: 8 words, rows g (of `first`) and g + 8 (of `second`) in turn."""
    return [word for pair in zip(first, second, strict=True) for word in pair]


def _query(e: Emitter, queries: Any, at: list[Any], low: Any, block: int) -> list[list[Any]]:
    """32 features of a lane's queries as operands A: [high above low] of one query, or [high, low] of two."""
    halves = []
    for part in range(2):
        words = [e.b.add(row, low) if part else row for row in at]
        halves.append([e.load(queries, e.b.add(word, e.u32(16 * block)), 4) for word in words])
    if len(at) == 1:
        return [_operand(halves[0][0], halves[1][0])]
    return [_operand(*rows) for rows in halves]


# A product of halves with `parts` parts is made of separate sums, one of them (own = 1) of two kinds of rows:
# high * first part, low * first part, high * second part; low * low is left out. `_total` adds them in this order.


def _zeros(e: Emitter, own: int, parts: int) -> list[list[Any]]:
    return [e.zeros(4) for _ in range(own + parts - 1)]


def _dot(e: Emitter, sums: list[list[Any]], a: list[list[Any]], parts: list[list[Any]]) -> list[list[Any]]:
    """Add a product over 32 inputs to its separate sums."""
    pairs = [(operand, parts[0]) for operand in a] + [(a[0], part) for part in parts[1:]]
    return [
        e.mma(e.mma(c, left[:4], right[:2]), left[4:], right[2:]) for c, (left, right) in zip(sums, pairs, strict=True)
    ]


def _total(e: Emitter, own: int, sums: list[list[Any]]) -> list[Any]:
    """The product: two values of each of a lane's queries."""
    rows = [sums[0][:2], sums[0][2:], *(c[:2] for c in sums[1:])] if own == 1 else sums
    out = rows[0]
    for more in rows[1:]:
        out = [e.add(x, y) for x, y in zip(out, more, strict=True)]
    return out


def _mask(e: Emitter, scores: list[list[Any]], limit: list[Any], start: Any, t: Any) -> list[list[Any]]:
    """Scores of cells past a query's own position become -inf."""
    low = e.f32(NEG_INF)
    base = e.b.add(start, e.b.shl(t, e.u32(3)))
    out = []
    for tile, values in enumerate(scores):
        first = 32 * (tile // 4) + 2 * (tile % 4)
        row = []
        for i, value in enumerate(values):
            cell = e.b.add(base, e.u32(first + i % 2))
            row.append(e.b.select(e.b.icmp_signed("<=", cell, limit[i // 2]), value, low))
        out.append(row)
    return out


def _softmax(e: Emitter, scores: list[list[Any]]) -> tuple[list[list[list[Any]]], list[tuple[Any, Any]]]:
    """Weights as operands A for each 32 cells, as `_query` gives them; and (m, l) of the lane's queries."""
    zero, lowest = e.f32(0.0), e.f32(NEG_INF)
    own = len(scores[0]) // 2
    totals, weights = [], [list(s) for s in scores]
    for q in range(own):
        top = lowest
        for row in scores:
            for i in (2 * q, 2 * q + 1):
                top = greater(e, top, row[i])
        top = _quad_reduce(e, top, lambda a, c: greater(e, a, c))
        anchor = e.b.select(e.b.fcmp_ordered("==", top, lowest), zero, top)
        total = zero
        for row in weights:
            for i in (2 * q, 2 * q + 1):
                row[i] = exp2(e, sub(e, row[i], anchor))
                total = e.add(total, row[i])
        totals.append((top, _quad_reduce(e, total, e.add)))
    operands = []
    for half in range(2):
        rows: list[list[list[Any]]] = [[[] for _ in range(own)] for _ in range(2)]  # [high, low][query]
        for tile in range(4 * half, 4 * half + 4):
            for q in range(own):
                (ah, al), (bh, bl) = (e.split(weights[tile][2 * q + i]) for i in (0, 1))
                rows[0][q].append(e.pack(ah, bh))
                rows[1][q].append(e.pack(al, bl))
        operands.append([_operand(rows[0][0], rows[1][0])] if own == 1 else [_operand(*part) for part in rows])
    return operands, totals


# -- the kernel


def _query_limits(shape: AttentionShape) -> Any:
    """Macro: positions [own] of the lane's queries in the tile: g (and g + 8) for lane group g."""
    queries = range(0, shape.queries, 8)

    @macro(types.UniTuple(i32, len(queries)))
    def limits(e: Emitter, position: Any, first: Any, count: Any, heads: int, lane: Any) -> Any:
        out = []
        for base in queries:
            row = _query_row(e, base, heads, count, lane)
            out.append(e.load(position, e.b.add(first, row), 1)[0])
        return out

    return limits


def _query_row(e: Emitter, base: int, heads: Any, count: Any, lane: Any) -> Any:
    """Row within the tile of query base + lane / 4; queries past the last row repeat it."""
    query = e.b.add(e.b.lshr(lane, e.u32(2)), e.u32(base))
    row = e.b.udiv(query, heads)
    return e.b.select(e.b.icmp_signed("<", row, count), row, e.b.sub(count, e.u32(1)))


def _query_offsets(shape: AttentionShape) -> Any:
    """Macro: word offsets [own] of the lane's queries' first features."""
    half, queries = shape.head_dim // 2, range(0, shape.queries, 8)

    @macro(types.UniTuple(i32, len(queries)))
    def offsets(e: Emitter, first: Any, count: Any, head: Any, row_words: Any, lane: Any) -> Any:
        b, out = e.b, []
        for base in queries:
            row = b.add(first, _query_row(e, base, e.u32(shape.heads), count, lane))
            query = b.add(b.lshr(lane, e.u32(2)), e.u32(base))
            own = b.add(head, b.urem(query, e.u32(shape.heads)))
            word = b.add(b.mul(row, row_words), b.mul(own, e.u32(half)))
            out.append(b.add(word, b.shl(b.and_(lane, e.u32(3)), e.u32(2))))
        return out

    return offsets


def _scratch_word(e: Emitter, shape: AttentionShape, home: Any, i: int, thread: Any) -> Any:
    """Word offset of values 4 i .. 4 i + 3 of this thread's state in piece `home` of scratch memory."""
    piece = e.b.mul(e.i64(home), e.i64(shape.partial_floats))
    return e.b.add(piece, e.i64(e.b.shl(e.b.add(thread, e.u32(THREADS * i)), e.u32(2))))


def _keep(shape: AttentionShape) -> Any:
    """Macro: a state to piece `home` of scratch memory [quads, own, thread, 4]."""

    @macro(None)
    def keep(e: Emitter, state: Any, scratch: Any, home: Any, thread: Any) -> None:
        for i in range(shape.own * shape.quads):
            address = e.b.gep(scratch, [_scratch_word(e, shape, home, i, thread)])
            own = state[4 * i : 4 * i + 4]
            text = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
            e.asm(text, ir.VoidType(), "l,f,f,f,f,~{memory}", address, *own, effect=True)

    return keep


def _recall(e: Emitter, shape: AttentionShape, scratch: Any, home: Any, thread: Any) -> list[Any]:
    """A state from scratch memory, read where all multiprocessors see the same (L2)."""
    out: list[Any] = []
    for i in range(shape.own * shape.quads):
        address = e.b.gep(scratch, [_scratch_word(e, shape, home, i, thread)])
        out += e.asm("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", [F32] * 4, "=f,=f,=f,=f,l", address, effect=True)
    return out


def _merge_kept(shape: AttentionShape) -> Any:
    """Macro: merge the groups left in pieces `home` on, in order, several of them on their way at once."""
    depth = max(1, 16 // (shape.own * shape.quads))

    @macro(lambda state, *rest: state)
    def merge_kept(e: Emitter, state: Any, scratch: Any, home: Any, groups: Any, limit: Any, thread: Any) -> Any:
        b = e.b
        cells = [e.variable(value) for value in state]
        last = b.sub(groups, e.u32(1))
        with e.loop(e.u32(0), groups, depth) as group:
            parts = []
            for i in range(depth):
                own = b.add(group, e.u32(i))
                own = b.select(b.icmp_signed("<", own, last), own, last)
                parts.append(_recall(e, shape, scratch, b.add(home, own), thread))
            now = [b.load(cell) for cell in cells]
            for i, part in enumerate(parts):  # a group past the last starts past every query and changes nothing
                start = b.mul(b.add(group, e.u32(i)), e.u32(CELLS * WARPS))
                now = merge_all(e, shape, now, part, start, limit)
            for cell, value in zip(cells, now, strict=True):
                b.store(value, cell)
        return [b.load(cell) for cell in cells]

    return merge_kept


def _store_output(shape: AttentionShape) -> Any:
    """Macro: outputs o / l, split into halves, to [rows, 2, half_pitch]; feature order (head, feature)."""
    size = 4 * shape.own

    @macro(None)
    def store(
        e: Emitter, state: Any, out: Any, first: Any, count: Any, head: Any, head_dim: Any, half_pitch: Any,
        thread: Any,
    ) -> None:  # fmt: skip
        b = e.b
        lane, warp = b.and_(thread, e.u32(31)), b.lshr(thread, e.u32(5))
        group, t2 = b.lshr(lane, e.u32(2)), b.shl(b.and_(lane, e.u32(3)), e.u32(1))
        for quad in range(shape.quads):
            piece = b.add(warp, e.u32(quad * WARPS))
            feature = b.add(b.shl(piece, e.u32(3)), t2)
            mine = state[size * quad : size * (quad + 1)]
            for q in range(shape.own):
                query = b.add(group, e.u32(8 * q))
                row, own = b.udiv(query, e.u32(shape.heads)), b.urem(query, e.u32(shape.heads))
                inverse = e.asm("rcp.rn.f32 $0, $1;", F32, "=f,f", mine[2 * shape.own + 2 * q + 1])
                (ah, al), (bh, bl) = (e.split(e.mul(mine[2 * q + i], inverse)) for i in (0, 1))
                real = b.and_(b.icmp_signed("<", row, count), b.icmp_signed("<", feature, head_dim))
                with b.if_then(real):
                    word = b.lshr(b.add(b.mul(b.add(head, own), head_dim), feature), e.u32(1))
                    word = b.add(b.mul(b.add(first, row), b.shl(half_pitch, e.u32(1))), word)
                    b.store(e.pack(ah, bh), b.gep(out, [e.i64(word)]))
                    b.store(e.pack(al, bl), b.gep(out, [e.i64(b.add(word, half_pitch))]))

    return store


@macro(i32)
def _take_ticket(e: Emitter, tickets: Any, index: Any) -> Any:
    """Add one to a counter; its value before. What this block wrote is seen by who takes a later ticket."""
    address = e.b.gep(tickets, [e.i64(index)])
    return e.asm("atom.acq_rel.gpu.global.add.s32 $0, [$1], 1;", I32, "=r,l,~{memory}", address, effect=True)


def _prefetch(shape: AttentionShape) -> Any:
    """Macro: bring a page's keys and values of a head closer, before the kernel before has written the newest."""
    page_bytes = CELLS * shape.head_dim * 2 * shape.parts

    @macro(None)
    def prefetch(e: Emitter, keys: Any, values: Any, page: Any, lane: Any) -> None:
        b = e.b
        for cells in (keys, values):
            first = b.add(b.mul(e.i64(page), e.i64(page_bytes // 4)), e.i64(b.shl(lane, e.u32(5))))
            for line in range(0, page_bytes, 128 * 32):
                address = b.gep(cells, [b.add(first, e.i64(line // 4))])
                e.asm("prefetch.global.L2 [$0];", ir.VoidType(), "l", address, effect=True)

    return prefetch


def attention_kernel(shape: AttentionShape) -> Any:
    """The kernel. Grid: (query tiles, heads / shape.heads, blocks that share a tile's groups); block: 128 threads."""
    attend, merge_chunks = _attend_chunk(shape), chunks_merger(shape)
    merge_states, empty = states_merger(shape), empty_state(shape)
    limits, offsets, store = _query_limits(shape), _query_offsets(shape), _store_output(shape)
    keep, merge_kept, prefetch = _keep(shape), _merge_kept(shape), _prefetch(shape)
    heads, spread = shape.heads, shape.spread
    half = shape.head_dim // 2

    def kernel(args):
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        last = cuda.shared.array(1, types.int32)
        let_next_start()
        first = args.tiles[2 * cuda.blockIdx.x]
        count = args.tiles[2 * cuda.blockIdx.x + 1]
        if count == 0:
            return
        chunks = args.position[first + count - 1] // CELLS + 1
        groups = (chunks + WARPS - 1) // WARPS
        if cuda.blockIdx.z >= groups:
            return
        head = cuda.blockIdx.y * heads
        kv_head = head // (args.heads // args.kv_heads)
        table = args.slot[first] * args.pages_a_slot
        limit = limits(args.position, first, count, heads, lane)
        q_at = offsets(first, count, head, args.heads * (2 * half), lane)
        tile = cuda.blockIdx.x * cuda.gridDim.y + cuda.blockIdx.y
        total = empty()
        page = args.pages[table + min(cuda.blockIdx.z * WARPS + warp, chunks - 1)]
        if spread:
            prefetch(args.keys, args.values, page * args.kv_heads + kv_head, lane)
        wait_for_previous()
        for group in range(cuda.blockIdx.z, groups, cuda.gridDim.z):
            chunk = group * WARPS + warp
            if chunk < chunks:
                at = page * args.kv_heads + kv_head
                start = chunk * CELLS
                attend(args.queries, q_at, args.heads * half, args.keys, args.values, at, limit, start, warp, lane)
            page = args.pages[table + min(chunk + cuda.gridDim.z * WARPS, chunks - 1)]
            cuda.syncthreads()
            state = merge_chunks(group * (CELLS * WARPS), chunks - group * WARPS, limit, thread)
            if spread and groups > 1:
                keep(state, args.scratch, tile * args.groups + group, thread)
            else:
                total = merge_states(total, state, group * (CELLS * WARPS), limit)
            cuda.syncthreads()
        if spread and groups > 1:
            if thread == 0:
                shares = min(groups, cuda.gridDim.z)
                last[0] = _take_ticket(args.tickets, tile) == shares - 1
                if last[0]:
                    args.tickets[tile] = 0
            cuda.syncthreads()
            if not last[0]:
                return
            total = merge_kept(total, args.scratch, tile * args.groups, groups, limit, thread)
        store(total, args.out, first, count, head, args.head_dim, args.half_pitch, thread)

    return kernel
