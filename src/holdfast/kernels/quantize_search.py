"""The search for the best grid, eight rows at a time, one per vector element.

The rows' values are given as ``t``: from 0, the row's least, to 1, its greatest; eight rows' first values,
then their second, and so on. A grid is a low end and a step, in the same terms.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from holdfast.kernels.simd import greater, load, nearest, smaller, splat, where_less

_helper = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

_REFINEMENTS = 3
# How much of a step a value may be off: less than it may be when a grid's numbers have been rounded.
_WITHIN = 0.975
WITHIN_STORED = 0.997


@_helper
def _two_losses(t, width, low, shift, inverse, top):
    """Squared errors, in steps, on the grid from ``low`` on, and on the one from ``shift`` steps higher."""
    zero = splat(np.float32(0))
    first = second = zero
    for j in range(width):
        u = (load(t + 32 * j) - low) * inverse
        error = u - nearest(smaller(greater(u, zero), top))
        first = first + error * error
        u = u - shift
        error = u - nearest(smaller(greater(u, zero), top))
        second = second + error * error
    return first, second


@_helper
def losses(t, width, low, scale, top):
    """Squared errors on a grid."""
    zero = splat(np.float32(0))
    inverse = splat(np.float32(1)) / scale
    total = zero
    for j in range(width):
        u = (load(t + 32 * j) - low) * inverse
        error = u - nearest(smaller(greater(u, zero), top))
        total = total + error * error
    return total * scale * scale


@_helper
def _losses_and_sums(t, width, low, scale, top):
    """Squared errors on a grid; and the sums of codes, of their squares and of codes times values.

    Codes are counted from the middle of the grid, values from the middle of the range: so sums stay small.
    """
    zero = splat(np.float32(0))
    half = splat(np.float32(0.5))
    inverse = splat(np.float32(1)) / scale
    middle = top * half
    total = codes = squares = products = zero
    for j in range(width):
        value = load(t + 32 * j)
        u = (value - low) * inverse
        code = nearest(smaller(greater(u, zero), top))
        error = u - code
        total = total + error * error
        code = code - middle
        codes = codes + code
        squares = squares + code * code
        products = products + code * (value - half)
    return total * scale * scale, codes, squares, products


@_helper
def only_allowed(loss, low, scale, levels, within):
    """The loss, or infinity where a value from 0 to 1 may be further than within / levels from the grid."""
    zero, never = splat(np.float32(0)), splat(np.float32(np.inf))
    step = splat(np.float32(within / levels))
    loss = where_less(zero, scale, where_less(step, low, never, loss), never)
    high = low + scale * splat(np.float32(levels))
    loss = where_less(step, splat(np.float32(1)) - high, never, loss)
    return where_less(step + step, scale, never, loss)


@_helper
def _refined(t, width, levels, sum_t, low, scale, times, best, best_low, best_scale):
    """The best grids so far, or those that least squares lead to from (low, scale), where they are better.

    The grid that fits the codes best takes the place of the one that gave them, and new codes are given.
    """
    half, one = splat(np.float32(0.5)), splat(np.float32(1))
    room = splat(np.float32(_WITHIN / levels))
    top = splat(np.float32(levels))
    count = splat(np.float32(width))
    codes = squares = products = loss = one
    if times > 0:
        loss, codes, squares, products = _losses_and_sums(t, width, low, scale, top)
    for left in range(times - 1, -1, -1):
        # Where all codes are the same, this divides by zero; what comes out is never less than anything.
        scale = (count * products - sum_t * codes) / (count * squares - codes * codes)
        low = half + (sum_t - scale * codes) / count - scale * top * half
        # No end may be further inside than is allowed.
        high = greater(low + scale * top, one - room)
        low = smaller(low, room)
        scale = (high - low) / top
        if left > 0:
            loss, codes, squares, products = _losses_and_sums(t, width, low, scale, top)
        else:
            loss = losses(t, width, low, scale, top)
        loss = only_allowed(loss, low, scale, levels, 1.001 * _WITHIN)
        best_low = where_less(loss, best, low, best_low)
        best_scale = where_less(loss, best, scale, best_scale)
        best = smaller(loss, best)
    return best, best_low, best_scale


@_helper
def search(t, width, levels, bins, moves):
    """The best grids: low ends, steps, and the mean codes on them.

    The walk of Check-N-Run (section 4.2.3): from the whole range on, the end whose move by 1/bins costs
    less moves, ``moves`` times; the best grid on the way counts, the first included. Beyond the paper,
    least squares go on from there: from the best grid, and with 3 or 4 bits, where they gain more than the
    walk itself, from each on the way.
    """
    zero = splat(np.float32(0))
    top = splat(np.float32(levels))
    sum_t = zero
    for j in range(width):
        sum_t = sum_t + (load(t + 32 * j) - splat(np.float32(0.5)))
    from_each = 2 if levels == 15 else 1 if levels == 7 else 0
    low = best_low = zero
    scale = best_scale = splat(np.float32(1.0 / levels))
    best = losses(t, width, low, scale, top)
    for left in range(bins - 1, bins - 1 - moves, -1):
        best, best_low, best_scale = _refined(
            t, width, levels, sum_t, low, scale, from_each, best, best_low, best_scale
        )
        scale = splat(np.float32(left / (bins * levels)))
        shift = splat(np.float32(levels / left))
        with_high, with_low = _two_losses(t, width, low, shift, splat(np.float32(1)) / scale, top)
        low = where_less(with_low, with_high, low + splat(np.float32(1.0 / bins)), low)
        loss = only_allowed(smaller(with_low, with_high) * scale * scale, low, scale, levels, _WITHIN)
        best_low = where_less(loss, best, low, best_low)
        best_scale = where_less(loss, best, scale, best_scale)
        best = smaller(loss, best)
    best, best_low, best_scale = _refined(
        t, width, levels, sum_t, low, scale, from_each, best, best_low, best_scale
    )
    best, best_low, best_scale = _refined(
        t, width, levels, sum_t, best_low, best_scale, _REFINEMENTS, best, best_low, best_scale
    )
    _, codes, _, _ = _losses_and_sums(t, width, best_low, best_scale, top)
    count = splat(np.float32(width))
    return best_low, best_scale, codes / count + top * splat(np.float32(0.5))
