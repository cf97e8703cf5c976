"""Vectors of eight float32 or int32, for the codecs' loops, which LLVM does not vectorize by itself.

Vectorizing a sum would reorder it, so LLVM leaves such loops scalar. Loops written with these vectors fix
the order: elements are combined in the same order on every machine, and no product and sum are fused. So
equal inputs give equal bytes everywhere. Addresses are plain integers and need no alignment beyond 4 bytes.
All machines that Numba compiles for are little-endian.

Gain over the scalar fallback, in rows per second at dim 64 on one thread (``holdfast bench kernels``):
encoding 6.7 to 7.6 times (adaptive), 3.3 times (asymmetric, 8 bits), 5.3 times (logarithms); decoding 2.1 to
3.0 times.

There are two implementations of the same operations, with the same bits as results:

- LLVM vectors, the default. LLVM maps them to whatever vector registers the processor has.
- Eight scalars, one after the other. Used if the installed LLVM rejects the vector intrinsics below, or if
  the environment variable ``HOLDFAST_SIMD`` is ``0``.
"""

from __future__ import annotations

import operator
import os

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

COUNT = 8

_FLOAT, _INT, _BYTE, _WORD = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(64)
_RINT = "llvm.rint.v8f32"
_MASKED_LOAD = "llvm.masked.load.v8f32.p0"
_MASKED_STORE = "llvm.masked.store.v8f32.p0"
_PROBE = f"""
declare <8 x float> @{_RINT}(<8 x float>)
declare <8 x float> @{_MASKED_LOAD}(ptr, i32, <8 x i1>, <8 x float>)
declare void @{_MASKED_STORE}(<8 x float>, ptr, i32, <8 x i1>)
"""


def accepted(assembly: str) -> bool:
    """Whether the installed LLVM knows the intrinsics that this LLVM assembly declares."""
    try:
        module = binding.parse_assembly(assembly)
    except RuntimeError:
        return False
    return "Unknown intrinsic" not in str(module)  # LLVM prints this comment above the declaration


VECTORS = os.environ.get("HOLDFAST_SIMD") != "0" and accepted(_PROBE)
"""Whether operations here use LLVM vectors; else eight scalars."""


def compiled(function):
    """Compile a loop that uses vectors. Numba caches both implementations side by side."""
    if not VECTORS:
        function.__qualname__ += "_scalar"  # a part of the cache file's name
    return njit(cache=True, nogil=True, error_model="numpy")(function)


def _eight(kind):
    return ir.VectorType(kind, COUNT) if VECTORS else ir.ArrayType(kind, COUNT)


_FLOATS, _INTS = _eight(_FLOAT), _eight(_INT)


class _Vector(types.Type):
    def __init__(self, kind):
        self.kind = kind
        super().__init__(name=f"vector({kind})")


floats8 = _Vector("float32")
ints8 = _Vector("int32")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, _FLOATS if fe_type.kind == "float32" else _INTS)


# The two implementations. ``build`` makes one instruction of a builder and operands, which works for scalars
# and for LLVM vectors alike; ``_like`` is the type that a result must be cast to.


def each(builder, build, *vectors):
    """Apply an instruction to each element."""
    if VECTORS:
        return build(builder, *vectors)
    columns = zip(*(_elements(builder, vector) for vector in vectors), strict=True)
    return _packed(builder, [build(builder, *operands) for operands in columns])


def _like(value, kind):
    return ir.VectorType(kind, COUNT) if isinstance(value.type, ir.VectorType) else kind


def _constant(value, number):
    """An int32 constant, or a vector of it if ``value`` is a vector."""
    return ir.Constant(_INTS, [number] * COUNT) if isinstance(value.type, ir.VectorType) else _INT(number)


def _elements(builder, vector):
    return [builder.extract_value(vector, i) for i in range(COUNT)]


def _packed(builder, elements):
    vector = ir.Constant(ir.ArrayType(elements[0].type, COUNT), ir.Undefined)
    for i, element in enumerate(elements):
        vector = builder.insert_value(vector, element, i)
    return vector


def _splat(builder, value):
    if not VECTORS:
        return _packed(builder, [value] * COUNT)
    first = builder.insert_element(ir.Constant(_eight(value.type), ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * COUNT))


def _at(builder, address, kind, offset=0):
    return builder.inttoptr(builder.add(address, address.type(offset)), kind.as_pointer())


def _first(builder, count):
    """The mask of the first ``count`` elements of an LLVM vector."""
    places = ir.Constant(_INTS, list(range(COUNT)))
    return builder.icmp_signed("<", places, _splat(builder, builder.trunc(count, _INT)))


