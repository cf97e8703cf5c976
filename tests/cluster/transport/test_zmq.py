"""The transport over real sockets: what gets through, what does not, and that nothing stops a node."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.messages import Beat, Commit, Part, Peer, Pull, Pushed, Rows, ViewNumber
from holdfast.cluster.transport.base import Envelope, Frame, as_array
from holdfast.cluster.transport.zmq import COPY_BELOW_BYTES, Limits, ZmqTransport
from holdfast.cluster.wire import Header, encode
from holdfast.errors import ConfigError

SERVER = Peer("server", 3)
WORKER = Peer("worker", 1, 2)
JOB = "job-a"


@contextlib.contextmanager
def pair(bind: str = "tcp://127.0.0.1", **options: Any) -> Iterator[tuple[ZmqTransport, ZmqTransport]]:
    """A server that listens and a worker that is connected to it."""
    with (
        ZmqTransport(SERVER, JOB, bind, **options) as server,
        ZmqTransport(WORKER, JOB, None, **options) as worker,
    ):
        worker.connect("server", 3, server.endpoint)
        yield server, worker


def until(done: Callable[[], bool], *transports: ZmqTransport, seconds: float = 60.0) -> list[Envelope]:
    """Poll until something holds; what came in meanwhile."""
    seen: list[Envelope] = []
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, [transport.counters for transport in transports]
        for transport in transports:
            seen += transport.poll(0.01)
    return seen


def take(transport: ZmqTransport, count: int = 1, *others: ZmqTransport) -> list[Envelope]:
    """The next so many messages; the others are polled too."""
    seen: list[Envelope] = []
    deadline = time.monotonic() + 60
    while len(seen) < count:
        assert time.monotonic() < deadline, (len(seen), transport.counters)
        seen += transport.poll(0.02)
        for other in others:
            assert other.poll(0) == []
    assert len(seen) == count
    return seen


def works(server: ZmqTransport, worker: ZmqTransport) -> None:
    """A request and its answer go through."""
    assert worker.send(Envelope(WORKER, SERVER, Commit(99)))
    [asked] = take(server, 1, worker)
    assert asked.message == Commit(99)
    assert server.send(Envelope(SERVER, asked.source, Pushed(99, True)))
    [answer] = take(worker, 1, server)
    assert (answer.source, answer.message) == (SERVER, Pushed(99, True))


@contextlib.contextmanager
def raw_dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(endpoint)
        yield dealer


def raw_tcp(endpoint: str) -> socket.socket:
    host, port = endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def header(job: str = JOB, target: Peer = SERVER) -> bytes:
    return encode(Header(job, WORKER, target, Commit(1)))


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_request_and_its_answer_with_arrays(kind: str, tmp_path: Path) -> None:
    bind = "tcp://127.0.0.1" if kind == "tcp" else f"ipc://{tmp_path}/s"
    places = [np.arange(5, dtype=np.uint32), np.arange(70_000, dtype=np.uint32)]
    with pair(bind) as (server, worker):
        assert server.endpoint.startswith(bind)
        assert worker.endpoint == ""
        pull = Pull(7, (Part(0, 5), Part(1, 70_000)))
        assert worker.send(Envelope(WORKER, SERVER, pull, places))
        [asked] = take(server)
        assert (asked.source, asked.target, asked.message) == (WORKER, SERVER, pull)
        for place, frame in zip(places, asked.frames, strict=True):
            np.testing.assert_array_equal(as_array(frame, np.uint32, place.shape), place)
        weights = np.random.default_rng(1).random((70_000, 4), np.float32)
        assert server.send(Envelope(SERVER, WORKER, Rows(7, (Part(1, 70_000),), (0,)), [weights]))
        [answer] = take(worker)
        assert answer.message == Rows(7, (Part(1, 70_000),), (0,))
        np.testing.assert_array_equal(as_array(answer.frames[0], np.float32, weights.shape), weights)
        sizes = sum(place.nbytes for place in places)
        assert worker.counters.sent == server.counters.received == 1
        assert worker.counters.sent_bytes == server.counters.received_bytes > sizes


def test_large_and_empty_frames() -> None:
    large = np.random.default_rng(2).integers(0, 1 << 32, 16 << 20, np.uint32)  # 64 MB
    frames: list[Frame] = [
        b"",
        large,
        np.empty((0, 16), np.float32),
        memoryview(b"abc"),
        large[:40].reshape(5, 8)[:, :3],
    ]
    with pair() as (server, worker):
        assert worker.send(Envelope(WORKER, SERVER, Commit(1), frames))
        [got] = take(server)
        assert [memoryview(frame).nbytes for frame in got.frames] == [0, large.nbytes, 0, 3, 60]  # type: ignore[arg-type]
        np.testing.assert_array_equal(as_array(got.frames[1], np.uint32, large.shape), large)
        np.testing.assert_array_equal(
            as_array(got.frames[4], np.uint32, (5, 3)), large[:40].reshape(5, 8)[:, :3]
        )


def test_arrays_that_come_in_are_aligned() -> None:
    """ZeroMQ's own buffers of small frames are not, and compiled kernels would not take them."""
    with pair() as (server, worker):
        for rows in (1, 3, 500, 2000, 3000, 5000, 40_000):
            array = np.arange(rows, dtype=np.float64)
            assert worker.send(Envelope(WORKER, SERVER, Commit(1), [b"x", array, array]))
            [got] = take(server)
            for frame in got.frames[1:]:
                assert as_array(frame, np.float64, (rows,)).flags.aligned


