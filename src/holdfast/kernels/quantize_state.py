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

from holdfast.kernels.rows import _pointer, _prefetch

RAW_STATE = 0xFFFF
"""A first word that says: this row is stored elsewhere, as it was. (A NaN, as any other would be.)"""

_AHEAD = 12
_EXPONENT = 0x7F80  # of a bfloat16; all ones: no number
_LEAST = 1.401298464324817e-45

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


UNSIGNED = _factors(8, 256)
SIGNED = _factors(4, 128)
"""Code to factor, for rows without and with negative values."""


def _middles(factors):
    """The least number that each code is nearest to, in logarithms; code 1 takes all that is below."""
    return np.concatenate([[0.0, 0.0], np.sqrt(factors[1:-1] * factors[2:])])


_MIDDLES_UNSIGNED = _middles(UNSIGNED)
_MIDDLES_SIGNED = _middles(SIGNED)


@njit(cache=True, nogil=True, inline="always")
def _is_number(ints, width):
    """Are all of these numbers, is one of them below zero (-0.0 is not), and the largest magnitude's bits."""
    magnitude = np.int32(0)
    least = np.int32(0x7FFFFFFF)
    for j in range(width):
        bits = ints[j]
        magnitude = max(magnitude, np.int32(bits & 0x7FFFFFFF))
        least = min(least, np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    return magnitude < 0x7F800000, least < -1, magnitude


@njit(cache=True, nogil=True)
def encode_bfloat16(source, source_stride, stored, stride, rows, width, raw):
    """Rows of float32 to bfloat16, to nearest even; the largest stay finite. raw[i]: has no numbers."""
    for i in range(rows):
        ints = carray(_pointer(source + i * source_stride), width, np.int32)
        out = carray(_pointer(stored + i * stride), 2 * width, np.uint8)
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


@njit(cache=True, nogil=True, inline="always")
def _decode_bfloat16_row(stored, out, width):
    """``out`` is the destination as uint32. A NaN or infinity, which no encoder writes, becomes zero."""
    if (stored[1] & 0x7F) == 0x7F and stored[0] & 0x80:
        return False
    for j in range(width):
        bits = np.uint32(stored[2 * j]) << np.uint32(16) | np.uint32(stored[2 * j + 1]) << np.uint32(24)
        out[j] = bits if bits & np.uint32(0x7F800000) != np.uint32(0x7F800000) else np.uint32(0)
    return True


@njit(cache=True, nogil=True)
def encode_log(source, source_stride, stored, stride, rows, width, raw):
    """Rows of float32 to eight bits of logarithm and sign. raw[i]: has no numbers."""
    one = np.zeros(1, np.float32)
    words = one.view(np.uint32)
    wide = np.zeros(1, np.float64)
    wide_words = wide.view(np.int64)
    for i in range(rows):
        ints = carray(_pointer(source + i * source_stride), width, np.int32)
        row = carray(_pointer(source + i * source_stride), width, np.float32)
        out = carray(_pointer(stored + i * stride), width + 2, np.uint8)
        number, negative, magnitude = _is_number(ints, width)
        raw[i] = not number
        if not number or magnitude == 0:
            for j in range(width + 2):
                out[j] = 0 if number or j > 1 else 255
            continue
        scale_bits = min((np.int64(magnitude) + 0xFFFF) >> 16, _EXPONENT - 1)
        words[0] = np.uint32(scale_bits << 16)
        inverse = 1.0 / np.float64(one[0])
        out[0] = np.uint8(scale_bits & 255)
        out[1] = np.uint8(scale_bits >> 8 | (0x80 if negative else 0))
        parts, top = (4, 127) if negative else (8, 255)
        for j in range(width):
            value = np.float64(row[j])
            code = 0
            if value != 0:
                wide[0] = abs(value) * inverse
                # The code at the power of two above, then down to the one whose middle is below.
                code = min(max(top + ((wide_words[0] >> 52) - 1022) * parts, 1), top)
                if negative:
                    while code > 1 and wide[0] < _MIDDLES_SIGNED[code]:
                        code -= 1
                    if value < 0:
                        code |= 0x80
                else:
                    while code > 1 and wide[0] < _MIDDLES_UNSIGNED[code]:
                        code -= 1
            out[j + 2] = np.uint8(code)


@njit(cache=True, nogil=True, inline="always")
def _decode_log_row(stored, out, width, one):
    """``out`` is the destination as float32."""
    if (stored[1] & 0x7F) == 0x7F and stored[0] & 0x80:
        return False
    words = one.view(np.uint32)
    words[0] = np.uint32(stored[0]) << np.uint32(16) | np.uint32(stored[1] & 0x7F) << np.uint32(24)
    scale = np.float64(one[0])
    if stored[1] & 0x80:
        for j in range(width):
            code = stored[j + 2] & 0x7F
            value = max(scale * SIGNED[code], _LEAST) if code else 0.0
            out[j] = np.float32(-value if stored[j + 2] & 0x80 and code else value)
    else:
        for j in range(width):
            code = stored[j + 2]
            out[j] = np.float32(max(scale * UNSIGNED[code], _LEAST) if code else 0.0)
    return True


@njit(cache=True, nogil=True)
def decode_state(stored, stride, target, target_stride, rows, width, bits):
    """Rows that ``encode_bfloat16`` or ``encode_log`` wrote; rows that are raw are left as they are."""
    one = np.zeros(1, np.float32)
    for i in range(rows):
        if bits == 16:
            row = carray(_pointer(stored + i * stride), 2 * width, np.uint8)
            _decode_bfloat16_row(row, carray(_pointer(target + i * target_stride), width, np.uint32), width)
        else:
            row = carray(_pointer(stored + i * stride), width + 2, np.uint8)
            _decode_log_row(row, carray(_pointer(target + i * target_stride), width, np.float32), width, one)


@njit(cache=True, nogil=True)
def decode_state_into(addresses, firsts, width, ids, stored, stride, bits, positions):
    """Decode stored row p to row ids[p] of tables, as ``decode_uniform_into`` does."""
    one = np.zeros(1, np.float32)
    some = positions.shape[0] > 0
    count = positions.shape[0] if some else ids.shape[0]
    table = ahead = 0
    for i in range(count):
        p = positions[i] if some else i
        if i + _AHEAD < count:  # rows lie anywhere: ask for the one that comes in a while
            coming = ids[positions[i + _AHEAD] if some else i + _AHEAD]
            while coming >= firsts[ahead + 1]:
                ahead += 1
            _prefetch(addresses[ahead] + (coming - firsts[ahead]) * (4 * width))
        while ids[p] >= firsts[table + 1]:
            table += 1
        target = addresses[table] + (ids[p] - firsts[table]) * (4 * width)
        if bits == 16:
            row = carray(_pointer(stored + p * stride), 2 * width, np.uint8)
            _decode_bfloat16_row(row, carray(_pointer(target), width, np.uint32), width)
        else:
            row = carray(_pointer(stored + p * stride), width + 2, np.uint8)
            _decode_log_row(row, carray(_pointer(target), width, np.float32), width, one)


@njit(cache=True, nogil=True)
def find_raw_state(stored, stride, rows, raw):
    """raw[i] = row i says that it is stored elsewhere."""
    for i in range(rows):
        row = carray(_pointer(stored + i * stride), 2, np.uint8)
        raw[i] = (row[1] & 0x7F) == 0x7F and (row[0] & 0x80) != 0
