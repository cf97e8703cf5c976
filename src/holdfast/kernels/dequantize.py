"""The hot loops that turn stored rows of uniform quantization back into floats; see ``quantize``.

A stored row, all little-endian:

    grid 16   u16 scale: 7 bits of exponent, 9 of mantissa, as ``_scale_16`` reads them;
              i16 zero, in steps of 2**-fraction; codes
    grid 32   f32 scale; f32 zero; codes

    value     grid 16: scale * (code + zero / 2**fraction)      grid 32: zero + scale * code
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from holdfast.kernels.machine import pointer, prefetch
from holdfast.kernels.simd import (
    as_float,
    compiled,
    from_bytes,
    read8,
    read16,
    read32,
    read64,
    splat,
    store,
    store_some,
)

# Numba's cache of this file is valid until the file changes. So it contains the checksums of the files whose
# functions it inlines; a test compares them.
BUILT_WITH = {"simd": "d06c9da87557", "machine": "d8b2aca3c980"}

RAW_16 = 0xFFFF
"""The scale (grid 16) that marks a raw row, which is stored elsewhere."""
CONSTANT_16 = 0xFFFE
"""The scale (grid 16) that marks a row whose values all equal the float32 in the next four bytes."""
NO_SCALE_16 = 0xFE00
"""Scales of grid 16 from here on are markers."""
RAW_32 = 0x7FC00000
"""The scale (grid 32) that marks a raw row, which is stored elsewhere."""

LARGEST = 3.4028234663852886e38
SCALE_OFFSET = 64 << 9
"""The exponents of grid 16 begin at 64 of float32's: scales from 2**-63 to 2**64."""
LEAST_EASY, MOST_EASY, FAR = 2.0**-62, 2.0**62, 2.0**15
"""Easy rows: no scale is as small, no magnitude as large, and none lies as many steps from zero."""

_AHEAD = 12

_helper = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_inlined = njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True
)


@_inlined
def fraction_bits(bits):
    """Bits behind the point of a zero of grid 16: the fewer the codes, the finer it matters."""
    return 4 if bits == 8 else 10 - bits


@_inlined
def _scale_16(bits):
    """The number that a scale of grid 16 is: 0 for 0, else bits 29 to 14 of a float32, moved by an offset."""
    return (
        as_float((bits + np.uint64(SCALE_OFFSET)) << np.uint64(14)) if bits > np.uint64(0) else np.float32(0)
    )


@_inlined
def _unpacked(word, bits):
    """Undo ``_packed``."""
    if bits == 8:
        return word
    shift = np.uint64(8 - bits)
    ones = np.uint64((1 << bits) - 1) * np.uint64(0x0101010101010101)
    pairs = np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0001000100010001)
    fours = np.uint64((1 << 4 * bits) - 1) * np.uint64(0x0000000100000001)
    word = (word | word << (np.uint64(4) * shift)) & fours
    word = (word | word << (shift + shift)) & pairs
    return (word | word << shift) & ones


@_inlined
def _read_some(stored, size):
    word = np.uint64(0)
    for j in range(size):
        word |= read8(stored + j) << np.uint64(8 * j)
    return word


@_inlined
def _decode_packed(stored, out, width, bits, grid, scale, zero):
    """Decode packed codes in float32."""
    scales, zeros = splat(scale), splat(zero)
    for block in range((width + 7) >> 3):
        at = stored + block * bits
        left = width - 8 * block
        if left < 8:
            word = _read_some(at, (left * bits + 7) >> 3)
        elif bits == 8:
            word = read64(at)
        elif bits == 4:
            word = read32(at)
        elif bits == 2:
            word = read16(at)
        else:
            word = read16(at) | read8(at + 2) << np.uint64(16)
        codes = from_bytes(_unpacked(word, bits))
        values = (codes + zeros) * scales if grid == 16 else codes * scales + zeros
        if left >= 8:
            store(out + 32 * block, values)
        else:
            store_some(out + 32 * block, values, left)


