"""Memory that the loops over records are fast on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LINE_WORDS = 16  # of a cache line


def aligned_zeros(count: int, words: int) -> NDArray[np.uint32]:
    """[count, words] that begin at a cache line: NumPy's own begin in its middle, and records would straddle
    lines."""
    space = np.zeros(count * words + _LINE_WORDS, np.uint32)
    first = -(space.ctypes.data // 4) % _LINE_WORDS
    return space[first : first + count * words].reshape(count, words)
