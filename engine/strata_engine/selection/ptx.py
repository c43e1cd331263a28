"""What the selection kernels need beyond plain numba.cuda: 16-byte loads, bit casts, sums over a warp or a block.

Under `NUMBA_ENABLE_CUDASIM=1` each has a stand-in that Python can run, so that the kernels can be tested without a
GPU. The stand-ins meet at barriers: kernels call the warp functions from all threads of a block, or from none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numba import cuda as numba_cuda
from numba.core import config

cuda: Any = numba_cuda  # its type stubs do not know what may be called inside a kernel

SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
THREADS = 64 if SIMULATED else 512  # a block
WARPS = THREADS // 32
ALL_LANES = 0xFFFFFFFF


def kernel(blocks: int) -> Callable[[Callable[..., None]], Any]:
    """Jit a kernel of THREADS threads a block, of which `blocks` blocks fit on a multiprocessor."""
    return cuda.jit if SIMULATED else cuda.jit(launch_bounds=(THREADS, blocks))


def compile_ptx(kernel: Any, signature: tuple[Any, ...], cc: tuple[int, int]) -> str:
    """The PTX of a kernel for compute capability `cc`; no GPU and no driver are needed.

    numba asks the current device for the capability of each device function: here it is told `cc`.
    """
    device = SimpleNamespace(compute_capability=cc)
    with mock.patch("numba.cuda.dispatcher.get_current_device", lambda: device):
        return cuda.compile_ptx(kernel.py_func, signature, cc=cc, **_options(kernel))[0]


def _options(kernel: Any) -> dict[str, Any]:
    """The target options of a jitted kernel that the compiler function takes."""
    return {"launch_bounds": kernel.targetoptions.get("launch_bounds"), "fastmath": False, "opt": True}


if SIMULATED:

    def load4(row, index):
        return row[index], row[index + 1], row[index + 2], row[index + 3]

    def load_fresh(array, index):
        return array[index]

    def anchored(row):
        return row

    def load_runs(row, number, step, loads):
        return _scores(row, number, step, loads, 4, np.nan)

    def load8(row, number, step, loads):
        return _scores(row, number, step, loads, 8, np.inf)  # where a GPU gives anything, what would win

    def _scores(row, number, step, loads, count, unread):
        numbers = range(number, number + count * step, step)
        return tuple(row[4 * n + j] if n < loads else np.float32(unread) for n in numbers for j in range(4))

    def largest(x):
        return np.float32(max((v for v in x if not np.isnan(v)), default=-np.inf))

    def reach(x, bound):
        return np.uint32(sum(1 << i for i, v in enumerate(x) if v >= bound))

    def prefetch(row, index):
        pass

    def onward(i, step):
        return np.int32(i + step)

    def float_bits(x):
        return np.float32(x).view(np.uint32)

    def bits_float(bits):
        return np.uint32(bits).view(np.float32)

    @cuda.jit(device=True)
    def _gather(value):
        """Every thread's value, as a list; all threads of the block take part."""
        box = cuda.shared.array(THREADS, np.int64)
        cuda.syncthreads()
        box[cuda.threadIdx.x] = value
        cuda.syncthreads()
        return [int(v) for v in box]

    @cuda.jit(device=True)
    def sum_above(value, scratch):
        return sum(_gather(value)[cuda.threadIdx.x + 1 :])

    @cuda.jit(device=True)
    def sum_below(value, scratch):
        return sum(_gather(value)[: cuda.threadIdx.x])

    @cuda.jit(device=True)
    def warp_scan(value):
        first = cuda.threadIdx.x // 32 * 32
        warp = _gather(value)[first : first + 32]
        return sum(warp[: cuda.threadIdx.x % 32]), sum(warp)

    @cuda.jit(device=True)
    def warp_any(condition):
        return True  # it may spare a warp the calls at which all have to meet

    @cuda.jit(device=True)
    def warp_all(condition):
        first = cuda.threadIdx.x // 32 * 32
        return all(_gather(condition)[first : first + 32])

    @cuda.jit(device=True)
    def warp_get(value, lane):
        return np.int32(_gather(value)[cuda.threadIdx.x // 32 * 32 + lane])

    @cuda.jit(device=True)
    def warp_pick(found, value):
        values, marks = _gather(value), _gather(found)
        first = cuda.threadIdx.x // 32 * 32
        return np.uint32(next((values[i] for i in range(first, first + 32) if marks[i]), 0))

    @cuda.jit(device=True)
    def quad_sum(value):
        first = cuda.threadIdx.x // 4 * 4
        return np.int32(sum(_gather(value)[first : first + 4]))

    @cuda.jit(device=True)
    def warp_max(value):
        first = cuda.threadIdx.x // 32 * 32
        return np.uint32(max(_gather(value)[first : first + 32]))

    @cuda.jit(device=True)
    def warp_kth_largest(value, k):
        first = cuda.threadIdx.x // 32 * 32
        return np.uint32(sorted(_gather(value)[first : first + 32])[-k])

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda import dispatcher
    from numba.cuda.extending import intrinsic

    from ..gpu.emit import GLOBAL, Emitter, floats, macro

    F32, U32 = ir.FloatType(), ir.IntType(32)
    DATA = 4  # which member of numba's array structure points to its elements

    @intrinsic
    def load4(typingctx, row, index):
        """Four float32 of a C-contiguous row from a 16-byte aligned address, as a tuple.

        The load is pinned (a side effect to the compiler), so that one written before a barrier is issued before it.
        """
        signature = types.UniTuple(types.float32, 4)(row, types.int64)

        def codegen(context, builder, sig, args):
            array = context.make_array(sig.args[0])(context, builder, value=args[0])
            pointer = builder.gep(array.data, [args[1]])
            result = ir.LiteralStructType([F32] * 4)
            asm = ir.InlineAsm(
                ir.FunctionType(result, [pointer.type]),
                "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];",
                "=f,=f,=f,=f,l",
                side_effect=True,
            )
            loaded = builder.call(asm, [pointer])
            return context.make_tuple(builder, sig.return_type, [builder.extract_value(loaded, i) for i in range(4)])

        return signature, codegen

    @intrinsic
    def anchored(typingctx, row):
        """The same row, in global memory, its address hidden from the compiler, which would work it out at each use."""

        def codegen(context, builder, sig, args):
            box = context.make_array(sig.args[0])(context, builder, value=args[0])
            pointer = builder.addrspacecast(box.data, ir.PointerType(box.data.type.pointee, GLOBAL))
            kind = ir.FunctionType(pointer.type, [pointer.type])
            hidden = builder.call(ir.InlineAsm(kind, "mov.b64 $0, $1;", "=l,l"), [pointer])
            box.data = builder.addrspacecast(hidden, box.data.type)
            return box._getvalue()

        return row(row), codegen

    def _loads(count: int, filled: bool) -> Any:
        """A macro: loads number, number + step, .. of a row, `count` of them, all in flight: their scores, in order.

        A load is four scores. From load `loads` on nothing is read: NaN if `filled`, else anything.
        """
        fill = "".join(f"mov.b32 ${i}, 0f7FC00000; " for i in range(4)) if filled else ""
        text = f"{{ .reg .pred p; {fill}setp.lt.s32 p, $5, $6; @p ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$4]; }}"

        @macro(floats(4 * count))
        def load(e: Emitter, row: Any, number: Any, step: Any, loads: Any) -> Any:
            b, x = e.b, []
            data = b.bitcast(b.extract_value(row, DATA), ir.IntType(8).as_pointer())
            first = b.gep(data, [b.shl(e.i64(number), e.i64(4))])
            for i in range(count):
                on = b.mul(step, e.u32(i))
                place = b.gep(first, [b.shl(e.i64(on), e.i64(4))])
                x += e.asm(text, [F32] * 4, "=f,=f,=f,=f,l,r,r", place, b.add(number, on), loads, effect=True)
            return x

        return load

    load_runs, load8 = _loads(4, True), _loads(8, False)

    @macro(types.float32)
    def largest(e: Emitter, x: Any) -> Any:
        """The largest of some scores, NaN aside; -inf if there is none."""
        values = [*x, e.f32(-np.inf)]
        while len(values) > 1:
            pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
            values = [e.asm("max.f32 $0, $1, $2;", F32, "=f,f,f", *p) if len(p) == 2 else p[0] for p in pairs]
        return values[0]

    @macro(types.uint32)
    def reach(e: Emitter, x: Any, bound: Any) -> Any:
        """Bit i is set where score i of at most 32 reaches the bound."""
        chains = [e.u32(0)] * 4  # of instructions that wait for each other
        for i, value in enumerate(x):
            text = f"{{ .reg .pred p; setp.ge.f32 p, $2, $3; mov.b32 $0, $1; @p or.b32 $0, $0, {1 << i}; }}"
            chains[i % 4] = e.asm(text, U32, "=&r,r,f,f", chains[i % 4], value, bound)
        return e.b.or_(e.b.or_(chains[0], chains[1]), e.b.or_(chains[2], chains[3]))

    @intrinsic
    def prefetch(typingctx, row, index):
        """Start bringing the 128 bytes around element `index` of a row to L2."""

        def codegen(context, builder, sig, args):
            array = context.make_array(sig.args[0])(context, builder, value=args[0])
            pointer = builder.gep(array.data, [args[1]])
            kind = ir.FunctionType(ir.VoidType(), [pointer.type])
            builder.call(ir.InlineAsm(kind, "prefetch.global.L2 [$0];", "l", side_effect=True), [pointer])
            return context.get_dummy_value()

        return types.void(row, types.int64), codegen

    @intrinsic
    def onward(typingctx, i, step):
        """i + step, int32, in a way that no compiler sees through, so that the loop it drives is not unrolled.

        For loops of few rounds: code that runs once costs more to fetch and to issue than a branch does.
        """

        def codegen(context, builder, sig, args):
            asm = ir.InlineAsm(ir.FunctionType(U32, [U32, U32]), "add.s32 $0, $1, $2;", "=r,r,r", side_effect=True)
            return builder.call(asm, args)

        return types.int32(types.int32, types.int32), codegen

    @intrinsic
    def load_fresh(typingctx, array, index):
        """A 32-bit word of a 1-D array that other blocks write while this kernel runs, from L2; not reordered."""

        def codegen(context, builder, sig, args):
            box = context.make_array(sig.args[0])(context, builder, value=args[0])
            pointer = builder.gep(box.data, [args[1]])
            kind = ir.FunctionType(U32, [pointer.type])
            asm = ir.InlineAsm(kind, "ld.global.cg.u32 $0, [$1];", "=r,l,~{memory}", side_effect=True)
            return builder.call(asm, [pointer])

        return array.dtype(array, types.int64), codegen

    def _bitcast(source: Any, target: Any, llvm: Any) -> Callable[..., Any]:
        def cast(typingctx, value):
            def codegen(context, builder, sig, args):
                return builder.bitcast(args[0], llvm)

            return target(source), codegen

        return intrinsic(cast)

    float_bits = _bitcast(types.float32, types.uint32, U32)
    bits_float = _bitcast(types.uint32, types.float32, F32)

    def _warp_reduce(operation: str) -> Callable[..., Any]:
        """A device function that reduces an int32 over the warp to every lane: one instruction from sm_80 on."""
        one = f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;"
        steps = (
            f"shfl.sync.bfly.b32 t, $0, {step}, 31, 0xffffffff; {operation}.s32 $0, $0, t;" for step in (16, 8, 4, 2, 1)
        )
        many = "{ .reg .s32 t; mov.s32 $0, $1; " + " ".join(steps) + " }"

        def reduce(typingctx, value):
            def codegen(context, builder, sig, args):
                recent = dispatcher.get_current_device().compute_capability >= (8, 0)
                constraints = "=r,r" if recent else "=&r,r"
                asm = ir.InlineAsm(ir.FunctionType(U32, [U32]), one if recent else many, constraints, side_effect=True)
                return builder.call(asm, args, attrs=("convergent",))

            return types.int32(types.int32), codegen

        return intrinsic(reduce)

    _warp_sum, _warp_max = _warp_reduce("add"), _warp_reduce("max")

    @cuda.jit(device=True)
    def sum_above(value, scratch):
        """The sum of `value` over the block's threads above this one, int32; one barrier.

        `scratch`: uint32 [WARPS] of shared memory that nobody else uses until the next barrier after this call.
        """
        lane, warp = cuda.laneid, cuda.threadIdx.x >> 5
        total = np.int32(value)
        step = 1
        while step < 32:
            other = cuda.shfl_down_sync(ALL_LANES, total, step)
            if lane + step < 32:
                total = np.int32(total + other)
            step *= 2
        if lane == 0:
            scratch[warp] = total
        cuda.syncthreads()
        others = np.int32(scratch[lane]) if warp < lane < WARPS else np.int32(0)
        return np.int32(total - value + _warp_sum(others))

    @cuda.jit(device=True)
    def sum_below(value, scratch):
        """The sum of `value` over the block's threads below this one; otherwise as `sum_above`."""
        lane, warp = cuda.laneid, cuda.threadIdx.x >> 5
        total = np.int32(value)
        step = 1
        while step < 32:
            other = cuda.shfl_up_sync(ALL_LANES, total, step)
            if lane >= step:
                total = np.int32(total + other)
            step *= 2
        if lane == 31:
            scratch[warp] = total
        cuda.syncthreads()
        others = np.int32(scratch[lane]) if lane < warp else np.int32(0)
        return np.int32(total - value + _warp_sum(others))

    @cuda.jit(device=True)
    def _signed(key):
        """uint32 -> int32 of the same order: shuffles move signed words."""
        return np.int32(key ^ np.uint32(0x80000000))

    @cuda.jit(device=True)
    def warp_scan(value):
        """(sum of `value` over the warp's lanes below this one, over all lanes), int32; cheap where all are 0."""
        if not cuda.any_sync(ALL_LANES, value != 0):
            return np.int32(0), np.int32(0)
        total = np.int32(value)
        step = 1
        while step < 32:
            other = cuda.shfl_up_sync(ALL_LANES, total, step)
            if cuda.laneid >= step:
                total = np.int32(total + other)
            step *= 2
        return np.int32(total - value), cuda.shfl_sync(ALL_LANES, total, 31)

    @cuda.jit(device=True)
    def warp_any(condition):
        """True if the condition holds in a lane of the warp; what it guards must do nothing where it holds in none."""
        return cuda.any_sync(ALL_LANES, condition)

    @cuda.jit(device=True)
    def warp_all(condition):
        """True if the condition holds in all lanes of the warp."""
        return cuda.all_sync(ALL_LANES, condition)

    @cuda.jit(device=True)
    def warp_get(value, lane):
        """The int32 that a lane of the warp passes; all lanes call it together."""
        return cuda.shfl_sync(ALL_LANES, value, lane)

    @cuda.jit(device=True)
    def warp_pick(found, value):
        """The uint32 of the warp's lowest lane for which `found` is true."""
        lowest = np.int32(cuda.ffs(cuda.ballot_sync(ALL_LANES, found)) - 1)
        return np.uint32(cuda.shfl_sync(ALL_LANES, np.int32(value), lowest))

    @cuda.jit(device=True)
    def quad_sum(value):
        """The sum of an int32 over the four lanes of a quad, in each of them."""
        value = np.int32(value + cuda.shfl_xor_sync(ALL_LANES, value, 1))
        return np.int32(value + cuda.shfl_xor_sync(ALL_LANES, value, 2))

    @cuda.jit(device=True)
    def warp_max(value):
        """The largest uint32 of the warp, in every lane."""
        return np.uint32(_warp_max(_signed(value))) ^ np.uint32(0x80000000)

    @cuda.jit(device=True)
    def warp_kth_largest(value, k):
        """The k-th largest uint32 of the warp, k = 1..32."""
        mine = _signed(value)
        kth = mine
        left = np.int32(k)
        while left > 0:
            kth = _warp_max(mine)
            left = np.int32(left - np.int32(cuda.popc(cuda.ballot_sync(ALL_LANES, mine == kth))))
            mine = np.int32(-0x80000000) if mine == kth else mine
        return np.uint32(kth) ^ np.uint32(0x80000000)
