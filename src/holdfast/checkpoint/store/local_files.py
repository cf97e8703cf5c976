"""The file operations of a local store.

All of them go through one object, so that a test can record them, fail the n-th of a kind, or
work out what a crash between two of them leaves behind (see `holdfast.testing`).
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast.errors import UnsafeName

# O_PATH asks for the right to pass through a folder, not to list it.
_PASS_THROUGH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_BUFFERS_PER_CALL = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a folder."""

    name: str
    is_folder: bool
    size: int
    modified: float


def _sync_outside(folder: str) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder that we may pass through but not read is not one that we made
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def split(path: str) -> tuple[str, str]:
    """Return the folder of ``path`` ("" is the store's root) and the last part."""
    folder, _, last = path.rpartition("/")
    return folder, last


class Files:
    """Operations on the files under one folder, the root, by paths relative to it.

    No operation follows a symbolic link below the root: each folder on the way is opened by itself,
    so a link that is put in the way at any moment is refused with `UnsafeName`. Everything else that
    goes wrong is an `OSError`. Used by one `LocalStore`, from several threads.
    """

    def __init__(self) -> None:
        self._root: int | None = None
        self._root_path = ""

    def open_root(self, path: str, create: bool) -> None:
        """Open the root, and make it if asked to; called once, before anything else."""
        self._root_path = os.path.abspath(path)
        if create:
            self._make_root()
        self._root = os.open(self._root_path, os.O_PATH | os.O_DIRECTORY)

    def close_root(self) -> None:
        """Close the root; closing twice is fine."""
        root, self._root = self._root, None
        if root is not None:
            os.close(root)

    def mkdir(self, path: str) -> None:
        """Create a folder."""
        with self._folder_of(path) as (folder, last):
            os.mkdir(last, 0o777, dir_fd=folder)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        with self._folder_of(path) as (folder, last):
            os.rmdir(last, dir_fd=folder)

    def create(self, path: str) -> int:
        """Create a file and return its descriptor for writing."""
        with self._folder_of(path) as (folder, last):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # which follows no link
            return os.open(last, flags, 0o666, dir_fd=folder)

    def writev(self, handle: int, views: Sequence[memoryview]) -> int:
        """Append as much of ``views`` as one call takes and return the number of bytes."""
        return os.writev(handle, views[:_BUFFERS_PER_CALL])

    def bypass_cache(self, handle: int, bypass: bool) -> bool:
        """Let writes to a file go past the page cache, or no longer; False if its file system refuses.

        Those that do must be aligned: their memory, their offset and their length.
        """
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT if bypass else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True

    def fsync(self, handle: int) -> None:
        """Make a file's content durable."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a handle."""
        os.close(handle)

    def link(self, source: str, target: str) -> None:
        """Give the file ``source`` a second name in the same folder, unless that name is taken."""
        with self._folder_of(target) as (folder, last):
            os.link(split(source)[1], last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        with self._folder_of(path) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def fsync_dir(self, path: str) -> None:
        """Make the names in a folder durable."""
        handle = self._open_folder(path)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def open_read(self, path: str) -> tuple[int, int]:
        """Open a regular file and return its descriptor and its size."""
        with self._folder_of(path) as (folder, last):
            self._refuse_link(folder, last, path)
            # Without O_NONBLOCK a named pipe in a file's place would make us wait for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(last, flags, dir_fd=folder)
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            os.close(handle)
            raise FileNotFoundError(f"{path} is a folder")
        if not stat.S_ISREG(status.st_mode):
            os.close(handle)
            raise UnsafeName(f"{path!r} in {self._root_path} is not a regular file: remove it")
        return handle, status.st_size

    def preadv(self, handle: int, view: memoryview, offset: int) -> int:
        """Read from ``offset`` into ``view`` and return the number of bytes, 0 at the end."""
        return os.preadv(handle, [view], offset)

    def exists(self, path: str) -> bool:
        """Whether the file exists."""
        try:
            with self._folder_of(path) as (folder, last):
                self._refuse_link(folder, last, path)
                os.stat(last, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def scan(self, path: str) -> list[Entry]:
        """Return the entries of a folder; files that disappear meanwhile are skipped."""
        handle = self._open_folder(path)
        try:
            with os.scandir(handle) as found:
                return [entry for item in found if (entry := self._entry(path, item)) is not None]
        finally:
            os.close(handle)

    def open_lock(self, path: str) -> int:
        """Open a lock file for reading and writing, and make it if it is missing.

        Whoever can open a file for reading can lock it. So its mode lets in only those who can write to its
        folder; that of an older file is changed.
        """
        with self._folder_of(path) as (folder, last):
            self._refuse_link(folder, last, path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            handle = os.open(last, flags, 0o600, dir_fd=folder)
            with suppress(OSError):  # a file system without modes: the lock works all the same
                writers = os.stat(folder).st_mode & 0o022
                if os.fstat(handle).st_uid == os.geteuid():
                    os.fchmod(handle, 0o600 | writers | writers << 1)
            return handle

    def is_same_file(self, handle: int, path: str) -> bool:
        """Whether ``path`` still names the open file ``handle``."""
        try:
            with self._folder_of(path) as (folder, last):
                named = os.stat(last, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(handle))

    def _entry(self, folder: str, item: os.DirEntry[str]) -> Entry | None:
        try:
            status = item.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        is_folder = stat.S_ISDIR(status.st_mode)
        if not is_folder and not stat.S_ISREG(status.st_mode):
            where = f"{folder}/{item.name}" if folder else item.name
            raise UnsafeName(f"{where!r} in {self._root_path} is a link or a device, not a file: remove it")
        return Entry(item.name, is_folder, status.st_size, status.st_mtime)

    def _make_root(self) -> None:
        made_in = [os.path.dirname(self._root_path)]
        while not os.path.isdir(made_in[-1]):
            made_in.append(os.path.dirname(made_in[-1]))
        made = [] if os.path.isdir(self._root_path) else [self._root_path, *made_in[:-1]]
        os.makedirs(self._root_path, exist_ok=True)
        # The root's own name must be as durable as what is put under it. A root that is there may have
        # been made by a process that died before this line, so its name is made durable every time.
        try:
            for folder in reversed(made_in):
                _sync_outside(folder)
        except OSError:
            for folder in made:  # to be made anew: a sync that succeeds after one that failed proves nothing
                with suppress(OSError):
                    os.rmdir(folder)
            raise

    @contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[int, str]]:
        folder, last = split(path)
        if not folder:
            yield self._live_root(), last
            return
        handle = self._walk(folder)
        try:
            yield handle, last
        finally:
            os.close(handle)

    def _open_folder(self, path: str) -> int:
        handle = self._walk(path)
        try:
            # The handle of the walk is not good for reading; "." below it is the same folder.
            return os.open(".", os.O_RDONLY, dir_fd=handle)
        finally:
            os.close(handle)

    def _walk(self, path: str) -> int:
        """Open the folder ``path`` part by part; a link on the way is refused."""
        handle = os.dup(self._live_root())
        passed = ""
        for part in path.split("/") if path else ():
            passed = f"{passed}/{part}" if passed else part
            try:
                deeper = os.open(part, _PASS_THROUGH, dir_fd=handle)
            except NotADirectoryError:
                self._refuse_link(handle, part, passed)
                raise
            finally:
                os.close(handle)
            handle = deeper
        return handle

    def _refuse_link(self, folder: int, last: str, path: str) -> None:
        try:
            mode = os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISLNK(mode):
            raise UnsafeName(
                f"{path!r} in {self._root_path} is a symbolic link, which is never followed: remove it"
            )

    def _live_root(self) -> int:
        if self._root is None:
            raise OSError(f"the store at {self._root_path} is closed")
        return self._root
