"""The loop that makes synthetic samples, and what each draw means."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

GUIDE_BITS = 12
CURVE_BITS = 10


@njit(cache=True, nogil=True, inline="always")
def _mix(x):
    """Splitmix64's finalizer: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def _curve(bits, curve):
    """The inverse distribution function at the uniform draw that the bits stand for."""
    knot = np.int64(bits >> np.uint64(64 - CURVE_BITS))
    between = np.float64((bits >> np.uint64(20)) & np.uint64(0xFFFFFFFF)) * 2.0**-32
    return curve[knot] + between * (curve[knot + 1] - curve[knot])


@njit(cache=True, nogil=True, inline="always")
def _hidden(bits, shift):
    """A hidden value from 16 of the bits: mean 0, variance 1, uniform."""
    return (np.float64((bits >> np.uint64(shift)) & np.uint64(0xFFFF)) - 32767.5) * (1.7320508 / 32768.0)


@njit(cache=True, nogil=True)
def fill(first, seed, rows, stride, hots, starts, knot_start, knot_rank, knot_mass, guide,
          dense_curve, noise_curve, dense, flat, labels):  # fmt: skip
    """Make samples first, first + 1, … into dense, flat and labels."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    tables = rows.shape[0]
    teacher = _mix(seed + golden)
    weight_scale = 2.2 / math.sqrt(tables)
    pair_scale = 1.0 / tables
    for s in range(labels.shape[0]):
        state = _mix(_mix(seed) ^ ((first + np.uint64(s)) * golden))
        logit = -1.6
        for j in range(dense.shape[1]):
            state += golden
            value = _curve(_mix(state), dense_curve)
            dense[s, j] = value
            logit += _hidden(_mix(teacher ^ np.uint64(j + 1)), 0) * 0.15 * (value - 1.0)
        sum0 = sum1 = squares = 0.0
        for t in range(tables):
            weight = vector0 = vector1 = 0.0
            for h in range(hots[t]):
                state += golden
                bits = _mix(state)
                draw = np.uint32(bits >> np.uint64(32))
                knot = guide[t, draw >> np.uint32(32 - GUIDE_BITS)]
                base = knot_start[t]
                last = knot_start[t + 1] - base - 2
                while knot < last and knot_mass[base + knot + 1] <= draw:
                    knot += 1
                low = knot_rank[base + knot]
                width = knot_rank[base + knot + 1] - low
                rank = np.int64(low + np.float64(bits & np.uint64(0xFFFFFFFF)) * 2.0**-32 * width)
                row = (rank * stride[t]) % rows[t]
                flat[starts[t] + s * hots[t] + h] = row
                hidden = _mix(
                    teacher + np.uint64(row) * golden + np.uint64(t + 1) * np.uint64(0xD1342543DE82EF95)
                )
                weight += _hidden(hidden, 0)
                vector0 += _hidden(hidden, 16)
                vector1 += _hidden(hidden, 32)
            share = 1.0 / hots[t]
            logit += weight * share * weight_scale
            vector0 *= share
            vector1 *= share
            sum0 += vector0
            sum1 += vector1
            squares += vector0 * vector0 + vector1 * vector1
        logit += pair_scale * (sum0 * sum0 + sum1 * sum1 - squares)
        state += golden
        labels[s] = 1.0 if logit + _curve(_mix(state), noise_curve) > 0.0 else 0.0
