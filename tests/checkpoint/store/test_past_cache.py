"""Large files that are written past the page cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.store import past_cache
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.local_files import Files
from holdfast.errors import StoreFull
from holdfast.testing.crash import Journal, RecordingFiles
from holdfast.testing.stores import content_of

SLICE = 8192


class Noted(RecordingFiles):
    """Notes of each write its length and whether it went past the cache; may refuse in several ways."""

    def __init__(self, *, refuses: str = "") -> None:
        super().__init__(Journal())
        self.journal = self._journal
        self.refuses = refuses
        self.direct = False
        self.writes: list[tuple[int, bool]] = []

    def bypass_cache(self, handle: int, bypass: bool) -> bool:
        if bypass and self.refuses == "at once":
            return False
        self.direct = bypass
        return True  # not really: the file system of a test may not know how to

    def writev(self, handle: int, views: Sequence[memoryview]) -> int:
        if self.direct:
            (view,) = views
            assert np.frombuffer(view, np.uint8).ctypes.data % 4096 == 0
            assert view.nbytes % 4096 == 0
            if self.refuses == "when it writes":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if self.refuses == "no space":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.refuses == "half of it":
                views = [view[:5000]]
        count = super().writev(handle, views)
        self.writes.append((count, self.direct))
        return count


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_cache, "SLICE_BYTES", SLICE)
    monkeypatch.setattr(past_cache, "LEAST_BYTES", 2 * SLICE)


def put(root: Path, files: Files, parts: Sequence[bytes], *, pauses: list[int] | None = None) -> None:
    """Put an object, and compare what is read."""
    with LocalStore(root, create=True, files=files) as store:
        if pauses is not None:
            store.pause = lambda: pauses.append(1)
        assert store.put("chunks/a", parts) == sum(map(len, parts))
        assert content_of(store, "chunks/a") == b"".join(parts)


def test_all_but_the_end_goes_past_the_cache(tmp_path: Path) -> None:
    files, pauses = Noted(), list[int]()
    put(tmp_path, files, [os.urandom(10_000), b"", os.urandom(SLICE), b"end"], pauses=pauses)
    assert files.writes == [(SLICE, True), (SLICE, True), (10_003 - SLICE, False)]
    assert len(pauses) == 3, "one for each slice"
    kinds = [operation.kind for operation in files.journal.operations]
    assert kinds.index("fsync") < kinds.index("link")


def test_nothing_is_left_for_the_cache_if_the_length_fits(tmp_path: Path) -> None:
    files = Noted()
    put(tmp_path, files, [os.urandom(2 * SLICE + 4096)], pauses=[])
    assert files.writes == [(SLICE, True), (SLICE, True), (4096, True)]


def test_small_files_and_those_of_nobody_who_pauses_are_cached(tmp_path: Path) -> None:
    files = Noted()
    put(tmp_path / "small", files, [os.urandom(2 * SLICE - 1)], pauses=[])
    assert files.writes == [(2 * SLICE - 1, False)]
    files = Noted()
    put(tmp_path / "usual", files, [os.urandom(3 * SLICE)])
    assert files.writes == [(3 * SLICE, False)]


@pytest.mark.parametrize("how", ["at once", "when it writes", "half of it"])
def test_a_file_system_that_refuses(tmp_path: Path, how: str) -> None:
    files = Noted(refuses=how)
    put(tmp_path, files, [os.urandom(2 * SLICE + 100)], pauses=[])
    assert [direct for _, direct in files.writes[how == "half of it" :]].count(True) == 0
    assert sum(count for count, _ in files.writes) == 2 * SLICE + 100


def test_a_full_disk(tmp_path: Path) -> None:
    with LocalStore(tmp_path, create=True, files=Noted(refuses="no space")) as store:
        store.pause = lambda: None
        with pytest.raises(StoreFull):
            store.put("chunks/a", [os.urandom(2 * SLICE)])
        assert store.list() == []


@pytest.mark.parametrize("size", [2 * SLICE, 3 * SLICE + 4096, 2 * SLICE + 1, 5 * SLICE - 1])
def test_on_this_disk(tmp_path: Path, size: int) -> None:
    """With whatever the file system of the tests allows, and again into the same memory."""
    with LocalStore(tmp_path, create=True) as store:
        store.pause = lambda: None
        first, second = os.urandom(size), os.urandom(size)
        store.put("chunks/a", [first])
        store.put("chunks/b", [second[:100], second[100:]])
        assert content_of(store, "chunks/a") == first
        assert content_of(store, "chunks/b") == second


def test_whether_a_file_bypasses_the_cache_can_be_changed(tmp_path: Path) -> None:
    files = Files()
    files.open_root(str(tmp_path), create=True)
    handle = files.create("a")
    try:
        if files.bypass_cache(handle, True):
            with pytest.raises(OSError, match="Invalid argument"):
                os.write(handle, b"not aligned")
            assert files.bypass_cache(handle, False)
        assert os.write(handle, b"not aligned") == 11
    finally:
        files.close(handle)
        files.close_root()


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 20))
def test_gathering_keeps_every_byte(parts: list[bytes], room: int) -> None:
    space = memoryview(bytearray(room))
    gathered = [
        bytes(space[:size]) for size in past_cache._gathered([memoryview(p) for p in parts if p], space)
    ]
    assert b"".join(gathered) == b"".join(parts)
    assert all(len(piece) == room for piece in gathered[:-1])
