"""A store in a folder of a local or network disk.

An object is written under a hidden name, synced, and only then given its own name by a hard link, which
fails if the name is taken. So an object that can be seen is whole, whatever crashed and when.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from holdfast.checkpoint.store import past_cache
from holdfast.checkpoint.store.base import (
    LOCK_FILE,
    PARTIAL_PREFIX,
    RESERVE_PREFIX,
    ObjectInfo,
    ObjectReader,
    ReadRequest,
    Store,
    WriterLock,
    byte_views,
    check_name,
    check_prefix,
    is_connection_lost,
    is_full,
    is_name,
    is_out_of_resources,
)
from holdfast.checkpoint.store.local_files import Entry, Files, split
from holdfast.checkpoint.store.local_lock import LocalLock
from holdfast.errors import AlreadyExists, ObjectMissing, StoreError, StoreFull, StoreUnreachable

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Files", "LocalStore"]

_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}
_NO_LINKS = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

# Several files: room is needed for two manifests before anything can be deleted, and for their inodes; some
# file systems count a link as one.
_RESERVE = tuple(f"{RESERVE_PREFIX}{number}" for number in range(4))
_SMALLEST_RESERVE_BYTES = 1 << 15


def explain(error: OSError, doing: str, what: str) -> StoreError:
    """Turn an `OSError` into a message with a remedy."""
    reason = error.strerror or str(error)
    if is_full(error):
        return StoreFull(f"no space left to {doing} {what}: free some on its disk, or inodes (df -i)")
    if error.errno in _NO_PERMISSION:
        return StoreError(f"no permission to {doing} {what} ({reason}): check its owner, mode and mount")
    if error.errno in _NO_LINKS:
        return StoreError(f"could not {doing} {what}: its file system has no hard links: use another folder")
    if is_out_of_resources(error):
        return StoreUnreachable(
            f"could not {doing} {what} ({reason}): raise the limit on open files (ulimit -n), or free memory"
        )
    if is_connection_lost(error):
        return StoreUnreachable(f"could not {doing} {what} ({reason}): check the network and the mount")
    return StoreError(f"could not {doing} {what} ({reason}): check the disk, then try again")


@contextmanager
def _explained(doing: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain(error, doing, what) from error


class LocalReader(ObjectReader):
    """An open file, which stays readable after its name is deleted."""

    def __init__(self, files: Files, name: str, url: str, handle: int, size: int) -> None:
        self._files = files
        self._handle: int | None = handle
        self._what = f"{name!r} in {url}"
        self.name = name
        self.size = size

    def _fill(self, requests: list[ReadRequest]) -> None:
        with _explained("read", self._what):
            if self._handle is None:
                raise OSError("it is closed")
            for request in requests:
                filled = 0
                while filled < request.into.nbytes:
                    offset = request.offset + filled
                    count = self._files.preadv(self._handle, request.into[filled:], offset)
                    if not count:  # it was longer when it was opened
                        raise self._too_short(request.end, offset)
                    filled += count

    def forget_cached(self) -> None:
        """Ask the kernel to drop the file from the page cache; it does so with what has been synced."""
        if self._handle is not None and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # it says nothing about the bytes that were read
                self._files.close(handle)


class LocalStore(Store):
    """Objects as files in a folder; see `Store` for the contract.

    Names in a folder are synced in batches: `put` leaves that to the next `publish` or `sync`, which syncs
    each folder that changed once, however many objects went into it.
    """

    keeps_open_files = True
    may_publish_late = False

    def __init__(self, path: str | os.PathLike[str], *, create: bool, files: Files | None = None) -> None:
        self.url = os.fspath(path)
        self._files = files or Files()
        self._known_folders: set[str] = {""}
        self._new_folders: set[str] = set()
        self._distrusted: set[str] = set()
        self._doubtful: set[str] = set()
        self._making_folders = threading.RLock()
        self._unsynced: set[str] = set()
        self._unsynced_guard = threading.Lock()
        self._reserve_bytes = 0
        self._slice: memoryview | None = None
        # One sync at a time: a second publish must not overtake the sync that its own puts rely on.
        self._syncing = threading.Lock()
        if not create and not os.path.isdir(self.url):
            raise StoreError(f"no store at {self.url}: check the path, or save a checkpoint there first")
        with _explained("open", f"the store {self.url}"):
            self._files.open_root(self.url, create)

    def put(self, name: str, parts: Sequence[Buffer]) -> int:
        """Write, sync and name a new file; see `Store.put`."""
        views = byte_views(parts)
        size = sum(view.nbytes for view in views)
        with self._creating(name):
            self._make_folder_of(name)
            self._create_whole(name, views)
        return size

    def publish(self, name: str, data: bytes) -> None:
        """Sync everything, then write, sync and name a file and sync its name; see `Store.publish`."""
        with self._creating(name):
            self._make_folder_of(name)
            self._sync_folders()  # first: whoever sees the new name may rely on all earlier puts
            self._create_whole(name, byte_views([data]))
            self._files.fsync_dir(split(name)[0])

    def sync(self) -> None:
        """Make the names of all earlier puts durable."""
        with _explained("sync", f"the store {self.url}"):
            self._sync_folders()

    def open(self, name: str) -> ObjectReader:
        """Open a file; see `Store.open`."""
        check_name(name)
        try:
            handle, size = self._files.open_read(name)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(
                f"{self.url} has no object {name!r}: it was deleted or never written"
            ) from None
        except OSError as error:
            raise explain(error, "open", f"{name!r} in {self.url}") from error
        return LocalReader(self._files, name, self.url, handle, size)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """List files by prefix; see `Store.list`. A link or device among them is refused by name."""
        found = [
            ObjectInfo(name, entry.size, entry.modified)
            for name, entry in self._named(prefix)
            if not entry.is_folder
        ]
        return sorted(found, key=lambda info: info.name)

    def misplaced(self, prefix: str) -> Sequence[str]:
        """Return the folders by prefix; see `Store.misplaced`."""
        return sorted(name for name, entry in self._named(prefix) if entry.is_folder)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files and sync their folders; see `Store.delete`."""
        doomed = [check_name(name) for name in names]
        changed: set[str] = set()
        with _explained("delete from", f"the store {self.url}"):
            try:
                for name in doomed:
                    with suppress(FileNotFoundError, NotADirectoryError):
                        self._files.unlink(name)
                        changed.add(split(name)[0])
            finally:
                for folder in sorted(changed):
                    self._files.fsync_dir(folder)

    def lock_writer(self, wait_seconds: float | None = 0.0) -> WriterLock:
        """Take the lock; see `Store.lock_writer`. The kernel frees a dead writer's, so it never waits."""
        with _explained("lock", f"the store {self.url}"):
            return LocalLock(self._files, self.url)

    def clear_unfinished(self) -> None:
        """Delete hidden files, and let the next publish make durable whatever is here."""
        with _explained("clear away unfinished files in", f"the store {self.url}"):
            self._adopt()

    def keep_reserve(self, size: int) -> None:
        """Fill some hidden files; see `Store.keep_reserve`."""
        if size <= self._reserve_bytes:
            return
        # It is only a precaution: what cannot be written now, the next save will tell.
        with suppress(OSError, StoreError):
            sizes = [self._size_of(name) for name in _RESERVE]
            for number, name in enumerate(_RESERVE):
                if sizes[number] < size:
                    sizes[number] = self._fill(name, size)
            self._reserve_bytes = min(sizes)

    def use_reserve(self) -> bool:
        """Delete one of the hidden files; see `Store.use_reserve`."""
        self._reserve_bytes = 0
        for name in _RESERVE:
            with suppress(OSError):
                self._files.unlink(name)
                return True
        return False

    def close(self) -> None:
        """Close the folder."""
        self._files.close_root()

    def _named(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        folder = split(check_prefix(prefix))[0]
        with _explained("list", f"the store {self.url}"):
            for name, entry in self._walk(folder):
                if name.startswith(prefix) and is_name(name):
                    yield name, entry

    @contextmanager
    def _creating(self, name: str) -> Iterator[None]:
        check_name(name)
        try:
            yield
        except FileExistsError:
            raise AlreadyExists(
                f"{self.url} has an object {name!r} already: another writer may be at work, stop one of them"
            ) from None
        except OSError as error:
            raise explain(error, "write", f"{name!r} in {self.url}") from error

    def _create_whole(self, name: str, views: Sequence[memoryview]) -> None:
        if self._files.exists(name):  # the link below decides; this only saves a long write for nothing
            raise FileExistsError(name)
        folder, _ = split(name)
        partial = os.path.join(folder, PARTIAL_PREFIX + secrets.token_hex(8))
        handle = self._files.create(partial)
        try:
            try:
                self._write_all(handle, views)
                self._files.fsync(handle)  # before the name: an object that can be seen is whole
            finally:
                self._files.close(handle)
            with self._unsynced_guard:
                self._unsynced.add(folder)
            try:
                self._files.link(partial, name)
            except OSError as error:
                if error.errno != errno.EPERM:
                    raise
                # The file is our own, just made: Linux says so on file systems without hard links.
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from error
        finally:
            # What cannot be removed now is never listed, and the next writer clears it away.
            with suppress(OSError):
                self._files.unlink(partial)

    def _size_of(self, name: str) -> int:
        try:
            handle, size = self._files.open_read(name)
        except FileNotFoundError:
            return -1
        self._files.close(handle)
        return size

    def _fill(self, name: str, least: int) -> int:
        """Create a file of that size, larger if there is space. Returns its size."""
        roomy = max(least, _SMALLEST_RESERVE_BYTES)
        for size in (2 * roomy, roomy):
            with suppress(OSError):
                return self._write_noise(name, size)
        return self._write_noise(name, least)

    def _write_noise(self, name: str, size: int) -> int:
        """Write random bytes, since some file systems store zeros in no space."""
        if self._files.exists(name):
            self._files.unlink(name)
        handle = self._files.create(name)
        try:
            try:
                self._write_all(handle, byte_views([secrets.token_bytes(size)]))
            finally:
                self._files.close(handle)
        except BaseException:
            with suppress(OSError):
                self._files.unlink(name)
            raise
        return size

    def _write_all(self, handle: int, views: Sequence[memoryview]) -> None:
        pause = self.pause
        if pause is not None and sum(view.nbytes for view in views) >= past_cache.LEAST_BYTES:
            if self._slice is None:
                self._slice = past_cache.aligned_slice()
            past_cache.write_past_cache(self._files, handle, views, self._slice, pause)
            return
        waiting = list(views)
        first = 0
        while first < len(waiting):
            count = self._files.writev(handle, waiting[first:])
            while first < len(waiting) and count >= waiting[first].nbytes:
                count -= waiting[first].nbytes
                first += 1
            if count:
                waiting[first] = waiting[first][count:]

    def _make_folder_of(self, name: str) -> None:
        folder, _ = split(name)
        if folder in self._known_folders:
            return
        with self._making_folders:
            if folder in self._known_folders:
                return
            self._make_folder_of(folder)
            parent, _ = split(folder)
            try:
                self._files.mkdir(folder)
                self._new_folders.add(folder)
            except FileExistsError:
                if parent in self._distrusted:
                    self._make_anew(folder)
            with self._unsynced_guard:
                # Also when it was there: its maker may have died before syncing its name.
                self._unsynced.add(parent)
            self._known_folders.add(folder)

    def _make_anew(self, folder: str) -> None:
        """Replace a folder whose name could not be synced: a second sync that succeeds proves nothing."""
        try:
            self._files.rmdir(folder)
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise
            if folder in self._doubtful:
                raise StoreError(
                    f"the name of the folder {folder!r} in {self.url} could not be synced: check the disk"
                ) from error
            return  # what is in it was published by others, who had synced its name before
        self._files.mkdir(folder)
        self._new_folders.add(folder)
        self._doubtful.discard(folder)

    def _sync_folders(self) -> None:
        with self._syncing:
            with self._unsynced_guard:
                folders, self._unsynced = self._unsynced, set()
            try:
                # Parents before children: a durable name in a folder that is lost is lost too.
                for folder in sorted(folders):
                    self._sync_folder(folder)
            except BaseException:
                with self._unsynced_guard:
                    self._unsynced |= folders
                raise

    def _sync_folder(self, folder: str) -> None:
        try:
            self._files.fsync_dir(folder)
        except BaseException:
            # The kernel may have dropped what it could not write. Objects of a save that failed are put again
            # under other names; folders keep theirs, so they are looked at again before they are used.
            with self._making_folders:
                self._distrusted.add(folder)
                self._doubtful |= {f for f in self._new_folders if split(f)[0] == folder}
                self._known_folders = {f for f in self._known_folders if not f or split(f)[0] != folder}
            raise
        with self._making_folders:
            self._new_folders = {f for f in self._new_folders if split(f)[0] != folder}

    def _adopt(self) -> None:
        """Take over the folder from a writer that may have crashed at any point."""
        folders = {""}
        for name, entry in self._walk(""):
            if entry.is_folder:
                folders.add(name)
            elif split(name)[1].startswith(PARTIAL_PREFIX):
                with suppress(OSError):
                    self._files.unlink(name)
        # Names that it did not sync can be seen, so the next publish must make them durable.
        with self._unsynced_guard:
            self._unsynced |= folders

    def _walk(self, folder: str) -> Iterator[tuple[str, Entry]]:
        """Yield what is below ``folder``; folders that no store makes are left alone."""
        try:
            entries = self._files.scan(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if name == LOCK_FILE:
                continue
            yield name, entry
            if entry.is_folder and is_name(name):
                yield from self._walk(name)
