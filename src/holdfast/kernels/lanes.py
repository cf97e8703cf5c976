"""Eight float32 or int32 side by side, for loops that compilers do not find the lanes of themselves.

A loop written with these adds its lanes up in one order on every machine, whatever its vectors hold; no
product and sum are fused. So equal inputs give equal bytes everywhere, at a vector's speed. Addresses are
plain integers, aligned or not; machines are little-endian, as all are that Numba compiles for.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

COUNT = 8

_FLOATS = ir.VectorType(ir.FloatType(), COUNT)
_INTS = ir.VectorType(ir.IntType(32), COUNT)
_BYTES = ir.VectorType(ir.IntType(8), COUNT)


class _Lanes(types.Type):
    """Eight floats, or eight ints."""

    def __init__(self, kind):
        self.kind = kind
        super().__init__(name=f"lanes({kind})")


floats8 = _Lanes("float32")
ints8 = _Lanes("int32")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, _FLOATS if fe_type.kind == "float32" else _INTS)


def _operator(function, kind, build):
    """Make an operator of Python work on lanes, by one instruction."""

    @infer_global(function)
    class _Typing(ConcreteTemplate):
        cases = (signature(kind, kind, kind),)

    @lower_builtin(function, kind, kind)
    def _lower(context, builder, sig, arguments):
        return build(builder, *arguments)


for _function, _build in {
    operator.add: ir.IRBuilder.fadd,
    operator.sub: ir.IRBuilder.fsub,
    operator.mul: ir.IRBuilder.fmul,
    operator.truediv: ir.IRBuilder.fdiv,
}.items():
    _operator(_function, floats8, _build)
for _function, _build in {
    operator.add: ir.IRBuilder.add,
    operator.and_: ir.IRBuilder.and_,
    operator.or_: ir.IRBuilder.or_,
    operator.lshift: ir.IRBuilder.shl,
    operator.rshift: ir.IRBuilder.lshr,
}.items():
    _operator(_function, ints8, _build)


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _called(builder, name, kind, arguments):
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(arguments)), f"{name}.v8f32"
    )
    return builder.call(function, arguments)


def _shuffled(builder, value, by):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), COUNT), [(i + by) % COUNT for i in range(COUNT)])
    return builder.shuffle_vector(value, value, mask)


def _smaller(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _greater(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _everywhere(builder, value):
    vector = ir.VectorType(value.type, COUNT)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * COUNT))


@intrinsic
def splat(typing_context, value):
    """One float32 in all lanes."""

    def generate(context, builder, sig, arguments):
        return _everywhere(builder, arguments[0])

    return floats8(types.float32), generate


@intrinsic
def splat_int(typing_context, value):
    """One int32 in all lanes."""

    def generate(context, builder, sig, arguments):
        return _everywhere(builder, arguments[0])

    return ints8(types.int32), generate


@intrinsic
def load(typing_context, address):
    """Eight floats from an address on."""

    def generate(context, builder, sig, arguments):
        return builder.load(_at(builder, arguments[0], _FLOATS), align=4)

    return floats8(types.int64), generate


@intrinsic
def prefetch(typing_context, address):
    """Ask for a cache line that will be read soon; any address will do."""

    def generate(context, builder, sig, arguments):
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(function, [pointer, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def store(typing_context, address, value):
    """Eight floats or ints to an address."""

    def generate(context, builder, sig, arguments):
        builder.store(arguments[1], _at(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


def _first(builder, count):
    """The mask of the first lanes."""
    places = ir.Constant(_INTS, list(range(COUNT)))
    return builder.icmp_signed("<", places, _everywhere(builder, builder.trunc(count, ir.IntType(32))))


@intrinsic
def load_some(typing_context, address, count, others):
    """The first ``count`` lanes from an address on; no more is read. The lanes of ``others`` for the rest."""

    def generate(context, builder, sig, arguments):
        address, count, others = arguments
        mask = _first(builder, count)
        kind = ir.FunctionType(_FLOATS, [cgutils.voidptr_t, ir.IntType(32), mask.type, _FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v8f32.p0")
        pointer = builder.inttoptr(address, cgutils.voidptr_t)
        return builder.call(function, [pointer, ir.IntType(32)(4), mask, others])

    return floats8(types.int64, types.int64, floats8), generate


@intrinsic
def store_some(typing_context, address, value, count):
    """The first ``count`` lanes to an address; no more is written."""

    def generate(context, builder, sig, arguments):
        address, value, count = arguments
        mask = _first(builder, count)
        kind = ir.FunctionType(ir.VoidType(), [_FLOATS, cgutils.voidptr_t, ir.IntType(32), mask.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v8f32.p0")
        pointer = builder.inttoptr(address, cgutils.voidptr_t)
        builder.call(function, [value, pointer, ir.IntType(32)(4), mask])
        return context.get_dummy_value()

    return types.void(types.int64, floats8, types.int64), generate


@intrinsic
def smaller(typing_context, a, b):
    """The smaller ones; of a NaN and a number, b."""
    return floats8(floats8, floats8), lambda context, builder, sig, arguments: _smaller(builder, *arguments)


@intrinsic
def greater(typing_context, a, b):
    """The greater ones; of a NaN and a number, b."""
    return floats8(floats8, floats8), lambda context, builder, sig, arguments: _greater(builder, *arguments)


@intrinsic
def where_less(typing_context, a, b, then, otherwise):
    """``then`` in the lanes where a < b, else ``otherwise``."""

    def generate(context, builder, sig, arguments):
        a, b, then, otherwise = arguments
        return builder.select(builder.fcmp_ordered("<", a, b), then, otherwise)

    return floats8(floats8, floats8, floats8, floats8), generate


@intrinsic
def nearest(typing_context, value):
    """Rounded to whole numbers, halves to the even one."""
    return floats8(floats8), lambda context, builder, sig, arguments: _called(
        builder, "llvm.rint", _FLOATS, arguments
    )


@intrinsic
def magnitude_bits(typing_context, value):
    """The bits without the sign: ordered as the magnitudes are, then infinity, then NaN."""

    def generate(context, builder, sig, arguments):
        bits = builder.bitcast(arguments[0], _INTS)
        return builder.and_(bits, ir.Constant(_INTS, [0x7FFFFFFF] * COUNT))

    return ints8(floats8), generate


@intrinsic
def greater_int(typing_context, a, b):
    """The greater ones."""

    def generate(context, builder, sig, arguments):
        a, b = arguments
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    return ints8(ints8, ints8), generate


@intrinsic
def bits_of(typing_context, value):
    """Floats as the ints that have their bits."""
    return ints8(floats8), lambda context, builder, sig, arguments: builder.bitcast(arguments[0], _INTS)


@intrinsic
def from_bits(typing_context, value):
    """Ints as the floats that have their bits."""
    return floats8(ints8), lambda context, builder, sig, arguments: builder.bitcast(arguments[0], _FLOATS)


@intrinsic
def to_ints(typing_context, value):
    """Floats as whole numbers, cut off; they must be such that int32 holds."""
    return ints8(floats8), lambda context, builder, sig, arguments: builder.fptosi(arguments[0], _INTS)


def _across(builder, rows, combine):
    """Eight vectors to one that has in lane i what ``combine`` makes of the i-th's lanes."""
    half = 4
    while len(rows) > 1:
        # Of each two vectors the parts that belong together, side by side: 4 and 4 lanes, then 2, then 1.
        first = [i for i in range(2 * COUNT) if i % (2 * half) < half]
        masks = [ir.Constant(_INTS, [i + more for i in first]) for more in (0, half)]
        rows = [
            combine(builder, *(builder.shuffle_vector(a, b, mask) for mask in masks))
            for a, b in zip(rows[::2], rows[1::2], strict=True)
        ]
        half //= 2
    return rows[0]


