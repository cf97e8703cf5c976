"""What a launcher starts, whoever else may be a launcher."""

from __future__ import annotations

from holdfast.cluster.protocol.messages import Peer, ServerInView, View, ViewNumber, WorkerInView
from holdfast.cluster.supervisor.starts import Starts


def view(number: int, launcher: int, *servers: int, worker: int = 1) -> View:
    entries = tuple(ServerInView(slot, incarnation) for slot, incarnation in enumerate(servers))
    return View(ViewNumber(number), "running", entries, (WorkerInView(0, worker),), launcher=launcher)


def begun(starts: Starts, number: int, launcher: int, *servers: int, worker: int = 1) -> list[Peer]:
    """What is started after a view."""
    peers = starts.take(view(number, launcher, *servers, worker=worker))
    starts.running.update({(peer.role, peer.slot): peer for peer in peers})
    return peers


def test_each_incarnation_is_started_once() -> None:
    starts = Starts()
    assert begun(starts, 1, 0, 1, 1) == [Peer("worker", 0, 1), Peer("server", 0, 1), Peer("server", 1, 1)]
    assert begun(starts, 2, 0, 1, 1) == []
    assert begun(starts, 3, 0, 1, 3) == [Peer("server", 1, 3)]
    assert begun(starts, 2, 0, 2, 3) == [], "an old view is late"
    assert starts.view.number == ViewNumber(3)


def test_a_successor_starts_only_what_is_newer_than_the_first_view_that_names_it() -> None:
    starts = Starts(2, takes_over=True)
    assert begun(starts, 7, 1, 4, 1) == [], "this one is still for its predecessor"
    assert starts.view.number == ViewNumber(), "so it is sent again"
    assert begun(starts, 8, 2, 4, 2) == [], "whether these run, nobody knows"
    assert not starts.takes_over
    assert starts.running["server", 1] == Peer("server", 1, 2)
    assert begun(starts, 9, 2, 4, 3, worker=2) == [Peer("worker", 0, 2), Peer("server", 1, 3)]


def test_a_launcher_that_was_replaced_starts_nothing_any_more() -> None:
    starts = Starts(1)
    begun(starts, 1, 1, 1)
    assert begun(starts, 5, 2, 2) == []
    assert starts.superseded
    assert begun(starts, 6, 2, 3) == []
