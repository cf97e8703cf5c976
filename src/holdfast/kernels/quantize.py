"""The hot loops of uniform quantization: rows of floats to a few bits a number; ``dequantize`` goes back.

Rows are given as the address of the first and the bytes from one to the next, so that one compiled
loop serves whole arrays, columns of records and tables anywhere. Bounds are the caller's duty. Nothing
is added up in an order that depends on the machine: equal rows give equal bytes everywhere.

Most rows are *easy*: float32 can do all that is needed without overflow, without denormals and with
roundings that are far smaller than a step; eight of them get their grids at once. The others are done
one by one in float64, and what comes of them is decoded again and checked.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from holdfast.kernels.dequantize import (
    CONSTANT_16,
    FAR,
    LARGEST,
    LEAST_EASY,
    MOST_EASY,
    NO_SCALE_16,
    RAW_16,
    RAW_32,
    SCALE_OFFSET,
    decode_uniform,
    fraction_bits,
)
from holdfast.kernels.machine import pointer
from holdfast.kernels.quantize_search import WITHIN_STORED, losses, only_allowed, search
from holdfast.kernels.simd import (
    as_bits,
    as_float,
    bits_of,
    compiled,
    from_bits,
    greater,
    greater_int,
    highest_each,
    highest_int,
    load,
    load_some,
    lowest_each,
    magnitude_bits,
    nearest,
    prefetch,
    read32,
    smaller,
    splat,
    splat_int,
    store,
    to_bytes,
    to_ints,
    where_less,
    write8,
    write16,
    write32,
    write64,
)

# Numba's cache of this file is valid until the file changes. So it contains the checksums of the files whose
# functions it inlines; a test compares them.
BUILT_WITH = {
    "dequantize": "4a6f6bfa6f78",
    "simd": "d06c9da87557",
    "machine": "d8b2aca3c980",
    "quantize_search": "67976de95453",
}

SYMMETRIC, ASYMMETRIC, ADAPTIVE = 0, 1, 2

_helper = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_inlined = njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True
)


@_inlined
def _extent(row, width, magnitude):
    """Per vector element: minimum, maximum, and the maximum of the magnitude bits and the given ones."""
    low = high = splat(as_float(read32(row)))
    for block in range(width >> 3):
        value = load(row + 32 * block)
        low = smaller(value, low)
        high = greater(value, high)
        magnitude = greater_int(magnitude_bits(value), magnitude)
    if width & 7:
        value = load_some(row + 4 * (width & ~7), width & 7, low)
        low = smaller(value, low)
        high = greater(value, high)
        magnitude = greater_int(magnitude_bits(value), magnitude)
    return low, high, magnitude


@_helper
def _extents(source, stride, last, width, found):
    """The least and the greatest values of eight rows; of a row that is not finite, infinity.

    From ``last`` on, that row is taken for all that follow. ``found`` is a place for eight floats.
    """
    none = splat_int(np.int32(0))
    low0, high0, magnitude = _extent(source, width, none)
    low1, high1, magnitude = _extent(source + min(1, last) * stride, width, magnitude)
    low2, high2, magnitude = _extent(source + min(2, last) * stride, width, magnitude)
    low3, high3, magnitude = _extent(source + min(3, last) * stride, width, magnitude)
    low4, high4, magnitude = _extent(source + min(4, last) * stride, width, magnitude)
    low5, high5, magnitude = _extent(source + min(5, last) * stride, width, magnitude)
    low6, high6, magnitude = _extent(source + min(6, last) * stride, width, magnitude)
    low7, high7, magnitude = _extent(source + min(7, last) * stride, width, magnitude)
    lows = lowest_each(low0, low1, low2, low3, low4, low5, low6, low7)
    highs = highest_each(high0, high1, high2, high3, high4, high5, high6, high7)
    if highest_int(magnitude) < 0x7F800000:
        return lows, highs
    infinite = carray(pointer(found), 8, np.float32)  # comparisons pass a NaN by: which row has one?
    for i in range(8):
        magnitude = _extent(source + min(i, last) * stride, width, none)[2]
        infinite[i] = np.inf if highest_int(magnitude) >= 0x7F800000 else -np.inf
    return lows, greater(load(found), highs)


@_inlined
def _packed(word, bits):
    """The lowest bits of a word's eight bytes side by side."""
    if bits == 8:
        return word
    shift = np.uint64(8 - bits)
    pairs = np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0001000100010001)
    fours = np.uint64((1 << 4 * bits) - 1) * np.uint64(0x0000000100000001)
    word = (word | word >> shift) & pairs
    word = (word | word >> (shift + shift)) & fours
    return word | word >> (np.uint64(4) * shift)


