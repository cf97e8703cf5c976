"""When a job that makes no progress is given up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Redundancy, ServerBeat, ViewNumber, WorkerBeat, WorkerMark
from holdfast.cluster.supervisor.machine import Stalls
from holdfast.cluster.supervisor.members import JobFailure, ServerMember, WorkerMember
from holdfast.sim.cluster import counting_plan

PLAN = counting_plan(servers=2, workers=1, atomic=False, r=1)
HOPELESS = PLAN.timing.hopeless_seconds
QUIET = HOPELESS / 4


class Case:
    def __init__(self, **changed: Any) -> None:
        self.servers = [ServerMember("server", slot, 1, stage="started") for slot in range(2)]
        self.worker = WorkerMember("worker", 0, 1, stage="started")
        self.stalls = Stalls(replace(PLAN, **changed), self.servers, 0.0)
        for slot in range(2):
            self.say(slot)

    def say(self, slot: int, state: Any = "ready", stuck_on: tuple[int, ...] = (), **redundancy: Any) -> None:
        self.servers[slot].recovering = bool(redundancy.get("rows"))
        self.servers[slot].beat = ServerBeat(
            state,
            ViewNumber(1),
            marks=(WorkerMark(0),),
            stuck_on=stuck_on,
            started=ViewNumber(1),
            redundancy=Redundancy(**redundancy),
        )

    def look(self, now: float, steps: int = 5) -> JobFailure | None:
        return self.stalls.look(steps, [*self.servers, self.worker], now)

    def wait(self, begin: float, end: float, steps: int = 5) -> JobFailure | None:
        """Look once a second; what is said at the end, and nothing before."""
        now = begin
        while now < end:
            assert self.look(now, steps) is None
            now += 1.0
        return self.look(end, steps)


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_job_in_which_all_is_well_may_take_its_time(case: Case) -> None:
    assert case.wait(0.0, 10 * HOPELESS) is None


def test_one_that_lacks_something_and_makes_no_progress(case: Case) -> None:
    case.look(0.0)
    case.say(1, parities=3000)
    assert case.wait(0.0, HOPELESS) is None
    failure = case.look(HOPELESS + 0.1)
    assert failure is not None
    assert (failure.kind, failure.peer) == ("stalled", case.servers[1].peer)
    assert failure.text == "lacks 0 rows and 3,000 parities, and nothing has been recovered for 20 s"


def test_the_first_look_counts_as_progress(case: Case) -> None:
    case.say(1, parities=3)
    assert case.wait(15.0, 15.0 + HOPELESS, steps=0) is None
    assert case.look(15.1 + HOPELESS, steps=0) is not None


def test_without_a_code_nothing_can_come_back() -> None:
    case = Case(r=0)
    case.say(1, parities=3)
    assert case.wait(0.0, 3 * HOPELESS) is None


@pytest.mark.parametrize("what", ["steps", "rows", "parities"])
def test_progress_is_a_batch_or_less_that_is_lacking(case: Case, what: str) -> None:
    lacks: dict[str, Any] = {"rows": 9, "parities": 9}
    case.say(1, **lacks)
    case.wait(0.0, HOPELESS - 1)
    if what in lacks:
        lacks[what] -= 1
        case.say(1, **lacks)
    steps = 6 if what == "steps" else 5
    assert case.wait(HOPELESS, 2 * HOPELESS, steps) is None
    assert case.look(2 * HOPELESS + 0.1, steps) is not None


def test_more_that_is_lacking_is_no_progress_and_neither_is_what_comes_back_of_it(case: Case) -> None:
    case.say(1, rows=5)
    case.wait(0.0, 10.0)
    case.say(1, rows=9)
    case.wait(11.0, 12.0)
    case.say(1, rows=6)
    case.wait(13.0, HOPELESS)
    assert case.look(HOPELESS + 0.1) is not None


@pytest.mark.parametrize("reading", [{"state": "restoring"}, {"lost": "all"}])
def test_reading_from_a_store_may_take_long(case: Case, reading: dict[str, Any]) -> None:
    case.say(1, parities=3, **reading)
    assert case.wait(0.0, 3 * HOPELESS) is None
    case.say(1, parities=3)
    assert case.wait(3 * HOPELESS, 4 * HOPELESS) is None
    assert case.look(4 * HOPELESS + 0.1) is not None


def test_if_all_was_well_for_a_while_it_is_well(case: Case) -> None:
    case.say(0, stuck_on=(1,))
    case.wait(0.0, 10.0)
    case.say(0)
    case.wait(10.0, 10.0 + QUIET)
    case.say(0, stuck_on=(1,))
    case.wait(11.0 + QUIET, HOPELESS)
    assert case.look(HOPELESS + 0.1) is not None, "too short a while"

    case = Case()
    case.say(0, stuck_on=(1,))
    case.wait(0.0, 10.0)
    case.say(0)
    case.wait(10.0, 11.0 + QUIET)
    case.say(0, stuck_on=(1,))
    assert case.wait(11.0 + QUIET, HOPELESS + 5) is None


def test_servers_that_do_not_reach_each_other(case: Case) -> None:
    case.say(0, stuck_on=(1,))
    case.wait(0.0, HOPELESS)
    failure = case.look(HOPELESS + 0.1)
    assert failure is not None
    assert failure.peer == case.servers[0].peer
    assert failure.text == (
        f"waits, and nothing has been recovered for 20 s ({case.servers[0].peer} cannot reach server 1)"
    )


def test_workers_that_do_not_reach_a_server(case: Case) -> None:
    case.worker.beat = WorkerBeat("working", ViewNumber(1), stuck_on=(1,))
    case.say(1, rows=2)
    case.wait(0.0, HOPELESS)
    failure = case.look(HOPELESS + 0.1)
    assert failure is not None
    assert failure.peer == case.servers[1].peer or failure.peer == case.worker.peer
    assert f"({case.worker.peer} cannot reach server 1)" in failure.text


def test_a_server_that_is_not_there(case: Case) -> None:
    case.servers[1].beat = None
    case.wait(0.0, HOPELESS)
    failure = case.look(HOPELESS + 0.1)
    assert failure is not None
    assert failure.text == "is not running, and nothing has been recovered for 20 s"


class TestLosses:
    def test_another_in_its_place_helps_as_long_as_something_moves(self, case: Case) -> None:
        assert case.stalls.note_loss(case.servers[1], "was killed", HOPELESS) is None
        failure = case.stalls.note_loss(case.servers[1], "was killed", HOPELESS + 0.1)
        assert failure is not None
        assert (failure.kind, failure.peer) == ("stalled", case.servers[1].peer)
        assert failure.text == "was killed, and no batch has counted for 20 s"

    def test_time_in_which_nobody_looked_does_not_count(self, case: Case) -> None:
        case.stalls.forgive(5.0)
        assert case.stalls.note_loss(case.servers[1], "was killed", HOPELESS + 5.0) is None
        assert case.stalls.note_loss(case.servers[1], "was killed", HOPELESS + 5.1) is not None

    def test_more_is_lacking_after_a_server_is_lost(self, case: Case) -> None:
        """What its successor brings back is progress, though others lacked less before."""
        case.say(1, rows=3)
        case.wait(0.0, 10.0)
        case.stalls.note_loss(case.servers[1], "was killed", 10.0)
        case.say(1, rows=20)
        case.wait(10.0, 15.0)
        case.say(1, rows=19)
        assert case.wait(16.0, 15.0 + HOPELESS) is None

    def test_a_worker_that_is_lost_takes_no_rows_along(self, case: Case) -> None:
        case.say(1, rows=3)
        case.wait(0.0, 10.0)
        case.stalls.note_loss(case.worker, "was killed", 10.0)
        case.say(1, rows=20)
        case.wait(10.0, 15.0)
        case.say(1, rows=19)
        case.wait(16.0, HOPELESS)
        assert case.look(HOPELESS + 0.1) is not None

    def test_one_that_is_replaced_over_and_over_is_fine_for_a_moment_each_time(self, case: Case) -> None:
        now = 0.0
        case.look(now)
        while now < HOPELESS:
            now += QUIET - 1
            case.stalls.note_loss(case.worker, "was killed", now)
            case.look(now + 0.5)
        assert case.stalls.note_loss(case.worker, "was killed", HOPELESS + 2) is not None
