"""Memory that the processes of one machine share, so that large arrays need not be sent.

A server allocates what it sends through lanes (``redundancy.lanes``) in its *arena*, a file in memory without
a name. A peer on the same machine maps the file and reads arrays where they are: a message then carries only
their positions.

An owner must not overwrite an array that a peer still reads. Of what is in lanes, it knows: it keeps a
message until the peer has acknowledged it, and a flush until all parity servers have: then nobody undoes it.
So the owner may overwrite an array as soon as it does not refer to it, whatever a peer remembers. All other
arrays are *loans*: the owner's transport keeps them until the peer's transport returns them, when nobody
there refers to them any more.

The file ends with the last process that has mapped it. A peer opens it through the owner's entry in /proc,
which the kernel allows only to processes of the same user; where it cannot, arrays are sent as elsewhere.
"""

from __future__ import annotations

import bisect
import fcntl
import functools
import mmap
import os
import stat
import weakref
from collections import deque
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from holdfast.cluster.protocol.messages import Peer

ARENA_BYTES: Final = 1 << 36
"""Of addresses, not of memory: pages exist from their first use on."""
SHARED_FROM_BYTES: Final = 64 << 10
"""Smaller arrays are sent: as fast, and nobody needs to trust the owner with numbers of records."""
_KEPT_BYTES: Final = 64 << 20
"""Unused memory that an arena keeps: pages that are new to a process are dear."""
_WORD: Final = 4
_PAGE: Final = mmap.PAGESIZE


class Offer(Struct, frozen=True, array_like=True):
    """Where a node's arena is: for peers to which it is connected."""

    job: str
    source: Peer
    process: int
    file: int
    size: int


class Returned(Struct, frozen=True, array_like=True):
    """Loans that nobody reads any more."""

    owner: Peer
    loans: tuple[int, ...]


class Arena:
    """A process's memory that its peers can read.

    Args:
        size: of the file; more than is ever allocated at a time.
        kept_bytes: of unused memory that is not given back to the kernel.
        shared_from_bytes: ``find`` does not find smaller arrays.

    Raises OSError if the kernel has no such files, or no room for its addresses.
    """

    def __init__(
        self,
        size: int = ARENA_BYTES,
        kept_bytes: int = _KEPT_BYTES,
        shared_from_bytes: int = SHARED_FROM_BYTES,
    ) -> None:
        self.size = size
        self._kept_bytes = kept_bytes
        self._shared_from_bytes = shared_from_bytes
        self.file = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, size)
        # A peer that reads beyond the end of a file that has become shorter is killed (SIGBUS).
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals)
        self._map = mmap.mmap(self.file, size)
        self._first: int = np.frombuffer(self._map, np.uint8, 1).ctypes.data
        self._free: list[tuple[int, int]] = [(0, size)]  # begin and end, ascending, never adjacent
        self._used = 0  # behind it, no page has been touched
        self._unused = 0  # bytes of free memory that may have pages
        self._taken: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._returned: deque[int] = deque()

    def offer(self, job: str, me: Peer) -> Offer:
        """What a peer needs to map it."""
        return Offer(job, me, os.getpid(), self.file, self.size)

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, uninitialized, until nobody refers to them; elsewhere if the arena is full."""
        self._collect()
        length = -(-max(size, 1) // _PAGE) * _PAGE
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= length:
                if end - begin == length:
                    del self._free[number]
                else:
                    self._free[number] = begin + length, end
                self._used = max(self._used, begin + length)
                self._unused = max(0, self._unused - length)
                space: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, size, begin)
                # Views refer to this array, not to the map behind it. The callback only takes a note: it may
                # run anywhere, also in the middle of this method.
                note = functools.partial(_note, self._returned, begin)
                self._taken[begin] = length, weakref.ref(space, note)
                return space
        return np.empty(size, np.uint8)

    def find(self, array: memoryview | NDArray[Any]) -> int:
        """The position of an array; -1 if it is not in the arena."""
        if array.nbytes < max(1, self._shared_from_bytes):
            return -1
        at: int = np.asarray(array).ctypes.data - self._first
        return at if 0 <= at < self.size else -1

    def resident_bytes(self) -> int:
        """Memory that is in use, or kept for later use."""
        return os.fstat(self.file).st_blocks * 512

    def frame(self, at: int, size: int) -> memoryview:
        """The array at a position as peers see it: nobody here knows that they refer to it."""
        return memoryview(self._map)[at : at + size].toreadonly()

    def _collect(self) -> None:
        """Take back what nobody refers to any more."""
        while self._returned:
            begin = self._returned.popleft()
            length, _ = self._taken.pop(begin)
            self._insert(begin, begin + length)
            self._unused += length
        if self._unused > self._kept_bytes:
            self._unused = 0
            for begin, end in self._free:
                if begin < self._used:
                    self._map.madvise(mmap.MADV_REMOVE, begin, min(end, self._used) - begin)
            if self._free and self._free[-1][1] == self.size:
                self._used = min(self._used, self._free[-1][0])

    def _insert(self, begin: int, end: int) -> None:
        at = bisect.bisect(self._free, (begin, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == begin:
            at -= 1
            begin = self._free.pop(at)[0]
        self._free.insert(at, (begin, end))


def _note(returned: deque[int], begin: int, _: weakref.ref[Any]) -> None:
    returned.append(begin)


class SharedView:
    """A peer's arena, mapped to be read.

    Raises OSError or ValueError if it cannot be opened, or is not an arena of this user.
    """

    def __init__(self, offer: Offer) -> None:
        if offer.process < 1 or offer.file < 0 or not 0 < offer.size <= ARENA_BYTES:
            raise ValueError(f"not an arena: {offer}")
        file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ValueError(f"file {offer.file} of process {offer.process} is not an arena of this user")
            if status.st_size != offer.size or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"file {offer.file} of process {offer.process} may become shorter")
            self._map = mmap.mmap(file, offer.size, prot=mmap.PROT_READ)
            self._size = offer.size
        finally:
            os.close(file)
        self.returned: deque[int] = deque()
        """Loans that nobody refers to any more, to be returned to the owner."""
        self._loans: dict[int, list[weakref.ref[Any]]] = {}

    def frame(self, at: int, size: int, loan: int = 0) -> NDArray[np.uint8]:
        """The array at a position. Raises ValueError if it is not in the arena, or not aligned."""
        if at % _WORD or not 0 <= at <= at + size <= self._size:
            raise ValueError(f"an array of {size} bytes at {at}: expected one in the arena, aligned")
        array = np.frombuffer(self._map, np.uint8, size, at)
        if loan:
            note = functools.partial(self._note_end, loan)
            self._loans.setdefault(loan, []).append(weakref.ref(array, note))
        return array

    def _note_end(self, loan: int, _: weakref.ref[Any]) -> None:
        """An array of a loan is gone; the last one ends it."""
        if all(array() is None for array in self._loans.get(loan, ())):
            self._loans.pop(loan, None)
            self.returned.append(loan)