@_inlined
def _write_some(out, word, size):
    """The lowest ``size`` bytes of a word."""
    for j in range(size):
        write8(out + j, word >> np.uint64(8 * j))


@_inlined
def _write_packed(row, out, width, bits, zero, inverse, ahead):
    """The codes of easy values, packed. What lies ``ahead`` bytes further will be read next."""
    none = splat(np.float32(0))
    top = splat(np.float32((1 << bits) - 1))
    zeros = splat(zero)
    inverses = splat(inverse)
    for block in range(width >> 3):
        prefetch(row + ahead + 32 * block)
        u = (load(row + 32 * block) - zeros) * inverses
        word = to_bytes(nearest(smaller(greater(u, none), top)))
        if bits == 8:
            write64(out + 8 * block, word)
        elif bits == 4:
            write32(out + 4 * block, _packed(word, bits))
        elif bits == 2:
            write16(out + 2 * block, _packed(word, bits))
        else:
            word = _packed(word, bits)
            write16(out + 3 * block, word)
            write8(out + 3 * block + 2, word >> np.uint64(16))
    left = width & 7
    if left:
        u = (load_some(row + 4 * (width & ~7), left, zeros) - zeros) * inverses
        word = to_bytes(nearest(smaller(greater(u, none), top)))
        _write_some(out + (width >> 3) * bits, _packed(word, bits), (left * bits + 7) >> 3)


@_inlined
def _stored_scales(scales, grid):
    """Scales as they are stored, of easy rows."""
    if grid == 32:
        return scales
    return from_bits((bits_of(scales) + splat_int(np.int32(0x2000))) & splat_int(np.int32(-0x4000)))


@_inlined
def _zeros_in_parts(zeros, scales, bits):
    """Zeros of grid 16 as they are stored, but not yet cut to 16 bits."""
    limit = splat(np.float32(40000))
    parts = nearest(zeros / scales * splat(np.float32(1 << fraction_bits(bits))))
    return smaller(greater(parts, splat(np.float32(0)) - limit), limit)


@_inlined
def _zeros_of_parts(parts, scales, bits):
    return parts * splat(np.float32(1.0 / (1 << fraction_bits(bits)))) * scales


@_inlined
def _plain_grids(lows, highs, grid, bits):
    """Zeros, their stored parts and scales for the whole extents of eight rows."""
    levels = splat(np.float32((1 << bits) - 1))
    extents = highs - lows
    scales = _stored_scales(extents / levels, grid)
    if grid == 32:
        return lows, lows, scales
    # What the scale's rounding leaves uncovered is shared by both ends.
    spare = (extents - levels * scales) * splat(np.float32(0.5))
    parts = _zeros_in_parts(lows + spare, scales, bits)
    return _zeros_of_parts(parts, scales, bits), parts, scales


@_helper
def _found_grids(t, width, lows, highs, zeros, parts, scales, found, grid, bits):
    """The grids that a search found, as they are stored; where they are worse than the plain ones, these."""
    levels = (1 << bits) - 1
    top = splat(np.float32(levels))
    extents = highs - lows
    t_low, t_scale, mean_code = found
    new_scales = _stored_scales(t_scale * extents, grid)
    # Where the scale is rounded, the low end moves so that the grid stays where it was on the average.
    t_low = t_low + (t_scale - new_scales / extents) * mean_code
    t_scale = new_scales / extents
    new_zeros = new_parts = lows + t_low * extents
    if grid == 16:
        new_parts = _zeros_in_parts(new_zeros, new_scales, bits)
        new_zeros = _zeros_of_parts(new_parts, new_scales, bits)
    t_low = (new_zeros - lows) / extents
    plain = losses(t, width, (zeros - lows) / extents, scales / extents, top)
    loss = only_allowed(losses(t, width, t_low, t_scale, top), t_low, t_scale, levels, WITHIN_STORED)
    return (
        where_less(loss, plain, new_zeros, zeros),
        where_less(loss, plain, new_parts, parts),
        where_less(loss, plain, new_scales, scales),
    )


