"""What only an object store does: lost connections, wrong keys, leases that run out."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.base import ReadRequest, WriterLock, coalesce
from holdfast.checkpoint.store.s3 import _LARGEST_READ_BYTES, _split_reads
from holdfast.errors import AlreadyExists, StoreError, StoreLocked
from holdfast.testing.proxy import BreakingProxy, breaking_proxy
from holdfast.testing.s3 import ACCESS_KEY, SECRET_KEY, S3Server, running_s3
from holdfast.testing.stores import content_of, names_in
from tests.checkpoint.workers import wait_until_stopped

MIB = 1024 * 1024
IMPATIENT = {"max_retries": 2, "retry_seconds": 20.0, "request_seconds": 20.0}
_places = itertools.count()


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return f"s3://{s3_server.bucket}/only/{next(_places)}"


@pytest.fixture
def store(s3_server: S3Server, url: str) -> Iterator[Store]:
    with open_store(url, create=True, options=s3_server.options()) as store:
        yield store


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[BreakingProxy]:
    with breaking_proxy(int(s3_server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def fragile(s3_server: S3Server, proxy: BreakingProxy, url: str) -> Iterator[Store]:
    """The same place as ``store``, reached through a network that can break."""
    options = s3_server.options(endpoint=f"http://127.0.0.1:{proxy.port}", **IMPATIENT)
    with open_store(url, create=True, options=options) as store:
        yield store


class TestLostConnection:
    @pytest.mark.parametrize(("size", "cut"), [(40 * MIB, 20 * MIB), (4 * MIB, MIB), (100, 0)])
    def test_in_the_middle_of_an_upload(
        self, store: Store, fragile: Store, proxy: BreakingProxy, size: int, cut: int
    ) -> None:
        fragile.put("before", [b"before"])
        proxy.cut_after(cut)
        with pytest.raises(StoreError, match=r"lost the connection .* 'chunk' in s3://.*check the endpoint"):
            fragile.put("chunk", [bytes(size)])
        with pytest.raises(StoreError, match="lost the connection"):
            fragile.publish("manifest", bytes(1000))
        assert proxy.breaks > 0
        assert names_in(store) == ["before"]
        proxy.mend()
        assert fragile.put("chunk", [b"again"]) == 5
        assert content_of(store, "chunk") == b"again"

    @pytest.mark.parametrize("answers", [1, 3], ids=["the first answer", "every answer"])
    def test_after_the_server_did_what_it_was_asked(
        self, store: Store, fragile: Store, proxy: BreakingProxy, answers: int
    ) -> None:
        """The writer must not take its own object for another writer's."""
        proxy.drop_answers("PUT", answers)
        fragile.publish("manifest", b"mine")
        assert proxy.breaks == answers
        assert content_of(store, "manifest") == b"mine"

    def test_another_writers_object_is_not_taken_for_ones_own(
        self, store: Store, fragile: Store, proxy: BreakingProxy
    ) -> None:
        store.publish("manifest", b"same bytes")
        proxy.drop_answers("PUT")
        with pytest.raises(AlreadyExists):
            fragile.publish("manifest", b"same bytes")
        assert proxy.breaks == 1

    def test_reading(self, store: Store, fragile: Store, proxy: BreakingProxy) -> None:
        store.put("chunk", [bytes(1000)])
        with fragile.open("chunk") as reader:
            proxy.cut_after(0)
            with pytest.raises(StoreError, match="lost the connection while trying to read 'chunk'"):
                reader.read()
            with pytest.raises(StoreError, match="lost the connection while trying to list"):
                fragile.list()
            proxy.mend()
            assert reader.read() == bytes(1000)

    def test_a_server_that_hangs(self, s3_server: S3Server, store: Store, url: str) -> None:
        hurried = s3_server.options(max_retries=2, retry_seconds=2.0, request_seconds=2.0)
        with open_store(url, create=True, options=hurried) as impatient:
            os.kill(s3_server.pid, signal.SIGSTOP)
            try:
                wait_until_stopped(s3_server.pid)  # a busy machine is not quick to stop all of its threads
                with pytest.raises(StoreError, match="lost the connection"):
                    impatient.open("chunk")
            finally:
                os.kill(s3_server.pid, signal.SIGCONT)
        assert names_in(store) == []


def test_a_server_that_dies_leaves_nothing_behind() -> None:
    with running_s3() as server:
        folder = Path(os.readlink(f"/proc/{server.pid}/cwd"))
        store = open_store(f"s3://{server.bucket}/x", create=True, options=server.options(**IMPATIENT))
        store.put("chunk", [b"x"])
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(StoreError, match="lost the connection"):
            store.put("another", [b"x"])
        store.close()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(server.pid, 0)


