"""The loop that lays copies over records, against the obvious one."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.kernels.copies import lay_over


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 300])
def test_copies_of_some_records(count: int, share: float) -> None:
    chance = np.random.default_rng(count)
    changed = chance.permutation(np.flatnonzero(chance.random(count) < share)).astype(np.uint32)
    copies = chance.integers(0, 1 << 32, (len(changed) + 3, 5), np.uint32)
    copied = np.zeros(-(-count // 64), np.uint64)
    for place in changed.tolist():
        copied[place // 64] |= np.uint64(1) << np.uint64(place % 64)
    for density in (0.0, 0.3, 1.0):
        places = np.flatnonzero(chance.random(count) < density)
        out = np.zeros((len(places), 5), np.uint32)
        expected = out.copy()
        for at, place in enumerate(places.tolist()):
            for number, other in enumerate(changed.tolist()):
                if place == other:
                    expected[at] = copies[number]
        lay_over(copied, changed, copies, places, out)
        assert (out == expected).all()
