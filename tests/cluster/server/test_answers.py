"""What a server answers, saves and says of itself, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Counters, Envelope, Frame
from holdfast.cluster.protocol.messages import (
    Collect,
    Commit,
    Install,
    Part,
    Peer,
    Position,
    Pull,
    PulledRows,
    Push,
    Pushed,
    Redundancy,
    Refused,
    Saved,
    ServerBeat,
    ServerInView,
    View,
    ViewNumber,
    WorkerInView,
)
from holdfast.cluster.protocol.plan import JobPlan, Timing
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.server.machine import Opened, Server
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.tables.shard import digest

WORKER = Peer("worker", 0, 1)
SUPERVISOR = Peer("supervisor")
SGD = OptimizerPlan(name="sgd", lr=1.0)
TABLE = GroupPlan(name="t", dim=2, tables=(TablePlan("t", 5),), optimizer=SGD)
NETWORK = GroupPlan(name="n", dim=2, tables=(TablePlan("n", 3),), optimizer=SGD, initial="installed")
PLACES = np.array([3, 1], np.uint32)
ONES = np.ones((2, 2), np.float32)


class Saver:
    """Notes what it is asked to save."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.newest = 0
        self.collected: tuple[Saved, Sequence[Frame]] | None = None

    def touched(self, group: int, places: NDArray[np.uint32]) -> None:
        self.calls.append(("touched", group, places.tolist()))

    def cut(self, version: int, *, baseline: bool, whole: bool) -> None:
        self.calls.append(("cut", version, baseline, whole))

    def confirm(self, committed: int, tidied: int) -> None:
        self.calls.append(("confirm", committed, tidied))

    def saved(self) -> int:
        return self.newest

    def collect(
        self, version: int, *, tidy: bool, kept: Sequence[int] = ()
    ) -> tuple[Saved, Sequence[Frame]] | None:
        self.calls.append(("collect", version, tidy, *kept))
        return self.collected


class Case:
    """One server of a job with one worker."""

    def __init__(self, incarnation: int = 1, **options: Any) -> None:
        self.plan = JobPlan(
            job="j", seed=1, groups=(TABLE, NETWORK), servers=1, workers=1, timing=Timing(beat_seconds=0.25)
        )
        self.server = Server(Peer("server", 0, incarnation), self.plan, "tcp://here", **options)
        self.number = 0
        self.now = 0.0

    def view(
        self, phase: Any = "running", incarnation: int | None = None, starts: bool = True, **fields: Any
    ) -> None:
        """The next view reaches the server."""
        self.number += 1
        mine = self.server.me.incarnation if incarnation is None else incarnation
        servers = (ServerInView(0, mine, starts=starts, since=ViewNumber(1)),)
        workers = (WorkerInView(0, 1, starts=True),)
        view = View(ViewNumber(self.number), phase, servers, workers, **fields)
        self.server.receive(Envelope(SUPERVISOR, self.server.me, view), self.now)

    def started(self, *, installed: bool = True) -> Case:
        self.view()
        if installed:
            self.ask(Install((Part(1, 3),)), np.arange(3, dtype=np.uint32), np.zeros((3, 2), np.float32))
        self.server.outbox.clear()
        return self

    def ask(self, message: Message, *frames: Frame, target: Peer | None = None) -> list[Message]:
        """Something from the worker; what is answered."""
        self.server.outbox.clear()
        envelope = Envelope(WORKER, target or self.server.me, message, frames)
        self.server.receive(envelope, self.now)
        return [e.message for e in self.server.outbox if e.target == WORKER]

    def push(self, sequence: int, group: int = 0, **fields: Any) -> list[Message]:
        message = Push(sequence, Position(0, sequence), 8, (Part(group, 2),), **fields)
        places = PLACES if group == 0 else np.array([2, 0], np.uint32)
        return self.ask(message, places, ONES)

    def beats(self) -> list[ServerBeat]:
        found = [e.message for e in self.server.outbox if isinstance(e.message, ServerBeat)]
        self.server.outbox.clear()
        return found

    def beat(self) -> ServerBeat:
        self.server.outbox.clear()
        self.server.beat(self.now)
        (found,) = self.beats()
        return found