def test_large_frames_are_not_copied() -> None:
    """Sending holds on to the array itself, receiving hands out ZeroMQ's memory."""
    with pair() as (server, worker):
        array = np.ones(COPY_BELOW_BYTES, np.uint8)
        references = sys.getrefcount(array)
        worker.connect("server", 9, "tcp://127.0.0.1:9")  # nobody takes it from there
        worker.send(Envelope(WORKER, Peer("server", 9), Commit(1), [array]))
        assert sys.getrefcount(array) > references
        small = np.ones(COPY_BELOW_BYTES - 1, np.uint8)
        references = sys.getrefcount(small)
        worker.send(Envelope(WORKER, Peer("server", 9), Commit(1), [small]))
        assert sys.getrefcount(small) == references
        worker.send(Envelope(WORKER, SERVER, Commit(1), [array, b"small"]))
        [got] = take(server)
        assert isinstance(got.frames[0], memoryview)
        assert isinstance(got.frames[0].obj, zmq.Frame)


def test_many_peers() -> None:
    peers = [Peer("worker", slot, 1) for slot in range(20)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ZmqTransport(SERVER, JOB, "tcp://127.0.0.1"))
        workers = [stack.enter_context(ZmqTransport(peer, JOB, None)) for peer in peers]
        for worker in workers:
            worker.connect("server", 3, server.endpoint)
            for number in range(5):
                assert worker.send(Envelope(worker.me, SERVER, Commit(number)))
        for asked in take(server, 100):
            assert isinstance(asked.message, Commit)
            answer = Pushed(asked.message.sequence * 100 + asked.source.slot, True)
            assert server.send(Envelope(SERVER, asked.source, answer))
        for worker in workers:
            numbers = [answer.message for answer in take(worker, 5)]
            assert numbers == [Pushed(number * 100 + worker.me.slot, True) for number in range(5)]


def test_a_supervisor_reaches_whoever_has_spoken() -> None:
    me = Peer("supervisor")
    with ZmqTransport(me, JOB, "tcp://127.0.0.1") as supervisor, ZmqTransport(WORKER, JOB, None) as worker:
        assert not supervisor.send(Envelope(me, WORKER, Commit(1)))
        assert supervisor.counters.unroutable == 1
        worker.connect("supervisor", 0, supervisor.endpoint)
        worker.send(Envelope(WORKER, me, Beat("ready", ViewNumber())))
        take(supervisor)
        assert supervisor.send(Envelope(me, WORKER, Commit(2)))
        assert take(worker)[0].message == Commit(2)
        older = Peer("worker", 1, 1)  # the incarnation that it replaced
        assert not supervisor.send(Envelope(me, older, Commit(3)))
        assert supervisor.counters.unroutable == 2
        assert not worker.send(Envelope(WORKER, SERVER, Commit(4)))
        assert worker.counters.unroutable == 1


GARBAGE = [
    [],
    [b""],
    [b"\xff" * 100],
    [header()[:-1]],
    [header() + b"x"],
    [b"\x94\xa1\xff"],  # text that is no UTF-8
    [b"\x91" * 100_000],  # nested deeper than any stack
    [b"\xdd\xff\xff\xff\xff"],  # "an array of four billion"
    [b"", header()],
    [header()] + [b""] * 1025,
    [b"\x00" * ((1 << 20) + 1)],
]


def test_garbage_is_counted_and_does_no_harm() -> None:
    with pair() as (server, worker), raw_dealer(server.endpoint) as dealer:
        sent = [parts for parts in GARBAGE if parts]
        for parts in sent:
            dealer.send_multipart(parts)
        until(lambda: server.counters.malformed == len(sent), server)
        dealer.send_multipart([header(job="job-b")])
        dealer.send_multipart([header(target=Peer("server", 4))])
        dealer.send_multipart([header(target=Peer("worker", 3))])
        until(lambda: server.counters.misdirected == 2, server)
        assert server.counters.other_job == 1
        assert server.counters.received == 0
        works(server, worker)


