"""What follows from what nodes say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import (
    Figures,
    Peer,
    Redundancy,
    ServerBeat,
    ViewNumber,
    WorkerBeat,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import Resume
from holdfast.cluster.supervisor.members import Cut, ServerMember, Tally, WorkerMember
from holdfast.sim.cluster import counting_plan

PLAN = counting_plan(servers=2, workers=2, atomic=False)
MARKS = (WorkerMark(0, sequence=4, samples=40), WorkerMark(1, sequence=6, samples=60))


def server(
    *, stage: Any = "started", recovering: bool = False, said: bool = True, **fields: Any
) -> ServerMember:
    known: dict[str, Any] = {
        "state": "ready", "view": ViewNumber(2), "marks": MARKS, "started": ViewNumber(1), **fields,
    }  # fmt: skip
    member = ServerMember("server", 1, 3, beat=ServerBeat(**known) if said else None, stage=stage)
    member.recovering = recovering
    return member


def worker(slot: int = 0, *, stage: Any = "started", said: bool = True, **fields: Any) -> WorkerMember:
    known: dict[str, Any] = {"state": "working", "view": ViewNumber(2), **fields}
    return WorkerMember("worker", slot, 1, beat=WorkerBeat(**known) if said else None, stage=stage)


def test_a_member_names_its_node_and_its_events() -> None:
    assert server().peer == Peer("server", 1, 3)
    assert server().event("lost", step=4) == ("lost", {"slot": 1, "incarnation": 3, "step": 4})


def test_what_is_known_of_a_slot_at_first() -> None:
    first = WorkerMember("worker", 0, 1)
    assert (first.since, first.heard, first.beat, first.stage) == (0.0, None, None, "fencing")
    assert (first.since_view, first.deaths, first.died_at) == (ViewNumber(), 0, -1)
    server = ServerMember("server", 0, 1)
    assert (server.lost_at, server.recovering, server.recovered, server.wrong) == (None, False, False, (0, 0))
    assert (server.samples_then, server.updates_lost) == (0, 0)
    cut = Cut(3, ViewNumber(1))
    assert (cut.positions, cut.steps, cut.samples) == ((), 0, 0)


def test_whether_it_has_seen_a_view() -> None:
    assert server().follows(ViewNumber(2))
    assert not server().follows(ViewNumber(2, 1))
    assert not server(said=False).follows(ViewNumber(0))


class TestServers:
    def test_marks_mean_something_once_it_has_started(self) -> None:
        assert server().marks == MARKS
        assert server(started=ViewNumber()).marks == ()
        assert server(said=False).marks == ()

    def test_ready(self) -> None:
        assert server().ready
        assert not server(state="restoring").ready
        assert not server(said=False).ready

    @pytest.mark.parametrize(
        "changed",
        [
            {"redundancy": Redundancy(not_installed=1)},
            {"stage": "settling"},
            {"started": ViewNumber()},
            {"recovering": True},
            {"said": False},
        ],
    )
    def test_whole_and_sound(self, changed: dict[str, Any]) -> None:
        assert server().whole
        assert server().sound
        assert not server(**changed).whole
        assert not server(**changed).sound
        lacks = server(redundancy=Redundancy(parities=1))
        assert lacks.whole
        assert not lacks.sound

    def test_pushes_that_are_ahead(self) -> None:
        assert server(redundancy=Redundancy(updates_ahead=3)).ahead == 3
        assert server(said=False).ahead == 0

    @pytest.mark.parametrize(
        ("changed", "waits"),
        [
            ({}, False),
            ({"stage": "settling"}, True),
            ({"said": False}, True),
            ({"recovering": True}, False),
            ({"recovering": True, "redundancy": Redundancy(rows=1)}, True),
            ({"recovering": False, "redundancy": Redundancy(rows=1)}, False),
            ({"recovering": True, "redundancy": Redundancy(rows=3, not_installed=3)}, False),
            ({"recovering": True, "redundancy": Redundancy(rows=4, not_installed=3)}, True),
        ],
    )
    def test_whether_workers_may_well_wait_for_it(self, changed: dict[str, Any], waits: bool) -> None:
        assert server(**changed).makes_wait is waits


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({"state": "held"}, True),
        ({"state": "done"}, True),
        ({"state": "working"}, False),
        ({"state": "held", "view": ViewNumber(1)}, False),
        ({"state": "held", "stage": "fencing"}, False),
        ({"state": "held", "said": False}, False),
    ],
)
def test_whether_a_worker_holds(changed: dict[str, Any], holds: bool) -> None:
    assert worker(**changed).holds(ViewNumber(2)) is holds


class TestTally:
    def tally(self, servers: list[ServerMember], workers: list[WorkerMember], **changed: Any) -> Tally:
        return Tally(replace(PLAN, **changed), servers, workers)

    def test_what_all_servers_have_applied_counts(self) -> None:
        less = server(marks=(WorkerMark(0, sequence=5, samples=50), WorkerMark(1, sequence=3, samples=30)))
        tally = self.tally([server(), less, server(said=False)], [worker(0), worker(1)])
        assert tally.steps() == 4 + 3
        assert tally.samples() == 40 + 30

    def test_what_a_worker_says_counts_and_nothing_is_taken_back(self) -> None:
        workers = [worker(0, sequence=9), worker(1, said=False)]
        servers = [server()]
        tally = self.tally(servers, workers)
        assert tally.sequence(workers[0]) == 9
        assert tally.sequence(workers[1]) == 6
        workers[0].beat = None
        servers[0].beat = None
        assert tally.steps() == 15
        assert tally.samples() == 0

    def test_runs_that_it_goes_on_from_count(self) -> None:
        tally = self.tally(
            [server()], [worker(0), worker(1)], resume=Resume(version=1, steps=100, samples=1000)
        )
        assert tally.steps() == 110
        assert tally.samples() == 1100
        assert self.tally([], [worker(0), worker(1)]).steps() == 0

    @pytest.mark.parametrize(
        ("progress", "most", "done"),
        [((0.0, 0.0), None, None), ((0.2, 0.3), None, 0.3), ((0.2, 0.3), 20, 0.5), ((0.8, 0.3), 20, 0.8)],
    )
    def test_how_much_is_done(
        self, progress: tuple[float, float], most: int | None, done: float | None
    ) -> None:
        workers = [worker(slot, figures=Figures(progress=part)) for slot, part in enumerate(progress)]
        tally = self.tally([server()], workers, training={"max_steps": most})
        assert tally.done() == done

    def test_workers_that_are_not_there_say_nothing(self) -> None:
        assert self.tally([], [worker(0, said=False), worker(1, said=False)]).done() is None
