"""The hot loops that store optimizer state in 16 or 8 bits a number; addresses as in ``quantize``.

Optimizer state spans many powers of two within a row, and what counts is its relative error: a learning
rate is divided by its root. So these grids are fine near zero, and keep signs and zeros.

    16 bits   bfloat16
    8 bits    u16 scale: a bfloat16 not below the largest magnitude, its sign set if a value is negative;
              then a byte c for each value, 0 for zero, else
              no value negative     scale * 2**-((255 - c) / 8)
              some negative         sign in the highest bit; scale * 2**-((127 - c) / 4) of the others
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from holdfast.kernels.machine import pointer, prefetch
from holdfast.kernels.simd import (
    as_float,
    bits_of,
    compiled,
    from_bits,
    greater,
    load,
    load_some,
    nearest,
    read16,
    smaller,
    splat,
    splat_int,
    to_bytes,
    to_floats,
    where_less,
    write8,
    write16,
    write64,
)

# Numba's cache of this file is valid until the file changes. So it contains the checksums of the files whose
# functions it inlines; a test compares them.
BUILT_WITH = {"simd": "d06c9da87557", "machine": "d8b2aca3c980"}

RAW_STATE = 0xFFFF
"""A first word that says: this row is stored elsewhere, as it was. (A NaN, as any other would be.)"""

_AHEAD = 12
_EXPONENT = 0x7F80  # of a bfloat16; all ones: no number
_LEAST = 1.401298464324817e-45
# Scales between these: no operation on float32 leads out of its normal numbers, or it does not matter.
_LEAST_EASY, _MOST_EASY = 2.0**-60, 2.0**100
# log2(1 + f) = f + f * (1 - f) * (a + b f + c f**2 + d f**3), within 1.6e-5: a ten-thousandth of a step.
_A, _B, _C, _D = 0.441917032, -0.267179251, 0.148426294, -0.045148816

_helper = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

# 2 ** (j / 8), written out: no two machines may round them differently.
_EIGHTHS = np.array(
    [
        1.0, 1.0905077326652577, 1.189207115002721, 1.2968395546510096,
        1.4142135623730951, 1.5422108254079407, 1.681792830507429, 1.8340080864093424,
    ]
)  # fmt: skip


def _factors(parts, codes):
    """What each code multiplies the scale with: 0, then 2 ** -((codes - 1 - c) / parts)."""
    factors = np.zeros(codes)
    for code in range(1, codes):
        below = codes - 1 - code  # in parts of a power of two
        octaves = -(-below // parts)
        factors[code] = _EIGHTHS[(octaves * parts - below) * (8 // parts)] * 2.0**-octaves
    return factors


_UNSIGNED = _factors(8, 256)
_SIGNED = _factors(4, 128)
_FACTORS = np.stack([_UNSIGNED, np.concatenate([_SIGNED, -_SIGNED])]).astype(np.float32)
"""Byte to factor, for rows without and with negative values."""


def _middles(factors):
    """The least number that each code is nearest to, in logarithms; code 1 takes all that is below."""
    return np.concatenate([[0.0, 0.0], np.sqrt(factors[1:-1] * factors[2:])])


_MIDDLES_UNSIGNED = _middles(_UNSIGNED)
_MIDDLES_SIGNED = _middles(_SIGNED)


@_helper
def _is_number(ints, width):
    """Are all of these numbers, is one of them below zero (-0.0 is not), and the largest magnitude's bits."""
    magnitude = np.int32(0)
    least = np.int32(0x7FFFFFFF)
    for j in range(width):
        bits = ints[j]
        magnitude = max(magnitude, np.int32(bits & 0x7FFFFFFF))
        least = min(least, np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    return magnitude < 0x7F800000, least < -1, magnitude


@compiled
def encode_bfloat16(source, source_stride, stored, stride, rows, width, raw):
    """Rows of float32 to bfloat16, to nearest even; the largest stay finite. raw[i]: has no numbers."""
    for i in range(rows):
        ints = carray(pointer(source + i * source_stride), width, np.int32)
        out = carray(pointer(stored + i * stride), 2 * width, np.uint8)
        number = _is_number(ints, width)[0]
        raw[i] = not number
        if number:
            for j in range(width):
                bits = np.uint32(ints[j])
                even = (bits >> np.uint32(16)) & np.uint32(1)
                half = np.uint32((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
                if half & np.uint32(0x7FFF) == np.uint32(_EXPONENT):  # rounded up to infinity
                    half -= np.uint32(1)
                out[2 * j] = np.uint8(half & np.uint32(255))
                out[2 * j + 1] = np.uint8(half >> np.uint32(8))
        else:
            for j in range(2 * width):
                out[j] = 255 if j < 2 else 0


@_helper
def _decode_bfloat16_row(stored, out, width):
    """``stored`` and ``out`` are addresses. A NaN or infinity, which no encoder writes, becomes zero."""
    halves = carray(pointer(stored), 2 * width, np.uint8)
    if (halves[1] & 0x7F) == 0x7F and halves[0] & 0x80:
        return False
    values = carray(pointer(out), width, np.uint32)
    for j in range(width):
        bits = np.uint32(halves[2 * j]) << np.uint32(16) | np.uint32(halves[2 * j + 1]) << np.uint32(24)
        values[j] = bits if bits & np.uint32(0x7F800000) != np.uint32(0x7F800000) else np.uint32(0)
    return True


@compiled
def encode_log(source, source_stride, stored, stride, rows, width, raw):
    """Rows of float32 to eight bits of logarithm and sign. raw[i]: has no numbers."""
    for i in range(rows):
        row = source + i * source_stride
        out = stored + i * stride
        number, negative, magnitude = _is_number(carray(pointer(row), width, np.int32), width)
        raw[i] = not number
        if not number or magnitude == 0:
            codes = carray(pointer(out), width + 2, np.uint8)
            for j in range(width + 2):
                codes[j] = 0 if number or j > 1 else 255
            continue
        scale_bits = min(
            (np.uint64(magnitude) + np.uint64(0xFFFF)) >> np.uint64(16), np.uint64(_EXPONENT - 1)
        )
        scale = as_float(scale_bits << np.uint64(16))
        write16(out, scale_bits | np.uint64(0x8000 if negative else 0))
        if not _LEAST_EASY < scale < _MOST_EASY:
            _write_logs_hard(row, out + 2, width, np.float64(scale), negative)
            continue
        for start in range(0, width & ~7, 8):
            write64(out + 2 + start, _logs(load(row + 4 * start), scale, negative))
        if width & 7:
            start = width & ~7
            values = load_some(row + 4 * start, width & 7, splat(np.float32(0)))
            word = _logs(values, scale, negative)
            for j in range(width & 7):
                write8(out + 2 + start + j, word >> np.uint64(8 * j))


@_helper
def _logs(values, scale, negative):
    """The codes of eight values as a word."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    top = splat(np.float32(127 if negative else 255))
    parts = splat(np.float32(4 if negative else 8))
    magnitudes = greater(values, zero - values)
    bits = bits_of(magnitudes * splat(np.float32(1) / scale))
    exponent = to_floats(bits >> splat_int(np.int32(23))) - splat(np.float32(127))
    f = from_bits((bits & splat_int(np.int32(0x7FFFFF))) | splat_int(np.int32(0x3F800000))) - one
    inner = splat(np.float32(_C)) + f * splat(np.float32(_D))
    inner = splat(np.float32(_A)) + f * (splat(np.float32(_B)) + f * inner)
    logarithm = exponent + (f + f * (one - f) * inner)
    codes = smaller(greater(nearest(top + parts * logarithm), one), top)
    codes = where_less(zero, magnitudes, codes, zero)
    return to_bytes(where_less(values, zero, codes + splat(np.float32(128)), codes))


@_helper
def _write_logs_hard(row, out, width, scale, negative):
    """The codes of a row with a scale near the ends of float32's range, one by one."""
    values = carray(pointer(row), width, np.float32)
    codes = carray(pointer(out), width, np.uint8)
    top = 127 if negative else 255
    for j in range(width):
        ratio = abs(np.float64(values[j])) / scale
        code = top if ratio > 0 else 0
        while code > 1 and ratio < (_MIDDLES_SIGNED[code] if negative else _MIDDLES_UNSIGNED[code]):
            code -= 1
        codes[j] = np.uint8(code + 128 if values[j] < 0 else code)


@_helper
def _decode_log_row(stored, out, width):
    """``stored`` and ``out`` are addresses; False, and nothing written, if the row is raw."""
    word = read16(stored)
    if word & np.uint64(_EXPONENT) == np.uint64(_EXPONENT):
        return False
    scale = as_float((word & np.uint64(0x7FFF)) << np.uint64(16))
    factors = _FACTORS[1 if word & np.uint64(0x8000) else 0]
    codes = carray(pointer(stored + 2), width, np.uint8)
    values = carray(pointer(out), width, np.float32)
    for j in range(width):
        values[j] = scale * factors[codes[j]]
    if scale < _LEAST_EASY:  # what is not zero must not become it
        for j in range(width):
            if values[j] == 0 and factors[codes[j]] != 0:
                values[j] = np.float32(_LEAST) if factors[codes[j]] > 0 else -np.float32(_LEAST)
    return True


@compiled
def decode_state(stored, stride, target, target_stride, rows, width, bits):
    """Rows that ``encode_bfloat16`` or ``encode_log`` wrote; rows that are raw are left as they are."""
    for i in range(rows):
        if bits == 16:
            _decode_bfloat16_row(stored + i * stride, target + i * target_stride, width)
        else:
            _decode_log_row(stored + i * stride, target + i * target_stride, width)


@compiled
def decode_state_into(addresses, firsts, width, ids, stored, stride, bits, positions):
    """Decode stored row p to row ids[p] of tables, as ``decode_uniform_into`` does."""
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
        if bits == 16:
            _decode_bfloat16_row(stored + p * stride, out, width)
        else:
            _decode_log_row(stored + p * stride, out, width)


@compiled
def find_raw_state(stored, stride, rows, raw):
    """raw[i] = row i says that it is stored elsewhere."""
    for i in range(rows):
        row = carray(pointer(stored + i * stride), 2, np.uint8)
        raw[i] = (row[1] & 0x7F) == 0x7F and (row[0] & 0x80) != 0
