"""What the sampling kernels need beyond plain numba.cuda: macros over a thread's logits, and exact arithmetic.

A thread holds `4 * vectors` logits in registers: vector v is the four from local index 4 * (v * threads + thread) of
the block's segment, so a warp reads whole lines. They travel as a tuple; `i` numbers them, 4 * v + j.

Under `NUMBA_ENABLE_CUDASIM=1` every macro has a stand-in that Python can run, with warps of one thread, so that the
kernels can be tested without a GPU. Kernels import `cuda` from here.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba.core import config

from .tables import COUNT_SHIFT

LOCAL = (1 << COUNT_SHIFT) - 1  # the part of an entry that is its local index
SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
WARP = 1 if SIMULATED else 32
LOG2_E = 1.4426950408889634

if SIMULATED:
    from numba.cuda.simulator import kernel as _simulator

    class _Context:
        """`cuda` inside a simulated kernel, for functions of any module."""

        def __getattr__(self, name: str) -> Any:
            return getattr(_simulator._get_kernel_context(), name)

    cuda: Any = _Context()

    def inlined(function):
        return function

    def nothing(*_):
        pass

    wait_for_previous = let_next_start = nothing

    def opaque(value):
        return value

    def bits_of(x):
        return np.float32(x).view(np.uint32)

    def float_of(bits):
        return np.uint32(bits).view(np.float32)

    def ordered(x):
        bits = int(bits_of(np.float32(x) + np.float32(0.0)))
        return np.uint32(bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000))

    def value_of(key):
        key = int(key)
        return float_of(key ^ (0x80000000 if key >> 31 else 0xFFFFFFFF))

    def add(a, b):
        return np.float32(a) + np.float32(b)

    def sub(a, b):
        return np.float32(a) - np.float32(b)

    def mul(a, b):
        return np.float32(a) * np.float32(b)

    def divide(a, b):
        return np.float32(a) / np.float32(b)

    def warp_max(key):
        return key

    def warp_sum(x):
        return x

    def far_word(low, high, index):
        address = (int(high) << 32 | int(low) & 0xFFFFFFFF) + 4 * int(index)
        return ctypes.c_int32.from_address(address).value

    def far_float(low, high, index):
        return np.int32(far_word(low, high, index)).view(np.float32)

    def load_key(candidates, index, inside):
        return candidates[index] if inside else np.uint64(0)

    def load_entries(ints, start, end, thread, threads):
        return tuple(
            ints[at] if at < end else -1 for at in range(start + thread, start + thread + 4 * threads, threads)
        )

    def load_entry_logits(logits, base, *entries):
        return tuple(logits[base + local_part(entry)] if entry >= 0 else np.float32(0.0) for entry in entries)

    def local_part(entry):
        return entry & LOCAL if entry >= 0 else -1

    def local_of(token, first, segment):
        local = token - first
        return local if 0 <= local < segment else -1

else:
    from llvmlite import ir
    from numba import cuda, types

    from ..gpu.emit import (
        F32,
        I32,
        I64,
        Emitter,
        add,
        floats,
        inlined,
        let_next_start,
        macro,
        mul,
        wait_for_previous,
    )
    from ..gpu.emit import word_as_float as float_of

    __all__ = ["add", "cuda", "float_of", "inlined", "let_next_start", "mul", "wait_for_previous"]
    u32, i32, f32 = types.uint32, types.int32, types.float32
    F64 = ir.DoubleType()

    @macro(i32)
    def opaque(e: Emitter, value: Any) -> Any:
        """`value`, which the compiler no longer knows: a loop that often is not unrolled."""
        return e.asm("mov.b32 $0, $1;", I32, "=r,r", value, effect=True)

    @macro(u32)
    def bits_of(e: Emitter, x: Any) -> Any:
        return e.bits(x)

    @macro(u32)
    def ordered(e: Emitter, x: Any) -> Any:
        """An integer that orders as the float32 does; -0 and +0 share one."""
        bits = e.bits(e.add(x, e.f32(0.0)))
        return e.b.xor(bits, e.b.or_(e.b.ashr(bits, e.u32(31)), e.u32(0x80000000)))

    @macro(f32)
    def value_of(e: Emitter, key: Any) -> Any:
        """The float32 of an `ordered` integer."""
        return e.real(e.b.xor(key, e.b.or_(e.b.ashr(e.b.not_(key), e.u32(31)), e.u32(0x80000000))))

    @macro(f32)
    def sub(e: Emitter, a: Any, b: Any) -> Any:
        return e.asm("sub.rn.f32 $0, $1, $2;", F32, "=f,f,f", a, b)

    @macro(f32)
    def divide(e: Emitter, a: Any, b: Any) -> Any:
        return e.asm("div.rn.f32 $0, $1, $2;", F32, "=f,f,f", a, b)

    def _shuffle(e: Emitter, bits: Any, step: int) -> Any:
        return e.asm(f"shfl.sync.bfly.b32 $0, $1, {step}, 31, -1;", I32, "=r,r", bits, effect=True)

    @macro(u32)
    def warp_max(e: Emitter, key: Any) -> Any:
        """The largest unsigned integer of the warp, in every lane."""
        if e.cc >= (8, 0):
            return e.asm("redux.sync.max.u32 $0, $1, -1;", I32, "=r,r", key, effect=True)
        for step in (16, 8, 4, 2, 1):
            other = _shuffle(e, key, step)
            key = e.b.select(e.b.icmp_unsigned(">", other, key), other, key)
        return key

    @macro(f32)
    def warp_sum(e: Emitter, x: Any) -> Any:
        """The sum over the warp, as a tree: in every lane, in the same order always."""
        for step in (16, 8, 4, 2, 1):
            x = e.add(x, e.real(_shuffle(e, e.bits(x), step)))
        return x

    def _far(e: Emitter, low: Any, high: Any, index: Any) -> Any:
        text = "{ .reg .b64 a; mov.b64 a, {$1, $2}; mad.wide.s32 a, $3, 4, a; ld.global.b32 $0, [a]; }"
        return e.asm(text, I32, "=r,r,r,r", low, high, index, effect=True)

    @macro(i32)
    def far_word(e: Emitter, low: Any, high: Any, index: Any) -> Any:
        """The int32 number `index` at a device address that is itself data, in two halves."""
        return _far(e, low, high, index)

    @macro(f32)
    def far_float(e: Emitter, low: Any, high: Any, index: Any) -> Any:
        return e.real(_far(e, low, high, index))

    def _shared_address(e: Emitter, array: Any) -> Any:
        """Where a shared array of numba's stands, as the 32-bit address that shared loads take."""
        data = e.b.ptrtoint(e.b.extract_value(array, 4), I64)
        return e.asm("{ .reg .b64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", I32, "=r,l", data)

    def _flag(e: Emitter, inside: Any) -> Any:
        return e.b.zext(inside, I32) if inside.type != I32 else inside

    @macro(types.uint64)
    def load_key(e: Emitter, candidates: Any, index: Any, inside: Any) -> Any:
        """candidates[index], or 0 if not `inside`; no branch, so that several are under way at once."""
        text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b64 $0, 0; @p ld.global.b64 $0, [$1]; }"
        address = e.b.gep(candidates, [e.i64(index)])
        return e.asm(text, I64, "=l,l,r", address, _flag(e, inside), effect=True)

    @macro(types.UniTuple(i32, 4))
    def load_entries(e: Emitter, ints: Any, start: Any, end: Any, thread: Any, threads: Any) -> Any:
        """ints[start + thread] and what follows it in steps of `threads`; -1 from `end` on. All loads at once."""
        text = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
        places = [e.b.add(e.b.add(start, thread), e.b.mul(threads, e.u32(v))) for v in range(4)]
        return [e.asm(text, I32, "=r,l,r,r", e.b.gep(ints, [e.i64(i)]), i, end, effect=True) for i in places]

    @macro(types.UniTuple(f32, 4))
    def load_entry_logits(e: Emitter, logits: Any, base: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        """The logits of four entries of the segment at `base`; 0 for -1. All loads at once."""
        text = "{ .reg .pred p; setp.ge.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.f32 $0, [$1]; }"
        places = [e.b.add(base, e.b.and_(entry, e.u32(LOCAL))) for entry in (a, b, c, d)]
        pairs = zip(places, (a, b, c, d), strict=True)
        return [e.asm(text, F32, "=f,l,r", e.b.gep(logits, [e.i64(i)]), entry, effect=True) for i, entry in pairs]

    @macro(i32)
    def local_part(e: Emitter, entry: Any) -> Any:
        """The local index of an entry; -1 for -1."""
        return e.b.select(e.b.icmp_signed(">=", entry, e.u32(0)), e.b.and_(entry, e.u32(LOCAL)), entry)

    @macro(i32)
    def local_of(e: Emitter, token: Any, first: Any, segment: Any) -> Any:
        """token - first if that is in 0..segment - 1, else -1."""
        local = e.b.sub(token, first)
        return e.b.select(e.b.icmp_unsigned("<", local, segment), local, e.u32(0xFFFFFFFF))


def logit_macros(threads: int, vectors: int, wide: bool) -> SimpleNamespace:
    """The macros over a thread's logits. `wide`: rows are 16-byte aligned, so that vectors are loaded whole.

    load(logits, base, first, thread, vocab) -> x: the logits at base + first + local index; -inf from `vocab` on
    patched(x, thread, table, mask) -> x: what bit i of `mask` is set for, from the shared `table`, by local index
    owner_of(local), bit_of(local): the thread that holds the logit of a local index, and 1 << its i
    largest(x): the largest; NaN does not count      above(x, bound): bit i is set if logit i >= bound
    pick(x, i): logit i      exp_sum(x, top): the float32 sum of exp(x - top) for a finite top; NaN counts as nothing
    """
    if SIMULATED:
        return _simulated(threads, vectors)
    return _compiled(threads, vectors, wide)


def _simulated(threads: int, vectors: int) -> SimpleNamespace:
    count = 4 * vectors

    def load(logits, base, first, thread, vocab):
        tokens = [first + 4 * (i // 4 * threads + thread) + i % 4 for i in range(count)]
        return tuple(logits[base + token] if token < vocab else np.float32(-np.inf) for token in tokens)

    def patched(x, thread, table, mask):
        local = [4 * (i // 4 * threads + thread) + i % 4 for i in range(count)]
        return tuple(float_of(table[local[i]]) if int(mask) >> i & 1 else v for i, v in enumerate(x))

    def exp_sum(x, top):
        return np.float32(sum(np.exp(v - top) for v in x if v > -np.inf))

    return SimpleNamespace(
        load=load,
        exp_sum=exp_sum,
        owner_of=lambda local: local // 4 % threads,
        bit_of=lambda local: np.uint32(1 << (local // 4 // threads * 4 + local % 4)),
        patched=patched,
        largest=lambda x: max((v for v in x if not np.isnan(v)), default=np.float32(-np.inf)),
        above=lambda x, bound: sum(1 << i for i, v in enumerate(x) if v >= bound),
        pick=lambda x, i: x[i],
    )


def _compiled(threads: int, vectors: int, wide: bool) -> SimpleNamespace:
    count = 4 * vectors
    tuple_type = floats(count)

    def tree(values: list[Any], combine: Any) -> Any:
        while len(values) > 1:
            values = [
                combine(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)
            ]
        return values[0]

    def load_vector(e: Emitter, address: Any, token: Any, vocab: Any) -> list[Any]:
        empty = " ".join(f"mov.b32 ${i}, 0fFF800000;" for i in range(4))
        loads = "@p ld.global.L1::no_allocate.v4.f32 {$0, $1, $2, $3}, [$4];"
        inside = "setp.lt.s32 p, $5, $6;"
        if not wide:
            loads = " ".join(f"setp.lt.s32 p, {i}, t; @p ld.global.f32 ${i}, [$4 + {4 * i}];" for i in range(4))
            inside = "sub.s32 t, $6, $5;"
        text = f"{{ .reg .pred p; .reg .s32 t; {empty} {inside} {loads} }}"
        return e.asm(text, [F32] * 4, "=f,=f,=f,=f,l,r,r", address, token, vocab, effect=True)

    @macro(tuple_type)
    def load(e: Emitter, logits: Any, base: Any, first: Any, thread: Any, vocab: Any) -> Any:
        x: list[Any] = []
        for v in range(vectors):
            local = e.b.shl(e.b.add(thread, e.u32(v * threads)), e.u32(2))
            token = e.b.add(first, local)
            address = e.b.gep(logits, [e.i64(e.b.add(base, token))])
            x += load_vector(e, address, token, vocab)
        return x

    @macro(tuple_type)
    def patched(e: Emitter, x: Any, thread: Any, table: Any, mask: Any) -> Any:
        place = e.b.add(_shared_address(e, table), e.b.shl(thread, e.u32(4)))
        out = []
        for i, v in enumerate(x):
            at = 16 * (i // 4 * threads) + 4 * (i % 4)
            text = (
                f"{{ .reg .pred p; .reg .b32 t; and.b32 t, $2, {1 << i}; setp.ne.u32 p, t, 0; "
                f"mov.b32 $0, $3; @p ld.shared.f32 $0, [$1 + {at}]; }}"
            )
            out.append(e.asm(text, F32, "=f,r,r,f", place, mask, v, effect=True))
        return out

    @macro(f32)
    def largest(e: Emitter, x: Any) -> Any:
        return tree([*x, e.f32(-np.inf)], lambda a, b: e.asm("max.f32 $0, $1, $2;", F32, "=f,f,f", a, b))

    @macro(u32)
    def above(e: Emitter, x: Any, bound: Any) -> Any:
        hits = [e.b.select(e.b.fcmp_ordered(">=", v, bound), e.u32(1 << i), e.u32(0)) for i, v in enumerate(x)]
        return tree(hits, e.b.or_)

    @macro(f32)
    def pick(e: Emitter, x: Any, i: Any) -> Any:
        values, bit = list(x), 0
        while len(values) > 1:
            odd = e.b.icmp_unsigned("!=", e.b.and_(i, e.u32(1 << bit)), e.u32(0))
            values = [e.b.select(odd, values[j + 1], values[j]) for j in range(0, len(values), 2)]
            bit += 1
        return values[0]

    @macro(f32)
    def exp_sum(e: Emitter, x: Any, top: Any) -> Any:
        terms, none = [], e.f32(-200.0)  # also for NaN
        for v in x:
            shift = e.asm("sub.rn.f32 $0, $1, $2;", F32, "=f,f,f", v, top)
            shift = e.asm("max.f32 $0, $1, $2;", F32, "=f,f,f", shift, none)
            terms.append(e.asm("ex2.approx.ftz.f32 $0, $1;", F32, "=f,f", e.mul(shift, e.f32(LOG2_E))))
        return tree(terms, e.add)

    @macro(u32)
    def owner_of(e: Emitter, local: Any) -> Any:
        return e.b.and_(e.b.lshr(local, e.u32(2)), e.u32(threads - 1))

    @macro(u32)
    def bit_of(e: Emitter, local: Any) -> Any:
        vector = e.b.lshr(local, e.u32(threads.bit_length() + 1))
        i = e.b.or_(e.b.shl(vector, e.u32(2)), e.b.and_(local, e.u32(3)))
        return e.b.shl(e.u32(1), e.b.and_(i, e.u32(31)))

    return SimpleNamespace(
        load=load,
        patched=patched,
        exp_sum=exp_sum,
        largest=largest,
        above=above,
        pick=pick,
        owner_of=owner_of,
        bit_of=bit_of,
    )