@pytest.fixture
def case() -> Case:
    return Case().started()


class TestRows:
    def test_a_push_changes_rows_and_a_pull_shows_it(self, case: Case) -> None:
        before = case.server.shards[0].pull(PLACES)
        assert case.push(1) == [Pushed(1, applied=True, kept=1)]
        assert case.push(1) == [Pushed(1, applied=True, kept=1)]
        assert case.ask(Pull(7, (Part(0, 2),)), PLACES) == [PulledRows(7, (Part(0, 2),))]
        (frame,) = case.server.outbox[0].frames
        assert np.array_equal(np.asarray(frame), before - 1)
        assert case.server.pushes == 1

    def test_without_parities_nobody_needs_to_hear_of_changes(self, case: Case) -> None:
        """They would pile up: nothing ever takes them."""
        case.push(1)
        assert [len(shard.changes) for shard in case.server.shards] == [0, 0]

    def test_rows_whose_first_values_have_not_come(self) -> None:
        case = Case().started(installed=False)
        assert case.push(1, group=1) == [Refused("not installed", 1)]
        assert case.ask(Pull(7, (Part(0, 2), Part(1, 1))), PLACES, PLACES[1:]) == [PulledRows(7, (), (1,))]
        assert case.ask(Pull(8, ())) == [PulledRows(8, ())]

    def test_only_the_first_values_count(self) -> None:
        case = Case().started(installed=False)
        assert case.beat().redundancy.not_installed == 3
        assert case.beat().redundancy.rows == 0, "nothing was lost: it is the first in its slot"
        everywhere = np.arange(3, dtype=np.uint32)
        for value in (5.0, 7.0):
            case.ask(Install((Part(1, 3),)), everywhere, np.full((3, 2), value, np.float32))
        assert (case.server.shards[1].pull(everywhere) == 5.0).all()
        assert case.beat().redundancy.not_installed == 0

    def test_of_a_job_that_goes_on_from_a_version_none_do(self) -> None:
        case = Case(fresh=False).started(installed=False)
        everywhere = np.arange(3, dtype=np.uint32)
        case.ask(Install((Part(1, 3),)), everywhere, np.full((3, 2), 5.0, np.float32))
        assert not case.server.shards[1].pull(everywhere).any()

    def test_an_answer_can_hold_the_new_weights(self, case: Case) -> None:
        case.push(1, group=1)
        ((answer),) = case.push(2, group=1, returns=1)
        assert answer == Pushed(2, applied=True, kept=2, rows=2)
        (frame,) = case.server.outbox[0].frames
        assert np.asarray(frame).tolist() == [[-2, -2], [-2, -2]]
        (answer,) = case.push(3, group=1, returns=0)
        assert isinstance(answer, Pushed)
        assert (answer.rows, case.server.outbox[0].frames) == (0, ())

    @pytest.mark.parametrize(
        ("message", "frames"),
        [
            (Pull(1, (Part(0, 2),)), [np.array([5, 1], np.uint32)]),
            (Push(1, Position(0, 1), 8, (Part(0, 2),)), [np.array([5, 1], np.uint32), ONES]),
        ],
    )
    def test_what_does_not_fit_changes_nothing_and_is_counted(
        self, case: Case, message: Message, frames: list[Frame]
    ) -> None:
        before = digest(case.server.shards)
        assert case.ask(message, *frames) == [Refused("malformed")]
        assert case.server.admission.dropped == 1
        assert digest(case.server.shards) == before

    @pytest.mark.parametrize(
        ("message", "frames"),
        [
            (Pull(1, (Part(0, 2),)), []),
            (Pull(1, (Part(0, 2),)), [PLACES, PLACES]),
            (Pull(1, (Part(2, 2),)), [PLACES]),
            (Push(1, Position(0, 1), 8, (Part(0, 2),)), [PLACES]),
        ],
    )
    def test_what_no_worker_would_send_is_not_even_answered(
        self, case: Case, message: Message, frames: list[Frame]
    ) -> None:
        assert case.ask(message, *frames) == []
        assert case.server.admission.dropped == 1

    def test_what_is_meant_for_another_in_its_slot(self, case: Case) -> None:
        other = Peer("server", 0, 2)
        assert case.ask(Pull(7, (Part(0, 2),)), PLACES, target=other) == []

    def test_a_pull_can_commit_the_push_that_its_rows_must_contain(self, case: Case) -> None:
        before = case.server.shards[0].pull(PLACES)
        assert case.push(1, stage=True) == [Pushed(1, applied=False)]
        commit = Pull(7, (Part(0, 2),), after=1, commits=True)
        for _ in range(2):  # asked again, nothing more changes
            assert case.ask(commit, PLACES) == [PulledRows(7, (Part(0, 2),))]
            (frame,) = case.server.outbox[0].frames
            assert np.array_equal(np.asarray(frame), before - 1)
        assert case.server.pushes == 1
        assert case.push(2, stage=True) == [Pushed(2, applied=False, kept=1)]

    def test_a_commit_in_a_pull_whose_rows_come_later_is_answered(self) -> None:
        case = Case().started(installed=False)
        case.push(1, stage=True)
        pull = Pull(7, (Part(0, 2), Part(1, 1)), after=1, commits=True)
        for answers in (
            [Pushed(1, applied=True, kept=1), PulledRows(7, (), (1,))],
            [PulledRows(7, (), (1,))],
        ):
            assert case.ask(pull, PLACES, PLACES[1:]) == answers
        assert case.server.pushes == 1

    def test_a_pull_that_commits_what_is_not_staged_waits(self, case: Case) -> None:
        """It goes to a replacement, to which the worker sends the push again."""
        assert case.ask(Pull(7, (Part(1, 2),), after=1, commits=True), PLACES[1:].repeat(2)) == []
        answers = case.push(1, group=1, stage=True, returns=1)
        assert answers == [PulledRows(7, (Part(1, 2),)), Pushed(1, applied=False, rows=2)]
        rows = [np.asarray(frame).tolist() for e in case.server.outbox for frame in e.frames]
        assert rows == [[[0, 0], [0, 0]], [[-1, -1], [-1, -1]]]
        assert case.server.pushes == 1

    def test_commits_are_answered(self, case: Case) -> None:
        assert case.ask(Commit(1)) == [Refused("not staged", 1)]
        assert case.push(1, stage=True) == [Pushed(1, applied=False)]
        assert case.server.pushes == 0
        assert case.ask(Commit(1)) == [Pushed(1, applied=True, kept=1)]
        assert case.server.pushes == 1


