"""When training goes on after a server's death, and when redundancy is back."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import (
    Figures,
    Redundancy,
    ServerBeat,
    ViewNumber,
    WorkerBeat,
    WorkerMark,
)
from holdfast.cluster.supervisor.members import JobFailure, ServerMember, Tally, WorkerMember
from holdfast.cluster.supervisor.recovery_log import Recoveries, RecoveryLog
from holdfast.sim.cluster import counting_plan


def marks(*sequences: int) -> tuple[WorkerMark, ...]:
    return tuple(WorkerMark(slot, sequence=sequence) for slot, sequence in enumerate(sequences))


def test_training_has_resumed_when_every_worker_at_work_pushes_something_new() -> None:
    recoveries = Recoveries()
    recoveries.lose(1, 10.0)
    assert not recoveries.has_resumed(1, marks(9, 9), [True, True])
    recoveries.start(1, [marks(5, 7), marks(6, 7)])
    assert not recoveries.has_resumed(1, marks(4, 7), [True, True])
    assert not recoveries.has_resumed(1, marks(6, 8), [True, True]), "others have 6 already"
    assert not recoveries.has_resumed(1, marks(6, 8), [False, False])
    assert recoveries.has_resumed(1, marks(6, 8), [False, True]), "the other one is done"
    assert not recoveries.has_resumed(1, marks(9, 9), [True, True]), "said once"


def test_redundancy_is_restored_when_all_is_there() -> None:
    recoveries = Recoveries()
    assert (recoveries.degraded, recoveries.since) == (False, None)
    assert not recoveries.is_restored(sound=True, lacking=False)
    recoveries.lose(1, 10.0)
    recoveries.lose(2, 11.0)
    assert not recoveries.is_restored(sound=False, lacking=True)
    assert (recoveries.degraded, recoveries.since) == (True, 10.0)
    assert recoveries.is_restored(sound=True, lacking=False)
    assert not recoveries.degraded
    assert not recoveries.is_restored(sound=True, lacking=False), "said once"
    # A supervisor that came back, or a job from a checkpoint: since when, nobody knows.
    assert not recoveries.is_restored(sound=False, lacking=True)
    assert (recoveries.degraded, recoveries.since) == (True, None)
    assert recoveries.is_restored(sound=True, lacking=False)


class Case:
    """Three servers, of which the last one is lost and comes back."""

    def __init__(self, **changed: Any) -> None:
        plan = replace(counting_plan(servers=3, workers=2, atomic=False, r=1, rows=90), **changed)
        self.servers = [ServerMember("server", slot, 1, stage="started") for slot in range(3)]
        self.workers = [WorkerMember("worker", slot, 1, stage="started") for slot in range(2)]
        for worker in self.workers:
            worker.beat = WorkerBeat("working", ViewNumber(1), figures=Figures(progress=0.5))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.log = RecoveryLog(
            plan, self.servers, self.workers, Tally(plan, self.servers, self.workers), self.events
        )
        for slot in range(3):
            self.say(slot)
        self.events.clear()

    @property
    def lost(self) -> ServerMember:
        return self.servers[2]

    def say(self, slot: int, sequence: int = 5, now: float = 30.0, **redundancy: Any) -> JobFailure | None:
        said = tuple(WorkerMark(w, sequence=sequence, samples=sequence * 10) for w in range(2))
        self.servers[slot].beat = ServerBeat(
            "ready", ViewNumber(1), marks=said, started=ViewNumber(1), redundancy=Redundancy(**redundancy)
        )
        return self.log.note(self.servers[slot], now)

    def lose(self) -> None:
        """It is gone at 10, and another takes over at 12.5."""
        self.log.note_loss(self.lost, 10.0)
        self.log.note_start(self.lost, 12.5)

    def told(self, *names: str) -> list[tuple[str, dict[str, Any]]]:
        """Events without slot and incarnation."""
        found = [
            (name, {key: value for key, value in figures.items() if key not in ("slot", "incarnation")})
            for name, figures in self.events
            if not names or name in names
        ]
        self.events.clear()
        return found


@pytest.fixture
def case() -> Case:
    return Case()


class TestRows:
    def test_a_server_that_was_never_lost_has_nothing_to_tell(self, case: Case) -> None:
        case.say(0)
        case.log.note_redundancy(1.0)
        assert case.told() == []
        assert not case.log.degraded

    def test_from_its_start_to_its_last_row(self, case: Case) -> None:
        case.lose()
        assert case.log.degraded
        assert case.events[0] == ("server_started", {"slot": 2, "incarnation": 1, "after_seconds": 2.5})
        case.told()
        assert case.say(2, sequence=4, rows=8) is None
        assert [case.lost.recovering] == [True]
        assert case.told() == []
        case.lost.deaths = 3
        case.say(2, sequence=5, now=14.0, recovered=8)
        assert (case.lost.recovering, case.lost.deaths) == (False, 0)
        assert case.told() == [("server_recovered", {"rows": 8, "after_seconds": 4.0})]

    def test_a_beat_that_comes_late_takes_no_rows_away(self, case: Case) -> None:
        case.lose()
        case.say(2, recovered=8)
        case.told()
        case.say(2, rows=3)
        assert not case.lost.recovering
        case.say(2, recovered=8)
        assert case.told() == []

    def test_rows_that_are_lacking_from_the_start_are_recovered_too(self, case: Case) -> None:
        """As after a start from a checkpoint: since when, nobody knows."""
        fresh = ServerMember("server", 2, 1, stage="started")
        case.servers[2] = fresh
        case.say(2, rows=8)
        assert fresh.recovering
        case.say(2, recovered=8)
        assert case.told() == [("server_recovered", {"rows": 8, "after_seconds": None})]

    def test_what_was_compared_is_told_if_it_was_asked_for(self) -> None:
        case = Case(compare_recovered=True)
        case.lose()
        case.say(2, now=14.0, recovered=8, compared=7, unequal=1)
        (event,) = case.told("server_recovered")
        assert event[1] == {"rows": 8, "after_seconds": 4.0, "compared": 7, "unequal": 1}

    def test_before_it_has_started_it_says_nothing(self, case: Case) -> None:
        case.lost.beat = ServerBeat("ready", ViewNumber(1), redundancy=Redundancy(network_lost=True))
        assert case.log.note(case.lost, 1.0) is None
        case.lost.beat = None
        assert case.log.note(case.lost, 1.0) is None

    def test_losing_it_again_begins_anew(self, case: Case) -> None:
        case.lose()
        case.say(2, recovered=8, updates_lost=2)
        case.log.note_loss(case.lost, 20.0)
        assert (case.lost.recovering, case.lost.recovered, case.lost.updates_lost) == (False, False, 0)
        assert case.lost.lost_at == 20.0


class TestTraining:
    def test_it_has_resumed_when_all_at_work_have_pushed_something_new(self, case: Case) -> None:
        case.lose()
        case.told()
        case.say(2, sequence=5, rows=8, now=13.0)
        assert case.told() == []
        case.say(2, sequence=6, rows=8, now=13.25)
        assert case.told() == [("training_resumed", {"after_seconds": 3.25})]
        case.say(2, sequence=7, rows=8)
        assert case.told() == []

    def test_workers_that_are_not_at_work_are_not_waited_for(self, case: Case) -> None:
        case.lose()
        case.told()
        case.workers[0].beat = None
        case.workers[1].beat = WorkerBeat("held", ViewNumber(1))
        case.say(2, sequence=9, rows=8)
        assert case.told() == []
        case.workers[1].beat = WorkerBeat("working", ViewNumber(1))
        case.say(2, sequence=9, rows=8)
        assert len(case.told("training_resumed")) == 1


class TestRedundancy:
    def test_it_is_back_when_all_servers_have_rows_and_parities(self, case: Case) -> None:
        case.lose()
        case.say(2, rows=8, parities=3)
        case.log.note_redundancy(14.0)
        case.say(2, recovered=8, parities=3)
        case.told()
        case.log.note_redundancy(15.0)
        assert case.told() == []
        assert case.log.degraded
        case.say(2, recovered=8)
        case.log.note_redundancy(16.5)
        case.log.note_redundancy(17.0)
        assert case.told() == [("redundancy_restored", {"after_seconds": 6.5})]
        assert not case.log.degraded

    @pytest.mark.parametrize("lacks", [{"parities": 3}, {"rows": 3}])
    def test_a_server_that_lacks_something_from_the_start(self, case: Case, lacks: dict[str, int]) -> None:
        case.servers[2] = ServerMember("server", 2, 1, stage="started")
        case.say(2, **lacks)
        case.log.note_redundancy(1.0)
        assert case.log.degraded
        case.say(2)
        case.log.note_redundancy(2.0)
        assert case.told("redundancy_restored") == [("redundancy_restored", {"after_seconds": None})]

    def test_one_that_has_not_started_says_nothing(self, case: Case) -> None:
        case.lost.stage = "settling"
        case.lost.beat = ServerBeat("ready", ViewNumber(1), redundancy=Redundancy(parities=3))
        case.log.note_redundancy(1.0)
        assert not case.log.degraded

    def test_parities_that_were_wrong_are_told_once(self, case: Case) -> None:
        for wrong, repaired in ((1, 0), (1, 0), (2, 1)):
            case.say(0, wrong=wrong, repaired=repaired)
        assert case.told() == [
            ("parities_wrong", {"wrong": 1, "repaired": 0}),
            ("parities_wrong", {"wrong": 2, "repaired": 1}),
        ]


class TestLosses:
    def test_updates_of_the_network_are_told_as_they_are_lost(self, case: Case) -> None:
        for lost in (2, 2, 5, 4):
            case.say(0, updates_lost=lost)
        assert case.told() == [
            ("network_updates_lost", {"updates": 2}),
            ("network_updates_lost", {"updates": 3}),
        ]

    def test_a_network_that_nobody_has(self, case: Case) -> None:
        failure = case.say(2, rows=7, not_installed=7000, network_lost=True)
        assert failure is not None
        assert (failure.kind, failure.peer) == ("network", case.lost.peer)
        assert failure.text == "took over, but lacks 7,000 rows of the network"

    @pytest.mark.parametrize(
        ("beyond", "said", "fails"),
        [
            ("job", {"lost": "3 rows"}, True),
            ("job", {"lost": "3 rows", "network_lost": True}, True),
            ("rows", {"lost": "3 rows"}, False),
            ("rows", {"lost": "3 rows", "network_lost": True}, True),
        ],
    )
    def test_rows_that_cannot_be_recovered(self, beyond: str, said: dict[str, Any], fails: bool) -> None:
        failure = Case(beyond=beyond).say(2, rows=7, **said)
        assert (failure is not None) is fails
        if failure is not None:
            assert (failure.kind, failure.text) == ("lost", "took over, but could not recover 3 rows")


class TestGoingBack:
    @pytest.mark.parametrize("partial", ["", "partial"])
    def test_what_was_lost_is_counted(self, partial: str) -> None:
        case = Case(partial=partial, beyond="rows")
        case.lose()
        case.lost.samples_then = 400
        case.told()
        case.say(2, now=14.0, went_back=45, version=3, version_samples=100, lost="some")
        rolled_back = {
            "version": 3, "rows": 45, "what": "some", "samples_lost": 300, "after_seconds": 4.0,
            "pls": 300 * 0.5 * 0.5 / 100,
        }  # fmt: skip
        found = dict(case.told())
        assert found["server_rolled_back"] == rolled_back
        assert ("server_recovered" in found) is not bool(partial)
        case.log.note_redundancy(15.0)
        assert bool(case.told("redundancy_restored")) is not bool(partial)

    def test_losses_add_up(self) -> None:
        case = Case(partial="partial")
        for number in (1, 2):
            case.lose()
            case.lost.samples_then = 400
            case.told()
            case.say(2, went_back=90, version=0, version_samples=380)
            (event,) = case.told("server_rolled_back")
            assert event[1]["pls"] == pytest.approx(20 * number * 0.5 / 100)

    def test_a_version_that_is_newer_than_the_loss(self) -> None:
        case = Case(partial="partial")
        case.lose()
        case.lost.samples_then = 40
        case.say(2, went_back=90, version=0, version_samples=380)
        (event,) = case.told("server_rolled_back")
        assert event[1]["samples_lost"] == 0

    def test_where_nobody_knows_how_much_is_done_no_share_is_told(self) -> None:
        case = Case(partial="partial")
        for worker in case.workers:
            worker.beat = None
        case.lose()
        case.say(2, went_back=90, version=0)
        (event,) = case.told("server_rolled_back")
        assert event[1]["pls"] is None
