"""The transport over real sockets: what gets through, what does not, and that nothing stops a node."""

from __future__ import annotations

import contextlib
import itertools
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
import xxhash
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import (
    Commit,
    Part,
    Peer,
    Pull,
    PulledRows,
    Pushed,
    ViewNumber,
    WorkerBeat,
)
from holdfast.cluster.protocol.wire import Header, encode
from holdfast.cluster.runtime.keys import JobKeys, Keys
from holdfast.cluster.runtime.transport.packing import pack
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.zmq import COPY_BELOW_BYTES, Limits, ZmqTransport
from holdfast.errors import ConfigError

SERVER = Peer("server", 3)
WORKER = Peer("worker", 1, 2)
JOB = "job-a"


KEYS = JobKeys(servers=10, workers=20)


class Net:
    """Where nodes of a test listen: on Unix sockets in a private folder, or on TCP with keys."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        self._numbers = itertools.count()

    def keys(self, me: Peer) -> Keys | None:
        return KEYS.of(me) if self.kind == "tcp" else None

    def address(self) -> str:
        return "tcp://127.0.0.1" if self.kind == "tcp" else self.nowhere()

    def nowhere(self) -> str:
        """An endpoint at which nobody is."""
        return "tcp://127.0.0.1:9" if self.kind == "tcp" else f"ipc://{self._folder}/{next(self._numbers)}"

    def listen(self, me: Peer = SERVER, **options: Any) -> ZmqTransport:
        return ZmqTransport(me, JOB, self.address(), self.keys(me), **options)

    def join(self, me: Peer = WORKER, **options: Any) -> ZmqTransport:
        return ZmqTransport(me, JOB, None, self.keys(me), **options)

    @contextlib.contextmanager
    def pair(self, **options: Any) -> Iterator[tuple[ZmqTransport, ZmqTransport]]:
        """A server that listens and a worker that is connected to it."""
        with self.listen(**options) as server, self.join(**options) as worker:
            worker.connect("server", 3, server.endpoint)
            yield server, worker


@pytest.fixture(params=["ipc", "tcp"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    with private_folder() as folder:
        yield Net(request.param, folder)


@pytest.fixture
def local() -> Iterator[Net]:
    """Where a raw client of this user can connect: without keys."""
    with private_folder() as folder:
        yield Net("ipc", folder)


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


def raw_client(endpoint: str) -> socket.socket:
    scheme, _, address = endpoint.partition("://")
    client = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
    client.settimeout(5)
    host, _, port = address.rpartition(":")
    client.connect(address if scheme == "ipc" else (host, int(port)))
    return client


def header(job: str = JOB, target: Peer = SERVER) -> bytes:
    """A message without arrays."""
    return bytes(pack(job, Envelope(WORKER, target, Commit(1)))[0])


def sealed(content: bytes) -> bytes:
    """What is no message, with a checksum that is right."""
    return struct.pack("<QI", xxhash.xxh3_64_intdigest(content), len(content)) + content


def test_a_request_and_its_answer_with_arrays(net: Net) -> None:
    places = [np.arange(5, dtype=np.uint32), np.arange(70_000, dtype=np.uint32)]
    with net.pair() as (server, worker):
        assert server.endpoint.startswith(f"{net.kind}://")
        assert worker.endpoint == ""
        pull = Pull(7, (Part(0, 5), Part(1, 70_000)))
        assert worker.send(Envelope(WORKER, SERVER, pull, places))
        [asked] = take(server)
        assert (asked.source, asked.target, asked.message) == (WORKER, SERVER, pull)
        for place, frame in zip(places, asked.frames, strict=True):
            np.testing.assert_array_equal(as_array(frame, np.uint32, place.shape), place)
        weights = np.random.default_rng(1).random((70_000, 4), np.float32)
        assert server.send(Envelope(SERVER, WORKER, PulledRows(7, (Part(1, 70_000),), (0,)), [weights]))
        [answer] = take(worker)
        assert answer.message == PulledRows(7, (Part(1, 70_000),), (0,))
        np.testing.assert_array_equal(as_array(answer.frames[0], np.float32, weights.shape), weights)
        sizes = sum(place.nbytes for place in places)
        assert worker.counters.sent == server.counters.received == 1
        assert worker.counters.sent_bytes == server.counters.received_bytes > sizes


def test_large_and_empty_frames(net: Net) -> None:
    large = np.random.default_rng(2).integers(0, 1 << 32, 16 << 20, np.uint32)  # 64 MB
    frames: list[Frame] = [
        b"",
        large,
        np.empty((0, 16), np.float32),
        memoryview(b"abc"),
        large[:40].reshape(5, 8)[:, :3],
    ]
    with net.pair() as (server, worker):
        assert worker.send(Envelope(WORKER, SERVER, Commit(1), frames))
        [got] = take(server)
        assert [memoryview(frame).nbytes for frame in got.frames] == [0, large.nbytes, 0, 3, 60]  # type: ignore[arg-type]
        np.testing.assert_array_equal(as_array(got.frames[1], np.uint32, large.shape), large)
        np.testing.assert_array_equal(
            as_array(got.frames[4], np.uint32, (5, 3)), large[:40].reshape(5, 8)[:, :3]
        )


def test_arrays_that_come_in_are_aligned(net: Net) -> None:
    """ZeroMQ's own buffers of small frames are not, and compiled kernels would not take them."""
    with net.pair() as (server, worker):
        for rows in (1, 3, 500, 2000, 3000, 5000, 40_000):
            array = np.arange(rows, dtype=np.float64)
            assert worker.send(Envelope(WORKER, SERVER, Commit(1), [b"x", array, array]))
            [got] = take(server)
            for frame in got.frames[1:]:
                assert as_array(frame, np.float64, (rows,)).flags.aligned


