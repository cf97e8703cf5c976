"""The interface and the guarantees of all stores.

A store holds immutable objects under safe names. The order of a save is:

1. ``lock_writer()`` once, for the life of the writer;
2. ``put()`` for every file of the new version, in any order, from any thread;
3. ``publish()`` for the object that makes the version exist. It comes last, because
   a reader that sees it may rely on everything that was put before it.

Deleting is the reverse: first the published object, then, in a second ``delete()``, what it named.
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast.errors import StoreError, UnsafeName

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PIECE = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_LONGEST_NAME = 512
_LONGEST_PIECE = 200  # a file system takes 255; room is left for what a store adds

# The locks lie beside the objects, so no object may take their names.
LOCK_FILE = "writer.lock"
LEASE_OBJECT = "writer.lease"
RESERVED_NAMES = frozenset({LOCK_FILE, LEASE_OBJECT})

# No object's name starts with a dot, so neither an unfinished file nor one of the reserve is one.
PARTIAL_PREFIX = ".partial-"
RESERVE_PREFIX = ".reserve-"


_CONNECTION_LOST = {
    errno.ENOTCONN, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESHUTDOWN,
}  # fmt: skip

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}

_NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_out_of_resources(error: Exception) -> bool:
    """Whether an error means that this process or machine is out of resources."""
    return isinstance(error, OSError) and error.errno in _NO_RESOURCES


def is_full(error: Exception) -> bool:
    """Whether an error means that there are no free blocks, inodes or quota."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def is_connection_lost(error: Exception) -> bool:
    """Whether an error means that the connection to a store is lost."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno in _CONNECTION_LOST


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing; ``modified`` is in Unix seconds by the store's clock."""

    name: str
    size: int
    modified: float


def is_name(name: str) -> bool:
    """Whether ``name`` is a valid object name."""
    return (
        len(name) <= _LONGEST_NAME
        and all(len(piece) <= _LONGEST_PIECE and _PIECE.fullmatch(piece) for piece in name.split("/"))
        and name not in RESERVED_NAMES
    )


