"""Macros: device code that Python unrolls while numba compiles.

numba gives no register arrays: a local array whose index is not a constant goes to slow memory. A *macro* is a Python
function that runs at compile time with LLVM values in its hands, so a Python loop in it is an unrolled loop and a
Python list is a set of registers. Inside kernels a macro is called like a function; groups of registers travel as
tuples.

    @macro(lambda c, a, b: c)              # result type, from the argument types
    def multiply(e, c, a, b):              # e: Emitter; tuples arrive as lists, integers as 32 bits
        return e.mma(c, a, b)

All floating-point operations here are the rounding (`.rn`) forms, which no compiler stage may fuse: results must have
the same bits in every kernel that computes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda import dispatcher
from numba.cuda.extending import intrinsic

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
GLOBAL, SHARED = 1, 3  # LLVM's numbers of address spaces

u32, i32, f32 = types.uint32, types.int32, types.float32
U32Ptr, I32Ptr, F32Ptr, U16Ptr, F64Ptr = (
    types.CPointer(t) for t in (types.uint32, types.int32, types.float32, types.uint16, types.float64)
)

_target: tuple[int, int] = (8, 0)


def words(count: int) -> types.UniTuple:
    """The type of `count` 32-bit registers."""
    return types.UniTuple(u32, count)


def floats(count: int) -> types.UniTuple:
    """The type of `count` float32 registers."""
    return types.UniTuple(f32, count)


class Emitter:
    """LLVM instructions and inline PTX for the body of a macro."""

    def __init__(self, builder: Any) -> None:
        self.b = builder
        self.cc = _target

    # -- constants and integers

    def u32(self, value: int) -> Any:
        return ir.Constant(I32, value)

    def f32(self, value: float) -> Any:
        return ir.Constant(F32, value)

    def i64(self, value: Any) -> Any:
        """A 64-bit index."""
        if isinstance(value, int):
            return ir.Constant(I64, value)
        return value if value.type == I64 else self.b.sext(value, I64)

    def zeros(self, count: int) -> list[Any]:
        return [ir.Constant(F32, 0.0)] * count

    def asm(self, text: str, result: Any, constraints: str, *args: Any, effect: bool = False) -> Any:
        """One inline PTX instruction; several results come back as a list."""
        many = isinstance(result, list)
        kind = ir.LiteralStructType(result) if many else result
        value = self.b.call(
            ir.InlineAsm(ir.FunctionType(kind, [a.type for a in args]), text, constraints, side_effect=effect), args
        )
        return [self.b.extract_value(value, i) for i in range(len(result))] if many else value

    # -- float32, never fused

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.asm("fma.rn.f32 $0, $1, $2, $3;", F32, "=f,f,f,f", a, b, c)

    def add(self, a: Any, b: Any) -> Any:
        return self.asm("add.rn.f32 $0, $1, $2;", F32, "=f,f,f", a, b)

    def mul(self, a: Any, b: Any) -> Any:
        return self.asm("mul.rn.f32 $0, $1, $2;", F32, "=f,f,f", a, b)

    # -- pairs of halves in one register

    def sub_h2(self, a: Any, b: Any) -> Any:
        return self.asm("sub.rn.f16x2 $0, $1, $2;", I32, "=r,r,r", a, b)

    def fma_h2(self, a: Any, b: Any, c: Any) -> Any:
        return self.asm("fma.rn.f16x2 $0, $1, $2, $3;", I32, "=r,r,r,r", a, b, c)

    def half(self, word: Any, upper: int) -> Any:
        """One half of a register, as float32."""
        bits = self.b.trunc(self.b.lshr(word, self.u32(16)) if upper else word, I16)
        return self.asm("cvt.f32.f16 $0, $1;", F32, "=f,h", bits)

    def to_half(self, value: Any) -> Any:
        """float32 -> the bits of the nearest half, saturated at the largest finite one."""
        text = "{ .reg .f32 t; min.f32 t, $1, 0f477FE000; max.f32 t, t, 0fC77FE000; cvt.rn.f16.f32 $0, t; }"
        return self.asm(text, I16, "=h,f", value)

    def split(self, value: Any) -> tuple[Any, Any]:
        """float32 -> (high, low) halves with value = high + low to about 22 bits."""
        high = self.to_half(value)
        back = self.asm("cvt.f32.f16 $0, $1;", F32, "=f,h", high)
        rest = self.asm("sub.rn.f32 $0, $1, $2;", F32, "=f,f,f", value, back)
        return high, self.to_half(rest)

    def pack(self, low: Any, high: Any) -> Any:
        """Two halves -> one register."""
        return self.b.or_(self.b.zext(low, I32), self.b.shl(self.b.zext(high, I32), self.u32(16)))

    def mma(self, c: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        """c[16, 8] + a[16, 16] b[16, 8]: halves in, float32 sums. Turing does it in two steps of eight."""
        if self.cc >= (8, 0):
            text = (
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
            )
            return self.asm(text, [F32] * 4, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", *a, *b, *c)
        text = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"
        for half in (0, 1):
            c = self.asm(text, [F32] * 4, "=f,=f,=f,=f,r,r,r,f,f,f,f", a[2 * half], a[2 * half + 1], b[half], *c)
        return c

    # -- control flow and lanes

    word_pointer = I32.as_pointer()

    def variable(self, value: Any) -> Any:
        """A memory cell that LLVM turns into a register."""
        with self.b.goto_entry_block():
            cell = self.b.alloca(value.type)
        self.b.store(value, cell)
        return cell

    @contextmanager
    def loop(self, start: Any, end: Any, step: Any) -> Iterator[Any]:
        """`for i in range(start, end, step)` around what is emitted inside."""
        cell = self.variable(start)
        head, body, tail = (self.b.append_basic_block(f"loop.{name}") for name in ("head", "body", "tail"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.load(cell)
        self.b.cbranch(self.b.icmp_signed("<", i, end), body, tail)
        self.b.position_at_end(body)
        yield i
        self.b.store(self.b.add(i, self.u32(step) if isinstance(step, int) else step), cell)
        self.b.branch(head)
        self.b.position_at_end(tail)

    def barrier(self) -> None:
        """Wait for all threads of the block, as cuda.syncthreads."""
        self.asm("bar.sync 0;", ir.VoidType(), "~{memory}", effect=True)

    def warp_barrier(self) -> None:
        """Wait for all lanes of the warp, and see what they wrote."""
        self.asm("bar.warp.sync -1;", ir.VoidType(), "~{memory}", effect=True)

    def barrier_arrive(self, which: Any, threads: int) -> None:
        """Count this warp in at a named barrier of `threads` threads, without waiting for the others."""
        self.asm(f"bar.arrive $0, {threads};", ir.VoidType(), "r,~{memory}", which, effect=True)

    def barrier_wait(self, which: Any, threads: int) -> None:
        """Count this warp in at a named barrier and wait until `threads` threads are."""
        self.asm(f"bar.sync $0, {threads};", ir.VoidType(), "r,~{memory}", which, effect=True)

    def butterfly(self, value: Any, step: int) -> Any:
        """The float32 of the lane whose number differs in bit `step`."""
        text = f"shfl.sync.bfly.b32 $0, $1, {step}, 31, -1;"
        return self.real(self.asm(text, I32, "=r,r", self.bits(value), effect=True))

    def and_or(self, a: Any, mask: int, bits: Any) -> Any:
        """(a & mask) | bits in one instruction."""
        return self.asm(f"lop3.b32 $0, $1, {mask}, $2, 0xEA;", I32, "=r,r,r", a, bits)

    # -- memory

    def opaque(self, pointer: Any) -> Any:
        """The same pointer into global memory, its sum hidden from LLVM, which would add it up anew at each use."""
        pointer = self.b.addrspacecast(pointer, ir.PointerType(I32, GLOBAL))
        return self.asm("mov.b64 $0, $1;", pointer.type, "=l,l", pointer)

    def _vector(self, pointer: Any, count: int) -> list[Any]:
        if count == 1:
            return [self.b.load(pointer, align=4)]
        kind = ir.VectorType(I32, count)
        typed = self.b.bitcast(pointer, ir.PointerType(kind, pointer.type.addrspace))
        value = self.b.load(typed, align=4 * count)
        return [self.b.extract_element(value, self.u32(i)) for i in range(count)]

    def load(self, pointer: Any, index: Any, count: int) -> list[Any]:
        """`count` (1, 2 or 4) aligned words at a word index of global memory."""
        return self._vector(self.b.gep(pointer, [self.i64(index)]), count)

    def shared(self, offset: Any) -> Any:
        """A word pointer to the byte `offset` of the block's dynamic shared memory."""
        module, name = self.b.module, "strata_shared"
        base = module.globals.get(name)
        if base is None:
            base = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=SHARED)
            base.linkage, base.align = "external", 16
        raw = self.b.gep(base, [ir.Constant(I32, 0), offset])
        return self.b.bitcast(raw, ir.PointerType(I32, SHARED))

    def load_shared(self, offset: Any, count: int) -> list[Any]:
        """`count` (1, 2 or 4) aligned words at a byte offset of shared memory."""
        return self._vector(self.shared(offset), count)

    def store_shared(self, offset: Any, values: list[Any]) -> None:
        """Store 1, 2 or 4 aligned words at a byte offset of shared memory."""
        pointer = self.shared(offset)
        if len(values) == 1:
            self.b.store(values[0], pointer, align=4)
            return
        kind = ir.VectorType(I32, len(values))
        vector = ir.Constant(kind, ir.Undefined)
        for i, value in enumerate(values):
            vector = self.b.insert_element(vector, value, self.u32(i))
        self.b.store(vector, self.b.bitcast(pointer, ir.PointerType(kind, SHARED)), align=4 * len(values))

    def copy_async(self, offset: Any, pointer: Any, index: Any, count: int = 4) -> None:
        """Start copying `count` (1, 2, 4) words at a word index of global memory to a byte offset of shared memory."""
        source = self.b.gep(pointer, [self.i64(index)])
        if self.cc < (8, 0):
            self.store_shared(offset, self._vector(source, count))
            return
        target = self.b.ptrtoint(self.shared(offset), I32)
        text = f"cp.async.{'cg' if count == 4 else 'ca'}.shared.global [$0], [$1], {4 * count};"
        self.asm(text, ir.VoidType(), "r,l,~{memory}", target, source, effect=True)

    def copy_commit(self) -> None:
        """Close the group of asynchronous copies started so far."""
        if self.cc >= (8, 0):
            self.asm("cp.async.commit_group;", ir.VoidType(), "~{memory}", effect=True)

    def copy_wait(self, pending: int) -> None:
        """Wait until at most `pending` groups of asynchronous copies are unfinished."""
        if self.cc >= (8, 0):
            self.asm(f"cp.async.wait_group {pending};", ir.VoidType(), "~{memory}", effect=True)

    def wait_for_previous(self) -> None:
        """Wait until the kernel before this one is done and its writes are seen (Hopper's dependent launch)."""
        if self.cc >= (9, 0):
            self.asm("griddepcontrol.wait;", ir.VoidType(), "~{memory}", effect=True)

    def bits(self, value: Any) -> Any:
        return self.b.bitcast(value, I32)

    def real(self, value: Any) -> Any:
        return self.b.bitcast(value, F32)


