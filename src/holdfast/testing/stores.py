"""The contract of a store, as tests that any store must pass."""

from __future__ import annotations

import array
import itertools
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import pytest

from holdfast.checkpoint.store import ObjectInfo, Store
from holdfast.errors import AlreadyExists, ObjectMissing, StoreError, StoreLocked, UnsafeName

if TYPE_CHECKING:
    from typing_extensions import Buffer

BAD_NAMES = (
    "",
    "/",
    "/etc/passwd",
    "..",
    "../up",
    "a/../b",
    "a/..",
    "a/./b",
    "./a",
    ".hidden",
    "a/.hidden",
    "a//b",
    "a/",
    "/a",
    "-flag",
    "Upper",
    "a b",
    "a\\b",
    "a\x00b",
    "a\n",
    "ä",
    "a:b",
    "a%2fb",
    "a" * 201,
    "/".join(["a"] * 300),
    "writer.lock",
    "writer.lease",
)


class Opener(Protocol):
    """Opens one and the same place again and again."""

    def __call__(self, *, create: bool) -> Store:
        """Return a new store on the place."""


def names_in(store: Store, prefix: str = "") -> list[str]:
    """Return the names in a listing."""
    return [info.name for info in store.list(prefix)]


def content_of(store: Store, name: str) -> bytes:
    """Return a whole object."""
    with store.open(name) as reader:
        return reader.read()


