"""K-means for each row by itself: what quantization is compared with, not a way to store rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from holdfast.kernels.machine import mixed

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "d8b2aca3c980"}


@njit(cache=True, nogil=True)
def _draw(state):
    """A number from 0 to 1, and the next state."""
    state += np.uint64(0x9E3779B97F4A7C15)
    return np.float64(mixed(state) >> np.uint64(11)) * 2.0**-53, state


@njit(cache=True, nogil=True)
def row_state(seed, row):
    """Where a row's random numbers start."""
    return mixed(np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(row))


@njit(cache=True, nogil=True)
def start_anywhere(values, centers, state):
    """The values at places that are drawn at random, no place twice, are the centers."""
    places = np.arange(len(values))
    for c in range(len(centers)):
        at, state = _draw(state)
        other = c + int(at * (len(values) - c))
        places[c], places[other] = places[other], places[c]
        centers[c] = values[places[c]]


@njit(cache=True, nogil=True)
def start_apart(values, centers, state):
    """K-means++: each next center is a value drawn by its squared distance to the nearest so far."""
    at, state = _draw(state)
    centers[0] = values[int(at * len(values))]
    apart = np.full(len(values), np.inf)
    for c in range(1, len(centers)):
        total = 0.0
        for j in range(len(values)):
            away = values[j] - centers[c - 1]
            apart[j] = min(apart[j], away * away)
            total += apart[j]
        at, state = _draw(state)
        rest = at * total
        chosen = 0
        while chosen < len(values) - 1 and rest >= apart[chosen]:
            rest -= apart[chosen]
            chosen += 1
        centers[c] = values[chosen]


@njit(cache=True, nogil=True)
def _improve(values, centers):
    """One of Lloyd's iterations. Both ascend, and still do afterwards; a center without values stays."""
    j = 0
    for c in range(len(centers)):
        total = 0.0
        first = j
        end = np.inf if c + 1 == len(centers) else 0.5 * (centers[c] + centers[c + 1])
        while j < len(values) and values[j] <= end:
            total += values[j]
            j += 1
        if j > first:
            centers[c] = total / (j - first)


@njit(cache=True, nogil=True)
def kmeans_rows(rows, ordered, clusters, iterations, plus_plus, seed, out):
    """out[i] = row i with each value replaced by the nearest of ``clusters`` centers of that row.

    ``ordered`` has each row's values as float64, ascending. With as many clusters as values, or more,
    every value is a center: the row itself.
    """
    centers = np.empty(clusters)
    for i in range(rows.shape[0]):
        if clusters >= rows.shape[1]:
            for j in range(rows.shape[1]):
                out[i, j] = rows[i, j]
            continue
        if plus_plus:
            start_apart(ordered[i], centers, row_state(seed, i))
        else:
            start_anywhere(ordered[i], centers, row_state(seed, i))
        for c in range(1, clusters):  # into order
            k = c
            while k > 0 and centers[k] < centers[k - 1]:
                centers[k], centers[k - 1] = centers[k - 1], centers[k]
                k -= 1
        for _ in range(iterations):
            _improve(ordered[i], centers)
        for j in range(rows.shape[1]):
            best = 0
            for c in range(1, clusters):
                if abs(centers[c] - rows[i, j]) < abs(centers[best] - rows[i, j]):
                    best = c
            out[i, j] = centers[best]
