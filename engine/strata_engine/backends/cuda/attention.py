"""Attention over paged cells, the same bits for a token and for a prompt.

A *chunk* is one page of 64 cells, aligned to positions; eight chunks are a *group*. A chunk's result for a query is
(maximum m, sum l of exp2(score - m), output o = sum of exp2(score - m) * value). Chunks of a group are merged in order,
and groups are merged in order, whoever computes them; so what else is in the step, and how the groups are spread over
blocks, does not show in the result. A query's own position bounds what it sees.

One block of eight warps takes a *query tile* (up to 16 * mt queries: neighbouring rows of one slot, times the heads
that share a key-value head) and one group at a time, a chunk a warp. With `spread` the groups of a tile go to several
blocks, which leave their results in scratch memory; the last to finish merges them.

Cells are halves: keys [page, kv head, part, cell, head_dim], values [page, kv head, part, head_dim, cell], so that both
are operand B of the tensor cores in plain 16-byte reads. parts = 2 keeps a high and a low half, float32-like cells.
Online softmax merge: Milakov and Gimelshein 2018. Twin: `attend_rows`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from numba import cuda, types

from .emit import (
    F32,
    I32,
    Emitter,
    F32Ptr,
    I32Ptr,
    U32Ptr,
    floats,
    i32,
    let_next_start,
    macro,
    wait_for_previous,
)
from .shapes import CELLS, THREADS, WARPS, AttentionShape, Cells

NEG_INF = float("-inf")


CELLS_TYPE = types.NamedTuple(
    (U32Ptr, U32Ptr, U32Ptr, I32Ptr, I32Ptr, I32Ptr, I32Ptr, U32Ptr, F32Ptr, I32Ptr, i32, i32, i32, i32, i32, i32),
    Cells,
)
SIGNATURE = types.void(CELLS_TYPE)


# -- merging


def _exp2(e: Emitter, value: Any) -> Any:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", F32, "=f,f", value)


def _greater(e: Emitter, a: Any, b: Any) -> Any:
    return e.asm("max.f32 $0, $1, $2;", F32, "=f,f,f", a, b)


def _sub(e: Emitter, a: Any, b: Any) -> Any:
    return e.asm("sub.rn.f32 $0, $1, $2;", F32, "=f,f,f", a, b)


def merge(e: Emitter, state: list[Any], part: list[Any], seen: tuple[Any, Any]) -> list[Any]:
    """Merge a later part into a state; both are [o x 4, m, l, m, l]: two outputs of each of two queries.

    `seen`: for each query, whether it sees the part at all; if not, its state stays.
    """
    out = list(state)
    for q in (0, 1):
        m_at, l_at = 4 + 2 * q, 5 + 2 * q
        top = _greater(e, state[m_at], part[m_at])
        old, new = _exp2(e, _sub(e, state[m_at], top)), _exp2(e, _sub(e, part[m_at], top))
        for at in (2 * q, 2 * q + 1, l_at):
            value = e.fma(part[at], new, e.mul(state[at], old))
            out[at] = e.b.select(seen[q], value, state[at])
        out[m_at] = e.b.select(seen[q], top, state[m_at])
    return out


def _empty(e: Emitter) -> list[Any]:
    """The state of nothing seen."""
    zero, low = e.f32(0.0), e.f32(NEG_INF)
    return [zero, zero, zero, zero, low, zero, low, zero]


def empty_state(quads: int) -> Any:
    """A macro: the state of nothing seen, [quads, 8]."""

    @macro(lambda: floats(8 * quads))
    def empty(e: Emitter) -> Any:
        return _empty(e) * quads

    return empty


def _merge_states(quads: int, mt: int) -> Any:
    """Macro: merge one state into another, for the queries at or after position `start`."""

    @macro(lambda state, *rest: state)
    def merge_states(e: Emitter, state: Any, part: Any, start: Any, limit: Any) -> Any:
        out = []
        for quad in range(quads):
            seen = _sees(e, limit, quad * mt // quads, start)
            out += merge(e, state[8 * quad : 8 * quad + 8], part[8 * quad : 8 * quad + 8], seen)
        return out

    return merge_states


def _sees(e: Emitter, limit: list[Any], m: int, start: Any) -> tuple[Any, Any]:
    """Whether the two queries of 16-query group m are at or past position `start`."""
    return tuple(e.b.icmp_signed(">=", limit[2 * m + q], start) for q in (0, 1))  # type: ignore[return-value]


def _merge_chunks(shape: AttentionShape) -> Any:
    """Macro: merge the chunks of a group, in order, from shared memory; each thread its own quads."""
    quads, mt, features = shape.quads, shape.mt, shape.head_dim // 8

    @macro(floats(8 * quads))
    def merge_chunks(e: Emitter, start: Any, chunks: Any, limit: Any, thread: Any) -> Any:
        b = e.b
        lane, warp = b.and_(thread, e.u32(31)), b.lshr(thread, e.u32(5))
        group = b.lshr(lane, e.u32(2))
        out = []
        for quad in range(quads):
            m = quad * mt // quads
            cells = [e.variable(value) for value in _empty(e)]
            piece = b.add(warp, e.u32(quad * WARPS))
            for chunk in range(WARPS):
                there = b.icmp_signed("<", e.u32(chunk), chunks)
                with b.if_then(there) if shape.spread else nullcontext():
                    at = b.add(b.shl(piece, e.u32(9)), b.shl(lane, e.u32(4)))
                    o = e.load_shared(b.add(at, e.u32(512 * chunk * mt * features)), 4)
                    sums = b.add(b.shl(group, e.u32(3)), e.u32(_sums_at(shape, chunk, m)))
                    low, high = e.load_shared(sums, 2), e.load_shared(b.add(sums, e.u32(64)), 2)
                    part = [e.real(v) for v in (*o, *low, *high)]
                    seen = _sees(e, limit, m, b.add(start, e.u32(CELLS * chunk)))
                    for cell, value in zip(cells, merge(e, [b.load(c) for c in cells], part, seen), strict=True):
                        b.store(value, cell)
            state = [b.load(cell) for cell in cells]
            out += state
        return out

    return merge_chunks


def _sums_at(shape: AttentionShape, chunk: int, m: int) -> int:
    """Byte offset of the (m, l) pairs of a chunk's 16 queries in shared memory."""
    outputs = WARPS * shape.queries * shape.head_dim * 4
    return outputs + (chunk * shape.mt + m) * 16 * 8


