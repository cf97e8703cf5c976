"""What changed in records since somebody was last told of it, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.kernels import update
from holdfast.kernels.copies import lay_over

Records = NDArray[np.uint32]

_LEAST_ROOM = 256


class MemberChange(NamedTuple):
    """Old XOR new of some records that are the same member of their stripes."""

    member: int
    blocks: NDArray[np.uint32]
    """place // k of each, every one once, in no order."""
    differences: Records


class Changes:
    """Copies of records as they were before their first update: many updates of a row are one difference.

    Args:
        records: the records of a group at a server.
        k: data records of a stripe.
        keep: False for a group whose changes nobody wants to know: nothing is copied then.
    """

    def __init__(self, records: Records, k: int, *, keep: bool) -> None:
        self._records = records
        self._k = k
        self._copied = np.zeros(-(-len(records) // 64) if keep else 0, np.uint64)
        self._places = np.empty(0, np.uint32)
        self._copies = np.empty((0, records.shape[1]), np.uint32)
        self._count = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return int(self._count[0])

    def for_update(
        self, most: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], Records, NDArray[np.int64]]:
        """The arrays that ``kernels.update`` takes, with room for so many more records."""
        if len(self._copied):
            self._make_room(min(len(self) + most, len(self._records)))
        return self._copied, self._places, self._copies, self._count

    def keep(self, places: NDArray[np.uint32] | NDArray[np.int64]) -> None:
        """Copy records that are about to be written to in another way."""
        if len(self._copied):
            update.keep_records(self._records, places, self.for_update(len(places)))

    def take(self) -> list[MemberChange]:
        """All changes since the last call; members without any are left out."""
        count = len(self)
        starts = np.empty(self._k + 1, np.int64)
        blocks = np.empty(count, np.uint32)
        differences = np.empty((count, self._records.shape[1]), np.uint32)
        update.take_changes(self._records, self.for_update(0), self._k, starts, blocks, differences)
        spans = [(m, slice(int(starts[m]), int(starts[m + 1]))) for m in range(self._k)]
        return [MemberChange(m, blocks[at], differences[at]) for m, at in spans if at.stop > at.start]

    def told(self, places: NDArray[np.int64]) -> Records:
        """Records, by ascending places, as they were when ``take`` was last called."""
        found: Records = self._records[places]
        if len(self):
            lay_over(self._copied, self._places[: len(self)], self._copies, places, found)
        return found

    def _make_room(self, count: int) -> None:
        if count > len(self._places):
            room = min(max(2 * len(self._places), count, _LEAST_ROOM), len(self._records))
            places, copies = np.empty(room, np.uint32), np.empty((room, self._records.shape[1]), np.uint32)
            places[: len(self)] = self._places[: len(self)]
            copies[: len(self)] = self._copies[: len(self)]
            self._places, self._copies = places, copies