def test_garbage_from_a_server_does_its_worker_no_harm() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with ZmqTransport(WORKER, JOB, None) as worker:
            worker.connect("server", 3, f"tcp://127.0.0.1:{port}")
            worker.send(Envelope(WORKER, SERVER, Commit(1)))
            route = router.recv_multipart()[0]
            for parts in ([b""], [b"junk", b"junk"], [header()]):
                router.send_multipart([route, *parts])
            until(lambda: worker.counters.malformed == 2 and worker.counters.misdirected == 1, worker)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(0, 200), st.integers(0, 255))
def test_any_bytes_at_all(parts: list[bytes], place: int, value: int) -> None:
    """Random frames, and a real header with one byte changed."""
    changed = bytearray(header())
    changed[place % len(changed)] = value
    server, dealer = _FUZZED.get()
    before = server.counters
    total = before.malformed + before.other_job + before.misdirected + before.received
    dealer.send_multipart(parts)
    dealer.send_multipart([bytes(changed), *parts])

    def counted() -> bool:
        now = server.counters
        return now.malformed + now.other_job + now.misdirected + now.received == total + 2

    until(counted, server)


class _Fuzzed:
    """One server and one raw client for all examples."""

    def __init__(self) -> None:
        self.open: tuple[ZmqTransport, zmq.Socket[bytes]] | None = None
        self.stack = contextlib.ExitStack()

    def get(self) -> tuple[ZmqTransport, zmq.Socket[bytes]]:
        if self.open is None:
            server = self.stack.enter_context(ZmqTransport(SERVER, JOB, "tcp://127.0.0.1"))
            self.open = server, self.stack.enter_context(raw_dealer(server.endpoint))
        return self.open


_FUZZED = _Fuzzed()


@pytest.fixture(scope="module", autouse=True)
def _close_fuzzed() -> Iterator[None]:
    yield
    _FUZZED.stack.close()


def test_what_is_too_large_is_not_read() -> None:
    limits = Limits(max_message_bytes=1 << 20, max_frames=4, max_header_bytes=1000)
    with pair(limits=limits) as (server, worker), raw_dealer(server.endpoint) as dealer:
        dealer.send_multipart([header(), *[b"x" * (400 << 10)] * 3])  # each small enough
        dealer.send_multipart([header(), *[b"x"] * 5])
        dealer.send_multipart([b"x" * 1001])
        until(lambda: server.counters.malformed == 3, server)
        dealer.send_multipart([header(), b"x" * (2 << 20)])  # its connection is closed
        time.sleep(0.1)
        works(server, worker)
        assert server.counters.received == 1
        with pytest.raises(ConfigError, match=r"Commit to server 3 has \d+ bytes: expected at most 1048576"):
            worker.send(Envelope(WORKER, SERVER, Commit(1), [bytes(2 << 20)]))
        with pytest.raises(ConfigError, match="5 frames: expected at most 4"):
            worker.send(Envelope(WORKER, SERVER, Commit(1), [b""] * 5))
        works(server, worker)


def test_a_raw_connection_does_no_harm() -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    huge = b"\x02" + struct.pack(">Q", 1 << 62)  # a frame of 4 exabytes
    streams = [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        os.urandom(4096),
        b"\x01\x00" + b"\xff" + struct.pack(">Q", 1 << 62) + b"\x00",  # the oldest ZeroMQ
        greeting[:30],
        greeting,
        greeting + huge,
        greeting + b"\x04\x05\x05READY" + huge,
        greeting + b"\x04\x26\x05READY" + b"\x0bSocket-Type\0\0\0\x06DEALER" + huge,
    ]
    with pair() as (server, worker):
        connections = []
        for stream in streams:
            connection = raw_tcp(server.endpoint)
            connection.sendall(stream)
            connections.append(connection)
        works(server, worker)
        for connection in connections:
            connection.close()
        works(server, worker)
        assert server.counters.received == 2


def test_a_peer_that_comes_back_on_its_endpoint() -> None:
    with ZmqTransport(WORKER, JOB, None) as worker:
        first = ZmqTransport(SERVER, JOB, "tcp://127.0.0.1")
        endpoint = first.endpoint
        worker.connect("server", 3, endpoint)
        works(first, worker)
        first.close()
        for number in range(3):
            worker.send(Envelope(WORKER, SERVER, Commit(number)))
        with ZmqTransport(SERVER, JOB, endpoint) as second:
            assert second.endpoint == endpoint
            deadline = time.monotonic() + 60
            while not second.poll(0.05):
                worker.send(Envelope(WORKER, SERVER, Commit(4)))
                assert time.monotonic() < deadline
            while second.poll(0.1):
                pass
            works(second, worker)


def test_a_peer_that_reconnects_is_answered_there() -> None:
    with ZmqTransport(SERVER, JOB, "tcp://127.0.0.1") as server:
        for _ in range(2):
            with ZmqTransport(WORKER, JOB, None) as worker:
                worker.connect("server", 3, server.endpoint)
                works(server, worker)
        deadline = time.monotonic() + 60
        while server.send(Envelope(SERVER, WORKER, Commit(1))):  # until its end is noticed
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.counters.unroutable == 1