# -- one chunk


def _quad_reduce(e: Emitter, value: Any, combine: Any) -> Any:
    """Combine over the four lanes that share a query."""
    for step in (1, 2):
        value = combine(value, e.butterfly(value, step))
    return value


def _attend_chunk(shape: AttentionShape) -> Any:
    """Macro: one warp, one chunk: scores, softmax and outputs of a query tile, left in shared memory.

    q_at [2 mt]: word offset of the lane's queries; limit [2 mt]: their positions; page: index of (page, kv head).
    """
    mt, parts, head_dim = shape.mt, shape.parts, shape.head_dim
    blocks, plane = head_dim // 32, CELLS * head_dim // 2

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

        def load_value(feature: int) -> list[list[list[Any]]]:
            word = b.add(value_row, e.i64(feature * 8 * (CELLS // 2)))
            return [
                [e.load(values, b.add(word, e.i64(16 * half + plane * p)), 4) for p in range(parts)] for half in (0, 1)
            ]

        early = [load_value(feature) for feature in range(8 // parts if mt == 1 else 0)]
        scores = [[e.zeros(4) for _ in range(8)] for _ in range(mt)]
        for block in range(blocks):
            q = [_query(e, queries, q_at[2 * m : 2 * m + 2], q_low, block) for m in range(mt)]
            for tile in range(8):
                first = 32 * (tile // 4) + 2 * (tile % 4)
                word = b.add(key_row, e.i64(first * (head_dim // 2) + 16 * block))
                k = [e.load(keys, b.add(word, e.i64(plane * p)), 4) for p in range(parts)]
                for m in range(mt):
                    scores[m][tile] = _dot(e, scores[m][tile], q[m], k)
        weights = []
        for m in range(mt):
            masked = _mask(e, scores[m], limit[2 * m : 2 * m + 2], start, t)
            words, sums = _softmax(e, masked)
            weights.append(words)
            for q_, (top, total) in enumerate(sums):
                at = b.add(b.mul(warp, e.u32(128 * mt)), b.shl(g, e.u32(3)))
                e.store_shared(b.add(at, e.u32(_sums_at(shape, 0, m) + 64 * q_)), [e.bits(top), e.bits(total)])
        for feature in range(head_dim // 8):
            v = early[feature] if feature < len(early) else load_value(feature)
            for m in range(mt):
                o = e.zeros(4)
                for half in range(2):
                    o = _dot(e, o, weights[m][half], v[half])
                at = b.add(b.mul(warp, e.u32(512 * mt * (head_dim // 8))), b.shl(lane, e.u32(4)))
                at = b.add(at, e.u32(512 * (m * (head_dim // 8) + feature)))
                e.store_shared(at, [e.bits(x) for x in o])

    return attend


def _query(e: Emitter, queries: Any, at: list[Any], low: Any, block: int) -> tuple[list[Any], list[Any]]:
    """Operand A (high, low) of 32 features: 8 words each, rows g and g + 8 in turn."""
    out = []
    for part in range(2):
        rows = []
        for row in at:
            word = e.b.add(row, low) if part else row
            rows.append(e.load(queries, e.b.add(word, e.u32(16 * block)), 4))
        out.append([word for pair in zip(*rows, strict=True) for word in pair])
    return out[0], out[1]


def _dot(e: Emitter, c: list[Any], a: tuple[list[Any], list[Any]], parts: list[list[Any]]) -> list[Any]:
    """c + (a high + a low)(b high + b low) over 32 inputs, without low times low; always in this order."""
    pairs = [(a[0], parts[0]), (a[1], parts[0])] + ([(a[0], parts[1])] if len(parts) == 2 else [])
    for left, right in pairs:
        c = e.mma(c, left[:4], right[:2])
        c = e.mma(c, left[4:], right[2:])
    return c


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


def _softmax(e: Emitter, scores: list[list[Any]]) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Weights as operand A for each 32 cells, (high, low) of 8 words; and (m, l) of the lane's two queries."""
    zero, lowest = e.f32(0.0), e.f32(NEG_INF)
    tops, totals, weights = [], [], [list(s) for s in scores]
    for q in (0, 1):
        top = lowest
        for row in scores:
            for i in (2 * q, 2 * q + 1):
                top = _greater(e, top, row[i])
        top = _quad_reduce(e, top, lambda a, c: _greater(e, a, c))
        anchor = e.b.select(e.b.fcmp_ordered("==", top, lowest), zero, top)
        total = zero
        for row in weights:
            for i in (2 * q, 2 * q + 1):
                row[i] = _exp2(e, _sub(e, row[i], anchor))
                total = e.add(total, row[i])
        tops.append(top)
        totals.append(_quad_reduce(e, total, e.add))
    operands = []
    for half in range(2):
        high, low = [], []
        for tile in range(4 * half, 4 * half + 4):
            for q in (0, 1):
                (ah, al), (bh, bl) = (e.split(weights[tile][2 * q + i]) for i in (0, 1))
                high.append(e.pack(ah, bh))
                low.append(e.pack(al, bl))
        operands.append((high, low))
    return operands, list(zip(tops, totals, strict=True))


# -- the kernel


def _query_limits(mt: int) -> Any:
    """Macro: the lane's query indexes [2 mt] in the tile, for lane group g: 16 m + g and 16 m + g + 8."""

    @macro(types.UniTuple(i32, 2 * mt))
    def limits(e: Emitter, position: Any, first: Any, count: Any, heads: int, lane: Any) -> Any:
        out = []
        for m in range(mt):
            for half in (0, 8):
                row = _query_row(e, 16 * m + half, heads, count, lane)
                out.append(e.load(position, e.b.add(first, row), 1)[0])
        return out

    return limits


def _query_row(e: Emitter, base: int, heads: Any, count: Any, lane: Any) -> Any:
    """Row within the tile of query base + lane / 4; queries past the last row repeat it."""
    query = e.b.add(e.b.lshr(lane, e.u32(2)), e.u32(base))
    row = e.b.udiv(query, heads)
    return e.b.select(e.b.icmp_signed("<", row, count), row, e.b.sub(count, e.u32(1)))


def _query_offsets(shape: AttentionShape) -> Any:
    """Macro: word offsets [2 mt] of the lane's queries' first features."""
    half = shape.head_dim // 2

    @macro(types.UniTuple(i32, 2 * shape.mt))
    def offsets(e: Emitter, first: Any, count: Any, head: Any, row_words: Any, lane: Any) -> Any:
        b, out = e.b, []
        for m in range(shape.mt):
            for base in (0, 8):
                row = b.add(first, _query_row(e, 16 * m + base, e.u32(shape.heads), count, lane))
                query = b.add(b.lshr(lane, e.u32(2)), e.u32(16 * m + base))
                own = b.add(head, b.urem(query, e.u32(shape.heads)))
                word = b.add(b.mul(row, row_words), b.mul(own, e.u32(half)))
                out.append(b.add(word, b.shl(b.and_(lane, e.u32(3)), e.u32(2))))
        return out

    return offsets


def _scratch_word(e: Emitter, shape: AttentionShape, home: Any, i: int, thread: Any) -> Any:
    """Word offset of value i of this thread's state in piece `home` of scratch memory."""
    piece = e.b.mul(e.i64(home), e.i64(shape.partial_floats))
    return e.b.add(piece, e.i64(e.b.add(thread, e.u32(THREADS * i))))


def _keep(shape: AttentionShape) -> Any:
    """Macro: a state to piece `home` of scratch memory [quads, 8, thread]."""

    @macro(None)
    def keep(e: Emitter, state: Any, scratch: Any, home: Any, thread: Any) -> None:
        for i, value in enumerate(state):
            e.b.store(value, e.b.gep(scratch, [_scratch_word(e, shape, home, i, thread)]))

    return keep


def _recall(shape: AttentionShape) -> Any:
    """Macro: a state from scratch memory, read where all multiprocessors see the same (L2)."""

    @macro(floats(8 * shape.quads))
    def recall(e: Emitter, scratch: Any, home: Any, thread: Any) -> Any:
        out = []
        for i in range(8 * shape.quads):
            address = e.b.gep(scratch, [_scratch_word(e, shape, home, i, thread)])
            out.append(e.asm("ld.global.cg.f32 $0, [$1];", F32, "=f,l", address, effect=True))
        return out

    return recall


def _store_output(shape: AttentionShape) -> Any:
    """Macro: outputs o / l, split into halves, to [rows, 2, half_pitch]; feature order (head, feature)."""
    features = shape.head_dim // 8

    @macro(None)
    def store(
        e: Emitter, state: Any, out: Any, first: Any, count: Any, head: Any, head_dim: Any, half_pitch: Any,
        thread: Any,
    ) -> None:  # fmt: skip
        b = e.b
        lane, warp = b.and_(thread, e.u32(31)), b.lshr(thread, e.u32(5))
        group, t2 = b.lshr(lane, e.u32(2)), b.shl(b.and_(lane, e.u32(3)), e.u32(1))
        for quad in range(shape.quads):
            m = quad * shape.mt // shape.quads
            piece = b.add(warp, e.u32(quad * WARPS - m * features))
            feature = b.add(b.shl(piece, e.u32(3)), t2)
            for q in (0, 1):
                query = b.add(group, e.u32(16 * m + 8 * q))
                row, own = b.udiv(query, e.u32(shape.heads)), b.urem(query, e.u32(shape.heads))
                mine = state[8 * quad : 8 * quad + 8]
                inverse = e.asm("rcp.rn.f32 $0, $1;", F32, "=f,f", mine[5 + 2 * q])
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
    """Add one to a counter; its value before."""
    address = e.b.gep(tickets, [e.i64(index)])
    return e.asm("atom.global.add.s32 $0, [$1], 1;", I32, "=r,l,~{memory}", address, effect=True)


def attention_kernel(shape: AttentionShape) -> Any:
    """The kernel. Grid: (query tiles, heads / shape.heads, blocks that share a tile's groups); block: 256 threads."""
    attend, merge_chunks = _attend_chunk(shape), _merge_chunks(shape)
    merge_states, empty = _merge_states(shape.quads, shape.mt), empty_state(shape.quads)
    limits, offsets, store = _query_limits(shape.mt), _query_offsets(shape), _store_output(shape)
    keep, recall = _keep(shape), _recall(shape)
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
            cuda.threadfence()
            cuda.syncthreads()
            if thread == 0:
                shares = min(groups, cuda.gridDim.z)
                last[0] = _take_ticket(args.tickets, tile) == shares - 1
                if last[0]:
                    args.tickets[tile] = 0
            cuda.syncthreads()
            if not last[0]:
                return
            cuda.threadfence()
            for group in range(groups):
                state = recall(args.scratch, tile * args.groups + group, thread)
                total = merge_states(total, state, group * (CELLS * WARPS), limit)
        store(total, args.out, first, count, head, args.head_dim, args.half_pitch, thread)

    return kernel
