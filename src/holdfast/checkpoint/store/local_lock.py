"""The writer's lock on a local disk, which the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from weakref import WeakSet

from holdfast.checkpoint.store import holder
from holdfast.checkpoint.store.base import LOCK_FILE, WriterLock, is_full
from holdfast.checkpoint.store.local_files import Files
from holdfast.errors import StoreError, StoreFull, StoreLocked


class LocalLock(WriterLock):
    """An flock on the store's lock file, which contains the host and process id of the writer."""

    def __init__(self, files: Files, url: str) -> None:
        """Take the lock, or raise `StoreLocked`."""
        self._files = files
        self._url = url
        self._handle: int | None = None
        self._released = False
        with suppress(StoreFull):  # who only reads or deletes can do without; whoever saves renews it first
            self._take()
        _held.add(self)

    def _take(self) -> None:
        url = self._url
        try:
            self._handle = self._files.open_lock(LOCK_FILE)
        except OSError as error:
            if not is_full(error):
                raise
            raise StoreFull(
                f"no space left for the file {LOCK_FILE} of {url}: free some on its disk"
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            host, pid = holder.read_holder(os.pread(self._handle, 4096, 0))
            self._close()
            raise StoreLocked(
                f"{url} is being written by process {pid or 'unknown'} on host {host}: "
                f"stop it or choose another store",
                host,
                pid,
            ) from None
        except BaseException:
            self._close()
            raise
        with suppress(OSError):  # on a full disk the lock still holds; only its note is missing
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(holder.note()).encode(), 0)

    def renew(self) -> None:
        """Check that nobody has removed the lock file, which would let a second writer in."""
        if self._handle is None and not self._released:
            try:
                self._take()
            except OSError as error:
                raise StoreError(f"could not lock {self._url} ({error}): check the disk") from error
        if self._handle is None or not self._files.is_same_file(self._handle, LOCK_FILE):
            raise StoreLocked(f"the lock on {self._url} was lost: close this writer", "unknown", 0)

    def release(self) -> None:
        """Unlock. The file stays: removing it could let two writers lock two files."""
        self._released = True
        _held.discard(self)
        if self._handle is not None:
            with suppress(OSError):
                os.ftruncate(self._handle, 0)
                # Closing alone would leave it to a child that was forked a moment ago.
                fcntl.flock(self._handle, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _drop_in_child(self) -> None:
        self._released = True
        self._close()


_held: WeakSet[LocalLock] = WeakSet()


def _drop_locks_in_child() -> None:
    # A forked child (a data loader's worker) shares the lock, and would hold it after its parent's death.
    for lock in list(_held):
        lock._drop_in_child()
    _held.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)