def macro(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn a compile-time function into one that kernels can call.

    `result` is the numba type of what it returns, or a function of the argument types that gives it; None if it
    returns nothing.
    """

    def wrap(body: Callable[..., Any]) -> Any:
        def expand(typingctx: Any, *args: Any) -> Any:
            kind = result if isinstance(result, types.Type) else result(*args) if result else types.void
            return kind(*args), lambda context, builder, sig, values: _run(body, builder, sig, values)

        names = ["typingctx", *list(inspect.signature(body).parameters)[1:]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        expand.__name__ = body.__name__
        expand.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        return intrinsic(expand)

    return wrap


def _run(body: Callable[..., Any], builder: Any, sig: Any, values: Any) -> Any:
    """Run a macro's body on LLVM values and give its result numba's form."""
    args = [
        [builder.extract_value(v, i) for i in range(len(t))]
        if isinstance(t, types.BaseTuple)
        else (builder.trunc(v, I32) if v.type == I64 else v)
        for t, v in zip(sig.args, values, strict=True)
    ]
    value = body(Emitter(builder), *args)
    if sig.return_type == types.void:
        return ir.Constant(ir.IntType(8).as_pointer(), None)
    if not isinstance(sig.return_type, types.BaseTuple):
        return value
    packed = ir.Constant(ir.ArrayType(value[0].type, len(value)), ir.Undefined)
    for i, item in enumerate(value):
        packed = builder.insert_value(packed, item, i)
    return packed


def inlined(function: Callable[..., Any]) -> Any:
    """A device function, copied into every kernel that calls it. It may not call macros that depend on the target."""
    return cuda.jit(device=True, forceinline=True)(function)  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True)
class _NoDevice:
    compute_capability: tuple[int, int]


def compile_ptx(kernel: Callable[..., None], signature: Any, cc: tuple[int, int], threads: int, blocks: int = 1) -> str:
    """PTX of a kernel for a compute capability; at least `blocks` blocks of `threads` are to fit on a multiprocessor.

    Works without a GPU: numba asks the current device while it types device functions, so it is given an answer.
    """
    global _target
    asked = dispatcher.get_current_device
    _target, dispatcher.get_current_device = cc, lambda: _NoDevice(cc)
    try:
        text, _ = cuda.compile(kernel, signature, device=False, abi="numba", cc=cc, launch_bounds=(threads, blocks))
    finally:
        dispatcher.get_current_device = asked
    return text


def constants(count: int, number: float) -> Any:
    """A macro without arguments: `count` times the same float32."""

    @macro(lambda: floats(count))
    def constant(e: Emitter) -> Any:
        return [e.f32(number)] * count

    return constant


@macro(f32)
def fma(e: Emitter, a: Any, b: Any, c: Any) -> Any:
    return e.fma(a, b, c)


@macro(f32)
def add(e: Emitter, a: Any, b: Any) -> Any:
    return e.add(a, b)


@macro(f32)
def mul(e: Emitter, a: Any, b: Any) -> Any:
    return e.mul(a, b)


@macro(words(2))
def split_pair(e: Emitter, a: Any, b: Any) -> Any:
    """Two neighbours -> (high parts, low parts), each a pair of halves in one word."""
    (ah, al), (bh, bl) = e.split(a), e.split(b)
    return [e.pack(ah, bh), e.pack(al, bl)]


@macro(types.uint16)
def to_half(e: Emitter, a: Any) -> Any:
    return e.to_half(a)


@macro(f32)
def from_half(e: Emitter, word: Any) -> Any:
    """The lower half of a word as float32."""
    return e.half(word, 0)


@macro(f32)
def word_as_float(e: Emitter, word: Any) -> Any:
    """The float32 whose bits a word holds."""
    return e.real(word)


@macro(f32)
def exp2(e: Emitter, a: Any) -> Any:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", F32, "=f,f", a)


@macro(f32)
def reciprocal(e: Emitter, a: Any) -> Any:
    return e.asm("rcp.rn.f32 $0, $1;", F32, "=f,f", a)


@macro(floats(4))
def load_shared4(e: Emitter, offset: Any) -> Any:
    return [e.real(v) for v in e.load_shared(offset, 4)]


@macro(f32)
def load_shared1(e: Emitter, offset: Any) -> Any:
    return e.real(e.load_shared(offset, 1)[0])


@macro(None)
def store_shared1(e: Emitter, offset: Any, value: Any) -> None:
    e.store_shared(offset, [e.bits(value)])


@macro(None)
def copy_commit(e: Emitter) -> None:
    """Close the group of asynchronous copies started so far."""
    e.copy_commit()


def copy_wait(pending: int) -> Any:
    """A macro: wait until at most `pending` groups of asynchronous copies are unfinished."""

    @macro(None)
    def wait(e: Emitter) -> None:
        e.copy_wait(pending)

    return wait


@macro(None)
def wait_for_previous(e: Emitter) -> None:
    """Wait until the kernel before this one is done and its writes are seen (Hopper's dependent launch)."""
    e.wait_for_previous()


@macro(None)
def let_next_start(e: Emitter) -> None:
    """Allow the next kernel's blocks to start; what it reads of ours waits in its `wait_for_previous`."""
    if e.cc >= (9, 0):
        e.asm("griddepcontrol.launch_dependents;", ir.VoidType(), "~{memory}", effect=True)
