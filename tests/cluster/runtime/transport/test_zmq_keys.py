"""On TCP only members of the job get in, and none can pass for another (hole 36)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Commit, Peer, Pushed, View, ViewNumber
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.keys import JobKeys, Keys
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.door import MOST_UNPROVEN
from holdfast.cluster.runtime.transport.packing import pack
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.errors import ConfigError

SERVER = Peer("server", 3)
WORKER = Peer("worker", 1, 2)
JOB = "job-a"
KEYS = JobKeys(servers=4, workers=2)
STRANGER = JobKeys(servers=4, workers=2).of(WORKER)
"""Of another job."""


@pytest.fixture
def server() -> Iterator[ZmqTransport]:
    with ZmqTransport(SERVER, JOB, "tcp://127.0.0.1", KEYS.of(SERVER)) as transport:
        yield transport


@contextlib.contextmanager
def connected(server: ZmqTransport, keys: Keys, me: Peer = WORKER) -> Iterator[ZmqTransport]:
    with ZmqTransport(me, JOB, None, keys) as worker:
        worker.connect("server", 3, server.endpoint)
        worker.send(Envelope(me, SERVER, Commit(1)))
        yield worker


def poll_for(transport: ZmqTransport, seconds: float) -> list[Envelope]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if seen := transport.poll(0.02):
            return seen
    return []


def works(server: ZmqTransport) -> None:
    """A member gets in and is answered."""
    with connected(server, KEYS.of(WORKER)) as worker:
        [asked] = poll_for(server, 60)
        assert asked.message == Commit(1)
        assert server.send(Envelope(SERVER, WORKER, Pushed(1, True)))
        assert [answer.message for answer in poll_for(worker, 60)] == [Pushed(1, True)]


def is_refused(server: ZmqTransport) -> None:
    deadline = time.monotonic() + 60
    while not server.counters.refused:
        assert server.poll(0.02) == []
        assert time.monotonic() < deadline
    assert server.counters.received == 0


def test_a_member_gets_in(server: ZmqTransport) -> None:
    works(server)
    assert server.counters.refused == 0


def test_a_key_of_another_job_is_refused(server: ZmqTransport) -> None:
    """Its holder knows the server's public key, and the job's name."""
    with connected(server, msgspec.structs.replace(STRANGER, members=KEYS.of(WORKER).members)):
        is_refused(server)
    works(server)


def test_who_does_not_know_the_servers_key_is_refused(server: ZmqTransport) -> None:
    with connected(server, STRANGER):
        is_refused(server)
    works(server)


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN"])
def test_a_client_without_keys_is_refused(server: ZmqTransport, mechanism: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if mechanism == "PLAIN":
            dealer.plain_username, dealer.plain_password = b"a", b"b"
        dealer.connect(server.endpoint)
        dealer.send_multipart(pack(JOB, Envelope(WORKER, SERVER, Commit(1))))
        is_refused(server)
    works(server)


@pytest.mark.parametrize(
    "me", [Peer("supervisor"), Peer("launcher"), Peer("worker", 0, 2), Peer("server", 1)]
)
def test_a_member_cannot_pass_for_another(server: ZmqTransport, me: Peer) -> None:
    """A worker's key, and a message that says that it comes from another role, or from another slot. Another
    incarnation of its own slot is for the protocol to refuse."""
    with connected(server, KEYS.of(WORKER), me) as liar:
        liar.send(Envelope(me, SERVER, View(ViewNumber(9), "stopping")))
        deadline = time.monotonic() + 60
        while server.counters.impostors < 2:
            assert server.poll(0.02) == []
            assert time.monotonic() < deadline
    works(server)
    assert server.counters.received == 1


def test_a_server_that_pretends_learns_nothing() -> None:
    """A member does not talk to one that has not the key of whom it looks for, be it another server's."""
    pretenders = [JobKeys(4, 2).of(SERVER), KEYS.of(Peer("server", 2))]
    for keys in pretenders:
        with (
            ZmqTransport(SERVER, JOB, "tcp://127.0.0.1", keys) as pretender,
            connected(pretender, KEYS.of(WORKER)),
        ):
            assert poll_for(pretender, 0.3) == []
            assert pretender.counters.received == 0