@_inlined
def _easy(lows, highs, parts, scales, grid):
    """1 for easy rows, else 0."""
    yes, no = splat(np.float32(1)), splat(np.float32(0))
    magnitudes = greater(highs, no - lows)
    easy = where_less(magnitudes, splat(np.float32(MOST_EASY)), yes, no)
    easy = where_less(splat(np.float32(LEAST_EASY)), scales, easy, no)
    if grid == 32:
        return where_less(magnitudes, scales * splat(np.float32(FAR)), easy, no)
    easy = where_less(splat(np.float32(-32768.5)), parts, easy, no)
    return where_less(parts, splat(np.float32(32767.5)), easy, no)


@compiled
def encode_uniform(source, source_stride, stored, stride, rows, width, bits, grid, method, bins, moves, raw):
    """Quantize rows of float32; sets raw[i] where row i cannot be represented and must be kept as it is."""
    levels = (1 << bits) - 1
    header = grid >> 2
    grids = np.zeros((8, 8), np.float32)  # of eight rows: low, high, easy, zero, scale, inverse, search's two
    headers = np.zeros(8, np.uint32)
    at_grids, at_headers = grids.ctypes.data, headers.ctypes.data
    t = np.zeros((width if method == ADAPTIVE else 0, 8), np.float32)
    for first in range(0, rows, 8):
        block = source + first * source_stride
        lows, highs = _extents(block, source_stride, rows - first - 1, width, at_grids + 64)
        store(at_grids, lows)
        store(at_grids + 32, highs)
        if method == SYMMETRIC:
            highs = greater(highs, splat(np.float32(0)) - lows)
            lows = splat(np.float32(0)) - highs
        zeros, parts, scales = _plain_grids(lows, highs, grid, bits)
        if method == ADAPTIVE:
            _normalize(block, source_stride, min(8, rows - first), width, grids, t)
            found = search(t.ctypes.data, width, levels, bins, moves)
            store(at_grids + 192, found[0])
            store(at_grids + 224, found[1])
            zeros, parts, scales = _found_grids(
                t.ctypes.data, width, lows, highs, zeros, parts, scales, found, grid, bits
            )
        easy = _easy(lows, highs, parts, scales, grid)
        easy = where_less(load(at_grids), load(at_grids + 32), easy, splat(np.float32(0)))
        store(at_grids + 64, easy)
        store(at_grids + 96, zeros)
        store(at_grids + 128, scales)
        store(at_grids + 160, splat(np.float32(1)) / scales)
        if grid == 16:
            whole = to_ints(where_less(splat(np.float32(0)), easy, parts, easy))
            scale_bits = (bits_of(scales) >> splat_int(np.int32(14))) + splat_int(np.int32(-SCALE_OFFSET))
            store(at_headers, (whole << splat_int(np.int32(16))) | scale_bits)
        for i in range(min(8, rows - first)):
            row = block + i * source_stride
            out = stored + (first + i) * stride
            raw[first + i] = False
            if grids[2, i] == 0:
                raw[first + i] = not _encode_hard(row, out, width, bits, grid, method, grids, i)
                continue
            if grid == 16:
                write32(out, np.uint64(headers[i]))
            else:
                write32(out, as_bits(grids[4, i]))
                write32(out + 4, as_bits(grids[3, i]))
            _write_packed(row, out + header, width, bits, grids[3, i], grids[5, i], 8 * source_stride)


@_helper
def _normalize(block, stride, count, width, grids, t):
    """Eight rows' values as parts of their ranges; 0 where that is none."""
    for i in range(count):
        values = carray(pointer(block + i * stride), width, np.float32)
        low, high = np.float64(grids[0, i]), np.float64(grids[1, i])
        if -MOST_EASY < low < high < MOST_EASY:
            start, inverse = grids[0, i], np.float32(1.0 / (high - low))
            for j in range(width):
                t[j, i] = (values[j] - start) * inverse
        else:
            inverse = 1.0 / (high - low) if low < high <= LARGEST else 0.0
            for j in range(width):
                t[j, i] = np.float32((np.float64(values[j]) - low) * inverse) if inverse > 0 else 0.0


