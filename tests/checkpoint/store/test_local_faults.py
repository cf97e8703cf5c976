"""A disk that fails at any operation: nothing half done is seen, and nothing older is lost."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.store.base import PARTIAL_PREFIX
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import StoreError
from holdfast.testing.crash import read_folder
from holdfast.testing.faults import WRITING_OPERATIONS, FaultyFiles
from holdfast.testing.stores import content_of, names_in

CURES = {
    errno.ENOSPC: "no space left .*: free some",
    errno.EACCES: "no permission .*: check its owner",
    errno.EIO: r"could not .*Input/output error.*: check the disk",
}
CHUNK = [b"chunk " * 1000, b"of", b"parts" * 999]
OLD = {"old/chunk": b"old chunk", "old/doomed": b"doomed", "old/manifest": b"old manifest"}

ACTIONS: dict[str, Callable[[LocalStore], object]] = {
    "new/deep/chunk": lambda store: store.put("new/deep/chunk", CHUNK),
    "published/manifest": lambda store: store.publish("published/manifest", b"new manifest" * 100),
}
NEW = {"new/deep/chunk": b"".join(CHUNK), "published/manifest": b"new manifest" * 100}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def prepare(folder: Path) -> Path:
    with LocalStore(folder, create=True) as store:
        for name, content in OLD.items():
            store.put(name, [content])
        store.sync()
    return folder


def assert_holds(store: LocalStore, expected: dict[str, bytes]) -> None:
    assert names_in(store) == sorted(expected)
    for name, content in expected.items():
        assert content_of(store, name) == content, name


@pytest.mark.parametrize("code", CURES, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", WRITING_OPERATIONS)
def test_one_failed_operation(root: Path, operation: str, code: int) -> None:
    """Each call of each operation fails once; the action that it belongs to is refused, then repeated."""
    at = 0
    while True:
        at += 1
        files = FaultyFiles(operation, at, code)
        folder = prepare(root / str(at))
        expected = dict(OLD)
        with LocalStore(folder, create=True, files=files) as store:
            for name, act in ACTIONS.items():
                fired_before = files.fired
                try:
                    act(store)
                except StoreError as error:
                    assert files.fired == fired_before + 1
                    assert_sentence(error, code)
                    if not is_there(store, name, operation):
                        assert_holds(store, expected)
                        act(store)
                expected[name] = NEW[name]
                assert_holds(store, expected)
            try:
                store.delete(["old/doomed"])
            except StoreError as error:
                assert_sentence(error, code)
                store.delete(["old/doomed"])
            del expected["old/doomed"]
            assert_holds(store, expected)
        left = [name for name in read_folder(folder) if PARTIAL_PREFIX in name]
        assert len(left) <= (1 if operation == "unlink" else 0)
        if not files.fired:
            break
    assert at > 1, f"{operation} was never called"


def is_there(store: LocalStore, name: str, operation: str) -> bool:
    """Whether it was created, and only its name could not be synced: a manifest may be there all the same."""
    return operation == "fsync_dir" and name == "published/manifest" and name in names_in(store)


def assert_sentence(error: StoreError, code: int) -> None:
    assert re.search(CURES[code], str(error)), error
    assert "\n" not in str(error)


@pytest.mark.parametrize("operation", WRITING_OPERATIONS)
def test_a_disk_that_stays_full(root: Path, operation: str) -> None:
    """From some call on nothing of a kind works any more, not even clearing up."""
    at = 0
    while True:
        at += 1
        files = FaultyFiles(operation, at, errno.ENOSPC, times=None)
        folder = prepare(root / str(at))
        expected = dict(OLD)
        with LocalStore(folder, create=True, files=files) as store:
            for name, act in ACTIONS.items():
                try:
                    act(store)
                except StoreError as error:
                    assert_sentence(error, errno.ENOSPC)
                    if not is_there(store, name, operation):
                        continue
                expected[name] = NEW[name]
                assert_holds(store, expected)
        with LocalStore(folder, create=True) as store, store.lock_writer():
            assert_holds(store, expected)
            store.clear_unfinished()
            assert not [name for name in read_folder(folder) if PARTIAL_PREFIX in name]
        if not files.fired:
            break
    assert at > 1, f"{operation} was never called"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["open_read", "preadv", "scan"])
def test_a_failed_read(root: Path, operation: str, code: int) -> None:
    files = FaultyFiles(operation, 1, code)
    with LocalStore(prepare(root), create=False, files=files) as store:
        with pytest.raises(StoreError) as failed:
            assert_holds(store, OLD)
        assert files.fired == 1
        assert_sentence(failed.value, code)
        assert_holds(store, OLD)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EPERM], ids=errno.errorcode.get)
def test_a_disk_without_hard_links(root: Path, code: int) -> None:
    files = FaultyFiles("link", 1, code)
    with (
        LocalStore(root, create=True, files=files) as store,
        pytest.raises(StoreError, match="no hard links: use another folder"),
    ):
        store.put("chunk", [b"x"])
    assert files.fired == 1
    assert read_folder(root) == {}


def test_an_operation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="fsink"):
        FaultyFiles("fsink", 1, errno.EIO)