def test_who_is_no_member_cannot_be_connected_to() -> None:
    with ZmqTransport(WORKER, JOB, None, KEYS.of(WORKER)) as worker:
        worker.connect("server", 3, "tcp://192.0.2.1:4000")  # kept for examples: nobody is there
        with pytest.raises(ConfigError, match="server 4 has no key: expected a member of the job"):
            worker.connect("server", 4, "tcp://127.0.0.1:4000")


def test_a_recorded_connection_cannot_be_replayed(server: ZmqTransport) -> None:
    """What a member's connection carried, sent again over another one, does nothing."""
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def carry(source: socket.socket, sink: socket.socket, record: bool) -> None:
            while data := source.recv(65536):
                if record:
                    recorded.append(data)
                sink.sendall(data)

        worker = ZmqTransport(WORKER, JOB, None, KEYS.of(WORKER))
        worker.connect("server", 3, f"tcp://127.0.0.1:{relay.getsockname()[1]}")
        worker.send(Envelope(WORKER, SERVER, Commit(1)))
        client, _ = relay.accept()
        with client, socket.create_connection((host, int(port))) as upstream:
            threads = [
                threading.Thread(target=carry, args=(client, upstream, True)),
                threading.Thread(target=carry, args=(upstream, client, False)),
            ]
            for thread in threads:
                thread.start()
            assert len(poll_for(server, 60)) == 1
            worker.close()
            threads[0].join()
            upstream.shutdown(socket.SHUT_RDWR)
            threads[1].join()
    assert b"commit" not in b"".join(recorded)
    before = server.counters.received
    with socket.create_connection((host, int(port))) as replay:
        replay.sendall(b"".join(recorded))
        assert poll_for(server, 0.3) == []
    assert server.counters.received == before


def test_members_get_in_while_strangers_hold_connections(server: ZmqTransport) -> None:
    """Of those that have not proved who they are only so many stay, each with one part of 64 KB at most; and
    a member that has spoken is not among those that go."""
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    part = b"\x06" + (64 << 10).to_bytes(8, "big") + bytes((64 << 10) - 1)
    with contextlib.ExitStack() as stack, connected(server, KEYS.of(WORKER)) as member:
        assert len(poll_for(server, 60)) == 1
        for _ in range(3 * MOST_UNPROVEN):
            held = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            with contextlib.suppress(OSError):  # it may have been closed already
                held.sendall(greeting + part)
        deadline = time.monotonic() + 60
        while server.counters.shed < 2 * MOST_UNPROVEN - 1:
            assert server.poll(0.02) == []
            assert time.monotonic() < deadline, server.counters
        assert member.send(Envelope(WORKER, SERVER, Commit(2)))
        assert [asked.message for asked in poll_for(server, 60)] == [Commit(2)]
        other = Peer("worker", 0, 1)
        with connected(server, KEYS.of(other), other):
            assert len(poll_for(server, 60)) == 1


def test_keys_are_made_for_one_run_and_one_node_each() -> None:
    mine, theirs = KEYS.of(WORKER), KEYS.of(Peer("worker", 0))
    assert mine == KEYS.of(Peer("worker", 1, 7)), "whatever the incarnation"
    assert (mine.secret != theirs.secret, mine.members == theirs.members) == (True, True)
    assert mine.names[mine.public] == ("worker", 1)
    assert len(mine.names) == 2 + 4 + 2
    assert JobKeys(4, 2).of(WORKER).secret != mine.secret


def test_a_secret_is_in_no_text() -> None:
    keys = KEYS.of(WORKER)
    plan = JobPlan(job="a", seed=0, groups=(), servers=4, workers=2)
    assignment = Assignment(me=WORKER, plan=plan, supervisor="", folder="", keys=keys)
    for text in (repr(keys), str(keys), repr(assignment)):
        assert keys.secret not in text
        assert keys.public in text
    sent = msgspec.json.encode(assignment)
    assert msgspec.json.decode(sent, type=Assignment).keys == keys