def _called(builder, name, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _smaller(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _greater(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _greater_int(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _operator(function, kind, build):
    """Make an operator of Python work element by element."""

    @infer_global(function)
    class _Typing(ConcreteTemplate):
        cases = (signature(kind, kind, kind),)

    @lower_builtin(function, kind, kind)
    def _lower(context, builder, sig, arguments):
        return each(builder, build, *arguments)


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


@intrinsic
def splat(typing_context, value):
    """Set all elements to one float32."""
    return floats8(types.float32), lambda context, builder, sig, arguments: _splat(builder, *arguments)


@intrinsic
def splat_int(typing_context, value):
    """Set all elements to one int32."""
    return ints8(types.int32), lambda context, builder, sig, arguments: _splat(builder, *arguments)


@intrinsic
def load(typing_context, address):
    """Read eight floats at an address."""

    def generate(context, builder, sig, arguments):
        return builder.load(_at(builder, arguments[0], _FLOATS), align=4)

    return floats8(types.int64), generate


@intrinsic
def store(typing_context, address, value):
    """Write eight floats or ints to an address."""

    def generate(context, builder, sig, arguments):
        builder.store(arguments[1], _at(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


@intrinsic
def load_some(typing_context, address, count, others):
    """Read ``count`` floats at an address and no more; the other elements are those of ``others``."""

    def generate(context, builder, sig, arguments):
        address, count, others = arguments
        if VECTORS:
            pointer = builder.inttoptr(address, cgutils.voidptr_t)
            return _called(builder, _MASKED_LOAD, _FLOATS, [pointer, _INT(4), _first(builder, count), others])
        elements = []
        for i, other in enumerate(_elements(builder, others)):
            slot = cgutils.alloca_once_value(builder, other)
            with builder.if_then(builder.icmp_signed("<", count.type(i), count)):
                builder.store(builder.load(_at(builder, address, _FLOAT, 4 * i), align=4), slot)
            elements.append(builder.load(slot))
        return _packed(builder, elements)

    return floats8(types.int64, types.int64, floats8), generate


@intrinsic
def store_some(typing_context, address, value, count):
    """Write the first ``count`` floats to an address and no more."""

    def generate(context, builder, sig, arguments):
        address, value, count = arguments
        if VECTORS:
            pointer = builder.inttoptr(address, cgutils.voidptr_t)
            _called(builder, _MASKED_STORE, ir.VoidType(), [value, pointer, _INT(4), _first(builder, count)])
            return context.get_dummy_value()
        for i, element in enumerate(_elements(builder, value)):
            with builder.if_then(builder.icmp_signed("<", count.type(i), count)):
                builder.store(element, _at(builder, address, _FLOAT, 4 * i), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, floats8, types.int64), generate


@intrinsic
def prefetch(typing_context, address):
    """Prefetch a cache line that will be read soon. Any address is allowed."""

    def generate(context, builder, sig, arguments):
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        _called(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _elementwise(result, kinds, build):
    """What an intrinsic returns if it applies ``build`` to each element."""
    return result(*kinds), lambda context, builder, sig, arguments: each(builder, build, *arguments)


@intrinsic
def smaller(typing_context, a, b):
    """The minimum of each two elements; b if either is NaN."""
    return _elementwise(floats8, (floats8, floats8), _smaller)


@intrinsic
def greater(typing_context, a, b):
    """The maximum of each two elements; b if either is NaN."""
    return _elementwise(floats8, (floats8, floats8), _greater)


@intrinsic
def greater_int(typing_context, a, b):
    """The maximum of each two elements."""
    return _elementwise(ints8, (ints8, ints8), _greater_int)


@intrinsic
def where_less(typing_context, a, b, then, otherwise):
    """``then`` where a < b, else ``otherwise``."""

    def build(builder, a, b, then, otherwise):
        return builder.select(builder.fcmp_ordered("<", a, b), then, otherwise)

    return _elementwise(floats8, [floats8] * 4, build)


@intrinsic
def nearest(typing_context, value):
    """Round to the nearest integer, ties to even."""

    def build(builder, value):
        name = _RINT if VECTORS else "llvm.rint.f32"
        return _called(builder, name, value.type, [value])

    return _elementwise(floats8, [floats8], build)


@intrinsic
def magnitude_bits(typing_context, value):
    """The bits without the sign. They sort as magnitudes do, then infinity, then NaN."""

    def build(builder, value):
        bits = builder.bitcast(value, _like(value, _INT))
        return builder.and_(bits, _constant(value, 0x7FFFFFFF))

    return _elementwise(ints8, [floats8], build)


@intrinsic
def bits_of(typing_context, value):
    """Reinterpret floats as ints."""
    return _elementwise(ints8, [floats8], lambda builder, value: builder.bitcast(value, _like(value, _INT)))


@intrinsic
def from_bits(typing_context, value):
    """Reinterpret ints as floats."""
    return _elementwise(floats8, [ints8], lambda builder, value: builder.bitcast(value, _like(value, _FLOAT)))


@intrinsic
def to_ints(typing_context, value):
    """Truncate floats, which must be in the range of int32, to ints."""
    return _elementwise(ints8, [floats8], lambda builder, value: builder.fptosi(value, _like(value, _INT)))


@intrinsic
def to_floats(typing_context, value):
    """Convert ints to floats."""
    return _elementwise(floats8, [ints8], lambda builder, value: builder.sitofp(value, _like(value, _FLOAT)))


def _across(builder, vectors, combine):
    """Reduce each of eight vectors by ``combine``: element i of the result is of vector i."""
    if not VECTORS:
        return _packed(builder, [_reduced(builder, vector, combine) for vector in vectors])
    half = 4
    while len(vectors) > 1:
        # Of each two vectors, put the parts to combine side by side: 4 and 4 elements, then 2, then 1.
        first = [i for i in range(2 * COUNT) if i % (2 * half) < half]
        masks = [ir.Constant(_INTS, [i + more for i in first]) for more in (0, half)]
        vectors = [
            combine(builder, *(builder.shuffle_vector(a, b, mask) for mask in masks))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        half //= 2
    return vectors[0]


def _reduced(builder, vector, combine):
    """Reduce one vector to a scalar: elements i and i + 4, then i and i + 2, then i and i + 1."""
    if VECTORS:
        for by in (4, 2, 1):
            mask = ir.Constant(_INTS, [(i + by) % COUNT for i in range(COUNT)])
            vector = combine(builder, vector, builder.shuffle_vector(vector, vector, mask))
        return builder.extract_element(vector, _INT(0))
    elements = _elements(builder, vector)
    while len(elements) > 1:
        half = len(elements) // 2
        elements = [combine(builder, a, b) for a, b in zip(elements[:half], elements[half:], strict=True)]
    return elements[0]


@intrinsic
def lowest_each(typing_context, a, b, c, d, e, f, g, h):
    """The minima of eight vectors; element i is of the i-th."""

    def generate(context, builder, sig, arguments):
        return _across(builder, list(arguments), _smaller)

    return floats8(*[floats8] * COUNT), generate


@intrinsic
def highest_each(typing_context, a, b, c, d, e, f, g, h):
    """The maxima of eight vectors; element i is of the i-th."""

    def generate(context, builder, sig, arguments):
        return _across(builder, list(arguments), _greater)

    return floats8(*[floats8] * COUNT), generate


@intrinsic
def highest_int(typing_context, value):
    """The maximum of eight ints."""

    def generate(context, builder, sig, arguments):
        return _reduced(builder, arguments[0], _greater_int)

    return types.int32(ints8), generate


@intrinsic
def to_bytes(typing_context, value):
    """Pack eight integers from 0 to 255 into a word, the first in its lowest byte."""

    def generate(context, builder, sig, arguments):
        if VECTORS:
            ints = builder.fptosi(arguments[0], _INTS)
            return builder.bitcast(builder.trunc(ints, _eight(_BYTE)), _WORD)
        word = _WORD(0)
        for i, element in enumerate(_elements(builder, arguments[0])):
            byte = builder.zext(builder.trunc(builder.fptosi(element, _INT), _BYTE), _WORD)
            word = builder.or_(word, builder.shl(byte, _WORD(8 * i)))
        return word

    return types.uint64(floats8), generate


@intrinsic
def from_bytes(typing_context, word):
    """Unpack the eight bytes of a word to floats."""

    def generate(context, builder, sig, arguments):
        if VECTORS:
            ints = builder.zext(builder.bitcast(arguments[0], _eight(_BYTE)), _INTS)
            return builder.sitofp(ints, _FLOATS)
        elements = []
        for i in range(COUNT):
            byte = builder.and_(builder.lshr(arguments[0], _WORD(8 * i)), _WORD(255))
            elements.append(builder.sitofp(builder.trunc(byte, _INT), _FLOAT))
        return _packed(builder, elements)

    return floats8(types.uint64), generate


@intrinsic
def as_float(typing_context, bits):
    """Reinterpret the lowest 32 bits of a word as a float32."""

    def generate(context, builder, sig, arguments):
        return builder.bitcast(builder.trunc(arguments[0], _INT), _FLOAT)

    return types.float32(types.uint64), generate


@intrinsic
def as_bits(typing_context, value):
    """The bits of a float32, as a word."""

    def generate(context, builder, sig, arguments):
        return builder.zext(builder.bitcast(arguments[0], _INT), _WORD)

    return types.uint64(types.float32), generate


def _word_access(size):
    kind = ir.IntType(8 * size)

    @intrinsic
    def read(typing_context, address):
        def generate(context, builder, sig, arguments):
            value = builder.load(_at(builder, arguments[0], kind), align=1)
            return value if size == 8 else builder.zext(value, _WORD)

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