@intrinsic
def lowest_each(typing_context, a, b, c, d, e, f, g, h):
    """In lane i the lowest number of the i-th."""

    def generate(context, builder, sig, arguments):
        return _across(builder, list(arguments), _smaller)

    return floats8(*[floats8] * COUNT), generate


@intrinsic
def highest_each(typing_context, a, b, c, d, e, f, g, h):
    """In lane i the highest number of the i-th."""

    def generate(context, builder, sig, arguments):
        return _across(builder, list(arguments), _greater)

    return floats8(*[floats8] * COUNT), generate


@intrinsic
def highest_int(typing_context, value):
    """The highest of eight ints."""

    def generate(context, builder, sig, arguments):
        value = arguments[0]
        for by in (4, 2, 1):
            other = _shuffled(builder, value, by)
            value = builder.select(builder.icmp_signed(">", value, other), value, other)
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.int32(ints8), generate


@intrinsic
def to_floats(typing_context, value):
    """Whole numbers as floats."""
    return floats8(ints8), lambda context, builder, sig, arguments: builder.sitofp(arguments[0], _FLOATS)


@intrinsic
def to_bytes(typing_context, value):
    """Eight whole numbers of 0 to 255 as a word of eight bytes, the first in the lowest."""

    def generate(context, builder, sig, arguments):
        ints = builder.fptosi(arguments[0], _INTS)
        return builder.bitcast(builder.trunc(ints, _BYTES), ir.IntType(64))

    return types.uint64(floats8), generate


@intrinsic
def from_bytes(typing_context, word):
    """The eight bytes of a word as floats."""

    def generate(context, builder, sig, arguments):
        ints = builder.zext(builder.bitcast(arguments[0], _BYTES), _INTS)
        return builder.sitofp(ints, _FLOATS)

    return floats8(types.uint64), generate


@intrinsic
def as_float(typing_context, bits):
    """The float32 with the lowest 32 bits of a word."""

    def generate(context, builder, sig, arguments):
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.uint64), generate


@intrinsic
def as_bits(typing_context, value):
    """A float32's bits."""

    def generate(context, builder, sig, arguments):
        return builder.zext(builder.bitcast(arguments[0], ir.IntType(32)), ir.IntType(64))

    return types.uint64(types.float32), generate


def _word_access(size):
    kind = ir.IntType(8 * size)

    @intrinsic
    def read(typing_context, address):
        def generate(context, builder, sig, arguments):
            value = builder.load(_at(builder, arguments[0], kind), align=1)
            return value if size == 8 else builder.zext(value, ir.IntType(64))

        return types.uint64(types.int64), generate

    @intrinsic
    def write(typing_context, address, word):
        def generate(context, builder, sig, arguments):
            value = arguments[1] if size == 8 else builder.trunc(arguments[1], kind)
            builder.store(value, _at(builder, arguments[0], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64), generate

    return read, write


read8, write8 = _word_access(1)
read16, write16 = _word_access(2)
read32, write32 = _word_access(4)
read64, write64 = _word_access(8)
