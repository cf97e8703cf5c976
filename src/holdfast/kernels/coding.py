"""The hot loops of erasure codes: records as bits, added by XOR and multiplied byte by byte in GF(2^8).

A byte is an element of the field: addition is XOR, multiplication that of polynomials over bits modulo
x^8 + x^4 + x^3 + x^2 + 1 (0x11d), for which 2 generates all elements but 0. ``PRODUCTS[a, b]`` is a product.
Nothing here knows what a number means, so NaN, infinities and -0 are bits like any others.

Arrays are C-contiguous uint32, records uint32 [records, words]. ``places`` name records of ``parity``; they
are trusted, and one that is named twice gets both differences, one after the other. No array may overlap
with the one that is written to, unless it is the same.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from holdfast.kernels.machine import prefetch

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "d8b2aca3c980"}

_compiled = njit(cache=True, nogil=True, error_model="numpy")
_inlined = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, forceinline=True)

POLYNOMIAL = 0x11D

_AHEAD = 8
_LINE = 64
_MOST_ASKED = 1024  # bytes of a record; behind them the processor runs on by itself
_BYTES = 32  # of a vector: the loops below do so many at a time
_WORDS = _BYTES // 4
_NIBBLE = 16


def _products() -> NDArray[np.uint8]:
    """All products of two bytes."""
    powers = np.zeros(2 * 255, np.int64)  # of 2: twice round, so that sums of logarithms need no modulo
    logarithms = np.zeros(256, np.int64)
    value = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    products: NDArray[np.uint8] = powers[logarithms[:, None] + logarithms[None, :]].astype(np.uint8)
    products[0, :] = products[:, 0] = 0
    return products


PRODUCTS = _products()
PRODUCTS.flags.writeable = False

# A product with a byte is the sum of those with its lower and its upper four bits: two lookups among sixteen,
# which is what a vector's shuffle does for all of its bytes at once. [coefficient, 32]: lower, then upper.
_TABLES = np.concatenate([PRODUCTS[:, :_NIBBLE], PRODUCTS[:, ::_NIBBLE]], axis=1)


def _vector(kind, count):
    return ir.VectorType(ir.IntType(kind), count)


def _splat(builder, scalar, count):
    vector = ir.VectorType(scalar.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(_vector(32, count), [0] * count))


def _constant_load(builder, address, kind, align):
    """From a table that nobody writes to: the compiler may keep it in a register."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _shuffled_product(builder, value, tables):
    """A vector's bytes times the coefficient whose tables lie at an address: by AVX2's shuffle."""
    vector = _vector(8, _BYTES)
    both = ir.Constant(_vector(32, _BYTES), [i % _NIBBLE for i in range(_BYTES)])
    lookup = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector, vector]), "llvm.x86.avx2.pshuf.b"
    )
    mask, four = (ir.Constant(vector, [number] * _BYTES) for number in (_NIBBLE - 1, 4))
    result = None
    for half, places in enumerate([builder.and_(value, mask), builder.lshr(value, four)]):
        address = builder.add(tables, ir.IntType(64)(half * _NIBBLE))
        table = _constant_load(builder, address, _vector(8, _NIBBLE), 1)
        part = builder.call(lookup, [builder.shuffle_vector(table, table, both), places])
        result = part if result is None else builder.xor(result, part)
    return result


def _bitwise_product(builder, value, tables):
    """The same on any machine: the sum of the products of the coefficient and each bit that is set."""
    vector = _vector(8, _BYTES)
    zero = ir.Constant(vector, [0] * _BYTES)
    result = zero
    for bit in range(8):
        place = 1 << bit if bit < 4 else _NIBBLE + (1 << bit - 4)
        address = builder.add(tables, ir.IntType(64)(place))
        product = _splat(builder, _constant_load(builder, address, ir.IntType(8), 1), _BYTES)
        there = builder.icmp_unsigned(
            "!=", builder.and_(value, ir.Constant(vector, [1 << bit] * _BYTES)), zero
        )
        result = builder.xor(result, builder.select(there, product, zero))
    return result


