"""GF(2^8) by the schoolbook, and codes by the letter of their definition: the slow twins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Records = NDArray[np.uint32]


def product(a: int, b: int) -> int:
    """Multiply the polynomials, then take the remainder."""
    total = 0
    for bit in range(8):
        if b >> bit & 1:
            total ^= a << bit
    for bit in range(14, 7, -1):
        if total >> bit & 1:
            total ^= 0x11D << (bit - 8)
    return total


def times(coefficient: int, records: Records) -> Records:
    table = np.array([product(coefficient, b) for b in range(256)], np.uint8)
    return table[np.ascontiguousarray(records).view(np.uint8)].view(np.uint32)


def encoded(members: Records, r: int, coefficient: Callable[[int, int], int]) -> Records:
    parities = np.zeros((r, *members.shape[1:]), np.uint32)
    for t in range(r):
        for m in range(len(members)):
            parities[t] ^= times(coefficient(t, m), members[m])
    return parities


STRANGE = [
    0x00000000, 0x80000000, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00001, 0xFFFFFFFF,
    0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x00800000,
]  # fmt: skip
"""0, -0, 1, both infinities, NaNs quiet and signalling, denormals, the largest and the smallest number."""

words = st.one_of(st.sampled_from(STRANGE), st.integers(0, 2**32 - 1))


def randoms(seed: int, *shape: int) -> Records:
    """Any bits, a third of them strange."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    return np.where(rng.random(shape) < 1 / 3, rng.choice(np.array(STRANGE, np.uint32), shape), bits)
