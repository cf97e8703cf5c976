"""The hot loops over rows. Each has a slow, obvious twin in the tests.

Rows are handled as bits: a field (weights, one optimizer state) of a table is a C-contiguous uint32
array [rows, words], and a record is a row's fields side by side. All loops release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def mark_rows(bits, ids):
    """Set the bit of every id in a uint64 bitmap. Ids outside of it are not its concern."""
    limit = bits.shape[0] * 64
    for i in range(ids.shape[0]):
        row = ids[i]
        if 0 <= row < limit:
            bits[row >> 6] |= np.uint64(1) << np.uint64(row & 63)


@njit(cache=True, nogil=True)
def count_marked(bits):
    """How many bits are set."""
    total = 0
    for w in range(bits.shape[0]):
        word = bits[w]
        while word != np.uint64(0):
            word &= word - np.uint64(1)
            total += 1
    return total


@njit(cache=True, nogil=True)
def marked_rows(bits, out):
    """Write the ids of all set bits to ``out``, ascending; how many there were."""
    found = 0
    for w in range(bits.shape[0]):
        word = bits[w]
        while word != np.uint64(0):
            lowest = word & (~word + np.uint64(1))
            # The position of a single bit: count the ones below it.
            below = lowest - np.uint64(1)
            position = 0
            while below != np.uint64(0):
                below &= below - np.uint64(1)
                position += 1
            out[found] = w * 64 + position
            found += 1
            word ^= lowest
    return found


@njit(cache=True, nogil=True)
def gather_words(field, ids, records, first):
    """Copy field[ids] to columns first, first + 1, … of the records."""
    words = field.shape[1]
    for i in range(ids.shape[0]):
        row = ids[i]
        for w in range(words):
            records[i, first + w] = field[row, w]


@njit(cache=True, nogil=True)
def scatter_words(field, ids, records, first):
    """Copy columns first, first + 1, … of the records to field[ids]."""
    words = field.shape[1]
    for i in range(ids.shape[0]):
        row = ids[i]
        for w in range(words):
            field[row, w] = records[i, first + w]