class TestSaving:
    @pytest.fixture
    def saver(self, case: Case) -> Saver:
        saver = Saver()
        case.server.open(Opened(saver))
        return saver

    def test_rows_that_pushes_touch_are_noted(self, case: Case, saver: Saver) -> None:
        case.push(1)
        assert saver.calls == [("touched", 0, [3, 1])]

    def test_a_cut_is_made_once_and_behind_what_is_confirmed(self, case: Case, saver: Saver) -> None:
        case.view("holding", cut=3, baseline=True, whole=False, committed=2, tidied=1)
        assert saver.calls == [("confirm", 2, 1), ("cut", 3, True, False)]
        assert case.beat().cut == 3
        saver.calls.clear()
        case.view("running", cut=3, committed=3)
        assert saver.calls == [("confirm", 3, 0)]

    def test_what_was_saved_is_collected(self, case: Case, saver: Saver) -> None:
        def collect() -> list[Message]:
            case.server.outbox.clear()
            case.server.receive(Envelope(SUPERVISOR, case.server.me, Collect(3, tidy=True, kept=(1, 3))), 0.0)
            return [e.message for e in case.server.outbox if isinstance(e.message, Saved)]

        assert collect() == []
        saver.collected = Saved(3, True, b"{}"), ()
        assert collect() == [Saved(3, True, b"{}")]
        assert saver.calls == [("collect", 3, True, 1, 3)] * 2

    def test_what_is_durable_is_told_at_once(self, case: Case, saver: Saver) -> None:
        case.server.tick(0.0)
        case.server.outbox.clear()
        case.server.tick(0.1)
        assert case.beats() == []
        saver.newest = 3
        case.server.tick(0.1)
        assert [beat.saved for beat in case.beats()] == [3]

    def test_before_the_start_there_is_nothing_to_copy(self) -> None:
        case = Case()
        saver = Saver()
        case.server.open(Opened(saver))
        case.view("starting", starts=False, cut=3)
        assert saver.calls == []