@_inlined
def _decode_codes(stored, out, width, bits, grid, scale, zero):
    """Decode codes in float32 where its precision suffices, else one by one in float64."""
    easy = np.float32(LEAST_EASY) < scale < np.float32(MOST_EASY) and abs(zero) <= scale * np.float32(2 * FAR)
    if grid == 32 and not easy:
        _decode_hard(stored, out, width, bits, scale, zero)
    else:
        _decode_packed(stored, out, width, bits, grid, scale, zero)


@_helper
def _decode_hard(stored, out, width, bits, scale, zero):
    """Values of codes on a grid of 32 bits: the product is exact, only the sum is rounded."""
    values = carray(pointer(out), width, np.float32)
    for j in range(width):
        at = stored + (j >> 3) * bits
        word = _read_some(at, min(bits, ((width - (j & ~7)) * bits + 7) >> 3))
        word = _unpacked(word, bits)
        code = np.float64(word >> np.uint64(8 * (j & 7)) & np.uint64(255))
        value = np.float64(zero) + np.float64(scale) * code
        values[j] = np.float32(min(max(value, -LARGEST), LARGEST))


@_inlined
def _decode_row(stored, out, width, bits, grid):
    """Decode one row to finite floats. Returns False, and writes nothing, if it is raw."""
    if grid == 16:
        word = read32(stored)
        scale_bits = word & np.uint64(0xFFFF)
        if scale_bits < np.uint64(NO_SCALE_16):
            scale = _scale_16(scale_bits)
            parts = np.int16(word >> np.uint64(16))
            zero = np.float32(parts) / np.float32(1 << fraction_bits(bits))
            _decode_codes(stored + 4, out, width, bits, grid, scale, zero)
            return True
        if _is_raw(stored, 4 + ((width * bits + 7) >> 3), grid):
            return False
        value = as_float(read32(stored + 2))
        values = carray(pointer(out), width, np.float32)
        for j in range(width):
            values[j] = value
        return True
    scale, zero = as_float(read32(stored)), as_float(read32(stored + 4))
    if not (np.isfinite(scale) and np.isfinite(zero)):
        return False
    _decode_codes(stored + 8, out, width, bits, grid, scale, zero)
    return True


@compiled
def decode_uniform(stored, stride, target, target_stride, rows, width, bits, grid):
    """Decode stored rows to float32; raw rows are not written."""
    for i in range(rows):
        _decode_row(stored + i * stride, target + i * target_stride, width, bits, grid)


@compiled
def decode_uniform_into(addresses, firsts, width, ids, stored, stride, bits, grid, positions):
    """Decode stored row p to row ids[p] of consecutively numbered tables, for each p of ``positions``.

    Table t begins at memory address addresses[t] and has rows firsts[t] to firsts[t + 1] - 1 of the
    numbering, of ``width`` float32 each. The caller makes sure that ids ascend and are in range.
    Without positions: every row. Raw rows are not written.
    """
    some = positions.shape[0] > 0
    count = positions.shape[0] if some else ids.shape[0]
    table = ahead = 0
    for i in range(count):
        p = positions[i] if some else i
        if i + _AHEAD < count:  # access is random: prefetch a later row
            coming = ids[positions[i + _AHEAD] if some else i + _AHEAD]
            while coming >= firsts[ahead + 1]:
                ahead += 1
            prefetch(addresses[ahead] + (coming - firsts[ahead]) * (4 * width))
        while ids[p] >= firsts[table + 1]:
            table += 1
        out = addresses[table] + (ids[p] - firsts[table]) * (4 * width)
        _decode_row(stored + p * stride, out, width, bits, grid)


@_inlined
def _is_raw(stored, size, grid):
    """Whether a stored row is marked as raw or has an invalid grid."""
    if grid == 32:
        scale, zero = as_float(read32(stored)), as_float(read32(stored + 4))
        return not (np.isfinite(scale) and np.isfinite(zero))
    scale_bits = read16(stored)
    if scale_bits == np.uint64(CONSTANT_16) and size >= 6:
        return not np.isfinite(as_float(read32(stored + 2)))
    return scale_bits >= np.uint64(NO_SCALE_16)


@compiled
def find_raw(stored, stride, rows, size, grid, raw):
    """raw[i] = row i is marked as raw or has an invalid grid."""
    for i in range(rows):
        raw[i] = _is_raw(stored + i * stride, size, grid)
