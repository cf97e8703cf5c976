"""The hot loops of prioritised saving: what is kept for each row that is looked up.

Ids outside of a table are not its concern, as in ``kernels.ids``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

WAYS = 16
"""Slots of a bucket: 64 bytes, a cache line."""


@njit(cache=True, nogil=True)
def count_rows(counters, ids):
    """Add one to the uint32 counter of each id; counters stay at their largest value."""
    rows = counters.shape[0]
    most = np.uint32(0xFFFFFFFF)
    for i in range(ids.shape[0]):
        row = ids[i]
        if 0 <= row < rows and counters[row] != most:
            counters[row] += np.uint32(1)


@njit(cache=True, nogil=True, inline="always")
def _mixed(value):
    """Splitmix64's finalizer."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def _bucket(row, buckets):
    """Where a row belongs: the upper bits of its hash, scaled."""
    return np.int64(((_mixed(np.uint64(row)) >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32))


@njit(cache=True, nogil=True)
def remember_rows(slots, ids, rows, state):
    """Put ids into buckets of ``slots`` [buckets, WAYS] (uint32: id + 1; 0 is free), each once.

    The slots of a bucket are filled from the front. In a full one a random id makes room; ``state`` [1]
    (uint64) is the chance behind it.
    """
    chance = state[0]
    for i in range(ids.shape[0]):
        row = ids[i]
        if not 0 <= row < rows:
            continue
        wanted = np.uint32(row + 1)
        bucket = _bucket(row, slots.shape[0])
        at = np.int64(0)
        while at < WAYS and slots[bucket, at] != wanted and slots[bucket, at] != np.uint32(0):
            at += 1
        if at == WAYS:
            chance += np.uint64(0x9E3779B97F4A7C15)
            at = np.int64(_mixed(chance) >> np.uint64(60))
        slots[bucket, at] = wanted
    state[0] = chance


@njit(cache=True, nogil=True)
def forget_rows(slots, ids):
    """Take ids out of their buckets, if they are there; what is behind them moves up."""
    for i in range(ids.shape[0]):
        wanted = np.uint32(ids[i] + 1)
        bucket = _bucket(ids[i], slots.shape[0])
        at = 0
        while at < WAYS and slots[bucket, at] != wanted:
            at += 1
        if at == WAYS:
            continue
        while at < WAYS - 1:
            slots[bucket, at] = slots[bucket, at + 1]
            at += 1
        slots[bucket, WAYS - 1] = np.uint32(0)


@njit(cache=True, nogil=True)
def change_sizes(now, before, out):
    """For each row the sum of squares of now - before, [rows, width] each; infinite where it is no number."""
    for i in range(now.shape[0]):
        total = np.float32(0)
        for j in range(now.shape[1]):
            change = now[i, j] - before[i, j]
            total += change * change
        out[i] = np.float32(np.inf) if np.isnan(total) else total
