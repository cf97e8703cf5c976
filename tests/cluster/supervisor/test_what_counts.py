"""How much of a dead server's work counts, by what the others say of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Instant, LaneState, ServerBeat, ViewNumber, WorkerMark
from holdfast.cluster.supervisor.machine import what_counts
from holdfast.cluster.supervisor.members import JobFailure, ServerMember
from holdfast.sim.cluster import counting_plan

PLAN = counting_plan(servers=3, workers=2, atomic=False, k=2, r=1)
DEAD = ServerMember("server", 0, 2)


def server(slot: int, *lanes: LaneState, sequences: tuple[int, ...] = (0, 0)) -> ServerMember:
    marks = tuple(WorkerMark(w, sequence=sequence) for w, sequence in enumerate(sequences))
    beat = ServerBeat("ready", ViewNumber(1), marks=marks, started=ViewNumber(1), lanes=lanes)
    return ServerMember("server", slot, 1, beat=beat)


def lane(incarnation: int, batch: int, first: int = 0) -> LaneState:
    return LaneState(0, incarnation, Instant(batch), Instant(first))


def test_what_all_parity_servers_have() -> None:
    others = [server(1, lane(1, 7)), server(2, LaneState(1, 1, Instant(3)), lane(1, 5))]
    assert what_counts(PLAN, DEAD, [DEAD, *others]) == Instant(5)


def test_nothing_of_one_that_not_all_have_heard_of() -> None:
    others = [server(1, lane(2, 4)), server(2, lane(1, 9, first=8))]
    assert what_counts(PLAN, DEAD, [DEAD, *others]) == Instant(0)


def test_without_parities_what_the_others_have_in_common() -> None:
    plan = replace(PLAN, beyond="rows")
    counts = what_counts(plan, DEAD, [server(1, sequences=(4, 7)), DEAD, server(2, sequences=(5, 6))])
    assert counts == Instant(0, (WorkerMark(0, sequence=4), WorkerMark(1, sequence=6)), installed=(0, 1))
    counts = what_counts(plan, DEAD, [DEAD, server(1), server(2)])
    assert counts == Instant(0, (WorkerMark(0), WorkerMark(1))), "nothing was pushed yet"


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([ServerMember("server", 1, 1)], "and all other servers died"),
        ([server(1)], "all servers with its parities died"),
    ],
)
def test_a_job_that_cannot_go_on(others: list[ServerMember], text: str) -> None:
    failure = what_counts(PLAN, DEAD, [DEAD, *others])
    assert isinstance(failure, JobFailure)
    assert (failure.kind, failure.peer) == ("lost", DEAD.peer)
    assert text in failure.text
