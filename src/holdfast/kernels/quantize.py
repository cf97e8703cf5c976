"""The hot loops of uniform quantization: a row of floats to a few bits a number and back.

Rows are given as the address of the first and the bytes from one to the next, so that one compiled
loop serves whole arrays, columns of records and tables anywhere. Bounds are the caller's duty. No loop
adds floats in an order that depends on the machine: equal rows give equal bytes everywhere.

A stored row (``levels`` = 2**bits - 1, all little-endian):

    grid 16   u16 scale: bits 30 to 15 of the float32; i16 zero, in steps of 2**-fraction; codes
    grid 32   f32 scale; f32 zero; codes

    value     grid 16: scale * (code + zero / 2**fraction)      grid 32: zero + scale * code
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from holdfast.kernels.rows import _pointer, _prefetch

SYMMETRIC, ASYMMETRIC, ADAPTIVE = 0, 1, 2

RAW_16 = 0xFFFF
"""A scale of grid 16 that says: this row is stored elsewhere, as it was."""
CONSTANT_16 = 0xFFFE
"""A scale of grid 16 that says: all values are the float32 in the four bytes that follow."""
NO_SCALE_16 = 0xFF00
"""Scales of grid 16 from here on are no numbers."""

_AHEAD = 12
_LARGEST = 3.4028234663852886e38
_REFINEMENTS = 3
# Within these no float32 operation on a row's values overflows, and none loses bits to denormals.
_LEAST_EASY, _MOST_EASY = 1e-30, 1e34
# A grid that begins this many steps from zero: float32 rounds values by less than 2**-8 steps.
_FAR = 65536.0


@njit(cache=True, nogil=True, inline="always")
def fraction_bits(bits):
    """Bits behind the point of a zero of grid 16: the fewer the codes, the finer it matters."""
    return 4 if bits == 8 else 10 - bits


@njit(cache=True, nogil=True)
def _extent(ints, width):
    """The least and greatest of some floats, given and returned as int32 that are ordered as they are."""
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    for j in range(width):
        value = np.int32(ints[j] ^ ((ints[j] >> 31) & 0x7FFFFFFF))
        low = min(low, value)
        high = max(high, value)
    return low, high


@njit(cache=True, nogil=True, inline="always")
def _pack(codes, out, count, bits):
    """Put the lowest bits of ``count`` codes side by side, the first into the lowest bits of a byte.

    ``codes`` has zeros up to the next multiple of eight.
    """
    if bits == 8:
        for j in range(count):
            out[j] = codes[j]
        return
    size = (count * bits + 7) >> 3
    shift = np.uint64(8 - bits)
    pairs = np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0001000100010001)
    fours = np.uint64((1 << 4 * bits) - 1) * np.uint64(0x0000000100000001)
    for block in range((count + 7) >> 3):
        word = np.uint64(0)
        for j in range(8):
            word |= np.uint64(codes[8 * block + j]) << np.uint64(8 * j)
        word = (word | word >> shift) & pairs
        word = (word | word >> (shift + shift)) & fours
        word |= word >> (np.uint64(4) * shift)
        for j in range(min(bits, size - bits * block)):
            out[bits * block + j] = np.uint8(word >> np.uint64(8 * j) & np.uint64(255))


@njit(cache=True, nogil=True, inline="always")
def _unpack(packed, codes, count, bits):
    """Undo ``_pack``; writes to ``codes`` up to the next multiple of eight."""
    size = (count * bits + 7) >> 3
    shift = np.uint64(8 - bits)
    ones = np.uint64((1 << bits) - 1) * np.uint64(0x0101010101010101)
    pairs = np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0001000100010001)
    fours = np.uint64((1 << 4 * bits) - 1) * np.uint64(0x0000000100000001)
    for block in range((count + 7) >> 3):
        word = np.uint64(0)
        for j in range(min(bits, size - bits * block)):
            word |= np.uint64(packed[bits * block + j]) << np.uint64(8 * j)
        word = (word | word << (np.uint64(4) * shift)) & fours
        word = (word | word << (shift + shift)) & pairs
        word = (word | word << shift) & ones
        for j in range(8):
            codes[8 * block + j] = np.uint8(word >> np.uint64(8 * j) & np.uint64(255))


@njit(cache=True, nogil=True, inline="always")
def _mark_raw(out, size, grid):
    """Make a stored row one that says that it is elsewhere: a scale that is no number, then zeros."""
    for j in range(size):
        out[j] = 0
    if grid == 16:
        out[0] = RAW_16 & 255
        out[1] = RAW_16 >> 8
    else:
        out[2] = 0xC0
        out[3] = 0x7F


@njit(cache=True, nogil=True, inline="always")
def _put16(out, at, value):
    out[at] = np.uint8(value & 255)
    out[at + 1] = np.uint8(value >> 8 & 255)


@njit(cache=True, nogil=True, inline="always")
def _put32(out, at, value):
    for j in range(4):
        out[at + j] = np.uint8(value >> 8 * j & 255)


@njit(cache=True, nogil=True, inline="always")
def _loss(t, width, low, scale, levels):
    """Sum of the squared errors of quantizing ``t`` on a grid."""
    inverse = np.float32(1) / scale
    top = np.float32(levels)
    zero, half = np.float32(0), np.float32(0.5)
    a = b = c = d = zero
    for j in range(0, width, 4):  # t is padded with zeros that are given a weight of none below
        u = (t[j] - low) * inverse
        e = u - min(max(np.floor(u + half), zero), top)
        a += e * e
        if j + 1 < width:
            u = (t[j + 1] - low) * inverse
            e = u - min(max(np.floor(u + half), zero), top)
            b += e * e
        if j + 2 < width:
            u = (t[j + 2] - low) * inverse
            e = u - min(max(np.floor(u + half), zero), top)
            c += e * e
        if j + 3 < width:
            u = (t[j + 3] - low) * inverse
            e = u - min(max(np.floor(u + half), zero), top)
            d += e * e
    return ((a + b) + (c + d)) * scale * scale


@njit(cache=True, nogil=True, inline="always")
def _allowed(low, scale, levels):
    """Is no value of 0 to 1 further from this grid than a step of the grid from 0 to 1?"""
    step = 0.999 / levels
    return low <= step and 1 - (low + scale * levels) <= step and scale <= 1.9 * step


@njit(cache=True, nogil=True)
def _search(t, width, levels, bins, moves):
    """The best grid for values from 0 to 1: its low end and its step.

    The walk of Check-N-Run (section 4.2.3): from the whole range on, the end whose move by 1/bins costs
    less moves, ``moves`` times; the best grid on the way counts, the first included. Then least squares:
    the grid that fits the codes best, new codes for it, as long as that helps.
    """
    start = np.float32(1.0 / levels)
    best_low, best_scale = np.float32(0), start
    best = _loss(t, width, best_low, best_scale, levels)
    from_low = from_high = 0
    for _ in range(moves):
        scale = np.float32((bins - from_low - from_high - 1) / (bins * levels))
        low = np.float32(from_low / bins)
        higher_low = np.float32((from_low + 1) / bins)
        if scale <= 0:
            break
        with_low = _loss(t, width, higher_low, scale, levels)
        with_high = _loss(t, width, low, scale, levels)
        if with_low < with_high:
            from_low += 1
            low = higher_low
        else:
            from_high += 1
        loss = min(with_low, with_high)
        if loss < best and _allowed(low, scale, levels):
            best, best_low, best_scale = loss, low, scale
    for _ in range(_REFINEMENTS):
        low, scale = _least_squares(t, width, best_low, best_scale, levels)
        if not (scale > 0 and _allowed(low, scale, levels)):
            break
        loss = _loss(t, width, low, scale, levels)
        if not loss < best:
            break
        best, best_low, best_scale = loss, low, scale
    return best_low, best_scale


@njit(cache=True, nogil=True, inline="always")
def _least_squares(t, width, low, scale, levels):
    """The grid that fits the codes best that a grid gives; a step of 0 if they are all the same."""
    inverse = np.float32(1) / scale
    codes = squares = 0
    sum_t = sum_product = 0.0
    for j in range(width):
        code = min(max(int(np.floor((t[j] - low) * inverse + np.float32(0.5))), 0), levels)
        codes += code
        squares += code * code
        sum_t += t[j]
        sum_product += t[j] * np.float64(code)
    variance = width * squares - codes * codes
    if variance <= 0:
        return np.float32(0), np.float32(0)
    slope = (width * sum_product - codes * sum_t) / variance
    return np.float32((sum_t - slope * codes) / width), np.float32(slope)


@njit(cache=True, nogil=True, inline="always")
def _codes(row, width, zero, scale, levels, codes):
    """Codes of values on a grid as it is stored."""
    inverse = 1.0 / scale
    for j in range(width):
        u = np.floor((np.float64(row[j]) - zero) * inverse + 0.5)
        codes[j] = np.uint8(min(max(u, 0.0), np.float64(levels)))


@njit(cache=True, nogil=True, inline="always")
def _squared_error(row, width, zero, scale, codes):
    total = 0.0
    for j in range(width):
        error = np.float64(row[j]) - (zero + scale * np.float64(codes[j]))
        total += error * error
    return total


@njit(cache=True, nogil=True, inline="always")
def _worst_error(row, width, decoded):
    worst = 0.0
    for j in range(width):
        worst = max(worst, abs(np.float64(row[j]) - np.float64(decoded[j])))
    return worst


@njit(cache=True, nogil=True, inline="always")
def _stored_scale(scale, grid, one):
    """Round a scale to what is stored: its bits, and the number that they are read as."""
    words = one.view(np.uint32)
    one[0] = np.float32(scale)
    bits = np.int64(words[0])
    if grid == 16:
        bits = min((bits + 0x4000) >> 15, np.int64(NO_SCALE_16 - 1))
        words[0] = np.uint32(bits << 15)
    return bits, np.float64(one[0])


@njit(cache=True, nogil=True, inline="always")
def _stored_zero(zero, scale, grid, bits, one):
    """The same for a zero on a stored scale; and False if it lies too many steps from zero."""
    if grid == 32:
        one[0] = np.float32(zero)
        return np.int64(one.view(np.uint32)[0]), np.float64(one[0]), True
    unit = np.float64(1 << fraction_bits(bits))
    steps = np.floor(zero / scale * unit + 0.5)
    if not -32768.0 <= steps <= 32767.0:
        return 0, 0.0, False
    return np.int64(steps) & 0xFFFF, steps / unit * scale, True


@njit(cache=True, nogil=True)
def encode_uniform(source, source_stride, stored, stride, rows, width, bits, grid, method, bins, moves, raw):
    """Quantize rows of float32; sets raw[i] where row i cannot be represented and must be kept as it is."""
    levels = (1 << bits) - 1
    header = grid >> 2
    size = header + ((width * bits + 7) >> 3)
    codes = np.zeros((width + 7) & ~7, np.uint8)
    others = np.zeros((width + 7) & ~7, np.uint8)
    t = np.zeros(width, np.float32)
    one = np.zeros(1, np.float32)
    for i in range(rows):
        row = carray(_pointer(source + i * source_stride), width, np.float32)
        ints = carray(_pointer(source + i * source_stride), width, np.int32)
        out = carray(_pointer(stored + i * stride), size, np.uint8)
        first, last = _extent(ints, width)
        raw[i] = True
        if last >= 0x7F800000 or first <= ~0x7F800000:
            _mark_raw(out, size, grid)
            continue
        words = one.view(np.int32)
        words[0] = first ^ ((first >> 31) & 0x7FFFFFFF)
        low = np.float64(one[0])
        words[0] = last ^ ((last >> 31) & 0x7FFFFFFF)
        high = np.float64(one[0])
        if low == high:
            raw[i] = not _put_constant(out, size, grid, one)
            continue
        if method == SYMMETRIC:
            high = max(-low, high)
            low = -high
        step = (high - low) / levels
        scale_bits, scale = _stored_scale(step, grid, one)
        fits = scale > 0
        zero_bits, zero = 0, 0.0
        if fits:
            # What the scale's rounding leaves uncovered is shared by both ends.
            spare = 0.5 * (high - low - levels * scale) if grid == 16 else 0.0
            zero_bits, zero, fits = _stored_zero(low + spare, scale, grid, bits, one)
        if not fits:
            _mark_raw(out, size, grid)
            continue
        _codes(row, width, zero, scale, levels, codes)
        if method == ADAPTIVE:
            inverse = 1.0 / (high - low)
            for j in range(width):
                t[j] = np.float32((np.float64(row[j]) - low) * inverse)
            t_low, t_scale = _search(t, width, levels, bins, moves)
            t_scale_bits, t_zero_bits, t_zero, t_scale = _fit(
                row, width, low, high, t_low, t_scale, levels, bits, grid, others, one
            )
            if t_scale > 0 and _squared_error(row, width, t_zero, t_scale, others) < _squared_error(
                row, width, zero, scale, codes
            ):
                scale_bits, zero_bits, zero, scale = t_scale_bits, t_zero_bits, t_zero, t_scale
                codes, others = others, codes
        if grid == 16:
            _put16(out, 0, scale_bits)
            _put16(out, 2, zero_bits)
        else:
            _put32(out, 0, scale_bits)
            _put32(out, 4, zero_bits)
        _pack(codes, out[header:], width, bits)
        far = grid == 32 and max(abs(low), abs(high)) > _FAR * scale
        if scale < _LEAST_EASY or scale > _MOST_EASY or far:
            _decode_row(out, t, others, width, bits, grid)
            if not _worst_error(row, width, t) <= step:
                _mark_raw(out, size, grid)
                continue
        raw[i] = False


@njit(cache=True, nogil=True, inline="always")
def _put_constant(out, size, grid, one):
    """Store a row of equal values, exactly; False if there is no room for it."""
    bits = np.int64(one.view(np.uint32)[0])
    for j in range(size):
        out[j] = 0
    if one[0] == 0:
        return True
    if grid == 32:
        _put32(out, 4, bits)
    elif size >= 6:
        _put16(out, 0, CONSTANT_16)
        _put32(out, 2, bits)
    else:
        _mark_raw(out, size, grid)
        return False
    return True


@njit(cache=True, nogil=True, inline="always")
def _fit(row, width, low, high, t_low, t_scale, levels, bits, grid, codes, one):
    """A grid that was found, as it can be stored (its bits and numbers), and the codes for it.

    Once the scale is rounded, the zero is fitted anew to the codes: so rounding costs next to nothing. A
    scale of -1: it cannot be stored.
    """
    extent = high - low
    scale_bits, scale = _stored_scale(t_scale * extent, grid, one)
    zero = low + t_low * extent
    zero_bits = np.int64(0)
    fits = scale > 0
    if fits and grid == 16:
        _codes(row, width, zero, scale, levels, codes)
        zero = 0.0
        for j in range(width):
            zero += np.float64(row[j]) - scale * np.float64(codes[j])
        zero /= width
    if fits:
        zero_bits, zero, fits = _stored_zero(zero, scale, grid, bits, one)
    if not fits or not _allowed((zero - low) / extent, scale / extent, levels):
        return 0, 0, 0.0, -1.0
    _codes(row, width, zero, scale, levels, codes)
    return scale_bits, zero_bits, zero, scale


@njit(cache=True, nogil=True, inline="always")
def _decode_row(stored, out, codes, width, bits, grid):
    """One stored row to floats; False, and nothing written, if it is raw. Always finite otherwise."""
    header = grid >> 2
    one = np.zeros(1, np.float32)
    words = one.view(np.uint32)
    largest = np.float32(_LARGEST)
    if grid == 16:
        scale_bits = np.uint32(stored[0]) | np.uint32(stored[1]) << np.uint32(8)
        if scale_bits >= NO_SCALE_16:
            if scale_bits != CONSTANT_16 or stored.shape[0] < 6:
                return False
            words[0] = (
                np.uint32(stored[2])
                | np.uint32(stored[3]) << np.uint32(8)
                | np.uint32(stored[4]) << np.uint32(16)
                | np.uint32(stored[5]) << np.uint32(24)
            )
            if not np.isfinite(one[0]):
                return False
            for j in range(width):
                out[j] = one[0]
            return True
        words[0] = np.uint32(scale_bits << np.uint32(15))
        scale = one[0]
        steps = np.int16(np.uint16(stored[2]) | np.uint16(stored[3]) << np.uint16(8))
        zero = np.float32(steps) / np.float32(1 << fraction_bits(bits))
        _unpack(stored[header:], codes, width, bits)
        for j in range(width):
            out[j] = scale * (np.float32(codes[j]) + zero)
        if scale > _MOST_EASY:
            for j in range(width):
                out[j] = min(max(out[j], -largest), largest)
        return True
    words[0] = (
        np.uint32(stored[0])
        | np.uint32(stored[1]) << np.uint32(8)
        | np.uint32(stored[2]) << np.uint32(16)
        | np.uint32(stored[3]) << np.uint32(24)
    )
    scale = one[0]
    words[0] = (
        np.uint32(stored[4])
        | np.uint32(stored[5]) << np.uint32(8)
        | np.uint32(stored[6]) << np.uint32(16)
        | np.uint32(stored[7]) << np.uint32(24)
    )
    zero = one[0]
    if not (np.isfinite(scale) and np.isfinite(zero)):
        return False
    _unpack(stored[header:], codes, width, bits)
    for j in range(width):
        # In float64: the product is exact, and only the sum is rounded.
        value = np.float64(zero) + np.float64(scale) * np.float64(codes[j])
        out[j] = np.float32(min(max(value, -_LARGEST), _LARGEST))
    return True


@njit(cache=True, nogil=True)
def decode_uniform(stored, stride, target, target_stride, rows, width, bits, grid):
    """Stored rows to rows of float32; rows that are raw are left as they are."""
    size = (grid >> 2) + ((width * bits + 7) >> 3)
    codes = np.zeros((width + 7) & ~7, np.uint8)
    for i in range(rows):
        row = carray(_pointer(stored + i * stride), size, np.uint8)
        out = carray(_pointer(target + i * target_stride), width, np.float32)
        _decode_row(row, out, codes, width, bits, grid)


@njit(cache=True, nogil=True)
def decode_uniform_into(addresses, firsts, width, ids, stored, stride, bits, grid, positions):
    """Decode stored row p to row ids[p] of tables that are numbered through, for each p of ``positions``.

    Table t begins at memory address addresses[t] and has rows firsts[t] to firsts[t + 1] - 1 of the
    numbering, of ``width`` float32 each. ids ascend and lie within the numbering: the caller's duty.
    Without positions: every row. Rows that are raw are left as they are.
    """
    size = (grid >> 2) + ((width * bits + 7) >> 3)
    codes = np.zeros((width + 7) & ~7, np.uint8)
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
        row = carray(_pointer(stored + p * stride), size, np.uint8)
        out = carray(_pointer(addresses[table] + (ids[p] - firsts[table]) * (4 * width)), width, np.float32)
        _decode_row(row, out, codes, width, bits, grid)


@njit(cache=True, nogil=True)
def find_raw(stored, stride, rows, size, grid, raw):
    """raw[i] = row i says that it is stored elsewhere, or has a grid that is none."""
    for i in range(rows):
        row = carray(_pointer(stored + i * stride), size, np.uint8)
        if grid == 16:
            scale = np.int64(row[0]) | np.int64(row[1]) << 8
            constant = scale == CONSTANT_16 and size >= 6
            if constant:  # of a number
                constant = ((np.int64(row[4]) | np.int64(row[5]) << 8) & 0x7F80) != 0x7F80
            raw[i] = scale >= NO_SCALE_16 and not constant
        else:
            scale = np.int64(row[2]) | np.int64(row[3]) << 8
            zero = np.int64(row[6]) | np.int64(row[7]) << 8
            raw[i] = (scale & 0x7F80) == 0x7F80 or (zero & 0x7F80) == 0x7F80
