"""The operations on files, one by one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.store.local_files import Files, split
from holdfast.errors import UnsafeName
from tests.other_user import CAN_BE_ANOTHER


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def files(root: Path) -> Iterator[Files]:
    before = handles()
    files = Files()
    files.open_root(str(root), create=True)
    yield files
    files.close_root()
    files.close_root()
    assert handles() == before, "a handle is left open"


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def write(files: Files, path: str, content: bytes = b"content") -> None:
    handle = files.create(path)
    assert files.writev(handle, [memoryview(content)]) == len(content)
    files.fsync(handle)
    files.close(handle)


def read(files: Files, path: str) -> bytes:
    handle, size = files.open_read(path)
    out = bytearray(size)
    assert files.preadv(handle, memoryview(out), 0) == size
    files.close(handle)
    return bytes(out)


@pytest.mark.parametrize(("path", "parts"), [("a", ("", "a")), ("a/b", ("a", "b")), ("a/b/c", ("a/b", "c"))])
def test_a_path_is_a_folder_and_a_name(path: str, parts: tuple[str, str]) -> None:
    assert split(path) == parts


def test_a_file_in_a_folder(files: Files, root: Path) -> None:
    files.mkdir("a")
    files.mkdir("a/b")
    write(files, "a/b/hidden")
    files.link("a/b/hidden", "a/b/object")
    files.unlink("a/b/hidden")
    files.fsync_dir("a/b")
    files.fsync_dir("")
    assert read(files, "a/b/object") == b"content"
    assert files.exists("a/b/object") is True
    assert not files.exists("a/b/hidden")
    assert not files.exists("c/object")
    with pytest.raises(FileExistsError):
        files.create("a/b/object")
    files.unlink("a/b/object")
    files.rmdir("a/b")
    assert [path.name for path in root.rglob("*")] == ["a"]


def test_modes_are_left_to_the_umask(files: Files, root: Path) -> None:
    before = os.umask(0)
    try:
        files.mkdir("a")
        write(files, "a/object")
    finally:
        os.umask(before)
    assert (root / "a").stat().st_mode & 0o7777 == 0o777
    assert (root / "a/object").stat().st_mode & 0o7777 == 0o666


def test_more_buffers_than_one_call_takes(files: Files) -> None:
    handle = files.create("object")
    written = files.writev(handle, [memoryview(b"x")] * (os.sysconf("SC_IOV_MAX") + 1))
    files.close(handle)
    assert written == os.sysconf("SC_IOV_MAX")


def test_a_listing_says_what_is_there(files: Files, root: Path) -> None:
    files.mkdir("a")
    files.mkdir("a/b")
    write(files, "a/object", b"12345")
    os.utime(root / "a/object", (1.0, 4711.5))
    found = {entry.name: entry for entry in files.scan("a")}
    assert set(found) == {"b", "object"}
    assert found["b"].is_folder
    assert not found["object"].is_folder
    assert (found["object"].size, found["object"].modified) == (5, 4711.5)


@pytest.mark.parametrize("path", ["evil", "evil/object"])
def test_links_are_refused_by_every_operation(files: Files, root: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").mkdir()
    (root / "evil").symlink_to(tmp_path / "outside")
    for operation in (files.open_read, files.exists, files.open_lock):
        with pytest.raises(UnsafeName, match=r"'evil' in .* is a symbolic link"):
            operation(path)
    assert not list((tmp_path / "outside").iterdir())


def test_a_folder_is_not_a_file(files: Files) -> None:
    files.mkdir("a")
    with pytest.raises(FileNotFoundError, match="a is a folder"):
        files.open_read("a")


def test_a_pipe_is_not_a_file(files: Files, root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(UnsafeName, match="is not a regular file"):
        files.open_read("pipe")


def test_a_file_in_place_of_a_folder(files: Files) -> None:
    write(files, "a")
    with pytest.raises(NotADirectoryError):
        files.open_read("a/object")
    with pytest.raises(NotADirectoryError):
        files.scan("a")


class TestLockFile:
    def test_it_is_the_same_until_another_takes_its_name(self, files: Files, root: Path) -> None:
        handle = files.open_lock("lock")
        assert files.is_same_file(handle, "lock")
        again = files.open_lock("lock")
        assert files.is_same_file(again, "lock")
        files.close(again)
        (root / "lock").rename(root / "moved")
        assert not files.is_same_file(handle, "lock")
        (root / "lock").symlink_to(root / "moved")
        assert not files.is_same_file(handle, "lock")
        (root / "lock").unlink()
        (root / "lock").touch()
        assert not files.is_same_file(handle, "lock")
        files.close(handle)

    @pytest.mark.skipif(not CAN_BE_ANOTHER, reason="takes root, to give a file to another user")
    def test_that_of_another_user_keeps_its_mode(self, files: Files, root: Path) -> None:
        (root / "lock").touch()
        (root / "lock").chmod(0o640)
        os.chown(root / "lock", 4711, 4711)
        files.close(files.open_lock("lock"))
        assert (root / "lock").stat().st_mode & 0o777 == 0o640


class TestRoot:
    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Folders in the order in which they are synced."""
        found: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda handle: found.append(os.readlink(f"/proc/self/fd/{handle}")))
        return found

    @pytest.mark.parametrize("there", [False, True])
    def test_the_names_that_lead_to_it_are_durable(
        self, tmp_path: Path, synced: list[str], there: bool
    ) -> None:
        """From the outside in. That of a root that is there, too: its maker may have died before."""
        root = tmp_path / "a/b/store"
        if there:
            root.mkdir(parents=True)
        files = Files()
        before = handles()
        files.open_root(str(root), create=True)
        files.close_root()
        assert handles() == before
        outside = [tmp_path / "a/b"] if there else [tmp_path, tmp_path / "a", tmp_path / "a/b"]
        assert synced == [str(folder) for folder in outside]

    def test_looking_makes_nothing_and_syncs_nothing(self, tmp_path: Path, synced: list[str]) -> None:
        with pytest.raises(FileNotFoundError):
            Files().open_root(str(tmp_path / "store"), create=False)
        assert not list(tmp_path.iterdir())
        assert not synced

    @pytest.mark.parametrize("there", [False, True])
    def test_what_could_not_be_synced_is_made_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
    ) -> None:
        """But a folder that was there before is not removed."""
        if there:
            (tmp_path / "a/b/store").mkdir(parents=True)

        def fail(handle: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            Files().open_root(str(tmp_path / "a/b/store"), create=True)
        assert [path.name for path in tmp_path.rglob("*")] == (["a", "b", "store"] if there else [])

    def test_a_closed_one_says_so(self, tmp_path: Path) -> None:
        files = Files()
        files.open_root(str(tmp_path), create=False)
        files.close_root()
        with pytest.raises(OSError, match=f"the store at {tmp_path} is closed"):
            files.exists("object")