def check_name(name: str) -> str:
    """Return ``name``, or raise `UnsafeName` if it could point outside the store or clash with its lock."""
    if name in RESERVED_NAMES:
        raise UnsafeName(f"the name {name!r} is the store's own: choose another")
    if not is_name(name):
        raise UnsafeName(
            f"{name!r} is not an object's name: use lower-case letters, digits, '_', '.' and '-' in parts "
            f"joined by '/', each starting with a letter or digit"
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return ``prefix``, or raise `UnsafeName` if no object name can begin with it."""
    pieces = prefix.split("/")
    if prefix and not all(_PIECE.fullmatch(piece) for piece in (pieces if pieces[-1] else pieces[:-1])):
        raise UnsafeName(f"{prefix!r} cannot begin an object's name: use what `check_name` allows")
    return prefix


def byte_views(parts: Iterable[Buffer]) -> list[memoryview]:
    """Return the non-empty buffers as flat views of bytes, without copying.

    Raises:
        TypeError: a buffer is not contiguous.
    """
    views = (memoryview(part) for part in parts)
    return [view.cast("B") for view in views if view.nbytes]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A range of an object and the memory to read it into."""

    offset: int
    into: memoryview

    @property
    def end(self) -> int:
        """The first offset after the stretch."""
        return self.offset + self.into.nbytes


def coalesce(ranges: Sequence[tuple[int, int]], out: memoryview) -> list[ReadRequest]:
    """Lay ``ranges`` back to back into ``out``; ranges that touch become one request."""
    requests: list[ReadRequest] = []
    filled = run_start = 0
    run_offset = run_end = -1
    for offset, length in ranges:
        if length and offset != run_end:
            if filled > run_start:
                requests.append(ReadRequest(run_offset, out[run_start:filled]))
            run_start, run_offset, run_end = filled, offset, offset
        filled += length
        run_end += length
    if filled > run_start:
        requests.append(ReadRequest(run_offset, out[run_start:filled]))
    return requests


class ObjectReader(ABC):
    """An open object; a context manager.

    On a local disk an open object stays readable when it is deleted meanwhile. On an object
    store it does not: a read after the delete raises `ObjectMissing`.

    Attributes:
        name: the object's name in its store.
        size: its length in bytes when it was opened.
    """

    name: str
    size: int

    def read_into(self, ranges: Sequence[tuple[int, int]], out: memoryview) -> None:
        """Fill ``out`` with the ``(offset, length)`` ranges, back to back, in the order given.

        Raises:
            StoreError: a range ends past the object's end: the message has the length that was
                needed and the length that was found. ``out`` may be partly filled.
            ValueError: ``out`` is not exactly as long as the ranges together.
        """
        view = out.cast("B") if out.nbytes else out
        needed = 0
        total = 0
        for offset, length in ranges:
            if offset < 0 or length < 0:
                raise ValueError(f"a range of {self.name!r} is negative: offset {offset}, length {length}")
            needed = max(needed, offset + length)
            total += length
        if total != view.nbytes:
            raise ValueError(f"the ranges of {self.name!r} hold {total} bytes, the buffer {view.nbytes}")
        if needed > self.size:
            raise self._too_short(needed, self.size)
        self._fill(coalesce(ranges, view))

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Return ``length`` bytes from ``offset``, or all that follow it."""
        if length is None:
            length = max(self.size - offset, 0)
        # Checked before memory is taken: a length can come from a damaged file.
        if offset + length > self.size:
            raise self._too_short(offset + length, self.size)
        content = bytearray(length)
        self.read_into([(offset, length)], memoryview(content))
        return bytes(content)

    @abstractmethod
    def _fill(self, requests: list[ReadRequest]) -> None:
        """Serve requests that lie within ``size``."""

    def forget_cached(self) -> None:  # noqa: B027 (most stores cache nothing here)
        """Ask the operating system to drop what it has cached of the object, so that reads are real ones."""

    @abstractmethod
    def close(self) -> None:
        """Close the object; closing twice is fine."""

    def _too_short(self, needed: int, found: int) -> StoreError:
        return StoreError(
            f"{self.name!r} is cut short: {needed} bytes were expected, {found} found; "
            f"restore another version"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WriterLock(ABC):
    """The right to write to a store, held from `Store.lock_writer` until `release`; a context manager."""

    @abstractmethod
    def renew(self) -> None:
        """Check that the lock is not known to be lost.

        Returns at once: a lock that can expire is renewed in the background.

        Raises:
            StoreLocked: another writer has taken the store over.
        """

    @abstractmethod
    def release(self) -> None:
        """Release the lock; releasing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Store(ABC):
    """A flat set of immutable objects; a context manager; safe to use from several threads.

    Every failure is a `StoreError` that names the store or the object and the cure.

    Attributes:
        url: where the store is, as messages name it: without passwords.
        keeps_open_files: whether an open object can be read on after it was deleted.
        publishes_exclusively: whether of several writers that publish one name only one succeeds.
        may_publish_late: whether an object may appear some time after its `publish` has failed.
        pause: called between two parts of a large put by the thread that puts, if not None: it may sleep, so
            that others get the processor. Only one thread may put meanwhile. A local store writes large
            files past the page cache then.
    """

    url: str
    keeps_open_files: bool = False
    publishes_exclusively: bool = True
    may_publish_late: bool = True
    pause: Callable[[], None] | None = None

    @abstractmethod
    def put(self, name: str, parts: Sequence[Buffer]) -> int:
        """Write a new object that is ``parts`` one after the other, and return its length.

        The content is durable on return; its name is durable after the next `sync` or `publish`.
        A failed put leaves no object.

        Raises:
            AlreadyExists: the name is taken.
        """

    @abstractmethod
    def publish(self, name: str, data: bytes) -> None:
        """Create an object atomically, after everything that was put before it is durable.

        Others see it whole or not at all, and it is durable on return. Of several writers that
        publish the same name exactly one succeeds, as long as it is not deleted: this is what correctness
        rests on. Where ``publishes_exclusively`` is False, the later one may replace the earlier one's.
        One that fails may have created the object all the same, whole, but perhaps not durable.

        Raises:
            AlreadyExists: another writer was first.
        """

    def sync(self) -> None:  # noqa: B027 - most stores have nothing left to do
        """Make every earlier `put` durable, its name included.

        If this or a `publish` fails, what was put since the last one that succeeded may be lost in a crash,
        though the next one succeeds: put it again, under other names.
        """

    @abstractmethod
    def open(self, name: str) -> ObjectReader:
        """Open an object for reading.

        Raises:
            ObjectMissing: there is none of that name.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the objects whose names begin with ``prefix``, sorted by name.

        Unfinished files and the writer's lock are not objects.
        """

    def misplaced(self, prefix: str) -> Sequence[str]:
        """Return the names that begin with ``prefix`` and are taken by what is no object, such as folders."""
        return ()

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete the objects, in the order given; durable on return. Names that are missing are fine."""

    def keep_reserve(self, size: int) -> None:  # noqa: B027 - some stores do not run full
        """Reserve space for publishing a few objects of that size, if there is space.

        On a full disk, deleting versions begins with publishing a manifest.
        """

    def use_reserve(self) -> bool:
        """Release a part of the reserve; False if nothing is left."""
        return False

    def clear_unfinished(self) -> None:  # noqa: B027 - some stores have no unfinished files
        """Delete unfinished files of crashed writers.

        Where a lock did not hold, another writer's put that is under way fails.
        """

    @abstractmethod
    def lock_writer(self, wait_seconds: float | None = 0.0) -> WriterLock:
        """Lock the store for writing, until the lock is released.

        The lock is an early warning that two jobs share a store. It is not what keeps versions
        whole: `publish` is conditional, so two writers without a lock cannot overwrite each other.

        Args:
            wait_seconds: how long to wait for the lock of a writer that may be dead, where nothing frees it
                at once; None: as long as it takes. A writer that is known to live is not waited for.

        Raises:
            StoreLocked: another writer holds the store; the message names it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the store's resources; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
