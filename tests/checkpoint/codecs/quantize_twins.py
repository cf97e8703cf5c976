"""Slow, obvious twins of the quantization kernels: NumPy on whole columns, bits as strings.

The order of float32 operations is the kernels' own, so bytes must be equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

one, half = np.float32(1), np.float32(0.5)
FRACTION = {2: 8, 3: 7, 4: 6, 8: 4}


def pack(codes: NDArray[np.int64], bits: int) -> Bytes:
    """Codes [rows, width], each as its bits from the lowest on, side by side; filled up with zeros."""
    single = (codes[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(single.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")


def unpack(stored: Bytes, width: int, bits: int) -> NDArray[np.int64]:
    single = np.unpackbits(stored, axis=1, bitorder="little")[:, : width * bits]
    codes: NDArray[np.int64] = (single.reshape(-1, width, bits).astype(np.int64) << np.arange(bits)).sum(2)
    return codes


def stored_scale(scale: Floats, grid: int) -> Floats:
    """To ten significant bits: half of what is cut off is added before."""
    if grid == 32:
        return scale
    return ((scale.view(np.uint32) + np.uint32(0x2000)) & np.uint32(0xFFFFC000)).view(np.float32)


def stored_zero(zero: Floats, scale: Floats, bits: int, grid: int) -> tuple[Floats, Floats]:
    """In parts of a step, and as it is read."""
    if grid == 32:
        return zero, zero
    unit = np.float32(2 ** FRACTION[bits])
    parts = np.rint(zero / scale * unit)
    return parts, parts * (one / unit) * scale


def codes_of(values: Floats, zero: Floats, scale: Floats, levels: int) -> Floats:
    return quantized(values, zero, scale, np.float32(levels))[1]


def encode_uniform(values: Floats, bits: int, grid: int, method: str, bins: int, moves: int) -> Bytes:
    """Of ordinary rows: none is raw, constant or hard."""
    levels = np.float32(2**bits - 1)
    low, high = values.min(1), values.max(1)
    if method == "symmetric":
        high = np.maximum(-low, high)
        low = -high
    extent = high - low
    scale = stored_scale(extent / levels, grid)
    spare = (extent - levels * scale) * half if grid == 16 else np.float32(0)
    parts, zero = stored_zero(low + spare, scale, bits, grid)
    if method == "adaptive":
        t = (values - low[:, None]) * (1.0 / (high.astype(np.float64) - low)).astype(np.float32)[:, None]
        t_low, t_scale, mean_code = search(t, int(levels), bins, moves)
        new_scale = stored_scale(t_scale * extent, grid)
        t_low = t_low + (t_scale - new_scale / extent) * mean_code
        t_scale = new_scale / extent
        new_parts, new_zero = stored_zero(low + t_low * extent, new_scale, bits, grid)
        t_low = (new_zero - low) / extent
        better = only_allowed(loss(t, t_low, t_scale, levels), t_low, t_scale, levels, 0.997) < loss(
            t, (zero - low) / extent, scale / extent, levels
        )
        parts = np.where(better, new_parts, parts)
        zero = np.where(better, new_zero, zero)
        scale = np.where(better, new_scale, scale)
    codes = pack(codes_of(values, zero, scale, int(levels)).astype(np.int64), bits)
    if grid == 32:
        return np.concatenate([np.stack([scale, zero], 1).astype("<f4").view(np.uint8), codes], 1)
    exponent_and_mantissa = (scale.view(np.uint32) >> 14) - (64 << 9)
    header = np.stack([exponent_and_mantissa, parts.astype(np.int64) & 0xFFFF], 1)
    return np.concatenate([header.astype("<u2").view(np.uint8), codes], 1)


def decode_uniform(stored: Bytes, width: int, bits: int, grid: int) -> Floats:
    """Of ordinary rows."""
    codes = unpack(stored[:, grid // 4 :], width, bits).astype(np.float32)
    if grid == 32:
        scale, zero = stored[:, :8].copy().view("<f4").T
        return np.asarray(codes * scale[:, None] + zero[:, None], np.float32)
    words = stored[:, :4].copy().view("<u2")
    scale = (words[:, 0].astype(np.uint32) + np.uint32(64 << 9) << np.uint32(14)).view(np.float32)
    zero = words[:, 1].astype(np.int16) / np.float32(2 ** FRACTION[bits])
    return np.asarray((codes + zero[:, None]) * scale[:, None], np.float32)


def added_up(columns: Floats) -> Floats:
    """Sums of rows, from the first value on: a machine's vectors must not change the order."""
    total = np.zeros(len(columns), np.float32)
    for column in columns.T:
        total = total + column
    return total


