"""What loops here need of the processor and Numba does not have: addresses, cache lines, bits of words."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context, address):
    """An integer as the address that it is."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def prefetch(typing_context, address):
    """Ask for a cache line that will be written to soon."""

    def generate(context, builder, signature, arguments):
        line = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [line, i32(1), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(address), generate


LINE = 64  # bytes of a cache line


def _move_line(builder, arguments, align):
    """The store of a cache line that is read at the second address and written at the first."""
    line = ir.VectorType(ir.IntType(64), LINE // 8)
    to, from_ = (builder.inttoptr(a, line.as_pointer()) for a in arguments)
    return builder.store(builder.load(from_, align=1), to, align=align)


@intrinsic
def copy_line(typing_context, target, source):
    """Copy as many bytes as a cache line has, between any addresses."""

    def generate(context, builder, signature, arguments):
        _move_line(builder, arguments, 1)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def stream_line(typing_context, target, source):
    """Copy a cache line, at addresses, past the caches: it is not read before it is written."""

    def generate(context, builder, signature, arguments):
        hint = builder.module.add_metadata([ir.IntType(32)(1)])
        _move_line(builder, arguments, LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def finish_streams(typing_context):
    """Lines that were streamed are in memory before anything that is written from here on."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def fetch_add(typing_context, address, number):
    """Add to the 64-bit integer at an address, whatever other threads do; what it was before."""

    def generate(context, builder, signature, arguments):
        integer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", integer, arguments[1], "monotonic")

    return types.int64(address, number), generate


@intrinsic
def trailing_zeros(typing_context, word):
    """How many of a word's lowest bits are 0: the place of its lowest 1."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(word), generate


@intrinsic
def ones(typing_context, word):
    """How many of a word's bits are 1."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(word), generate


@njit(cache=True, nogil=True, inline="always")
def mixed(value):
    """SplitMix64's last steps: every bit of the value moves every bit of the result."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
