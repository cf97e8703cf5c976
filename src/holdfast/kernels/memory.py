"""Memory that is aligned to cache lines."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LINE = 64  # bytes of a cache line
_LINE_WORDS = LINE // 4


def new_bytes(size: int) -> Bytes:
    """Uninitialized memory of this process alone."""
    return np.empty(size, np.uint8)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: for a mixture of both kinds Numba would compile every loop twice."""
    view = array.view()
    view.flags.writeable = False
    return view


def aligned_empty(size: int) -> NDArray[np.uint8]:
    """Uninitialized bytes, aligned to a cache line."""
    return aligned_part(np.empty(size + LINE, np.uint8), size)


def aligned_part(space: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """So many bytes of some memory, aligned to a cache line, of which the memory needs one more."""
    first = -space.ctypes.data % LINE
    return space[first : first + size]


def aligned_zeros(count: int, words: int) -> NDArray[np.uint32]:
    """[count, words] that begin at a cache line: NumPy's own begin in its middle, and records would straddle
    lines."""
    space = np.zeros(count * words + _LINE_WORDS, np.uint32)
    first = -(space.ctypes.data // 4) % _LINE_WORDS
    return space[first : first + count * words].reshape(count, words)


def aligned_bits(count: int) -> NDArray[np.uint64]:
    """A bitmap of so many bits, all zero, that begins at a cache line."""
    return aligned_zeros(-(-count // 64), 2).reshape(-1).view(np.uint64)