def quantized(t: Floats, low: Floats, scale: Floats, levels: np.float32) -> tuple[Floats, Floats]:
    u = (t - low[:, None]) * (one / scale)[:, None]
    return u, np.rint(np.clip(u, np.float32(0), levels))


def loss(t: Floats, low: Floats, scale: Floats, levels: np.float32) -> Floats:
    u, codes = quantized(t, low, scale, levels)
    return added_up((u - codes) * (u - codes)) * scale * scale


def only_allowed(found: Floats, low: Floats, scale: Floats, levels: np.float32, within: float) -> Floats:
    step = np.float32(within / float(levels))
    high = low + scale * levels
    good = (scale > 0) & ~(step < low) & ~(step < one - high) & ~(step + step < scale)
    return np.where(good, found, np.float32(np.inf))


def search(t: Floats, levels_: int, bins: int, moves: int) -> tuple[Floats, Floats, Floats]:
    """The walk, and least squares from the grids that it passes."""
    levels, count = np.float32(levels_), np.float32(t.shape[1])
    sum_t = added_up(t - half)
    room = np.float32(0.975 / levels_)
    from_each = {15: 2, 7: 1}.get(levels_, 0)
    low = np.zeros(len(t), np.float32)
    scale = np.full(len(t), 1 / levels_, np.float32)
    best = [loss(t, low, scale, levels), low, scale]

    def keep(found: Floats, low: Floats, scale: Floats) -> None:
        better = found < best[0]
        best[:] = [np.where(better, a, b) for a, b in zip((found, low, scale), best, strict=True)]

    def refine(low: Floats, scale: Floats, times: int) -> None:
        for _ in range(times):
            codes: Floats = quantized(t, low, scale, levels)[1] - levels * half
            sums, squares = added_up(codes), added_up(codes * codes)
            products = added_up(codes * (t - half))
            with np.errstate(divide="ignore", invalid="ignore"):
                scale = np.divide(count * products - sum_t * sums, count * squares - sums * sums)
                low = half + (sum_t - scale * sums) / count - scale * levels * half
            high = low + scale * levels
            high = np.where(high > one - room, high, one - room)
            low = np.where(low < room, low, room)
            scale = (high - low) / levels
            found = loss(t, low, scale, levels)
            keep(only_allowed(found, low, scale, levels, 1.001 * 0.975), low, scale)

    for left in range(bins - 1, bins - 1 - moves, -1):
        refine(low, scale, from_each)
        scale = np.full(len(t), left / (bins * levels_), np.float32)
        u = (t - low[:, None]) * (one / scale)[:, None]
        shifted = u - np.float32(levels_ / left)
        both = []
        for v in (u, shifted):
            error = v - np.rint(np.clip(v, np.float32(0), levels))
            both.append(added_up(error * error))
        low = np.where(both[1] < both[0], low + np.float32(1 / bins), low)
        found = np.minimum(*both) * scale * scale
        keep(only_allowed(found, low, scale, levels, 0.975), low, scale)
    refine(low, scale, from_each)
    refine(best[1], best[2], 3)
    codes = quantized(t, best[1], best[2], levels)[1] - levels * half
    return best[1], best[2], added_up(codes) / count + levels * half


def kmeans(row: NDArray[np.float64], centers: NDArray[np.float64], iterations: int) -> NDArray[np.float64]:
    """Lloyd's iterations from given centers, then each value's nearest."""
    centers = np.sort(centers)
    for _ in range(iterations):
        nearest = np.abs(row[:, None] - centers).argmin(1)
        centers = np.array(
            [row[nearest == c].mean() if (nearest == c).any() else x for c, x in enumerate(centers)]
        )
    replaced: NDArray[np.float64] = centers[np.abs(row[:, None] - centers).argmin(1)]
    return replaced
