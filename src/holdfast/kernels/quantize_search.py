"""The search for the best grid, eight rows at a time, one in each lane.

The rows' values are given as ``t``: from 0, the row's least, to 1, its greatest; eight rows' first values,
then their second, and so on. A grid is a low end and a step, in the same terms.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from holdfast.kernels.lanes import greater, load, nearest, smaller, splat, where_less

_helper = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

_REFINEMENTS = 3
_WITHIN = 0.99  # of a step may a value be off, to leave room for roundings


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
def only_allowed(loss, low, scale, levels):
    """The loss, or infinity where some value from 0 to 1 is further from the grid than 1 / levels."""
    never = splat(np.float32(np.inf))
    step = splat(np.float32(_WITHIN / levels))
    loss = where_less(step, low, never, loss)
    high = low + scale * splat(np.float32(levels))
    loss = where_less(step, splat(np.float32(1)) - high, never, loss)
    return where_less(step + step, scale, never, loss)


@_helper
def search(t, width, levels, bins, moves):
    """The best grids: low ends, steps, and the mean codes on them, counted from the middle.

    The walk of Check-N-Run (section 4.2.3): from the whole range on, the end whose move by 1/bins costs
    less moves, ``moves`` times; the best grid on the way counts, the first included. Then least squares:
    the grid that fits the codes best, new codes for it, as long as that helps.
    """
    zero = splat(np.float32(0))
    top = splat(np.float32(levels))
    width8 = splat(np.float32(width))
    best_low = low = zero
    best_scale = splat(np.float32(1.0 / levels))
    best = losses(t, width, low, best_scale, top)
    move = splat(np.float32(1.0 / bins))
    for left in range(bins - 1, bins - 1 - moves, -1):
        scale = splat(np.float32(left / (bins * levels)))
        with_high, with_low = _two_losses(
            t, width, low, splat(np.float32(levels / left)), splat(np.float32(1)) / scale, top
        )
        low = where_less(with_low, with_high, low + move, low)
        loss = only_allowed(smaller(with_low, with_high) * scale * scale, low, scale, levels)
        best_low = where_less(loss, best, low, best_low)
        best_scale = where_less(loss, best, scale, best_scale)
        best = smaller(loss, best)
    sum_t = zero
    for j in range(width):
        sum_t = sum_t + (load(t + 32 * j) - splat(np.float32(0.5)))
    loss, codes, squares, products = _losses_and_sums(t, width, best_low, best_scale, top)
    best_codes = codes
    for _ in range(_REFINEMENTS):
        # Where all codes are the same, this divides by zero; what comes out is never less than anything.
        scale = (width8 * products - sum_t * codes) / (width8 * squares - codes * codes)
        low = splat(np.float32(0.5)) + (sum_t - scale * codes) / width8 - scale * top * splat(np.float32(0.5))
        loss, codes, squares, products = _losses_and_sums(t, width, low, scale, top)
        loss = where_less(zero, scale, only_allowed(loss, low, scale, levels), splat(np.float32(np.inf)))
        best_low = where_less(loss, best, low, best_low)
        best_scale = where_less(loss, best, scale, best_scale)
        best_codes = where_less(loss, best, codes, best_codes)
        best = smaller(loss, best)
    return best_low, best_scale, best_codes / width8, sum_t / width8
