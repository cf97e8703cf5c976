"""The hot loops over rows. Each has a slow, obvious twin in the tests.

Rows are handled as bits: nothing here knows what a number means. All loops release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def mark_rows(bits, ids, first, rows):
    """Set the bits first + id of a uint64 bitmap. Ids outside of the table are not its concern."""
    for i in range(ids.shape[0]):
        row = ids[i]
        if 0 <= row < rows:
            bit = first + row
            bits[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)


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
def scatter_rows(field, ids, first, values):
    """field[ids[i] - first] = values[i], eight words at a time. Rows must be whole words (``as_words``)."""
    words = field.shape[1]
    for i in range(ids.shape[0]):
        row = ids[i] - first
        w = 0
        while w + 8 <= words:
            a0 = values[i, w]
            a1 = values[i, w + 1]
            a2 = values[i, w + 2]
            a3 = values[i, w + 3]
            a4 = values[i, w + 4]
            a5 = values[i, w + 5]
            a6 = values[i, w + 6]
            a7 = values[i, w + 7]
            field[row, w] = a0
            field[row, w + 1] = a1
            field[row, w + 2] = a2
            field[row, w + 3] = a3
            field[row, w + 4] = a4
            field[row, w + 5] = a5
            field[row, w + 6] = a6
            field[row, w + 7] = a7
            w += 8
        while w < words:
            field[row, w] = values[i, w]
            w += 1
