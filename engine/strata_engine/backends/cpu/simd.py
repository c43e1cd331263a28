"""Vectors of 16 float32 lanes, atomics and a pause, as functions that numba kernels can call.

Plain loops leave both the vector width and the contraction of multiply-adds to the compiler; here both are spelled
out, so every element is computed by the same operations in the same order whatever surrounds it. LLVM lowers a
vector to whatever the processor has (one AVX-512 register, two AVX2, four SSE or NEON).

Kernels work on pointers (`pointer(array)`), not on arrays: an array passed from function to function is reference
counted, with atomics, in the innermost loops. All offsets are in elements of the pointer's type. No bounds are checked,
and whoever calls a kernel keeps the arrays alive. `p[i]` reads or writes one element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic as numba_intrinsic
from numba.core.extending import models, register_model
from numba.np.arrayobj import make_array

LANES = 16

intrinsic: Any = numba_intrinsic  # what it makes has another signature than its typing function

_F32 = ir.FloatType()
_F32V = ir.VectorType(_F32, LANES)
_I32V = ir.VectorType(ir.IntType(32), LANES)


class F32x16(types.Type):
    """Numba type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _F32V)


def _at(builder, pointer, offset, bits):
    """Pointer to element `offset`, seen as `bits` (an LLVM type)."""
    return builder.bitcast(builder.gep(pointer, [offset]), bits.as_pointer())


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_F32V, [value] * LANES)


def _lanes(values) -> ir.Constant:
    return ir.Constant(_I32V, list(values))


def _call(builder, name, *args):
    """Call an LLVM vector intrinsic whose operands and result are all f32x16."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_F32V, [_F32V] * len(args)), f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, args)


def _spread(builder, scalar, vector_type):
    """A vector with `scalar` in every lane."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, undefined, _lanes([0] * LANES))


def _load(builder, pointer, align=4):
    value = builder.load(pointer)
    value.align = align
    return value


@intrinsic
def pointer(typingctx, array):
    """Pointer to the first element of an array."""

    def codegen(context, builder, signature, args):
        return make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def shifted(typingctx, pointer, offset):
    """The pointer moved on by `offset` elements."""

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), codegen


@intrinsic
def load(typingctx, pointer, offset):
    """16 values at `offset` as float32; the memory holds float32, or uint16 that are IEEE half bits."""
    half = pointer.dtype == types.uint16

    def codegen(context, builder, signature, args):
        if half:
            vector = ir.VectorType(ir.IntType(16), LANES)
            bits = _load(builder, _at(builder, args[0], args[1], vector), 2)
            return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _F32V)
        return _load(builder, _at(builder, args[0], args[1], _F32V))

    return f32x16(pointer, types.intp), codegen


@intrinsic
def store(typingctx, pointer, offset, value):
    """Write 16 lanes at `offset`: as float32, or rounded to IEEE half bits where the memory is uint16."""
    half = pointer.dtype == types.uint16

    def codegen(context, builder, signature, args):
        vector = args[2]
        if half:
            vector = builder.fptrunc(vector, ir.VectorType(ir.HalfType(), LANES))
            vector = builder.bitcast(vector, ir.VectorType(ir.IntType(16), LANES))
        builder.store(vector, _at(builder, args[0], args[1], vector.type), align=2 if half else 4)

    return types.void(pointer, types.intp, f32x16), codegen


@intrinsic
def store_one(typingctx, pointer, offset, value):
    """Write one float32 at `offset`, rounded to IEEE half bits where the memory is uint16."""
    half = pointer.dtype == types.uint16

    def codegen(context, builder, signature, args):
        scalar = args[2]
        if half:
            scalar = builder.bitcast(builder.fptrunc(scalar, ir.HalfType()), ir.IntType(16))
        builder.store(scalar, builder.gep(args[0], [args[1]]))

    return types.void(pointer, types.intp, types.float32), codegen


