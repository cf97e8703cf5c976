"""Low-level operations that Numba lacks: addresses, cache lines, bits of words, atomics."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context, address):
    """Convert an integer to a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def prefetch(typing_context, address):
    """Prefetch a cache line that will be written soon."""

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
    """Copy the bytes of one cache line; addresses need no alignment."""

    def generate(context, builder, signature, arguments):
        _move_line(builder, arguments, 1)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def stream_line(typing_context, target, source):
    """Copy an aligned cache line with a non-temporal store."""

    def generate(context, builder, signature, arguments):
        hint = builder.module.add_metadata([ir.IntType(32)(1)])
        _move_line(builder, arguments, LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def finish_streams(typing_context):
    """A memory fence after non-temporal stores."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def fetch_add(typing_context, address, number):
    """Atomically add to the 64-bit integer at an address. Returns its previous value.

    What this thread did before is seen by whoever adds later.
    """

    def generate(context, builder, signature, arguments):
        integer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", integer, arguments[1], "acq_rel")

    return types.int64(address, number), generate


@intrinsic
def trailing_zeros(typing_context, word):
    """The number of trailing zero bits of a word."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(word), generate


@intrinsic
def ones(typing_context, word):
    """The number of set bits of a word."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(word), generate


@njit(cache=True, nogil=True, inline="always")
def mixed(value):
    """SplitMix64's finalizer: every bit of the result depends on every bit of the value."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
