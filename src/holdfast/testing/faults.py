"""Faults of a disk, injected by operation and count."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Sequence

from holdfast.checkpoint.store.local_files import Entry, Files

WRITING_OPERATIONS = ("mkdir", "create", "writev", "fsync", "close", "link", "unlink", "fsync_dir")
READING_OPERATIONS = ("open_read", "preadv", "scan")


class FaultyFiles(Files):
    """Files on a disk that fails at the ``at``-th call of ``operation``, counted from 1.

    A write that fails for want of space writes half of its bytes first, as a full disk does. ``times`` is how
    many calls in a row fail; None means all from then on, as on a disk that stays full.

    Attributes:
        calls: how often each operation was called, failed calls included.
        fired: how many calls were failed; a test that expects a fault asserts that it is not 0.
    """

    def __init__(self, operation: str, at: int, code: int, times: int | None = 1) -> None:
        super().__init__()
        if operation not in WRITING_OPERATIONS + READING_OPERATIONS:
            raise ValueError(f"{operation!r} is not an operation that can fail")
        self._operation = operation
        self._first = at
        self._last = None if times is None else at + times - 1
        self._code = code
        self.calls: Counter[str] = Counter()
        self.fired = 0

    def _must_fail(self, operation: str) -> bool:
        self.calls[operation] += 1
        count = self.calls[operation]
        due = count >= self._first and (self._last is None or count <= self._last)
        if operation != self._operation or not due:
            return False
        self.fired += 1
        return True

    def _arrive(self, operation: str) -> None:
        if self._must_fail(operation):
            raise self._error()

    def _error(self) -> OSError:
        return OSError(self._code, os.strerror(self._code))

    def mkdir(self, path: str) -> None:
        """Fail or make a folder."""
        self._arrive("mkdir")
        super().mkdir(path)

    def create(self, path: str) -> int:
        """Fail or make a file."""
        self._arrive("create")
        return super().create(path)

    def writev(self, handle: int, views: Sequence[memoryview]) -> int:
        """Fail, on a full disk after half of the bytes, or write."""
        if self._must_fail("writev"):
            if self._code == errno.ENOSPC:
                content = b"".join(views)
                os.write(handle, content[: len(content) // 2])
            raise self._error()
        return super().writev(handle, views)

    def fsync(self, handle: int) -> None:
        """Fail or sync a file."""
        self._arrive("fsync")
        super().fsync(handle)

    def close(self, handle: int) -> None:
        """Close, and then perhaps fail: the kernel lets go of a handle also when closing fails."""
        super().close(handle)
        self._arrive("close")

    def link(self, source: str, target: str) -> None:
        """Fail or give a second name."""
        self._arrive("link")
        super().link(source, target)

    def unlink(self, path: str) -> None:
        """Fail or take a name away."""
        self._arrive("unlink")
        super().unlink(path)

    def fsync_dir(self, path: str) -> None:
        """Fail or sync a folder."""
        self._arrive("fsync_dir")
        super().fsync_dir(path)

    def open_read(self, path: str) -> tuple[int, int]:
        """Fail or open a file."""
        self._arrive("open_read")
        return super().open_read(path)

    def preadv(self, handle: int, view: memoryview, offset: int) -> int:
        """Fail or read."""
        self._arrive("preadv")
        return super().preadv(handle, view, offset)

    def scan(self, path: str) -> list[Entry]:
        """Fail or look into a folder."""
        self._arrive("scan")
        return super().scan(path)


class SmallDisk(Files):
    """Files on a disk that has room for so many bytes and so many files; both can be changed at any time."""

    def __init__(self, most_bytes: int, most_files: int) -> None:
        super().__init__()
        self.most_bytes = most_bytes
        self.most_files = most_files

    def used(self) -> tuple[int, int]:
        """Return how many bytes and files there are; names of one file count once."""
        found = {}
        for folder, _, names in os.walk(self._root_path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(os.path.join(folder, name), follow_symlinks=False)
                    found[status.st_ino] = status.st_size
        return sum(found.values()), len(found)

    def create(self, path: str) -> int:
        """Make a file, if there is an inode for it."""
        if self.used()[1] >= self.most_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)

    def writev(self, handle: int, views: Sequence[memoryview]) -> int:
        """Write as much as there is room for."""
        room = self.most_bytes - self.used()[0]
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        first = views[0][:room]
        return super().writev(handle, [first] if len(first) < len(views[0]) else _fitting(views, room))


def _fitting(views: Sequence[memoryview], room: int) -> list[memoryview]:
    chosen: list[memoryview] = []
    for view in views:
        room -= view.nbytes
        if room < 0:
            break
        chosen.append(view)
    return chosen
