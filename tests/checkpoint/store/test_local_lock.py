"""The lock of a store in a folder: who gets it, and what becomes of its file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.store.local import Files, LocalStore
from holdfast.errors import StoreError, StoreFull, StoreLocked

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


class Disk(Files):
    """A disk on which the lock file cannot be made for now."""

    fails: OSError | None = None

    def open_lock(self, path: str) -> int:
        if self.fails is not None:
            raise self.fails
        return super().open_lock(path)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path, disk: Disk) -> Iterator[LocalStore]:
    before = handles()
    with LocalStore(tmp_path, create=True, files=disk) as store:
        yield store
    assert handles() == before, "a handle is left open"


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_free(folder: Path) -> bool:
    with LocalStore(folder, create=False) as other:
        try:
            other.lock_writer().release()
        except StoreLocked:
            return False
        return True


def test_it_is_held_until_it_is_released(store: LocalStore, tmp_path: Path) -> None:
    lock = store.lock_writer()
    lock.renew()
    assert not is_free(tmp_path)
    lock.release()
    assert is_free(tmp_path)
    lock.release()
    with pytest.raises(StoreLocked, match="was lost: close this writer") as refused:
        lock.renew()
    assert (refused.value.host, refused.value.pid) == ("unknown", 0)


def test_its_file_names_the_holder_as_long_as_there_is_one(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "writer.lock").write_bytes(b"x" * 4096)
    with store.lock_writer():
        assert json.loads((tmp_path / "writer.lock").read_bytes())["pid"] == os.getpid()
        with pytest.raises(StoreLocked, match=f"by process {os.getpid()} on host .*: stop it") as refused:
            store.lock_writer()
        assert refused.value.pid == os.getpid()
    assert (tmp_path / "writer.lock").read_bytes() == b""


def test_a_child_that_was_just_forked_does_not_keep_it(store: LocalStore, tmp_path: Path) -> None:
    """It shares the open file for a moment, so closing alone would leave the lock to it."""
    with store.lock_writer():
        child = os.dup(next(handle for handle in map(int, os.listdir("/proc/self/fd")) if is_lock(handle)))
    try:
        assert is_free(tmp_path)
    finally:
        os.close(child)


def is_lock(handle: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{handle}").endswith("writer.lock")
    except OSError:
        return False


def test_on_a_full_disk_who_only_reads_can_do_without(store: LocalStore, disk: Disk, tmp_path: Path) -> None:
    disk.fails = FULL
    with store.lock_writer() as lock:
        with pytest.raises(StoreFull, match=r"no space left for the file writer\.lock of"):
            lock.renew()
        disk.fails = BROKEN
        with pytest.raises(StoreError, match=r"could not lock .*Input/output error.*check the disk"):
            lock.renew()
        disk.fails = None
        lock.renew()
        assert not is_free(tmp_path)
    disk.fails = FULL
    with store.lock_writer() as lock, LocalStore(tmp_path, create=False) as other, other.lock_writer():
        disk.fails = None
        with pytest.raises(StoreLocked, match=f"process {os.getpid()} "):
            lock.renew()


def test_any_other_failure_is_told_at_once(store: LocalStore, disk: Disk) -> None:
    disk.fails = BROKEN
    with pytest.raises(StoreError, match=r"could not lock the store .*Input/output error"):
        store.lock_writer()


def test_a_file_system_without_locks(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StoreError, match="No locks available"):
        store.lock_writer()


def test_a_note_that_does_not_fit_is_left_out(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int, content: bytes, offset: int) -> int:
        raise FULL

    monkeypatch.setattr(os, "pwrite", fail)
    with store.lock_writer() as lock:
        lock.renew()