def test_a_replaced_endpoint() -> None:
    with (
        ZmqTransport(SERVER, JOB, "tcp://127.0.0.1") as old,
        ZmqTransport(Peer("server", 3, 1), JOB, "tcp://127.0.0.1") as new,
        ZmqTransport(WORKER, JOB, None) as worker,
    ):
        worker.connect("server", 3, old.endpoint)
        worker.connect("server", 3, old.endpoint)
        works(old, worker)
        worker.connect("server", 3, new.endpoint)
        works(new, worker)
        assert old.poll(0.05) == []
        for wrong in ("tcp://127.0.0.1", "tcp://127.0.0.1:99999", "udp://127.0.0.1:1", "", "tcp://1.2.3.4:5"):
            with pytest.raises(ConfigError):
                worker.connect("server", 3, wrong)
        works(new, worker)


_STOPPED = """
import sys, time
from holdfast.cluster.messages import Peer
from holdfast.cluster.transport.zmq import ZmqTransport
t = ZmqTransport(Peer("server", 3), "job-a", "tcp://127.0.0.1")
print(t.endpoint, flush=True)
t.connect("worker", 1, sys.argv[1])
from holdfast.cluster.messages import Commit
from holdfast.cluster.transport.base import Envelope
t.send(Envelope(t.me, Peer("worker", 1, 2), Commit(5)))
while True:
    t.poll(1.0)
"""


def test_sends_to_a_stopped_peer_never_wait() -> None:
    with ZmqTransport(WORKER, JOB, "tcp://127.0.0.1", limits=Limits(max_queued=8)) as worker:
        child = subprocess.Popen(
            [sys.executable, "-c", _STOPPED, worker.endpoint], stdout=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout is not None
            endpoint = child.stdout.readline().strip()
            [hello] = take(worker)
            child.send_signal(signal.SIGSTOP)
            block = np.ones(1 << 20, np.uint8)
            answer = Envelope(WORKER, hello.source, Commit(1), [block])
            results = [worker.send(answer) for _ in range(64)]  # by its route
            assert results[0]
            assert not results[-1]
            assert worker.counters.full == results.count(False)
            worker.connect("server", 3, endpoint)  # by a connection of our own
            results = [worker.send(answer) for _ in range(64)]
            assert not results[-1]
            assert worker.poll(0) == []
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def test_queues_of_dead_peers_are_bounded() -> None:
    with ZmqTransport(WORKER, JOB, None, limits=Limits(max_queued=8)) as worker:
        worker.connect("server", 3, "tcp://127.0.0.1:9")
        results = [worker.send(Envelope(WORKER, SERVER, Commit(1))) for _ in range(20)]
        assert results == [True] * 8 + [False] * 12
        assert (worker.counters.sent, worker.counters.full) == (8, 12)


def test_closing_sends_what_was_sent_and_waits_for_nobody() -> None:
    with ZmqTransport(SERVER, JOB, "tcp://127.0.0.1") as server:
        worker = ZmqTransport(WORKER, JOB, None)
        worker.connect("server", 3, server.endpoint)
        worker.connect("server", 9, "tcp://127.0.0.1:9")
        worker.send(Envelope(WORKER, SERVER, Commit(1), [np.ones(1 << 20)]))
        worker.send(Envelope(WORKER, Peer("server", 9), Commit(1)))
        start = time.monotonic()
        worker.close()
        worker.close()
        assert time.monotonic() - start < 5
        take(server)


def test_waking_a_poll_from_another_thread() -> None:
    with ZmqTransport(WORKER, JOB, None) as worker:
        timer = threading.Timer(0.05, worker.wake)
        timer.start()
        start = time.monotonic()
        assert worker.poll(30.0) == []
        timer.join()
        worker.wake()
        worker.wake()
        assert worker.poll(30.0) == []
        assert time.monotonic() - start < 10
        start = time.monotonic()
        assert worker.poll(0.03) == []  # both are spent
        assert time.monotonic() - start >= 0.03


def test_limits_make_sense() -> None:
    with pytest.raises(ConfigError, match="max_frames is 0"):
        Limits(max_frames=0)
    with pytest.raises(ConfigError, match=r"max_queued is \d+: expected 1 to 2147483647"):
        Limits(max_queued=1 << 31)


def test_a_transport_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is left open keeps its context from closing."""
    monkeypatch.setattr("holdfast.cluster.transport.zmq.COPY_BELOW_BYTES", 1 << 40)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OverflowError):
        ZmqTransport(SERVER, JOB, "tcp://127.0.0.1")
    assert set(os.listdir("/proc/self/fd")) <= before
