"""A crash after any operation: what can be seen is whole, and what was promised is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import AlreadyExists, StoreError
from holdfast.testing.crash import (
    CrashState,
    FailedSyncFiles,
    Journal,
    RecordingFiles,
    crash_states,
    materialise,
)
from holdfast.testing.stores import content_of, names_in


def chunk(name: str) -> bytes:
    return f"content of {name};".encode() * 20


def manifest(*names: str) -> bytes:
    return json.dumps(names).encode()


def save(store: LocalStore, journal: Journal, version: str, new: list[str], all_names: list[str]) -> None:
    for name in new:
        whole = memoryview(chunk(name))
        store.put(name, [whole[:50], whole[50:]])
    store.publish(f"versions/{version}", manifest(*all_names))
    journal.mark(f"saved {version}")


def work(root: Path, files: type[RecordingFiles]) -> Journal:
    """Save, save on top, delete, restart, save again; ends with a crash."""
    with LocalStore(root, create=True) as store:
        store.put("chunks/base", [chunk("chunks/base")])
        store.publish("versions/v0", manifest("chunks/base"))
    journal = Journal()
    with LocalStore(root, create=True, files=files(journal)) as store, store.lock_writer():
        save(
            store, journal, "v1", ["chunks/1", "bundles/new/2"], ["chunks/base", "chunks/1", "bundles/new/2"]
        )
        save(store, journal, "v2", ["chunks/3"], ["chunks/1", "chunks/3"])
        journal.mark("deleting v0")
        store.delete(["versions/v0"])
        journal.mark("deleted v0")
        with pytest.raises(AlreadyExists):
            store.publish("versions/v2", b"a second writer")
        journal.mark("deleting v1")
        store.delete(["versions/v1"])
        journal.mark("deleted v1")
        store.delete(["chunks/base", "bundles/new/2"])
        store.put("chunks/orphan", [chunk("chunks/orphan")])
    with LocalStore(root, create=False, files=files(journal)) as store, store.lock_writer():
        store.clear_unfinished()
        save(store, journal, "v3", ["bundles/new/4"], ["chunks/3", "chunks/orphan", "bundles/new/4"])
    return journal


def broken_promises(folder: Path, marks: tuple[str, ...]) -> list[str]:
    broken = []
    with LocalStore(folder, create=False) as store:
        names = set(names_in(store))
        for name in names:
            content = content_of(store, name)
            if not name.startswith("versions/"):
                if content != chunk(name):
                    broken.append(f"{name} is not whole")
                continue
            try:
                needed = json.loads(content)
            except ValueError:
                broken.append(f"{name} is not whole")
                continue
            broken += [f"{name} needs {missing}" for missing in needed if missing not in names]
    for version in ("v0", "v1", "v2", "v3"):
        is_there = f"versions/{version}" in names
        saved = version == "v0" or f"saved {version}" in marks
        if saved and f"deleting {version}" not in marks and not is_there:
            broken.append(f"{version} was saved and is gone")
        if f"deleted {version}" in marks and is_there:
            broken.append(f"{version} was deleted and is back")
    return broken


def all_broken_promises(journal: Journal, folder: Path) -> Counter[str]:
    broken: Counter[str] = Counter()
    for number, state in enumerate(crash_states(journal)):
        place = folder / str(number)
        materialise(state, place, cache=folder / "cache")
        for promise in broken_promises(place, state.marks):
            broken[promise] += 1
        shutil.rmtree(place)
    return broken


def test_no_crash_breaks_a_promise(tmp_path: Path) -> None:
    journal = work(tmp_path / "store", RecordingFiles)
    states = list(crash_states(journal))
    assert len({state.prefix for state in states}) > len(journal.operations) * 0.6
    assert {"lost", "kept", "mixed"} <= {state.kind for state in states}
    assert not all_broken_promises(journal, tmp_path / "crashes")


def test_after_any_crash_the_next_writer_can_work(tmp_path: Path) -> None:
    journal = work(tmp_path / "store", RecordingFiles)
    for number, state in enumerate(crash_states(journal, mixed=1)):
        place = tmp_path / str(number)
        materialise(state, place)
        with LocalStore(place, create=True) as store, store.lock_writer():
            store.clear_unfinished()
            store.put("chunks/next", [b"next"])
            store.publish("versions/next", manifest("chunks/next"))
            assert content_of(store, "versions/next") == manifest("chunks/next")
        assert not list(place.rglob(".partial-*"))
        shutil.rmtree(place)


def test_what_is_put_again_makes_up_for_a_sync_that_failed(tmp_path: Path) -> None:
    """Names and folders that could not be synced are lost for good; what is made anew is not."""
    journal = Journal()
    files = FailedSyncFiles(journal, "fsync_dir", 1)
    with LocalStore(tmp_path / "store", create=True, files=files) as store:
        store.put("chunks/1", [b"whole"])
        with pytest.raises(StoreError, match="Input/output error"):
            store.publish("versions/v1", manifest("chunks/1"))
        with pytest.raises(StoreError, match=r"'chunks' .* could not be synced: check the disk"):
            store.put("chunks/2", [b"whole"])
        store.delete(["chunks/1"])
        store.put("chunks/2", [b"whole"])
        store.publish("versions/v1", manifest("chunks/2"))
        journal.mark("saved")
    assert files.fired
    lost = 0
    for state in crash_states(journal, mixed=8):
        if "versions/v1" in state.tree:
            assert state.content("chunks/2") == b"whole"
        lost += "chunks/1" not in state.tree
        assert "versions/v1" in state.tree or not state.marks
    assert lost


def test_a_root_whose_name_cannot_be_synced_is_not_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            LocalStore(tmp_path / "new/store", create=True)
    assert not list(tmp_path.iterdir())
    with LocalStore(tmp_path / "new/store", create=True) as store:
        store.put("chunk", [b"x"])


class NoFileSync(RecordingFiles):
    def fsync(self, handle: int) -> None:
        pass


class NoFolderSync(RecordingFiles):
    def fsync_dir(self, path: str) -> None:
        pass


class NoSyncOfNewFolders(RecordingFiles):
    """Syncs every folder but the root, which holds the names of the others."""

    def fsync_dir(self, path: str) -> None:
        if path:
            super().fsync_dir(path)


@pytest.mark.parametrize(
    ("careless", "consequence"),
    [
        (NoFileSync, "versions/v1 is not whole"),
        (NoFolderSync, "v1 was saved and is gone"),
        (NoFolderSync, "v0 was deleted and is back"),
        (NoSyncOfNewFolders, "versions/v1 needs bundles/new/2"),
    ],
)
def test_a_store_that_forgets_to_sync_is_caught(
    tmp_path: Path, careless: type[RecordingFiles], consequence: str
) -> None:
    journal = work(tmp_path / "store", careless)
    assert all_broken_promises(journal, tmp_path / "crashes")[consequence] > 0


class TestCrashStates:
    @pytest.fixture
    def states(self, tmp_path: Path) -> list[CrashState]:
        """A file that is written, named, and only then synced: wrong, and good to look at."""
        (tmp_path / "before").write_bytes(b"before")
        journal = Journal()
        files = RecordingFiles(journal)
        files.open_root(str(tmp_path), create=False)
        handle = files.create("hidden")
        files.writev(handle, [memoryview(b"abcd"), memoryview(b"efgh")])
        files.link("hidden", "object")
        files.unlink("hidden")
        files.fsync(handle)
        files.close(handle)
        files.unlink("before")
        files.fsync_dir("")
        journal.mark("done")
        files.close_root()
        return list(crash_states(journal, mixed=4, distinct=False))

    def test_every_prefix_is_there(self, states: list[CrashState]) -> None:
        assert {state.prefix for state in states} == set(range(9))

    def test_what_was_there_before_stays(self, states: list[CrashState]) -> None:
        assert all(state.content("before") == b"before" for state in states if state.prefix <= 5)

    def test_lost_kept_and_between(self, states: list[CrashState]) -> None:
        at_4 = {state.kind: state for state in states if state.prefix == 4}
        assert set(at_4["lost"].tree) == {"before"}
        assert at_4["names kept"].content("object") == b""
        assert at_4["kept"].content("object") == b"abcdefgh"
        assert set(at_4["kept"].tree) == {"before", "object"}

    def test_mixtures_tear_a_file(self, states: list[CrashState]) -> None:
        torn = {
            state.content("object") for state in states if "object" in state.tree and state.kind == "mixed"
        }
        assert torn - {b"", b"abcdefgh"}
        assert all(len(content) <= 8 for content in torn)

    def test_what_is_synced_is_certain(self, states: list[CrashState]) -> None:
        (end,) = [state for state in states if state.marks == ("done",)]
        assert {path: end.content(path) for path in end.tree} == {"object": b"abcdefgh"}

    def test_a_state_is_checked_once(self, tmp_path: Path) -> None:
        journal = work(tmp_path / "store", RecordingFiles)
        every = {(s.marks, tuple(sorted(s.tree))) for s in crash_states(journal, distinct=False)}
        once = [(s.marks, frozenset(s.tree.items())) for s in crash_states(journal)]
        assert len(once) == len(set(once))
        assert {(marks, tuple(sorted(dict(tree)))) for marks, tree in once} == every

    def test_a_state_becomes_a_folder(self, states: list[CrashState], tmp_path: Path) -> None:
        for number, state in enumerate(states):
            for cache in (None, tmp_path / "cache"):
                place = tmp_path / f"{number}-{cache is None}"
                materialise(state, place, cache)
                found = {path.name: path.read_bytes() for path in place.iterdir()}
                assert found == {path: state.content(path) for path in state.tree}
