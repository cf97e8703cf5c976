"""What can go wrong behind fsspec."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import fsspec
import pytest

from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import ConfigError, StoreError, StoreLocked, StoreUnreachable
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
        (LostConnection("gone"), r"could not write .*LostConnection: gone\): try again later"),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "no permission to write .*check the credentials",
        ),
        (OSError(errno.ENOSPC, "No space left"), "no space left to write .*No space left.*free some there"),
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


class TestOpening:
    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (ImportError("no package"), ConfigError, "fsspec cannot open memory:// URLs .*no package"),
            (ValueError("no option"), ConfigError, "fsspec cannot open memory:// URLs .*no option"),
            (TypeError("no argument"), ConfigError, "fsspec cannot open memory:// URLs .*no argument"),
            (ConnectionError("gone"), StoreUnreachable, "could not open the store memory://x .*gone"),
            (LostConnection("gone"), StoreError, "could not open the store memory://x .*gone"),
        ],
    )
    def test_a_file_system_that_cannot_be_made(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
        with pytest.raises(kind, match=message) as failed:
            open_store("memory://x", create=True)
        assert type(failed.value) is kind
        assert failed.value.__cause__ is error

    def test_a_secret_in_an_error_is_shown_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ValueError("what is hush-hush-hush?")

        monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
        with pytest.raises(ConfigError) as failed:
            open_store("memory://x", create=True, options={"password": "hush-hush-hush"})
        assert "hush" not in str(failed.value)
        assert failed.value.__cause__ is None

    def test_a_slash_at_the_end_makes_no_difference(self, store: Store) -> None:
        with open_store("memory://faults/store/", create=False) as same:
            assert same.url == store.url
            assert content_of(same, "before") == b"before"

    def test_looking_makes_nothing(self) -> None:
        with pytest.raises(StoreError, match="no store at memory://nowhere"):
            open_store("memory://nowhere", create=False)
        assert not fsspec.filesystem("memory").exists("/nowhere")


def test_two_writers_at_the_same_instant_are_not_told_apart(store: Store) -> None:
    assert not store.publishes_exclusively


def test_an_object_that_became_shorter(store: Store) -> None:
    with store.open("before") as reader:
        fsspec.filesystem("memory").pipe_file("/faults/store/before", b"be")
        with pytest.raises(StoreError, match="'before' is cut short: 6 bytes were expected, 2 found"):
            reader.read()
        with pytest.raises(StoreError, match="'before' is cut short: 4 bytes were expected, 2 found"):
            reader.read(1, 3)


def test_what_others_change_is_seen_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many file systems behind fsspec keep listings."""
    dropped: list[str] = []
    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "invalidate_cache", lambda self, path=None: dropped.append("dropped"))
    uses: list[Callable[[], object]] = [
        store.list,
        lambda: store.open("before"),
        lambda: store.put("new", [b"x"]),
        store.clear_unfinished,
        lambda: store.lock_writer().release(),
    ]
    for use in uses:
        dropped.clear()
        use()
        assert dropped


def test_a_store_whose_folder_is_gone_is_empty(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", fail)
    assert store.list() == []
    store.clear_unfinished()


class TestLease:
    PATH = "/faults/store/writer.lease"

    def test_it_lies_beside_the_objects_and_lasts_a_minute(self, store: Store) -> None:
        before = time.time()
        with store.lock_writer():
            said = json.loads(fsspec.filesystem("memory").cat_file(self.PATH))
            assert 59.0 < said["expires"] - before < 61.0 + time.time() - before
            assert said["seconds"] == 60.0
            with pytest.raises(StoreLocked):
                store.lock_writer()
        store.lock_writer().release()

    def test_another_that_took_it_meanwhile_is_not_overwritten(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = fsspec.filesystem("memory")
        theirs = b'{"owner": "another", "host": "far", "pid": 7}'
        lock = store.lock_writer()
        memory.pipe_file(self.PATH, theirs)
        lock.release()
        assert memory.cat_file(self.PATH) == theirs
        memory.rm_file(self.PATH)
        lock = store.lock_writer()
        memory.rm_file(self.PATH)
        lock.release()
        assert not memory.exists(self.PATH)

    def test_a_failure_names_the_lease(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise LostConnection("gone")

        memory = type(fsspec.filesystem("memory"))
        with monkeypatch.context() as broken:
            broken.setattr(memory, "cat_file", fail)
            with pytest.raises(StoreError, match="could not read the lease of memory://faults/store"):
                store.lock_writer()
        with monkeypatch.context() as broken:
            broken.setattr(memory, "pipe_file", fail)
            with pytest.raises(StoreError, match="could not write the lease of memory://faults/store"):
                store.lock_writer()


@pytest.mark.parametrize(
    ("info", "modified"),
    [
        ({"mtime": 4711}, 4711.0),
        ({"mtime": 4711.5}, 4711.5),
        ({"LastModified": datetime(1970, 1, 2, tzinfo=UTC)}, 86400.0),
        ({"updated": "1970-01-02T00:00:00+00:00"}, 86400.0),
        ({"mtime": "yesterday", "created": 7}, 7.0),
        ({}, 3.0),
    ],
)
def test_the_time_of_an_object_under_any_name(
    store: Store, monkeypatch: pytest.MonkeyPatch, info: dict[str, object], modified: float
) -> None:
    memory = type(fsspec.filesystem("memory"))
    listed = {"/faults/store/before": {"name": "x", "size": 6, **info}}
    monkeypatch.setattr(memory, "find", lambda *_, **__: listed)
    monkeypatch.setattr(memory, "modified", lambda self, name: datetime.fromtimestamp(3, UTC))
    assert [found.modified for found in store.list()] == [modified]


def test_an_object_without_any_time_is_as_old_as_can_be(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "find", lambda *_, **__: {"/faults/store/a": {"name": "a", "size": 6}})
    monkeypatch.setattr(memory, "modified", fail)
    assert [found.modified for found in store.list()] == [0.0]