class TestBeats:
    def test_every_so_often(self, case: Case) -> None:
        told = []
        for now in (10.0, 10.2, 10.25, 10.3, 10.5):
            case.server.tick(now)
            told.append(len(case.beats()))
        assert told == [1, 0, 1, 0, 1]

    def test_whenever_a_view_is_new(self, case: Case) -> None:
        case.server.outbox.clear()
        case.view()
        assert [beat.view for beat in case.beats()] == [ViewNumber(2)]
        case.number -= 1
        case.view()
        assert case.beats() == []

    def test_what_it_says(self) -> None:
        counters = Counters(malformed=2, received_bytes=30, sent_bytes=40)
        case = Case(counters=counters, measure=lambda: (5000, 1.5)).started()
        case.push(1)
        case.ask(Pull(1, (Part(2, 2),)), PLACES)
        beat = case.beat()
        assert (beat.state, beat.view, beat.endpoint, beat.started) == (
            "ready",
            ViewNumber(1),
            "tcp://here",
            ViewNumber(1),
        )
        (mark,) = beat.marks
        assert (mark.sequence, mark.samples, mark.kept, mark.contained) == (1, 8, 1, 0)
        assert (beat.lanes, beat.stuck_on, beat.cut, beat.saved) == ((), (), 0, 0)
        figures = beat.figures
        assert (figures.steps, figures.rows, figures.dropped) == (1, 8, 3)
        assert (figures.bytes_in, figures.bytes_out) == (30, 40)
        assert (figures.memory_bytes, figures.cpu_seconds) == (5000, (("process", 1.5),))
        assert figures.digest == ""
        case.view("stopping")
        assert case.beat().figures.digest == digest(case.server.shards)

    def test_a_server_that_reads_from_a_store_is_not_ready(self) -> None:
        case = Case(opens=True)
        assert case.beat().state == "restoring"
        back = Redundancy(went_back=4, version=2, version_samples=50)
        case.server.open(Opened(Saver(), rolled_back=back))
        assert case.beat().state == "ready"
        said = case.beat().redundancy
        assert (said.went_back, said.version, said.version_samples) == (4, 2, 50)

    def test_one_that_cannot_go_on_says_why(self, case: Case) -> None:
        case.server.fail("no such store")
        beat = case.beat()
        assert (beat.state, beat.error) == ("failed", "no such store")


class TestTheEnd:
    def test_of_the_job(self, case: Case) -> None:
        assert [case.server.over] == [False]
        case.view("stopping")
        assert [case.server.over] == [True]

    def test_when_another_has_taken_its_place(self, case: Case) -> None:
        case.view(incarnation=2)
        assert [case.server.over] == [True]
        case.server.outbox.clear()
        assert case.server.started == ViewNumber(1)

    def test_an_older_one_in_a_view_is_not_another(self) -> None:
        case = Case(incarnation=2)
        case.view(incarnation=1)
        assert not case.server.over
        assert case.server.started == ViewNumber()


class TestStarting:
    def test_it_starts_when_a_view_says_so(self) -> None:
        case = Case()
        case.view("starting", starts=False)
        assert case.push(1) == []
        assert case.server.started == ViewNumber()
        case.server.outbox.clear()
        case.view()
        assert case.server.started == ViewNumber(1)
        answers = [e.message for e in case.server.outbox if e.target == WORKER]
        assert answers == [Pushed(1, applied=True, kept=1)]
