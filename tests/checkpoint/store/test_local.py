"""What only a store in a folder does: links, locks between processes, what it never touches."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.store.base import PARTIAL_PREFIX, check_name
from holdfast.checkpoint.store.local import Files, LocalStore, explain
from holdfast.errors import (
    AlreadyExists,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreUnreachable,
    UnsafeName,
)
from holdfast.testing.crash import Journal, RecordingFiles, read_folder
from holdfast.testing.faults import FaultyFiles
from holdfast.testing.stores import content_of, names_in
from tests.other_user import CAN_BE_ANOTHER, folder_of_everybody, tries_to_lock

_HOLD_THE_LOCK = """
import sys
from holdfast.checkpoint.store.local import LocalStore
lock = LocalStore(sys.argv[1], create=True).lock_writer()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    with LocalStore(root, create=True) as store:
        yield store


@contextmanager
def lock_held_by_another_process(root: Path, code: str = _HOLD_THE_LOCK) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            yield holder
        finally:
            holder.kill()


class TestLinksAndDevices:
    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        (folder / "secret").write_bytes(b"secret")
        return folder

    def test_a_link_in_place_of_an_object(self, store: LocalStore, root: Path, outside: Path) -> None:
        (root / "evil").symlink_to(outside / "secret")
        (root / "dangling").symlink_to(outside / "new")
        for name in ("evil", "dangling"):
            with pytest.raises(UnsafeName, match=name):
                store.open(name)
            with pytest.raises(UnsafeName, match=name):
                store.put(name, [b"overwritten"])
            with pytest.raises(UnsafeName, match=name):
                store.publish(name, b"overwritten")
        assert read_folder(outside) == {"secret": b"secret"}

    def test_a_link_in_place_of_a_folder(self, store: LocalStore, root: Path, outside: Path) -> None:
        (root / "evil").symlink_to(outside)
        with pytest.raises(UnsafeName, match="evil"):
            store.open("evil/secret")
        with pytest.raises(UnsafeName, match="evil"):
            store.put("evil/new", [b"x"])
        with pytest.raises(UnsafeName, match="evil"):
            store.publish("evil/new", b"x")
        with pytest.raises(UnsafeName, match="evil"):
            store.delete(["evil/secret"])
        with pytest.raises(UnsafeName, match="evil"):
            store.list("evil/")
        assert read_folder(outside) == {"secret": b"secret"}

    def test_a_folder_that_becomes_a_link(self, store: LocalStore, root: Path, outside: Path) -> None:
        store.put("chunks/1", [b"x"])
        (root / "chunks").rename(root / "moved")
        (root / "chunks").symlink_to(outside)
        with pytest.raises(UnsafeName, match="chunks"):
            store.put("chunks/2", [b"x"])
        with pytest.raises(UnsafeName, match="chunks"):
            store.publish("manifest", b"x")
        assert names_in_folder(root) == ["chunks", "moved", "moved/1"]
        assert read_folder(outside) == {"secret": b"secret"}

    def test_a_listing_names_the_link(self, store: LocalStore, root: Path, outside: Path) -> None:
        (root / "deep").mkdir()
        (root / "deep" / "evil").symlink_to(outside / "secret")
        with pytest.raises(UnsafeName, match="deep/evil"):
            store.list()

    def test_a_link_in_place_of_the_lock(self, store: LocalStore, root: Path, outside: Path) -> None:
        (root / "writer.lock").symlink_to(outside / "secret")
        with pytest.raises(UnsafeName, match=r"writer\.lock"):
            store.lock_writer()
        assert read_folder(outside) == {"secret": b"secret"}

    def test_deleting_a_link_leaves_what_it_leads_to(
        self, store: LocalStore, root: Path, outside: Path
    ) -> None:
        (root / "evil").symlink_to(outside / "secret")
        store.delete(["evil"])
        assert not (root / "evil").is_symlink()
        assert read_folder(outside) == {"secret": b"secret"}

    def test_a_pipe_in_place_of_an_object(self, store: LocalStore, root: Path) -> None:
        os.mkfifo(root / "pipe")
        with pytest.raises(UnsafeName, match="pipe"):
            store.open("pipe")
        with pytest.raises(UnsafeName, match="pipe"):
            store.list()

    def test_the_root_itself_may_be_a_link(self, root: Path, outside: Path) -> None:
        root.symlink_to(outside)
        with LocalStore(root, create=True) as store:
            store.put("new", [b"x"])
        assert (outside / "new").read_bytes() == b"x"