def _product(context, builder, value, tables, shuffles):
    """By whichever way the machine has; ``shuffles`` says otherwise (the tests do)."""
    if shuffles is None:
        _, _, features = context.codegen().magic_tuple()  # Numba's cache goes by them, too
        shuffles = "+avx2" in features.split(",")
    return (_shuffled_product if shuffles else _bitwise_product)(builder, value, tables)


def _loaded(builder, address):
    vector = _vector(8, _BYTES)
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)


def _masked(builder, count):
    """The mask of the first words of a vector."""
    places = ir.Constant(_vector(32, _WORDS), list(range(_WORDS)))
    return builder.icmp_signed("<", places, _splat(builder, builder.trunc(count, ir.IntType(32)), _WORDS))


def _load_some(builder, address, mask):
    """The words of a mask, the others zero: no more is read."""
    words, pointer = _vector(32, _WORDS), cgutils.voidptr_t
    kind = ir.FunctionType(words, [pointer, ir.IntType(32), mask.type, words])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v8i32.p0")
    others = ir.Constant(words, [0] * _WORDS)
    found = builder.call(function, [builder.inttoptr(address, pointer), ir.IntType(32)(4), mask, others])
    return builder.bitcast(found, _vector(8, _BYTES))


def _store_some(builder, address, value, mask):
    """The words of a mask: no more is written."""
    words, pointer = _vector(32, _WORDS), cgutils.voidptr_t
    kind = ir.FunctionType(ir.VoidType(), [words, pointer, ir.IntType(32), mask.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v8i32.p0")
    value = builder.bitcast(value, words)
    builder.call(function, [value, builder.inttoptr(address, pointer), ir.IntType(32)(4), mask])


def _step(multiplies, shuffles=None):
    """Intrinsics that add 32 bytes at an address, times a coefficient or as they are, to those at another:
    a whole vector, and one of which only the first words are there."""

    def changed(context, builder, value, tables):
        return _product(context, builder, value, tables, shuffles) if multiplies else value

    @intrinsic
    def whole(typing_context, target, source, tables):
        def generate(context, builder, sig, arguments):
            target, source, tables = arguments
            value = changed(context, builder, _loaded(builder, source), tables)
            value = builder.xor(_loaded(builder, target), value)
            builder.store(value, builder.inttoptr(target, value.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    @intrinsic
    def some(typing_context, target, source, tables, words):
        def generate(context, builder, sig, arguments):
            target, source, tables, words = arguments
            mask = _masked(builder, words)
            value = changed(context, builder, _load_some(builder, source, mask), tables)
            value = builder.xor(_load_some(builder, target, mask), value)
            _store_some(builder, target, value, mask)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return whole, some


@intrinsic
def _write_sum(typing_context, target, a, b):
    """The sum of 32 bytes at two addresses, to a third."""

    def generate(context, builder, sig, arguments):
        target, a, b = arguments
        value = builder.xor(_loaded(builder, a), _loaded(builder, b))
        builder.store(value, builder.inttoptr(target, value.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_add, _add_some = _step(multiplies=False)
_add_product, _add_product_some = _step(multiplies=True)


@_inlined
def _add_record(target, source, words):
    """target ^= source, of records at addresses."""
    whole = words // _WORDS * _BYTES
    for w in range(0, whole, _BYTES):
        _add(target + w, source + w, 0)
    if words % _WORDS:
        _add_some(target + whole, source + whole, 0, words % _WORDS)


@_inlined
def _add_multiple(target, source, tables, words):
    """target ^= coefficient * source, of records at addresses."""
    whole = words // _WORDS * _BYTES
    for w in range(0, whole, _BYTES):
        _add_product(target + w, source + w, tables)
    if words % _WORDS:
        _add_product_some(target + whole, source + whole, tables, words % _WORDS)


@_inlined
def _ask(address, count):
    """Prefetch the cache lines of a record that is needed later: access is random."""
    for offset in range(0, min(count, _MOST_ASKED), _LINE):
        prefetch(address + offset)
    prefetch(address + count - 4)


@_compiled
def xor(a, b, out):
    """out = a ^ b, all of one shape. ``out`` may be one of them."""
    a, b, out = a.reshape(-1), b.reshape(-1), out.reshape(-1)
    whole = out.shape[0] // _WORDS * _WORDS
    for w in range(0, whole * 4, _BYTES):
        _write_sum(out.ctypes.data + w, a.ctypes.data + w, b.ctypes.data + w)
    for i in range(whole, out.shape[0]):
        out[i] = a[i] ^ b[i]


@_compiled
def multiply_add(coefficient, source, target):
    """target ^= coefficient * source, both of one shape."""
    tables = _TABLES.ctypes.data + np.int64(coefficient) * 2 * _NIBBLE
    _add_multiple(target.ctypes.data, source.ctypes.data, tables, target.size)


@_compiled
def xor_into(parity, places, differences):
    """parity[places[i]] ^= differences[i]"""
    words = parity.shape[1]
    at, of, row_bytes = parity.ctypes.data, differences.ctypes.data, words * 4
    for i in range(places.shape[0]):
        if i + _AHEAD < places.shape[0]:
            _ask(at + np.int64(places[i + _AHEAD]) * row_bytes, row_bytes)
        _add_record(at + np.int64(places[i]) * row_bytes, of + i * row_bytes, words)


@_compiled
def xor_from(target, parity, places):
    """target[i] ^= parity[places[i]]"""
    words = parity.shape[1]
    to, at, row_bytes = target.ctypes.data, parity.ctypes.data, words * 4
    for i in range(places.shape[0]):
        if i + _AHEAD < places.shape[0]:
            _ask(at + np.int64(places[i + _AHEAD]) * row_bytes, row_bytes)
        _add_record(to + i * row_bytes, at + np.int64(places[i]) * row_bytes, words)


@_compiled
def multiply_add_into(parity, places, coefficients, differences):
    """parity[places[i]] ^= coefficients[i] * differences[i]

    ``coefficients`` is uint8; a single one is that of all.
    """
    words = parity.shape[1]
    at, of, row_bytes = parity.ctypes.data, differences.ctypes.data, words * 4
    each = 1 if coefficients.shape[0] > 1 else 0
    for i in range(places.shape[0]):
        if i + _AHEAD < places.shape[0]:
            _ask(at + np.int64(places[i + _AHEAD]) * row_bytes, row_bytes)
        coefficient = np.int64(coefficients[i * each])
        target, source = at + np.int64(places[i]) * row_bytes, of + i * row_bytes
        if coefficient == 1:
            _add_record(target, source, words)
        else:
            tables = _TABLES.ctypes.data + coefficient * 2 * _NIBBLE
            _add_multiple(target, source, tables, words)


@_compiled
def within(numbers, count):
    """Whether all are 0 to count - 1."""
    wrong = 0
    for i in range(numbers.shape[0]):
        wrong |= (numbers[i] < 0) | (numbers[i] >= count)
    return wrong == 0


@_compiled
def choose_coefficients(matrix, parities, members, out):
    """out[i] = matrix[parities[i], members[i]]; of each, a single one is that of all. False if one of them is
    out of range."""
    each_parity = 1 if parities.shape[0] > 1 else 0
    each_member = 1 if members.shape[0] > 1 else 0
    for i in range(out.shape[0]):
        parity, member = np.int64(parities[i * each_parity]), np.int64(members[i * each_member])
        if not (0 <= parity < matrix.shape[0] and 0 <= member < matrix.shape[1]):
            return False
        out[i] = matrix[parity, member]
    return True