class StoreContract:
    """Tests of everything that `Store` promises.

    Subclass it in a test module and give it a fixture ``opener``: an `Opener` on an empty place that is new
    for each test. The stores that the contract opens through it are closed at the end of the test.
    """

    publishes_exclusively = True
    """Of writers that publish one name at the same instant exactly one succeeds."""

    reads_after_delete = False
    """An open object stays readable when it is deleted."""

    many_objects = 1005
    """Enough that a listing takes more than one page."""

    large_object_bytes = 17 * 1024 * 1024
    """Enough that an upload takes more than one part."""

    @pytest.fixture
    def store(self, opener: Opener) -> Iterator[Store]:
        """A new store."""
        with opener(create=True) as store:
            yield store

    @pytest.fixture
    def second(self, store: Store, opener: Opener) -> Iterator[Store]:
        """A second store on the same place."""
        with opener(create=True) as second:
            yield second

    def test_an_object_is_its_parts_one_after_the_other(self, store: Store) -> None:
        """Parts may be of any contiguous type, and empty."""
        floats = array.array("f", [1.5, -2.0, 0.25])
        parts: list[Buffer] = [b"head", b"", bytearray(b"-body-"), memoryview(b"xtailx")[1:5], floats]
        assert store.put("a/b/c.bin", parts) == 14 + 12
        assert content_of(store, "a/b/c.bin") == b"head-body-tail" + floats.tobytes()

    @pytest.mark.parametrize("parts", [[], [b""], [b"", b""]])
    def test_an_empty_object(self, store: Store, parts: list[bytes]) -> None:
        """It exists, has no bytes and can be read."""
        assert store.put("empty", parts) == 0
        with store.open("empty") as reader:
            assert reader.size == 0
            assert reader.read() == b""
            reader.read_into([], memoryview(b""))
            reader.read_into([(0, 0)], memoryview(bytearray()))

    def test_many_parts(self, store: Store) -> None:
        """More buffers than one call of the system takes."""
        parts = [bytes([i % 251]) * (i % 7) for i in range(3000)]
        store.put("many-parts", parts)
        assert content_of(store, "many-parts") == b"".join(parts)

    def test_a_large_object(self, store: Store) -> None:
        """It may go up in pieces, but it comes back as one."""
        content = random.Random(1).randbytes(self.large_object_bytes)
        view = memoryview(content)
        cuts = [0, 1, 5_000_001, 5_000_001, 9_999_999, len(content)]
        store.put("large", [view[a:b] for a, b in itertools.pairwise(cuts)])
        with store.open("large") as reader:
            assert reader.size == len(content)
            assert reader.read() == content
            assert reader.read(len(content) - 3, 3) == content[-3:]
        with pytest.raises(AlreadyExists, match="large"):
            store.put("large", [view])

    def test_put_never_overwrites(self, store: Store, second: Store) -> None:
        """Neither its own objects nor another writer's."""
        store.put("taken", [b"first"])
        for other in (store, second):
            with pytest.raises(AlreadyExists, match="taken"):
                other.put("taken", [b"second"])
        assert content_of(store, "taken") == b"first"

    def test_publish_never_overwrites(self, store: Store, second: Store) -> None:
        """Not even with the same content."""
        store.publish("manifest", b"first")
        for other in (store, second):
            for data in (b"second", b"first"):
                with pytest.raises(AlreadyExists, match="manifest"):
                    other.publish("manifest", data)
        assert content_of(second, "manifest") == b"first"

    def test_of_many_publishers_one_wins(self, store: Store, second: Store) -> None:
        """And what is there afterwards is the winner's, whole."""
        if not self.publishes_exclusively:
            pytest.skip("this store only looks before it writes")

        def publish(writer: int) -> int | None:
            try:
                (store, second)[writer % 2].publish("manifests/7", bytes([writer]) * 1000)
            except AlreadyExists:
                return None
            return writer

        with ThreadPoolExecutor(8) as pool:
            winners = [writer for writer in pool.map(publish, range(8)) if writer is not None]
        assert len(winners) == 1
        assert content_of(store, "manifests/7") == bytes(winners) * 1000

    def test_puts_from_many_threads(self, store: Store) -> None:
        """All arrive, also in folders that are new to all of them."""
        names = [f"d{i % 3}/e{i % 2}/o{i}" for i in range(24)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, [name.encode()]), names))
        store.sync()
        assert names_in(store) == sorted(names)
        assert all(content_of(store, name) == name.encode() for name in names)

    def test_ranges(self, store: Store) -> None:
        """Any ranges, in any order, overlapping, touching and empty, are what slices give."""
        content = random.Random(2).randbytes(300_000)
        store.put("ranges", [content])
        chance = random.Random(3)
        with store.open("ranges") as reader:
            for _ in range(20):
                ranges = []
                for _ in range(chance.randint(1, 12)):
                    offset = chance.randint(0, len(content))
                    length = chance.randint(0, min(len(content) - offset, chance.choice([0, 9, 70_000])))
                    ranges.append((offset, length))
                    if chance.random() < 0.5:
                        ranges.append((offset + length, min(5, len(content) - offset - length)))
                out = bytearray(sum(length for _, length in ranges))
                reader.read_into(ranges, memoryview(out))
                assert out == b"".join(content[o : o + n] for o, n in ranges), ranges

    def test_ranges_fill_any_writable_memory(self, store: Store) -> None:
        """Memory of floats is filled byte by byte."""
        floats = array.array("f", [float(i) for i in range(64)])
        store.put("floats", [floats])
        out = array.array("f", [0.0] * 4)
        with store.open("floats") as reader:
            reader.read_into([(4 * 10, 8), (4 * 60, 8)], memoryview(out))
        assert out.tolist() == [10.0, 11.0, 60.0, 61.0]

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (11, 0), (5, 1000), (1 << 62, 8)])
    def test_reading_past_the_end_says_both_lengths(self, store: Store, offset: int, length: int) -> None:
        """It is how a truncated object shows."""
        store.put("short", [b"0123456789"])
        with store.open("short") as reader:
            expected = f"'short' is cut short: {offset + length} bytes were expected, 10 found"
            with pytest.raises(StoreError, match=expected):
                reader.read_into([(0, 2), (offset, length)], memoryview(bytearray(2 + length)))
            with pytest.raises(StoreError, match=expected):
                reader.read(offset, length)

    def test_a_buffer_of_the_wrong_length_is_a_mistake(self, store: Store) -> None:
        """So is a range that is negative."""
        store.put("object", [b"0123456789"])
        with store.open("object") as reader:
            with pytest.raises(ValueError, match="hold 4 bytes, the buffer 5"):
                reader.read_into([(0, 4)], memoryview(bytearray(5)))
            for bad in [(-1, 2), (4, -2)]:
                with pytest.raises(ValueError, match="negative"):
                    reader.read_into([bad, (0, 2)], memoryview(bytearray(2)))

    def test_a_missing_object(self, store: Store) -> None:
        """Opening it says so; a folder is not an object."""
        store.put("folder/object", [b"x"])
        for name in ("nothing", "folder", "folder/nothing", "folder/object/below"):
            with pytest.raises(ObjectMissing, match=name):
                store.open(name)

    def test_listing(self, store: Store, second: Store) -> None:
        """Sorted, with sizes and times, by any prefix of the name."""
        before = time.time()
        for name in ("b/2", "a/10", "a/1", "ab", "a-b", "b/2x/deep"):
            store.put(name, [name.encode()])
        assert names_in(second) == sorted(["b/2", "a/10", "a/1", "ab", "a-b", "b/2x/deep"])
        assert names_in(second, "a/") == ["a/1", "a/10"]
        assert names_in(second, "a/1") == ["a/1", "a/10"]
        assert names_in(second, "a/10") == ["a/10"]
        assert names_in(second, "a") == ["a-b", "a/1", "a/10", "ab"]
        assert names_in(second, "b/2") == ["b/2", "b/2x/deep"]
        assert names_in(second, "none/of/them") == []
        info = second.list("ab")[0]
        assert info == ObjectInfo("ab", 2, info.modified)
        assert before - 60 < info.modified < time.time() + 60

    def test_an_empty_listing(self, store: Store) -> None:
        """A new store holds nothing."""
        assert store.list() == []

    def test_listing_many_objects(self, store: Store) -> None:
        """None is lost between pages, and all can be deleted at once."""
        names = [f"many/{i:05d}" for i in range(self.many_objects)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, [b"x"]), names))
        assert names_in(store, "many/") == names
        store.delete(names[1:])
        assert names_in(store) == names[:1]

    def test_delete(self, store: Store, second: Store) -> None:
        """What was named is gone, the rest is untouched, and the name is free again."""
        for name in ("d/1", "d/2", "d/3"):
            store.put(name, [name.encode()])
        store.delete(["d/1", "never-there", "d/nor-this", "d/3", "d/2/below"])
        assert names_in(second) == ["d/2"]
        assert content_of(second, "d/2") == b"d/2"
        store.delete(["d/1"])
        store.delete([])
        store.put("d/1", [b"again"])
        assert content_of(second, "d/1") == b"again"

    def test_an_open_object_that_is_deleted(self, store: Store) -> None:
        """It stays readable, or says that it is gone; it never gives other bytes."""
        store.put("doomed", [b"content"])
        with store.open("doomed") as reader:
            store.delete(["doomed"])
            if self.reads_after_delete:
                assert reader.read() == b"content"
            else:
                with pytest.raises(ObjectMissing, match="doomed"):
                    reader.read()

    @pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
    def test_a_name_that_could_lead_elsewhere_is_refused(self, store: Store, name: str) -> None:
        """By every method that takes one, and before anything is written."""
        with pytest.raises(UnsafeName):
            store.put(name, [b"x"])
        with pytest.raises(UnsafeName):
            store.publish(name, b"x")
        with pytest.raises(UnsafeName):
            store.open(name)
        store.put("good", [b"x"])
        with pytest.raises(UnsafeName):
            store.delete(["good", name])
        assert names_in(store) == ["good"]

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../", "a//", ".hidden", "A", "a/.x", "*"])
    def test_a_prefix_that_no_name_has_is_refused(self, store: Store, prefix: str) -> None:
        """A listing never looks outside of the store."""
        with pytest.raises(UnsafeName):
            store.list(prefix)

    def test_what_was_written_is_there_for_the_next_process(self, store: Store, opener: Opener) -> None:
        """Opening without ``create`` finds it."""
        store.put("chunk", [b"chunk"])
        store.publish("manifest", b"manifest")
        store.close()
        with opener(create=False) as later:
            assert names_in(later) == ["chunk", "manifest"]
            assert content_of(later, "manifest") == b"manifest"

    def test_opening_nothing(self, opener: Opener) -> None:
        """Without ``create`` it is an error, each time: looking makes no store."""
        for _ in range(2):
            with pytest.raises(StoreError, match="no store at"):
                opener(create=False)

    def test_one_writer_at_a_time(self, store: Store, second: Store) -> None:
        """The second is told who the first is, and gets its turn."""
        with store.lock_writer() as lock:
            lock.renew()
            with pytest.raises(StoreLocked, match=f"process {os.getpid()} on host") as refused:
                second.lock_writer()
            assert (refused.value.host, refused.value.pid) == (socket.gethostname(), os.getpid())
            with pytest.raises(StoreLocked):
                store.lock_writer()
            lock.renew()
        lock.release()
        with second.lock_writer(), pytest.raises(StoreLocked):
            store.lock_writer()
        store.lock_writer().release()

    def test_the_lock_is_not_an_object(self, store: Store) -> None:
        """It is neither listed nor in the way."""
        with store.lock_writer():
            assert store.list() == []
            store.put("chunk", [b"x"])
            store.publish("manifest", b"y")
            assert names_in(store) == ["chunk", "manifest"]
        assert names_in(store) == ["chunk", "manifest"]

    def test_the_reserve_is_not_an_object(self, store: Store, second: Store) -> None:
        """It is neither listed nor in the way, and can be given up and kept again."""
        store.put("chunk", [b"x"])
        for _ in range(2):
            store.keep_reserve(1000)
            assert names_in(second) == ["chunk"]
            while store.use_reserve():
                assert names_in(second) == ["chunk"]
        store.clear_unfinished()
        assert names_in(second) == ["chunk"]

    def test_closing_twice(self, store: Store) -> None:
        """Is fine, for a store and a reader."""
        store.put("object", [b"x"])
        reader = store.open("object")
        reader.close()
        reader.close()
        store.close()
        store.close()
