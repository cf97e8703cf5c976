"""The hot loop that finds records as they were when others were last told of them.

Arrays are C-contiguous. Places are trusted: the caller makes sure that they are in range.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_compiled = njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def lay_over(copied, changed, copies, places, out):
    """out[i] = copies[c] for every place that has a copy: places[i] == changed[c].

    ``copied`` is the bitmap of places in ``changed``, uint64, which names each once, in no order; ``places``
    ascend. Most places have no copy, and most copies are of other places: bitmaps tell, not searches.
    """
    wanted = np.zeros_like(copied)
    hits = 0
    for i in range(places.shape[0]):
        word, bit = places[i] >> 6, np.uint64(1) << np.uint64(places[i] & 63)
        if copied[word] & bit:
            wanted[word] |= bit
            hits += 1
    for c in range(changed.shape[0]):
        if hits == 0:
            return
        place = np.int64(changed[c])
        if wanted[place >> 6] & (np.uint64(1) << np.uint64(place & 63)):
            hits -= 1
            at = np.searchsorted(places, place)
            for w in range(out.shape[1]):
                out[at, w] = copies[c, w]
