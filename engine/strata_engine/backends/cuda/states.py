"""States of attention and how they are merged: (outputs, maximum, sum) of a part of the cells. See attention.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from .emit import F32, Emitter, floats, macro
from .shapes import CELLS, WARPS, AttentionShape

NEG_INF = float("-inf")


def exp2(e: Emitter, value: Any) -> Any:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", F32, "=f,f", value)


def greater(e: Emitter, a: Any, b: Any) -> Any:
    return e.asm("max.f32 $0, $1, $2;", F32, "=f,f,f", a, b)


def sub(e: Emitter, a: Any, b: Any) -> Any:
    return e.asm("sub.rn.f32 $0, $1, $2;", F32, "=f,f,f", a, b)


def merge(e: Emitter, state: list[Any], part: list[Any], seen: tuple[Any, Any]) -> list[Any]:
    """Merge a later part into a state; both are [o x 4, m, l, m, l]: two outputs of each of two queries.

    `seen`: for each query, whether it sees the part at all; if not, its state stays.
    """
    out = list(state)
    for q in (0, 1):
        m_at, l_at = 4 + 2 * q, 5 + 2 * q
        top = greater(e, state[m_at], part[m_at])
        old, new = exp2(e, sub(e, state[m_at], top)), exp2(e, sub(e, part[m_at], top))
        for at in (2 * q, 2 * q + 1, l_at):
            value = e.fma(part[at], new, e.mul(state[at], old))
            out[at] = e.b.select(seen[q], value, state[at])
        out[m_at] = e.b.select(seen[q], top, state[m_at])
    return out


def nothing(e: Emitter) -> list[Any]:
    """The state of nothing seen."""
    zero, low = e.f32(0.0), e.f32(NEG_INF)
    return [zero, zero, zero, zero, low, zero, low, zero]


def empty_state(quads: int) -> Any:
    """A macro: the state of nothing seen, [quads, 8]."""

    @macro(lambda: floats(8 * quads))
    def empty(e: Emitter) -> Any:
        return nothing(e) * quads

    return empty


def states_merger(quads: int, mt: int) -> Any:
    """Macro: merge one state into another, for the queries at or after position `start`."""

    @macro(lambda state, *rest: state)
    def merge_states(e: Emitter, state: Any, part: Any, start: Any, limit: Any) -> Any:
        return merge_all(e, state, part, start, limit, mt)

    return merge_states


def merge_all(e: Emitter, state: list[Any], part: list[Any], start: Any, limit: list[Any], mt: int) -> list[Any]:
    """`merge` for each of the quads of a state [quads, 8]; the part's first cell is at position `start`."""
    out, quads = [], len(state) // 8
    for quad in range(quads):
        seen = sees(e, limit, quad * mt // quads, start)
        out += merge(e, state[8 * quad : 8 * quad + 8], part[8 * quad : 8 * quad + 8], seen)
    return out


def sees(e: Emitter, limit: list[Any], m: int, start: Any) -> tuple[Any, Any]:
    """Whether the two queries of 16-query group m are at or past position `start`."""
    return tuple(e.b.icmp_signed(">=", limit[2 * m + q], start) for q in (0, 1))  # type: ignore[return-value]


def chunks_merger(shape: AttentionShape) -> Any:
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
            cells = [e.variable(value) for value in nothing(e)]
            piece = b.add(warp, e.u32(quad * WARPS))
            for chunk in range(WARPS):
                there = b.icmp_signed("<", e.u32(chunk), chunks)
                with b.if_then(there) if shape.spread else nullcontext():
                    at = b.add(b.shl(piece, e.u32(9)), b.shl(lane, e.u32(4)))
                    o = e.load_shared(b.add(at, e.u32(512 * chunk * mt * features)), 4)
                    sums = b.add(b.shl(group, e.u32(3)), e.u32(sums_at(shape, chunk, m)))
                    low, high = e.load_shared(sums, 2), e.load_shared(b.add(sums, e.u32(64)), 2)
                    part = [e.real(v) for v in (*o, *low, *high)]
                    seen = sees(e, limit, m, b.add(start, e.u32(CELLS * chunk)))
                    for cell, value in zip(cells, merge(e, [b.load(c) for c in cells], part, seen), strict=True):
                        b.store(value, cell)
            state = [b.load(cell) for cell in cells]
            out += state
        return out

    return merge_chunks


def sums_at(shape: AttentionShape, chunk: int, m: int) -> int:
    """Byte offset of the (m, l) pairs of a chunk's 16 queries in shared memory."""
    outputs = WARPS * shape.queries * shape.head_dim * 4
    return outputs + (chunk * shape.mt + m) * 16 * 8
