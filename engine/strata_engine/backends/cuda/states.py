"""States of attention and how they are merged: (outputs, maximum, sum) of a part of the cells. See attention.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ...gpu.emit import F32, Emitter, floats, macro
from .shapes import CELLS, WARPS, AttentionShape

NEG_INF = float("-inf")


def exp2(e: Emitter, value: Any) -> Any:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", F32, "=f,f", value)


def greater(e: Emitter, a: Any, b: Any) -> Any:
    return e.asm("max.f32 $0, $1, $2;", F32, "=f,f,f", a, b)


def sub(e: Emitter, a: Any, b: Any) -> Any:
    return e.asm("sub.rn.f32 $0, $1, $2;", F32, "=f,f,f", a, b)


def merge(e: Emitter, state: list[Any], part: list[Any], seen: list[Any]) -> list[Any]:
    """Merge a later part into a state; both are a quad: [two outputs, of each query; m, l, of each query].

    `seen`: for each query, whether it sees the part at all; if not, its state stays.
    """
    out = list(state)
    for q, sees_it in enumerate(seen):
        m_at = 2 * len(seen) + 2 * q
        l_at = m_at + 1
        top = greater(e, state[m_at], part[m_at])
        old, new = exp2(e, sub(e, state[m_at], top)), exp2(e, sub(e, part[m_at], top))
        for at in (2 * q, 2 * q + 1, l_at):
            value = e.fma(part[at], new, e.mul(state[at], old))
            out[at] = e.b.select(sees_it, value, state[at])
        out[m_at] = e.b.select(sees_it, top, state[m_at])
    return out


def nothing(e: Emitter, own: int) -> list[Any]:
    """The quad of nothing seen."""
    zero, low = e.f32(0.0), e.f32(NEG_INF)
    return [zero] * (2 * own) + [low, zero] * own


def empty_state(shape: AttentionShape) -> Any:
    """A macro: the state of nothing seen, [quads, 4 own]."""

    @macro(lambda: floats(4 * shape.own * shape.quads))
    def empty(e: Emitter) -> Any:
        return nothing(e, shape.own) * shape.quads

    return empty


def states_merger(shape: AttentionShape) -> Any:
    """Macro: merge one state into another, for the queries at or after position `start`."""

    @macro(lambda state, *rest: state)
    def merge_states(e: Emitter, state: Any, part: Any, start: Any, limit: Any) -> Any:
        return merge_all(e, shape, state, part, start, limit)

    return merge_states


def merge_all(
    e: Emitter, shape: AttentionShape, state: list[Any], part: list[Any], start: Any, limit: list[Any]
) -> list[Any]:
    """`merge` for each quad of a state; the part's first cell is at position `start`."""
    out, size, seen = [], 4 * shape.own, sees(e, limit, start)
    for quad in range(shape.quads):
        out += merge(e, state[size * quad : size * (quad + 1)], part[size * quad : size * (quad + 1)], seen)
    return out


def sees(e: Emitter, limit: list[Any], start: Any) -> list[Any]:
    """Whether each of a lane's queries is at or past position `start`."""
    return [e.b.icmp_signed(">=", position, start) for position in limit]


def chunks_merger(shape: AttentionShape) -> Any:
    """Macro: merge the chunks of a group, in order, from shared memory; each thread its own quads."""
    own, quads, features = shape.own, shape.quads, shape.head_dim // 8

    @macro(floats(4 * own * quads))
    def merge_chunks(e: Emitter, start: Any, chunks: Any, limit: Any, thread: Any) -> Any:
        b = e.b
        lane, warp = b.and_(thread, e.u32(31)), b.lshr(thread, e.u32(5))
        group = b.lshr(lane, e.u32(2))
        out = []
        for quad in range(quads):
            cells = [e.variable(value) for value in nothing(e, own)]
            piece = b.add(warp, e.u32(quad * WARPS))
            for chunk in range(WARPS):
                there = b.icmp_signed("<", e.u32(chunk), chunks)
                with b.if_then(there) if shape.spread else nullcontext():
                    at = b.add(b.mul(piece, e.u32(256 * own)), b.mul(lane, e.u32(8 * own)))
                    words = e.load_shared(b.add(at, e.u32(256 * own * chunk * features)), 2 * own)
                    sums = b.add(b.shl(group, e.u32(3)), e.u32(sums_at(shape, chunk)))
                    for q in range(own):
                        words += e.load_shared(b.add(sums, e.u32(64 * q)), 2)
                    part = [e.real(v) for v in words]
                    seen = sees(e, limit, b.add(start, e.u32(CELLS * chunk)))
                    for cell, value in zip(cells, merge(e, [b.load(c) for c in cells], part, seen), strict=True):
                        b.store(value, cell)
            out += [b.load(cell) for cell in cells]
        return out

    return merge_chunks


def sums_at(shape: AttentionShape, chunk: int) -> int:
    """Byte offset of the (m, l) pairs of a chunk's queries in shared memory."""
    return WARPS * shape.queries * shape.head_dim * 4 + chunk * 64 * shape.own