def test_large_frames_are_not_copied(local: Net) -> None:
    """Sending holds on to the array itself, receiving hands out ZeroMQ's memory."""
    with local.pair() as (server, worker):
        array = np.ones(COPY_BELOW_BYTES, np.uint8)
        references = sys.getrefcount(array)
        worker.connect("server", 9, local.nowhere())  # nobody takes it from there
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


def test_many_peers(net: Net) -> None:
    peers = [Peer("worker", slot, 1) for slot in range(20)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(net.listen())
        workers = [stack.enter_context(net.join(peer)) for peer in peers]
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


def test_a_supervisor_reaches_whoever_has_spoken(net: Net) -> None:
    me = Peer("supervisor")
    with net.listen(me) as supervisor, net.join() as worker:
        assert not supervisor.send(Envelope(me, WORKER, Commit(1)))
        assert supervisor.counters.unroutable == 1
        worker.connect("supervisor", 0, supervisor.endpoint)
        worker.send(Envelope(WORKER, me, WorkerBeat("ready", ViewNumber())))
        take(supervisor)
        assert supervisor.send(Envelope(me, WORKER, Commit(2)))
        assert take(worker)[0].message == Commit(2)
        older = Peer("worker", 1, 1)  # the incarnation that it replaced
        assert not supervisor.send(Envelope(me, older, Commit(3)))
        assert supervisor.counters.unroutable == 2
        assert not worker.send(Envelope(WORKER, SERVER, Commit(4)))
        assert worker.counters.unroutable == 1


CONTENT = header()[12:]
GARBAGE = [
    [b""],
    [b"\xff" * 100],
    [header()[:-1]],
    [header() + b"x"],
    [sealed(CONTENT[:-1])],
    [sealed(CONTENT + b"x")],
    [sealed(b"\x94\xa1\xff")],  # text that is no UTF-8
    [sealed(b"\x91" * 100_000)],  # nested deeper than any stack
    [sealed(b"\xdd\xff\xff\xff\xff")],  # "an array of four billion"
    [b"", header()],
    [header(), b""],  # an array that the header does not name
    [header()] + [b""] * 1025,
    [sealed(b"\x00" * ((1 << 20) + 1))],
    [sealed(encode(Header(JOB, WORKER, SERVER, Commit(1), (1 << 62,))))],
    [sealed(encode(Header(JOB, WORKER, SERVER, Commit(1), (-1,))))],
    [sealed(encode(Header(JOB, WORKER, SERVER, Commit(1), (0,) * 1025)))],
]


def test_garbage_is_counted_and_does_no_harm(local: Net) -> None:
    with local.pair() as (server, worker), raw_dealer(server.endpoint) as dealer:
        for parts in GARBAGE:
            dealer.send_multipart(parts)
        until(lambda: server.counters.malformed == len(GARBAGE), server)
        dealer.send_multipart([header(job="job-b")])
        dealer.send_multipart([header(target=Peer("server", 4))])
        dealer.send_multipart([header(target=Peer("worker", 3))])
        until(lambda: server.counters.misdirected == 2, server)
        assert server.counters.other_job == 1
        assert server.counters.received == 0
        works(server, worker)


def test_garbage_from_a_server_does_its_worker_no_harm(local: Net) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        endpoint = local.nowhere()
        router.bind(endpoint)
        with local.join() as worker:
            worker.connect("server", 3, endpoint)
            worker.send(Envelope(WORKER, SERVER, Commit(1)))
            route = router.recv_multipart()[0]
            other = pack(JOB, Envelope(Peer("server", 4), WORKER, Commit(1)))
            for parts in ([b""], [b"junk", b"junk"], [header()], other):
                router.send_multipart([route, *parts])
            until(lambda: worker.counters.dropped == 4, worker)
            counters = worker.counters
            assert (counters.malformed, counters.misdirected, counters.impostors) == (2, 1, 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(0, 200), st.integers(0, 255))
def test_any_bytes_at_all(parts: list[bytes], place: int, value: int) -> None:
    """Random frames, and a real header with one byte changed, with a checksum that is right and one that is
    not."""
    changed = bytearray(CONTENT)
    changed[place % len(changed)] = value
    server, dealer = _FUZZED.get()
    counters = server.counters
    total = counters.dropped + counters.received
    dealer.send_multipart(parts)
    dealer.send_multipart([sealed(bytes(changed))])
    dealer.send_multipart([header()[:12] + bytes(changed), *parts])
    until(lambda: counters.dropped + counters.received == total + 3, server)


class _Fuzzed:
    """One server and one raw client for all examples."""

    def __init__(self) -> None:
        self.open: tuple[ZmqTransport, zmq.Socket[bytes]] | None = None
        self.stack = contextlib.ExitStack()

    def get(self) -> tuple[ZmqTransport, zmq.Socket[bytes]]:
        if self.open is None:
            net = Net("ipc", self.stack.enter_context(private_folder()))
            server = self.stack.enter_context(net.listen())
            self.open = server, self.stack.enter_context(raw_dealer(server.endpoint))
        return self.open


_FUZZED = _Fuzzed()


@pytest.fixture(scope="module", autouse=True)
def _close_fuzzed() -> Iterator[None]:
    yield
    _FUZZED.stack.close()


def test_a_message_that_was_damaged_is_dropped_and_the_next_one_is_not(local: Net) -> None:
    """One bit of whatever part, and a part that is missing, doubled, or in another's place (hole 20)."""
    arrays: list[Frame] = [np.arange(9, dtype=np.uint32), b"", np.ones((40, 1000), np.float32), b"abc"]
    sent = [bytes(part) for part in pack(JOB, Envelope(WORKER, SERVER, Commit(1), arrays))]
    random = np.random.default_rng(3)
    damaged = [[*sent[:at], *sent[at + 1 :]] for at in (1, 3, 4)]
    damaged += [[*sent, sent[1]], [sent[0], sent[1], sent[4], sent[3], sent[2]]]
    for at, part in enumerate(sent):
        for bit in random.integers(0, 8 * len(part), 20) if part else ():
            flipped = bytearray(part)
            flipped[bit // 8] ^= 1 << (bit % 8)
            damaged.append([*sent[:at], bytes(flipped), *sent[at + 1 :]])
    with local.pair() as (server, worker), raw_dealer(server.endpoint) as dealer:
        for parts in damaged:
            dealer.send_multipart(parts)
        until(lambda: server.counters.dropped == len(damaged), server)
        assert server.counters.received == 0
        assert server.counters.damaged > 50, "the others name a header that is too long"
        dealer.send_multipart(sent)
        [got] = take(server)
        assert [bytes(frame) for frame in got.frames] == sent[1:]
        works(server, worker)


def test_what_is_too_large_is_not_read(local: Net) -> None:
    limits = Limits(max_message_bytes=1 << 20, max_frames=4, max_header_bytes=1000)
    with local.pair(limits=limits) as (server, worker), raw_dealer(server.endpoint) as dealer:
        dealer.send_multipart([header(), *[b"x" * (400 << 10)] * 3])  # each small enough
        dealer.send_multipart(pack(JOB, Envelope(WORKER, SERVER, Commit(1), [b"x"] * 5)))
        dealer.send_multipart([sealed(b"x" * 1001)])
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


def test_a_raw_connection_does_no_harm(net: Net) -> None:
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
    with net.pair() as (server, worker):
        connections = []
        for stream in streams:
            connection = raw_client(server.endpoint)
            connection.sendall(stream)
            connections.append(connection)
        works(server, worker)
        for connection in connections:
            connection.close()
        works(server, worker)
        assert server.counters.received == 2


def test_a_peer_that_comes_back_on_its_endpoint(net: Net) -> None:
    with net.join() as worker:
        first = net.listen()
        endpoint = first.endpoint
        worker.connect("server", 3, endpoint)
        works(first, worker)
        first.close()
        for number in range(3):
            worker.send(Envelope(WORKER, SERVER, Commit(number)))
        with ZmqTransport(SERVER, JOB, endpoint, net.keys(SERVER)) as second:
            assert second.endpoint == endpoint
            deadline = time.monotonic() + 60
            while not second.poll(0.05):
                worker.send(Envelope(WORKER, SERVER, Commit(4)))
                assert time.monotonic() < deadline
            while second.poll(0.1):
                pass
            works(second, worker)


def test_a_peer_that_reconnects_is_answered_there(net: Net) -> None:
    with net.listen() as server:
        for _ in range(2):
            with net.join() as worker:
                worker.connect("server", 3, server.endpoint)
                works(server, worker)
        deadline = time.monotonic() + 60
        while server.send(Envelope(SERVER, WORKER, Commit(1))):  # until its end is noticed
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.counters.unroutable == 1


def test_a_replaced_endpoint(local: Net) -> None:
    with local.listen() as old, local.listen(Peer("server", 3, 1)) as new, local.join() as worker:
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
from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
t = ZmqTransport(Peer("server", 3), "job-a", sys.argv[2])
print(t.endpoint, flush=True)
t.connect("worker", 1, sys.argv[1])
from holdfast.cluster.protocol.messages import Commit
from holdfast.cluster.protocol.envelope import Envelope
t.send(Envelope(t.me, Peer("worker", 1, 2), Commit(5)))
while True:
    t.poll(1.0)
"""


def test_sends_to_a_stopped_peer_never_wait(local: Net) -> None:
    with local.listen(WORKER, limits=Limits(max_queued=8)) as worker:
        child = subprocess.Popen(
            [sys.executable, "-c", _STOPPED, worker.endpoint, local.nowhere()],
            stdout=subprocess.PIPE,
            text=True,
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


def test_queues_of_dead_peers_are_bounded(net: Net) -> None:
    with net.join(limits=Limits(max_queued=8)) as worker:
        worker.connect("server", 3, net.nowhere())
        results = [worker.send(Envelope(WORKER, SERVER, Commit(1))) for _ in range(20)]
        assert results == [True] * 8 + [False] * 12
        assert (worker.counters.sent, worker.counters.full) == (8, 12)


def test_closing_sends_what_was_sent_and_waits_for_nobody(local: Net) -> None:
    with local.listen() as server:
        worker = local.join()
        worker.connect("server", 3, server.endpoint)
        worker.connect("server", 9, local.nowhere())
        worker.send(Envelope(WORKER, SERVER, Commit(1), [np.ones(1 << 20)]))
        worker.send(Envelope(WORKER, Peer("server", 9), Commit(1)))
        start = time.monotonic()
        worker.close()
        worker.close()
        assert time.monotonic() - start < 5
        take(server)


def test_waking_a_poll_from_another_thread(local: Net) -> None:
    with local.join() as worker:
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


def test_a_transport_that_cannot_be_made_leaves_nothing(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is left open keeps its context from closing."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqTransport(SERVER, JOB, "tcp://192.0.2.1", KEYS.of(SERVER))  # kept for examples: nobody has it
    monkeypatch.setattr("holdfast.cluster.runtime.transport.zmq.COPY_BELOW_BYTES", 1 << 40)
    with pytest.raises(OverflowError):
        net.listen()
    assert set(os.listdir("/proc/self/fd")) <= before
