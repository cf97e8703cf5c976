"""Memory that is aligned to cache lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LINE = 64  # bytes of a cache line
_LINE_WORDS = _LINE // 4


def aligned_empty(size: int) -> NDArray[np.uint8]:
    """Uninitialized bytes, aligned to a cache line."""
    space = np.empty(size + _LINE, np.uint8)
    first = -space.ctypes.data % _LINE
    return space[first : first + size]


def aligned_zeros(count: int, words: int) -> NDArray[np.uint32]:
    """[count, words] that begin at a cache line: NumPy's own begin in its middle, and records would straddle
    lines."""
    space = np.zeros(count * words + _LINE_WORDS, np.uint32)
    first = -(space.ctypes.data // 4) % _LINE_WORDS
    return space[first : first + count * words].reshape(count, words)
