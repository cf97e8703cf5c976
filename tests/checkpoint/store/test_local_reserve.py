"""Room that is held back for publishing on a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.checkpoint.store.local import LocalStore
from holdfast.testing.faults import FaultyFiles, SmallDisk
from holdfast.testing.stores import names_in

SMALLEST = 1 << 15


def sizes(root: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(root.glob(".reserve-*"))]


def test_four_files_twice_as_large_as_asked_for(tmp_path: Path) -> None:
    with LocalStore(tmp_path, create=True) as store:
        store.keep_reserve(100)
        assert sizes(tmp_path) == [2 * SMALLEST] * 4
        store.keep_reserve(SMALLEST * 3)
        assert sizes(tmp_path) == [6 * SMALLEST] * 4
        assert names_in(store) == []


def test_they_take_the_room_that_they_seem_to_take(tmp_path: Path) -> None:
    """Some file systems store a run of zeros in no space at all."""
    with LocalStore(tmp_path, create=True) as store:
        store.keep_reserve(100)
    assert len(set((tmp_path / ".reserve-0").read_bytes())) > 200


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (8 * SMALLEST, [2 * SMALLEST] * 4),
        (7 * SMALLEST, [2 * SMALLEST] * 3 + [SMALLEST]),
        (6 * SMALLEST + 1000, [2 * SMALLEST] * 3 + [1000]),
    ],
)
def test_as_large_as_there_is_room_for(tmp_path: Path, room: int, expected: list[int]) -> None:
    with LocalStore(tmp_path, create=True, files=SmallDisk(room, 100)) as store:
        store.keep_reserve(1000)
    assert sizes(tmp_path) == expected


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    disk = SmallDisk(2 * SMALLEST + 999, 100)
    with LocalStore(tmp_path, create=True, files=disk) as store:
        store.keep_reserve(1000)  # it is only a precaution
        assert sizes(tmp_path) == [2 * SMALLEST]
        disk.most_bytes = 100 * SMALLEST
        store.keep_reserve(1000)
    assert sizes(tmp_path) == [2 * SMALLEST] * 4


def test_it_is_written_only_when_it_is_too_small(tmp_path: Path) -> None:
    def written() -> list[int]:
        return [path.stat().st_mtime_ns for path in sorted(tmp_path.glob(".reserve-*"))]

    with LocalStore(tmp_path, create=True) as store:
        store.keep_reserve(SMALLEST)
        for path in tmp_path.glob(".reserve-*"):
            os.utime(path, (1, 1))  # clocks of file systems are coarse
        first = written()
        store.keep_reserve(2 * SMALLEST)
        assert written() == first
    with LocalStore(tmp_path, create=True) as store:  # of an earlier process, too
        store.keep_reserve(2 * SMALLEST)
        assert written() == first
        store.keep_reserve(2 * SMALLEST + 1)
        assert not set(written()) & set(first)


def test_what_is_known_to_be_there_is_not_looked_at_again(tmp_path: Path) -> None:
    """A save asks every time."""
    files = FaultyFiles("open_read", 10**9, errno.EIO)
    with LocalStore(tmp_path, create=True, files=files) as store:
        store.keep_reserve(100)
        looked = files.calls["open_read"]
        store.keep_reserve(2 * SMALLEST)
        assert files.calls["open_read"] == looked
        store.use_reserve()
        store.keep_reserve(1)
        assert files.calls["open_read"] > looked
    assert sizes(tmp_path) == [2 * SMALLEST] * 4


def test_it_is_given_up_file_by_file(tmp_path: Path) -> None:
    with LocalStore(tmp_path, create=True) as store:
        assert not store.use_reserve()
        store.keep_reserve(100)
        for left in (3, 2, 1, 0):
            assert store.use_reserve() is True
            assert len(sizes(tmp_path)) == left
        assert store.use_reserve() is False


def test_a_file_that_cannot_be_written_whole_is_removed(tmp_path: Path) -> None:
    files = FaultyFiles("writev", 1, errno.ENOSPC, times=None)
    with LocalStore(tmp_path, create=True, files=files) as store:
        store.keep_reserve(100)
        assert files.fired == 3
        assert files.calls["close"] == 3
    assert list(tmp_path.iterdir()) == []
