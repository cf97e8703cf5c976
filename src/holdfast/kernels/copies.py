"""The hot loop that finds records as they were when others were last told of them.

Arrays are C-contiguous. Places are trusted: the caller makes sure that they are in range.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_compiled = njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def lay_over(copied, blocks, copies, counts, places, out):
    """out[i] = the copy of the record at places[i], for every place that has one.

    Member m of k = len(counts) has counts[m] copies: copies[m, c] is of the record at place
    blocks[m, c] * k + m, each of which is named once, in no order. ``copied`` is the bitmap of these places,
    uint64; ``places`` ascend. Most places have no copy, and most copies are of other places: bitmaps tell,
    not searches.
    """
    wanted = np.zeros_like(copied)
    hits = 0
    for i in range(places.shape[0]):
        word, bit = places[i] >> 6, np.uint64(1) << np.uint64(places[i] & 63)
        if copied[word] & bit:
            wanted[word] |= bit
            hits += 1
    k = counts.shape[0]
    for m in range(k):
        for c in range(counts[m]):
            if hits == 0:
                return
            place = np.int64(blocks[m, c]) * k + m
            if wanted[place >> 6] & (np.uint64(1) << np.uint64(place & 63)):
                hits -= 1
                at = np.searchsorted(places, place)
                for w in range(out.shape[1]):
                    out[at, w] = copies[m, c, w]
