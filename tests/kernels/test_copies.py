"""The loop that lays copies over records, against the obvious one."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.kernels.copies import lay_over


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 300])
def test_copies_of_some_records(count: int, share: float, k: int) -> None:
    chance = np.random.default_rng(count)
    changed = chance.permutation(np.flatnonzero(chance.random(count) < share))
    counts = np.array([(changed % k == m).sum() for m in range(k)], np.int64)
    blocks = np.zeros((k, len(changed) + 3), np.uint32)
    copies = chance.integers(0, 1 << 32, (k, len(changed) + 3, 5), np.uint32)
    copied = np.zeros(-(-count // 64), np.uint64)
    right = {}
    for m in range(k):
        for c, place in enumerate(changed[changed % k == m].tolist()):
            blocks[m, c] = place // k
            copied[place // 64] |= np.uint64(1) << np.uint64(place % 64)
            right[place] = copies[m, c]
    for density in (0.0, 0.3, 1.0):
        places = np.flatnonzero(chance.random(count) < density)
        out = np.zeros((len(places), 5), np.uint32)
        expected = out.copy()
        for at, place in enumerate(places.tolist()):
            if place in right:
                expected[at] = right[place]
        lay_over(copied, blocks, copies, counts, places, out)
        assert (out == expected).all()
