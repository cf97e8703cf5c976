"""What changed in records since somebody was last told of it, bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.kernels import update
from holdfast.kernels.copies import lay_over
from holdfast.kernels.memory import LINE, Bytes, aligned_bits, aligned_part, aligned_zeros, new_bytes
from holdfast.kernels.teams import ALONE, Team

Records = NDArray[np.uint32]
_Arrays = tuple[NDArray[np.uint64], NDArray[np.uint32], Records, NDArray[np.int64]]

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
    returns is not copied again before it is sent. The memory is used again once nobody refers to it. Each
    thread of a team has a section of its own.

    Args:
        records: the records of a group at a server.
        k: data records of a stripe.
        keep: False for a group whose changes nobody wants to know: nothing is copied then.
        allocate: returns so many bytes of memory, uninitialized, as an array of its own.
        team: the threads that update records.
    """

    def __init__(
        self,
        records: Records,
        k: int,
        *,
        keep: bool,
        allocate: Callable[[int], Bytes] = new_bytes,
        team: Team = ALONE,
    ) -> None:
        self._allocate = allocate
        self._team = team
        self._records = records
        self._k = k
        self._copied = aligned_bits(len(records) if keep else 0)
        # Threads count at the same time: each in cache lines of its own.
        counts = aligned_zeros(team.threads, -(-k * 8 // LINE) * LINE // 4).view(np.int64)
        self._counts = [counts[i, :k] for i in range(team.threads)]
        self._blocks_of_all = -(-len(records) // k)
        self._spaces: list[Bytes] = []
        self._room = 0
        self._taken = False
        self._sections = self._space(0)

    def __len__(self) -> int:
        return sum(sum(counts.tolist()) for counts in self._counts)  # of so few numbers, faster than NumPy's

    def for_update(self, most: int) -> list[_Arrays]:
        """The arrays that ``kernels.update`` takes, for each thread, with room for so many more records."""
        if len(self._copied):
            self._make_room(most)
        return self._sections

    def keep(self, places: NDArray[np.uint32] | NDArray[np.int64]) -> None:
        """Copy records that are about to be written to in another way."""
        if len(self._copied):
            update.keep_records(self._records, places, self.for_update(len(places))[0])

    def take(self) -> list[MemberChange]:
        """All changes since the last call; members without any are left out. One that several threads have
        updated is there several times, with different records."""
        counted = [counts.tolist() for counts in self._counts]
        if not any(map(any, counted)):
            return []
        sections, records = self._sections, self._records
        nbytes = 2 * records.shape[1] * 4 * sum(map(sum, counted))
        parts = self._team.parts(nbytes)

        def take(part: int) -> None:
            for section in sections[part::parts]:
                update.take_changes(records, section)

        self._team.run(take, parts)
        self._taken = True
        return [
            MemberChange(m, blocks[m, :n], copies[m, :n])
            for (_, blocks, copies, _), counts in zip(sections, counted, strict=True)
            for m, n in enumerate(counts)
            if n
        ]

    def told(self, places: NDArray[np.int64]) -> Records:
        """Records, by ascending places, as they were when ``take`` was last called."""
        records, words = self._records, self._records.shape[1]
        found: Records = self._allocate(len(places) * words * 4).view(np.uint32).reshape(-1, words)
        floats = found.view(np.float32)
        self._team.run_slices(
            lambda some: update.gather_weights(records, places[some], floats[some]),
            len(places),
            2 * found.nbytes,
        )
        for section in self._sections:
            if any(section[-1].tolist()):
                lay_over(*section, places, found)
        return found

    def _make_room(self, most: int) -> None:
        """For so many more records, which may all be the same member and updated by the same thread."""
        counted = [counts.tolist() for counts in self._counts]
        count = min(max(map(max, counted)) + most, self._blocks_of_all)
        if count > self._room:
            before = self._sections
            self._sections = self._space(min(max(2 * self._room, count, _LEAST_ROOM), self._blocks_of_all))
            for (_, blocks, copies, _), old, counts in zip(self._sections, before, counted, strict=True):
                for m, n in enumerate(counts):
                    blocks[m, :n], copies[m, :n] = old[1][m, :n], old[2][m, :n]
        elif self._taken:
            self._sections = []  # whoever still refers to them is somebody else
            self._sections = self._space(self._room)
        self._taken = False

    def _space(self, room: int) -> list[_Arrays]:
        """For each thread, blocks [k, room] and copies [k, room, words] in memory that nobody refers to any
        more, or else in fresh memory, which costs a page fault for every 4 KiB."""
        if room != self._room:
            self._spaces.clear()
            self._room = room
        words = self._records.shape[1]
        threads, k = len(self._counts), self._k
        count = threads * k * room
        size = count * (words + 1) * 4
        for i in range(len(self._spaces)):
            if sys.getrefcount(self._spaces[i]) == _REFERENCES_OF_NOBODY:
                space = self._spaces[i]
                break
        else:
            space = self._allocate(size + LINE)
            self._spaces = [space, *self._spaces][:_MOST_SPACES]
        part = aligned_part(space, size).view(np.uint32)
        copies = part[: count * words].reshape(threads, k, room, words)
        blocks = part[count * words :].reshape(threads, k, room)
        return [(self._copied, blocks[i], copies[i], self._counts[i]) for i in range(threads)]