@_helper
def _mark_raw(out, size, grid):
    """Make a stored row one that says that it is elsewhere: a scale that is no number, then zeros."""
    _write_some(out, np.uint64(RAW_16 if grid == 16 else RAW_32), 4)
    for j in range(4, size):
        _write_some(out + j, np.uint64(0), 1)
    return False


@_helper
def _write_constant(out, size, grid, value):
    """Store a row of equal values, exactly; False, and raw, if there is no room for it."""
    for j in range(size):
        _write_some(out + j, np.uint64(0), 1)
    if value == 0:
        return True
    if grid == 32:
        write32(out + 4, as_bits(value))
    elif size >= 6:
        write16(out, np.uint64(CONSTANT_16))
        write32(out + 2, as_bits(value))
    else:
        return _mark_raw(out, size, grid)
    return True


@_helper
def _stored_grid(zero, scale, grid, bits):
    """Any grid as it is stored: scale and zero in bits and as they are read. A scale of 0: it is none."""
    scale_bits = as_bits(np.float32(scale))
    if grid == 32:
        zero_bits = as_bits(np.float32(zero))
        return scale_bits, zero_bits, np.float64(as_float(scale_bits)), np.float64(as_float(zero_bits))
    scale_bits = (scale_bits + np.uint64(0x2000)) >> np.uint64(14)
    scale = np.float64(as_float(scale_bits << np.uint64(14)))
    scale_bits -= np.uint64(SCALE_OFFSET)  # wraps around where it is too small
    unit = np.float64(1 << fraction_bits(bits))
    parts = np.floor(zero / scale * unit + 0.5) if scale > 0 else 0.0
    if not (np.uint64(0) < scale_bits < np.uint64(NO_SCALE_16) and -32768.0 <= parts <= 32767.0):
        return np.uint64(0), np.uint64(0), 0.0, 0.0
    return scale_bits, np.uint64(np.int64(parts) & 0xFFFF), scale, parts / unit * scale


@_helper
def _write_hard(row, out, width, bits, grid, zero, scale, step):
    """Write a row on a grid in float64; False if that is none, or puts a value a step or more off."""
    levels = (1 << bits) - 1
    header = grid >> 2
    scale_bits, zero_bits, scale, zero = _stored_grid(zero, scale, grid, bits)
    if not scale > 0:
        return False
    _write_some(out, scale_bits, header >> 1)
    _write_some(out + (header >> 1), zero_bits, header >> 1)
    values = carray(pointer(row), width, np.float32)
    for start in range(0, width, 8):
        word = np.uint64(0)
        count = min(8, width - start)
        for j in range(count):
            u = np.floor((np.float64(values[start + j]) - zero) / scale + 0.5)
            word |= np.uint64(min(max(u, 0.0), np.float64(levels))) << np.uint64(8 * j)
        _write_some(out + header + (start >> 3) * bits, _packed(word, bits), (count * bits + 7) >> 3)
    decoded = np.zeros(width, np.float32)
    decode_uniform(out, 0, decoded.ctypes.data, 0, 1, width, bits, grid)
    worst = 0.0
    for j in range(width):
        worst = max(worst, abs(np.float64(values[j]) - np.float64(decoded[j])))
    return worst <= step


@_helper
def _encode_hard(row, out, width, bits, grid, method, grids, i):
    """A row that is not easy; False, and the mark in its place, if it must be kept as it is."""
    levels = (1 << bits) - 1
    size = (grid >> 2) + ((width * bits + 7) >> 3)
    low, high = np.float64(grids[0, i]), np.float64(grids[1, i])
    if not (low >= -LARGEST and high <= LARGEST):
        return _mark_raw(out, size, grid)
    if low == high:
        return _write_constant(out, size, grid, grids[0, i])
    if method == SYMMETRIC:
        high = max(-low, high)
        low = -high
    extent = high - low
    step = extent / levels
    if method == ADAPTIVE:
        zero = low + extent * np.float64(grids[6, i])
        scale = extent * np.float64(grids[7, i])
        if _write_hard(row, out, width, bits, grid, zero, scale, step):
            return True
    scale = np.float64(_stored_grid(0.0, step, grid, bits)[2])
    zero = low + (0.5 * (extent - levels * scale) if grid == 16 else 0.0)
    if _write_hard(row, out, width, bits, grid, zero, step, step):
        return True
    return _mark_raw(out, size, grid)
