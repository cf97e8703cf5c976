"""Links that are broken on purpose, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Commit, Peer
from holdfast.cluster.runtime.transport.links import Links
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.zmq import ZmqTransport

SERVER, OTHER = Peer("server", 2, 1), Peer("server", 3, 1)
WORKER = Peer("worker", 1, 4)
LONG = 3600.0


@contextmanager
def nodes(path: Path) -> Iterator[tuple[ZmqTransport, ZmqTransport, ZmqTransport]]:
    """A server, and a worker and another server that talk to it; each maps the file by itself."""
    with (
        private_folder() as sockets,
        ZmqTransport(SERVER, "job", f"ipc://{sockets}/s", links=Links(path)) as server,
        ZmqTransport(WORKER, "job", None, links=Links(path)) as worker,
        ZmqTransport(OTHER, "job", None, links=Links(path)) as other,
    ):
        for each in (worker, other):
            each.connect("server", SERVER.slot, server.endpoint)
        yield server, worker, other


def heard(transport: ZmqTransport, count: int, seconds: float = 20.0) -> list[Envelope]:
    """What comes, up to so many."""
    found: list[Envelope] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += transport.poll(0.02)
    return found


def tell(transport: ZmqTransport, target: Peer, *sequences: int) -> None:
    for sequence in sequences:
        assert transport.send(Envelope(transport.me, target, Commit(sequence)))


def numbers(envelopes: list[Envelope]) -> list[int]:
    return [e.message.sequence for e in envelopes if isinstance(e.message, Commit)]


def test_a_cut_link_takes_nothing_either_way_and_others_do_not_notice(tmp_path: Path) -> None:
    links = Links(tmp_path / "links", create=True)
    with nodes(tmp_path / "links") as (server, worker, other):
        tell(worker, SERVER, 1)
        tell(other, SERVER, 1)
        assert len(heard(server, 2)) == 2
        links.break_link(Peer("worker", WORKER.slot), Peer("server", SERVER.slot), time.monotonic() + LONG)
        tell(worker, SERVER, 2)
        tell(other, SERVER, 2)
        tell(server, WORKER, 2)
        assert [e.source for e in heard(server, 2, seconds=1.0)] == [OTHER]
        assert heard(worker, 1, seconds=0.5) == []
        links.mend()
        tell(worker, SERVER, 3)
        tell(server, WORKER, 3)
        assert numbers(heard(server, 1)) == [3], "what was lost is lost"
        assert numbers(heard(worker, 1)) == [3]


def test_a_slow_link_takes_everything_in_the_end(tmp_path: Path) -> None:
    links = Links(tmp_path / "links", create=True)
    with nodes(tmp_path / "links") as (server, worker, _):
        tell(worker, SERVER, 0)
        heard(server, 1)
        links.slow(Peer("worker", WORKER.slot), time.monotonic() + LONG, 0.3)
        tell(worker, SERVER, *range(1, 101))
        found = numbers(heard(server, 100))
        assert sorted(found) == list(range(1, 101))
        assert found != sorted(found), "they come out of order"
        tell(server, WORKER, *range(5))
        assert sorted(numbers(heard(worker, 5))) == list(range(5))


def test_a_table_knows_every_node_apart(tmp_path: Path) -> None:
    links = Links(tmp_path / "links", create=True)
    peers = [Peer("supervisor"), Peer("launcher"), *(Peer("server", s) for s in range(5))]
    peers += [Peer("worker", w) for w in range(5)]
    links.break_link(Peer("server", 1), Peer("worker", 1), 7.0)
    cut = {(a, b) for a in peers for b in peers if links.state(a, b)[0]}
    one, other = Peer("server", 1), Peer("worker", 1)
    assert cut == {(one, other), (other, one)}