class TestAccess:
    @pytest.mark.parametrize("wrong", [{"secret_access_key": "wrong"}, {"access_key_id": "nobody"}])
    def test_a_wrong_key_is_refused_at_once(
        self, s3_server: S3Server, url: str, wrong: dict[str, str]
    ) -> None:
        with pytest.raises(StoreError, match=r"no permission to open .*check the access key"):
            open_store(url, create=True, options=s3_server.options(**wrong))

    def test_a_bucket_that_is_not_there(self, s3_server: S3Server) -> None:
        with pytest.raises(StoreError, match="no such bucket"):
            open_store("s3://not-there/x", create=True, options=s3_server.options())

    def test_the_environment_is_enough(
        self, s3_server: S3Server, store: Store, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("chunk", [b"x"])
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        with open_store(url, create=False) as found:
            assert names_in(found) == ["chunk"]

    def test_a_prefix_is_a_wall(self, s3_server: S3Server, store: Store, url: str) -> None:
        store.put("chunk", [b"x"])
        with open_store(f"{url}-sibling", create=True, options=s3_server.options()) as sibling:
            assert names_in(sibling) == []
            sibling.put("chunk", [b"y"])
            sibling.delete(["chunk"])
        assert content_of(store, "chunk") == b"x"


class TestReading:
    def test_an_object_that_was_replaced_by_a_shorter_one(self, store: Store) -> None:
        store.put("chunk", [b"0123456789"])
        with store.open("chunk") as reader:
            store.delete(["chunk"])
            store.put("chunk", [b"0123"])
            with pytest.raises(StoreError, match="'chunk' is cut short: 10 bytes were expected, 4 found"):
                reader.read()

    def test_requests_are_of_a_fair_size_and_leave_nothing_out(self) -> None:
        chance = random.Random(4)
        size = 5 * _LARGEST_READ_BYTES
        for _ in range(30):
            ranges = [
                (chance.randrange(size), chance.choice([1, 5000, 2 * MIB, _LARGEST_READ_BYTES + 7]))
                for _ in range(chance.randint(1, 30))
            ]
            if chance.random() < 0.7:
                ranges.sort()
            out = memoryview(bytearray(sum(length for _, length in ranges)))
            groups = list(_split_reads(coalesce(ranges, out)))
            assert all(group[-1].end - group[0].offset <= _LARGEST_READ_BYTES for group in groups)
            pieces = [piece for group in groups for piece in group]
            assert total_bytes(pieces) == out.nbytes
            assert [byte_at(pieces, i) for i in range(0, out.nbytes, out.nbytes // 7 + 1)] == [
                byte_at(plain(ranges, out), i) for i in range(0, out.nbytes, out.nbytes // 7 + 1)
            ]

    def test_near_ranges_share_a_request(self) -> None:
        ranges = [(i * 20_000, 16_000) for i in range(100)]
        out = memoryview(bytearray(1_600_000))
        assert len(list(_split_reads(coalesce(ranges, out)))) == 1


def total_bytes(requests: list[ReadRequest]) -> int:
    return sum(request.into.nbytes for request in requests)


def plain(ranges: list[tuple[int, int]], out: memoryview) -> list[ReadRequest]:
    """The obvious way: one request for each range."""
    ends = list(itertools.accumulate(length for _, length in ranges))
    return [ReadRequest(o, out[end - n : end]) for (o, n), end in zip(ranges, ends, strict=True)]


def byte_at(requests: list[ReadRequest], position: int) -> int:
    """Return the offset in the object of the byte that comes to ``position`` in the output."""
    for request in requests:
        if position < request.into.nbytes:
            return request.offset + position
        position -= request.into.nbytes
    raise IndexError(position)


class TestLease:
    def test_of_many_that_find_a_lease_that_ended_one_takes_it(
        self, s3_server: S3Server, store: Store, url: str
    ) -> None:
        """As after a writer that was killed: nobody released its lease."""
        import obstore

        ended = {"owner": "dead", "host": "gone", "pid": 1, "expires": 1.0}
        obstore.put(store._bucket, "writer.lease", json.dumps(ended).encode())  # type: ignore[attr-defined]

        def lock(_: int) -> WriterLock | None:
            with open_store(url, create=True, options=s3_server.options()) as writer:
                try:
                    return writer.lock_writer()
                except StoreLocked:
                    return None

        with ThreadPoolExecutor(6) as pool:
            held = [lock for lock in pool.map(lock, range(6)) if lock is not None]
        assert len(held) == 1
        held[0].release()

    def test_a_lease_that_runs_names_its_end(self, store: Store) -> None:
        with (
            store.lock_writer(),
            pytest.raises(StoreLocked, match=r"its lease runs out at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"),
        ):
            store.lock_writer()