@intrinsic
def load_codes(typingctx, pointer, offset):
    """One column of a weight tile: 32 rows' codes at `offset` as a pair of vectors (rows 0..15, rows 16..31).

    The memory's type is the code's format: uint8 two 4-bit codes a byte (row r in the low half, row r + 16 in the
    high half), int8 signed bytes, uint16 IEEE halves, int16 bfloat16, float32 itself.
    """
    pair = types.UniTuple(f32x16, 2)

    def codegen(context, builder, signature, args):
        dtype = signature.args[0].dtype

        def read(bits, start):
            vector = ir.VectorType(ir.IntType(bits), LANES)
            position = builder.add(args[1], ir.Constant(args[1].type, start))
            return _load(builder, _at(builder, args[0], position, vector), bits // 8)

        if dtype == types.uint8:
            both = builder.zext(read(8, 0), _I32V)
            low = builder.and_(both, _lanes([15] * LANES))
            high = builder.lshr(both, _lanes([4] * LANES))
            halves = [builder.sitofp(low, _F32V), builder.sitofp(high, _F32V)]
        elif dtype == types.int8:
            halves = [builder.sitofp(builder.sext(read(8, s), _I32V), _F32V) for s in (0, LANES)]
        elif dtype == types.uint16:
            half = ir.VectorType(ir.HalfType(), LANES)
            halves = [builder.fpext(builder.bitcast(read(16, s), half), _F32V) for s in (0, LANES)]
        elif dtype == types.int16:
            halves = [
                builder.bitcast(builder.shl(builder.zext(read(16, s), _I32V), _lanes([16] * LANES)), _F32V)
                for s in (0, LANES)
            ]
        else:
            halves = [builder.bitcast(read(32, s), _F32V) for s in (0, LANES)]
        return context.make_tuple(builder, pair, halves)

    return pair(pointer, types.intp), codegen


@intrinsic
def broadcast(typingctx, pointer, offset):
    """All lanes = the float32 at `offset`."""

    def codegen(context, builder, signature, args):
        one = _load(builder, _at(builder, args[0], args[1], _F32))
        return _spread(builder, one, _F32V)

    return f32x16(pointer, types.intp), codegen


@intrinsic
def splat(typingctx, value):
    """All lanes = the float32 `value`."""

    def codegen(context, builder, signature, args):
        return _spread(builder, args[0], _F32V)

    return f32x16(types.float32), codegen


def _elementwise(build: Callable[..., Any], arity: int) -> Any:
    """An intrinsic over `arity` vectors whose body is build(builder, *vectors)."""

    def codegen(context, builder, signature, args):
        return build(builder, *args)

    def one(typingctx, a):
        return f32x16(f32x16), codegen

    def two(typingctx, a, b):
        return f32x16(f32x16, f32x16), codegen

    def three(typingctx, a, b, c):
        return f32x16(f32x16, f32x16, f32x16), codegen

    return intrinsic((one, two, three)[arity - 1])


fma = _elementwise(lambda builder, a, b, c: _call(builder, "fma", a, b, c), 3)  # a * b + c, rounded once
add = _elementwise(lambda builder, a, b: builder.fadd(a, b), 2)
sub = _elementwise(lambda builder, a, b: builder.fsub(a, b), 2)
mul = _elementwise(lambda builder, a, b: builder.fmul(a, b), 2)
div = _elementwise(lambda builder, a, b: builder.fdiv(a, b), 2)
maximum = _elementwise(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b), 2)


def _build_exp(builder, x):
    """exp(x) by range reduction to [-ln2/2, ln2/2] and a degree-7 polynomial; at most 2 ulp off, 0 below -87.3.

    The scheme is Cody and Waite's, Software Manual for the Elementary Functions (1980), the polynomial Taylor's.
    """
    low, high = _constant(-87.3), _constant(88.3)
    tiny = builder.fcmp_ordered("<", x, low)
    x = builder.select(tiny, low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    n = _call(builder, "rint", builder.fmul(x, _constant(1.4426950408889634)))
    r = _call(builder, "fma", n, _constant(-0.693359375), x)
    r = _call(builder, "fma", n, _constant(2.12194440e-4), r)
    p = _constant(1.0 / 5040.0)
    for factor in (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        p = _call(builder, "fma", p, r, _constant(factor))
    exponent = builder.shl(builder.add(builder.fptosi(n, _I32V), _lanes([127] * LANES)), _lanes([23] * LANES))
    return builder.select(tiny, _constant(0.0), builder.fmul(p, builder.bitcast(exponent, _F32V)))


exp = _elementwise(_build_exp, 1)


def _reduce(builder, vector, combine):
    """Combine the 16 lanes in halves: (i, i + 8), (i, i + 4), (i, i + 2), (i, i + 1)."""
    for width in (8, 4, 2, 1):
        other = builder.shuffle_vector(vector, vector, _lanes([(i + width) % LANES for i in range(LANES)]))
        vector = combine(vector, other)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


@intrinsic
def lane_sum(typingctx, vector):
    """Sum of the 16 lanes, in a fixed order."""

    def codegen(context, builder, signature, args):
        return _reduce(builder, args[0], builder.fadd)

    return types.float32(f32x16), codegen


@intrinsic
def first_lane(typingctx, vector):
    """Lane 0."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(args[0], ir.Constant(ir.IntType(32), 0))

    return types.float32(f32x16), codegen


@intrinsic
def lane_max(typingctx, vector):
    """Largest of the 16 lanes; no lane may be NaN."""

    def codegen(context, builder, signature, args):
        return _reduce(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(f32x16), codegen


@intrinsic
def keep_first(typingctx, vector, count, fill):
    """The first `count` lanes of the vector, `fill` (float32) in the others."""

    def codegen(context, builder, signature, args):
        vector, count, fill = args
        count = builder.trunc(count, ir.IntType(32)) if count.type.width > 32 else count
        inside = builder.icmp_signed("<", _lanes(range(LANES)), _spread(builder, count, _I32V))
        return builder.select(inside, vector, _spread(builder, fill, _F32V))

    return f32x16(f32x16, types.intp, types.float32), codegen


@intrinsic
def atomic_add(typingctx, pointer, offset, value):
    """Add to an int64 element; returns what it held before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _at(builder, args[0], args[1], ir.IntType(64)), args[2], "seq_cst")

    return types.int64(pointer, types.intp, types.int64), codegen


@intrinsic
def atomic_load(typingctx, pointer, offset):
    """Read an int64 element that other threads write."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_at(builder, args[0], args[1], ir.IntType(64)), "seq_cst", 8)

    return types.int64(pointer, types.intp), codegen


@intrinsic
def yield_thread(typingctx):
    """Let another thread have this processor (POSIX sched_yield)."""

    def codegen(context, builder, signature, args):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen
