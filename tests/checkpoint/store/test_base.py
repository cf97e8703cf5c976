"""What all stores share: names, ranges, and which errors mean what."""

from __future__ import annotations

import errno
from array import array

import numpy as np
import pytest

from holdfast.checkpoint.store.base import (
    ObjectReader,
    ReadRequest,
    Store,
    WriterLock,
    byte_views,
    check_name,
    check_prefix,
    coalesce,
    is_connection_lost,
    is_full,
    is_name,
    is_out_of_resources,
)
from holdfast.errors import StoreError, UnsafeName

CONTENT = bytes(range(10))


class BytesReader(ObjectReader):
    """An object in memory."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.name = "chunk"
        self.size = len(content)
        self.content = content
        self.served: list[tuple[int, int]] = []
        self.closed = 0

    def _fill(self, requests: list[ReadRequest]) -> None:
        for request in requests:
            self.served.append((request.offset, request.end))
            request.into[:] = self.content[request.offset : request.end]

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (OSError(errno.ENOSPC, ""), is_full),
        (OSError(errno.EDQUOT, ""), is_full),
        (OSError(errno.EMFILE, ""), is_out_of_resources),
        (OSError(errno.ENOMEM, ""), is_out_of_resources),
        (OSError(errno.EHOSTUNREACH, ""), is_connection_lost),
        (OSError(errno.ENOTCONN, ""), is_connection_lost),
        (ConnectionResetError(), is_connection_lost),
        (TimeoutError(), is_connection_lost),
        (OSError(errno.EIO, ""), None),
        (ValueError("no OSError"), None),
    ],
    ids=lambda value: repr(value) if isinstance(value, Exception) else getattr(value, "__name__", "no"),
)
def test_an_error_means_one_thing(error: Exception, meaning: object) -> None:
    kinds = (is_full, is_out_of_resources, is_connection_lost)
    assert [kind for kind in kinds if kind(error)] == ([meaning] if meaning else [])


class TestNames:
    @pytest.mark.parametrize("name", ["a", "0", "a/b", "a.b_c-d", "a" * 200, "/".join(["a" * 127] * 4)])
    def test_good_ones(self, name: str) -> None:
        assert is_name(name)
        assert check_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", "A", "a//b", "a" * 201, f"a/{'b' * 201}", "/".join(["a" * 128] * 4)]
    )
    def test_bad_ones(self, name: str) -> None:
        assert not is_name(name)
        with pytest.raises(UnsafeName, match="is not an object's name"):
            check_name(name)

    @pytest.mark.parametrize("name", ["writer.lock", "writer.lease"])
    def test_the_names_of_locks_are_taken(self, name: str) -> None:
        assert not is_name(name)
        with pytest.raises(UnsafeName, match="is the store's own"):
            check_name(name)

    @pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/b/"])
    def test_what_can_begin_a_name(self, prefix: str) -> None:
        assert check_prefix(prefix) == prefix

    @pytest.mark.parametrize("prefix", ["/", "a//", "A/", "../", "a/B", ".a"])
    def test_what_cannot(self, prefix: str) -> None:
        with pytest.raises(UnsafeName, match="cannot begin an object's name"):
            check_prefix(prefix)


class TestRanges:
    def test_views_are_flat_and_none_is_empty(self) -> None:
        floats = np.ones((2, 3), np.float32)
        views = byte_views([b"ab", b"", floats.data, np.empty((0, 3), np.float32).data])
        assert [bytes(view) for view in views] == [b"ab", floats.tobytes()]
        assert {(view.ndim, view.format) for view in views} == {(1, "B")}

    @pytest.mark.parametrize(
        ("ranges", "requests"),
        [
            ([], []),
            ([(5, 0)], []),
            ([(2, 3)], [(2, 5)]),
            ([(2, 3), (5, 2)], [(2, 7)]),
            ([(2, 3), (6, 2)], [(2, 5), (6, 8)]),
            ([(5, 2), (2, 3)], [(5, 7), (2, 5)]),
            ([(2, 3), (0, 0), (5, 2)], [(2, 7)]),
            ([(0, 1), (1, 0), (1, 4)], [(0, 5)]),
            ([(3, 2), (3, 2)], [(3, 5), (3, 5)]),
            ([(1, 2), (3, 2), (5, 2)], [(1, 7)]),
        ],
    )
    def test_those_that_touch_are_one_request(
        self, ranges: list[tuple[int, int]], requests: list[tuple[int, int]]
    ) -> None:
        out = bytearray(sum(length for _, length in ranges))
        found = coalesce(ranges, memoryview(out))
        assert [(request.offset, request.end) for request in found] == requests
        for number, request in enumerate(found):
            request.into[:] = bytes([number + 1]) * request.into.nbytes
        assert all(out)


class TestReading:
    def test_ranges_back_to_back(self) -> None:
        reader = BytesReader()
        out = bytearray(6)
        reader.read_into([(7, 3), (0, 2), (2, 1)], memoryview(out))
        assert list(out) == [7, 8, 9, 0, 1, 2]
        assert reader.served == [(7, 10), (0, 3)]

    def test_into_memory_of_any_type(self) -> None:
        numbers = array("H", [0, 0])
        BytesReader().read_into([(0, 4)], memoryview(numbers))
        assert numbers.tobytes() == CONTENT[:4]
        BytesReader().read_into([], np.empty((0, 4), np.float32).data)

    @pytest.mark.parametrize("bad", [(-1, 2), (2, -1)])
    def test_a_negative_range(self, bad: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match=f"is negative: offset {bad[0]}, length {bad[1]}"):
            BytesReader().read_into([(0, 3), bad], memoryview(bytearray(3 + bad[1])))

    @pytest.mark.parametrize("length", [2, 4])
    def test_a_buffer_of_another_size(self, length: int) -> None:
        with pytest.raises(ValueError, match=f"hold 3 bytes, the buffer {length}"):
            BytesReader().read_into([(0, 1), (4, 2)], memoryview(bytearray(length)))

    def test_past_the_end(self) -> None:
        reader = BytesReader()
        with pytest.raises(StoreError, match="'chunk' is cut short: 11 bytes were expected, 10 found"):
            reader.read_into([(8, 3), (0, 1)], memoryview(bytearray(4)))
        assert reader.served == []

    def test_all_from_an_offset_on(self) -> None:
        assert BytesReader().read() == CONTENT
        assert BytesReader().read(4) == CONTENT[4:]
        assert BytesReader().read(4, 2) == CONTENT[4:6]
        assert BytesReader().read(10) == b""
        with pytest.raises(StoreError, match="12 bytes were expected, 10 found"):
            BytesReader().read(12)

    def test_no_memory_is_taken_for_a_length_that_cannot_be(self) -> None:
        with pytest.raises(StoreError, match=f"{2**62 + 3} bytes were expected, 10 found"):
            BytesReader().read(3, 2**62)

    def test_leaving_closes(self) -> None:
        reader = BytesReader()
        with reader as opened:
            assert opened is reader
        assert reader.closed == 1


def test_leaving_a_lock_releases_it() -> None:
    class Lock(WriterLock):
        released = False

        def renew(self) -> None:
            pass

        def release(self) -> None:
            self.released = True

    with Lock() as lock:
        assert not lock.released
    assert lock.released


def test_what_a_store_promises_unless_it_says_otherwise() -> None:
    assert not Store.keeps_open_files
    assert Store.publishes_exclusively
    assert Store.may_publish_late


class PlainStore(Store):
    """A store that implements nothing that it need not."""

    closed = False

    put = publish = open = list = delete = lock_writer = None  # type: ignore[assignment]

    def close(self) -> None:
        self.closed = True


def test_what_a_store_need_not_do() -> None:
    with PlainStore() as store:
        store.sync()
        store.keep_reserve(1)
        store.clear_unfinished()
        assert store.use_reserve() is False
        assert list(store.misplaced("")) == []
        assert not store.closed
    assert store.closed
