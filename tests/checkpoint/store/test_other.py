"""What can go wrong behind fsspec."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import StoreError, StoreUnreachable
from holdfast.testing.stores import content_of, names_in


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://faults/store", create=True) as store:
        store.put("before", [b"before"])
        yield store
    fsspec.filesystem("memory").rm("/", recursive=True)


class LostConnection(Exception):
    """What a package behind fsspec may raise: nothing that anybody has heard of."""


@pytest.mark.parametrize("operation", ["open", "mv", "makedirs", "exists"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LostConnection("gone"), "LostConnection: gone"),
        (PermissionError(errno.EACCES, "Permission denied"), "check the credentials"),
        (OSError(errno.ENOSPC, "No space left"), "No space left"),
    ],
    ids=["unknown", "permission", "space"],
)
@pytest.mark.parametrize("method", ["put", "publish"])
def test_a_write_that_fails_leaves_nothing(
    store: Store, operation: str, error: Exception, message: str, method: str
) -> None:
    def act() -> None:
        if method == "put":
            store.put("new/object", [b"x"])
        else:
            store.publish("new/object", b"x")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), operation, fail)
        with pytest.raises(StoreError, match=message) as failed:
            act()
        assert "'new/object' in memory://faults/store" in str(failed.value)
    assert [
        path for path in fsspec.filesystem("memory").find("/") if "object" in path or "partial" in path
    ] == []
    assert names_in(store) == ["before"]
    act()
    assert content_of(store, "new/object") == b"x"


@pytest.mark.parametrize("operation", ["find", "info", "cat_ranges", "rm_file"])
def test_every_other_failure_is_a_store_error_too(
    store: Store, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LostConnection("gone")

    def use_all() -> None:
        names_in(store)
        content_of(store, "before")
        store.delete(["before"])

    monkeypatch.setattr(type(fsspec.filesystem("memory")), operation, fail)
    with pytest.raises(StoreError, match="LostConnection: gone"):
        use_all()
    monkeypatch.undo()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("gone"),
        TimeoutError("gone"),
        OSError(errno.EHOSTUNREACH, "gone"),
        OSError(errno.EMFILE, "gone"),
    ],
)
def test_a_lost_connection_is_told_apart(
    store: Store, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", fail)
    with pytest.raises(StoreUnreachable, match="gone"):
        store.list()
    monkeypatch.undo()
    assert names_in(store) == ["before"]


def test_the_next_writer_clears_hidden_files_away(store: Store) -> None:
    """What a writer leaves that is killed between writing a file and giving it its name."""
    memory = fsspec.filesystem("memory")
    for path in ("new/.partial-1", ".partial-2", "Mine/.partial-3"):
        memory.pipe_file(f"/faults/store/{path}", b"x")
    store.put("new/object", [b"x"])
    store.clear_unfinished()
    left = [path for path in memory.find("/faults/store") if ".partial-" in path]
    assert left == ["/faults/store/Mine/.partial-3"]
    assert names_in(store) == ["before", "new/object"]
