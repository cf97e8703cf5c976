"""What changed in records since somebody was last told of it, bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.kernels import update
from holdfast.kernels.copies import lay_over
from holdfast.kernels.memory import LINE, Bytes, aligned_part, new_bytes

Records = NDArray[np.uint32]
_Arrays = tuple[NDArray[np.uint64], NDArray[np.uint32], Records, NDArray[np.int64]]

_NOTHING: Records = np.empty(0, np.uint32)
_LEAST_ROOM = 64
_MOST_SPACES = 3  # one that is filled, one on its way, one that others in this process may have to undo
_REFERENCES_OF_NOBODY = 2  # the list's reference, and that of the caller


class MemberChange(NamedTuple):
    """Old XOR new of some records that are the same member of their stripes."""

    member: int
    blocks: NDArray[np.uint32]
    """place // k of each, every one once, in no order."""
    differences: Records


class Changes:
    """Copies of records as they were before their first update: many updates of a row are one difference.

    Copies lie side by side for each member, and ``take`` turns them into differences where they are: what it
    returns is not copied again before it is sent. The memory is used again once nobody refers to it.

    Args:
        records: the records of a group at a server.
        k: data records of a stripe.
        keep: False for a group whose changes nobody wants to know: nothing is copied then.
        allocate: returns so many bytes of memory, uninitialized, as an array of its own.
    """

    def __init__(
        self, records: Records, k: int, *, keep: bool, allocate: Callable[[int], Bytes] = new_bytes
    ) -> None:
        self._allocate = allocate
        self._records = records
        self._k = k
        self._copied = np.zeros(-(-len(records) // 64) if keep else 0, np.uint64)
        self._counts = np.zeros(k, np.int64)
        self._blocks_of_all = -(-len(records) // k)
        self._spaces: list[Bytes] = []
        self._room = 0
        self._taken = False
        self._blocks, self._copies = self._space(0)

    def __len__(self) -> int:
        return sum(self._counts.tolist())  # of so few numbers, faster than NumPy's

    def for_update(self, most: int) -> _Arrays:
        """The arrays that ``kernels.update`` takes, with room for so many more records."""
        if len(self._copied):
            self._make_room(most)
        return self._copied, self._blocks, self._copies, self._counts

    def keep(self, places: NDArray[np.uint32] | NDArray[np.int64]) -> None:
        """Copy records that are about to be written to in another way."""
        if len(self._copied):
            update.keep_records(self._records, places, self.for_update(len(places)))

    def take(self) -> list[MemberChange]:
        """All changes since the last call; members without any are left out."""
        counts = self._counts.tolist()
        if not any(counts):
            return []
        update.take_changes(self._records, (self._copied, self._blocks, self._copies, self._counts))
        blocks, copies = self._blocks, self._copies
        self._taken = True
        return [MemberChange(m, blocks[m, :n], copies[m, :n]) for m, n in enumerate(counts) if n]

    def told(self, places: NDArray[np.int64]) -> Records:
        """Records, by ascending places, as they were when ``take`` was last called."""
        words = self._records.shape[1]
        found: Records = self._allocate(len(places) * words * 4).view(np.uint32).reshape(-1, words)
        update.gather_weights(self._records, places, found.view(np.float32))
        if any(self._counts.tolist()):
            lay_over(self._copied, self._blocks, self._copies, self._counts, places, found)
        return found

    def _make_room(self, most: int) -> None:
        """For so many more records, which may all be the same member."""
        count = min(max(self._counts.tolist()) + most, self._blocks_of_all)
        if count > self._room:
            room = min(max(2 * self._room, count, _LEAST_ROOM), self._blocks_of_all)
            blocks, copies = self._space(room)
            for m, n in enumerate(self._counts.tolist()):
                blocks[m, :n], copies[m, :n] = self._blocks[m, :n], self._copies[m, :n]
            self._blocks, self._copies = blocks, copies
        elif self._taken:
            self._blocks = self._copies = _NOTHING  # whoever still refers to them is somebody else
            self._blocks, self._copies = self._space(self._room)
        self._taken = False

    def _space(self, room: int) -> tuple[NDArray[np.uint32], Records]:
        """Blocks [k, room] and copies [k, room, words] in memory that nobody refers to any more, or else in
        fresh memory, which costs a page fault for every 4 KiB."""
        if room != self._room:
            self._spaces.clear()
            self._room = room
        words = self._records.shape[1]
        count = self._k * room
        size = count * (words + 1) * 4
        for i in range(len(self._spaces)):
            if sys.getrefcount(self._spaces[i]) == _REFERENCES_OF_NOBODY:
                space = self._spaces[i]
                break
        else:
            space = self._allocate(size + LINE)
            self._spaces = [space, *self._spaces][:_MOST_SPACES]
        part = aligned_part(space, size).view(np.uint32)
        copies = part[: count * words].reshape(self._k, room, words)
        return part[count * words :].reshape(self._k, room), copies