def names_in_folder(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@given(st.text(max_size=30) | st.from_regex(r"[a-z0-9./_-]{1,12}", fullmatch=True))
def test_every_accepted_name_is_of_the_form_that_is_documented(name: str) -> None:
    plain = re.fullmatch(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*", name) and ".." not in name.split(
        "/"
    )
    try:
        check_name(name)
    except UnsafeName:
        assert not plain
    else:
        assert plain
        assert os.path.normpath(f"/store/{name}") == f"/store/{name}"


class TestReading:
    def test_looking_writes_nothing(self, store: LocalStore, root: Path) -> None:
        store.put("chunks/1", [b"one"])
        store.publish("manifest", b"m")
        store.close()
        before = {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}
        journal = Journal()
        with LocalStore(root, create=False, files=RecordingFiles(journal)) as reader:
            assert names_in(reader) == ["chunks/1", "manifest"]
            assert content_of(reader, "chunks/1") == b"one"
        assert journal.operations == []
        assert {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]} == before

    def test_a_file_that_shrinks_while_it_is_open(self, store: LocalStore, root: Path) -> None:
        store.put("chunk", [b"0123456789"])
        with store.open("chunk") as reader:
            os.truncate(root / "chunk", 4)
            assert reader.read(0, 4) == b"0123"
            with pytest.raises(StoreError, match="'chunk' is cut short: 10 bytes were expected, 4 found"):
                reader.read()

    def test_short_reads_lose_nothing(self, root: Path) -> None:
        class SlowDisk(Files):
            def preadv(self, handle: int, view: memoryview, offset: int) -> int:
                return super().preadv(handle, view[:3], offset)

        with LocalStore(root, create=True, files=SlowDisk()) as store:
            store.put("chunk", [b"0123456789"])
            with store.open("chunk") as reader:
                assert reader.read(1, 8) == b"12345678"

    def test_a_reader_closes_its_file_once(self, root: Path) -> None:
        files = FaultyFiles("close", 2, errno.EIO)  # which says nothing about what was read
        with LocalStore(root, create=True, files=files) as store:
            store.put("chunk", [b"x"])
            reader = store.open("chunk")
            reader.close()
            reader.close()
            with pytest.raises(StoreError, match="it is closed"):
                reader.read()
        assert files.fired
        assert files.calls["close"] == 2

    def test_a_folder_in_place_of_an_object(self, store: LocalStore, root: Path) -> None:
        (root / "manifests/3").mkdir(parents=True)
        store.put("manifests/1", [b"x"])
        assert store.misplaced("manifests/") == ["manifests/3"]
        assert names_in(store) == ["manifests/1"]
        with pytest.raises(ObjectMissing):
            store.open("manifests/3")

    def test_an_object_in_place_of_a_folder(self, store: LocalStore) -> None:
        store.put("chunks", [b"x"])
        with pytest.raises(ObjectMissing):
            store.open("chunks/1")
        assert names_in(store, "chunks/") == []
        store.delete(["chunks/1"])

    def test_files_of_others_are_not_objects(self, store: LocalStore, root: Path) -> None:
        store.put("chunk", [b"x"])
        for stranger in (".DS_Store", "README.txt", "lost+found/x", f"{PARTIAL_PREFIX}0"):
            (root / stranger).parent.mkdir(exist_ok=True)
            (root / stranger).write_bytes(b"x")
        assert names_in(store) == ["chunk"]

    def test_a_closed_store_says_so(self, store: LocalStore) -> None:
        store.close()
        with pytest.raises(StoreError, match="is closed"):
            store.list()
        with pytest.raises(StoreError, match="is closed"):
            store.put("chunk", [b"x"])

    def test_a_file_in_place_of_the_store(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x")
        with pytest.raises(StoreError, match="no store at"):
            LocalStore(tmp_path / "file", create=False)
        with pytest.raises(StoreError, match="could not open"):
            LocalStore(tmp_path / "file", create=True)


@pytest.mark.parametrize(
    ("code", "kind", "cure"),
    [
        (errno.ENOSPC, StoreFull, "no space left to write x: free some"),
        (errno.EDQUOT, StoreFull, "no space left to write x: free some"),
        (errno.EROFS, StoreError, r"no permission to write x \(.*\): check its owner"),
        (errno.EMLINK, StoreError, "could not write x: its file system has no hard links"),
        (errno.EMFILE, StoreUnreachable, r"could not write x \(.*\): raise the limit on open files"),
        (errno.ENETDOWN, StoreUnreachable, r"could not write x \(.*\): check the network"),
        (errno.EIO, StoreError, r"could not write x \(Input/output error\): check the disk"),
    ],
)
def test_an_error_says_what_to_do(code: int, kind: type[StoreError], cure: str) -> None:
    explained = explain(OSError(code, os.strerror(code)), "write", "x")
    assert type(explained) is kind
    assert re.match(cure, str(explained))


def test_an_error_without_a_number_is_quoted() -> None:
    assert "(the store is closed)" in str(explain(OSError("the store is closed"), "read", "x"))


class TestFailedSyncs:
    class Disk(Files):
        fails: str | None = None

        def fsync_dir(self, path: str) -> None:
            if path == self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().fsync_dir(path)

    def test_a_folder_is_doubted_until_its_name_has_been_synced(self, root: Path) -> None:
        files = self.Disk()
        with LocalStore(root, create=True, files=files) as store:
            for version in ("1", "2"):
                files.fails = ""
                store.put(f"chunks/{version}", [b"x"])
                with pytest.raises(StoreError, match="Input/output error"):
                    store.sync()
                if version == "1":  # nobody can tell whether its name will survive a crash
                    with pytest.raises(StoreError, match=r"'chunks' in .* could not be synced"):
                        store.put("chunks/more", [b"x"])
                    store.delete(["chunks/1"])
                    store.put("chunks/again", [b"x"])  # in a folder that is made anew
                else:  # it was synced before
                    store.put("chunks/more", [b"x"])
                files.fails = None
                store.publish(f"manifest-{version}", b"m")

    def test_what_could_not_be_synced_is_synced_by_the_next(self, root: Path) -> None:
        journal = Journal()

        class Disk(RecordingFiles):
            fails = True

            def fsync_dir(self, path: str) -> None:
                if path == "a" and self.fails:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                super().fsync_dir(path)

        files = Disk(journal)
        with LocalStore(root, create=True, files=files) as store:
            store.put("a/1", [b"x"])
            store.put("b/1", [b"x"])
            with pytest.raises(StoreError):
                store.sync()
            files.fails = False
            store.sync()
            store.sync()  # nothing is left
        assert [op.path for op in journal.operations if op.kind == "fsync_dir"] == ["", "", "a", "b"]


def test_what_a_folder_promises_beyond_the_contract(store: LocalStore) -> None:
    assert store.keeps_open_files
    assert store.publishes_exclusively
    assert not store.may_publish_late


def test_a_name_that_is_taken_is_found_before_anything_is_written(root: Path) -> None:
    files = FaultyFiles("writev", 2, errno.EIO)
    with LocalStore(root, create=True, files=files) as store:
        store.put("chunk", [b"x"])
        with pytest.raises(AlreadyExists, match="has an object 'chunk' already"):
            store.put("chunk", [b"y"])
    assert not files.fired


def test_of_two_that_write_one_name_one_succeeds(root: Path) -> None:
    """The link decides, not the look before."""

    class Race(Files):
        def exists(self, path: str) -> bool:
            return False

    with LocalStore(root, create=True, files=Race()) as store:
        store.put("chunk", [b"x"])
        with pytest.raises(AlreadyExists):
            store.put("chunk", [b"y"])
        assert content_of(store, "chunk") == b"x"


class TestWriting:
    def test_short_writes_lose_nothing(self, root: Path) -> None:
        class SlowDisk(Files):
            def writev(self, handle: int, views: Sequence[memoryview]) -> int:
                return super().writev(handle, [b"".join(views)[:3]])  # type: ignore[list-item]

        parts = [b"a", b"bcdefg", b"hi", b"jklmnopqrstuvwxyz"]
        with LocalStore(root, create=True, files=SlowDisk()) as store:
            assert store.put("chunk", parts) == 26
            assert content_of(store, "chunk") == b"".join(parts)

    def test_no_hidden_file_is_left(self, store: LocalStore, root: Path) -> None:
        store.put("a/1", [b"x"])
        store.publish("b", b"x")
        with pytest.raises(StoreError):
            store.publish("b", b"y")
        assert names_in_folder(root) == ["a", "a/1", "b"]

    def test_names_are_synced_once_per_folder(self, root: Path) -> None:
        journal = Journal()
        with LocalStore(root, create=True, files=RecordingFiles(journal)) as store:
            for i in range(50):
                store.put(f"chunks/{i}", [b"x"])
            assert not [op for op in journal.operations if op.kind == "fsync_dir"]
            store.publish("manifests/1", b"m")
        synced = [op.path for op in journal.operations if op.kind == "fsync_dir"]
        assert sorted(synced) == ["", "chunks", "manifests"]
        assert synced[-1] == "manifests"


class TestLock:
    def test_another_process_is_named(self, store: LocalStore, root: Path) -> None:
        with lock_held_by_another_process(root) as holder:
            with pytest.raises(StoreLocked, match=f"process {holder.pid} on host") as refused:
                store.lock_writer()
            assert refused.value.pid == holder.pid

    def test_a_killed_process_holds_nothing(self, store: LocalStore, root: Path) -> None:
        with lock_held_by_another_process(root) as holder:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            with store.lock_writer():
                assert json.loads((root / "writer.lock").read_bytes())["pid"] == os.getpid()

    def test_a_child_that_outlives_a_killed_parent_holds_nothing(self, store: LocalStore, root: Path) -> None:
        code = _HOLD_THE_LOCK.replace("print(", "import os; child = os.fork() == 0; child and print(")
        with lock_held_by_another_process(root, code) as parent:
            parent.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
            store.lock_writer().release()

    def test_a_child_that_releases_leaves_the_parents_lock(self, store: LocalStore, root: Path) -> None:
        with store.lock_writer() as lock:
            child = os.fork()
            if child == 0:
                lock.release()
                os._exit(0)
            os.waitpid(child, 0)
            lock.renew()
            with LocalStore(root, create=False) as second, pytest.raises(StoreLocked):
                second.lock_writer()

    @pytest.mark.parametrize(
        ("folder", "lock"), [(0o755, 0o600), (0o700, 0o600), (0o775, 0o660), (0o2770, 0o660), (0o777, 0o666)]
    )
    @pytest.mark.parametrize("before", [None, 0o666, 0o644, 0o600])
    def test_who_can_write_to_the_store_can_lock_it(
        self, root: Path, folder: int, lock: int, before: int | None
    ) -> None:
        """And nobody else, whatever the umask is, also where an older lock file was made otherwise."""
        mask = os.umask(0o022)
        try:
            with LocalStore(root, create=True) as store:
                root.chmod(folder)
                if before is not None:
                    (root / "writer.lock").touch()
                    (root / "writer.lock").chmod(before)
                with store.lock_writer():
                    assert (root / "writer.lock").stat().st_mode & 0o777 == lock
        finally:
            os.umask(mask)

    @pytest.mark.skipif(not CAN_BE_ANOTHER, reason="takes root, to become another user")
    def test_another_user_cannot_keep_writers_out(self) -> None:
        with folder_of_everybody() as folder, LocalStore(folder / "store", create=True) as store:
            store.lock_writer().release()
            with tries_to_lock(folder / "store" / "writer.lock") as locked:
                assert not locked
                store.lock_writer().release()

    def test_a_lock_file_that_was_removed_is_noticed(self, store: LocalStore, root: Path) -> None:
        with store.lock_writer() as lock:
            (root / "writer.lock").unlink()
            with pytest.raises(StoreLocked, match="was lost"):
                lock.renew()

    @pytest.mark.parametrize("note", [b"", b"\xff", b"[]", b'{"host": 1}', b'{"pid": "x", "host": "h"}'])
    def test_a_note_that_makes_no_sense(self, store: LocalStore, root: Path, note: bytes) -> None:
        with lock_held_by_another_process(root):
            (root / "writer.lock").write_bytes(note)
            with pytest.raises(StoreLocked, match="process unknown on host unknown"):
                store.lock_writer()

    def test_the_next_writer_clears_hidden_files_away(self, store: LocalStore, root: Path) -> None:
        store.put("a/b/1", [b"x"])
        for folder in (root, root / "a", root / "a" / "b"):
            (folder / f"{PARTIAL_PREFIX}dead").write_bytes(b"half")
        with store.lock_writer():
            before = names_in_folder(root)
            assert len(before) == 7
            store.clear_unfinished()
            assert names_in_folder(root) == ["a", "a/b", "a/b/1", "writer.lock"]
