"""The supervisor's decisions, message by message (holes 15, 18, 19)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Evaluation,
    Exit,
    LaneState,
    LauncherBeat,
    Peer,
    Position,
    Redundancy,
    ServerBeat,
    View,
    ViewNumber,
    WorkerBeat,
    WorkerMark,
)
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.cluster.supervisor.views import Durable
from holdfast.sim.cluster import counting_plan
from holdfast.sim.storage import MemoryStorage

SERVERS, WORKERS = 2, 2


class Script:
    """A supervisor, and nodes that say what a test wants them to say."""

    def __init__(
        self, storage: MemoryStorage | None = None, atomic: bool = True, r: int = 0, **options: Any
    ) -> None:
        self.storage = storage or MemoryStorage()
        self.plan = counting_plan(servers=SERVERS, workers=WORKERS, atomic=atomic, r=r)
        self.machine = Supervisor(self.plan, self.storage, 0.0, **options)
        self.now = 0.0

    def beat(self, role: Any, slot: int, state: Any = "ready", incarnation: int = 1, **fields: Any) -> None:
        fields.setdefault("view", self.machine.view.number)
        if role == "server":
            fields.setdefault("marks", tuple(WorkerMark(w) for w in range(WORKERS)))
            fields.setdefault("endpoint", f"at {slot}")
            if slot < SERVERS:  # it has heard of what it is told of its view
                fields.setdefault("started", self.machine.view.servers[slot].since)
        kind = ServerBeat if role == "server" else WorkerBeat
        source = Peer(role, slot, incarnation)
        self.machine.receive(Envelope(source, self.machine.me, kind(state, **fields)), self.now)

    def servers(self, *sequences: int, staged: int = 0) -> None:
        """All servers say where worker 0 stands."""
        for slot, sequence in enumerate(sequences or (0,) * SERVERS):
            first = WorkerMark(
                0, sequence=sequence, batch=Position(0, sequence), staged=staged, kept=sequence
            )
            self.beat("server", slot, marks=(first, WorkerMark(1)))

    def started(self) -> Script:
        """Everybody is there and at work."""
        for _ in range(3):
            self.servers()
        for slot in range(WORKERS):
            self.beat("worker", slot, "working")
        assert [w.starts for w in self.machine.view.workers] == [True, True]
        return self

    def exit(self, peer: Peer, code: int = -9) -> None:
        beat = LauncherBeat("ready", self.machine.view.number, exited=(Exit(peer, code),))
        self.machine.receive(Envelope(Peer("launcher"), self.machine.me, beat), self.now)

    @property
    def phase(self) -> str:
        return self.machine.view.phase

    @property
    def worker(self) -> Any:
        return self.machine.view.workers[0]


def test_nobody_starts_before_all_servers_are_there() -> None:
    script = Script()
    script.beat("worker", 0)
    script.beat("server", 0)
    assert script.phase == "starting"
    script.beat("server", 1)
    assert script.phase == "running"
    assert [s.endpoint for s in script.machine.view.servers] == ["at 0", "at 1"]
    assert not script.worker.starts
    script.servers()
    script.servers()
    assert script.worker.starts


def test_whoever_shows_an_old_view_gets_the_new_one() -> None:
    script = Script().started()
    script.machine.outbox.clear()
    script.beat("worker", 1, "working")
    assert script.machine.outbox == []
    script.beat("worker", 1, "working", view=Script().machine.view.number)
    (envelope,) = script.machine.outbox
    assert envelope.target == Peer("worker", 1, 1)
    assert isinstance(envelope.message, View)


@pytest.mark.parametrize(
    ("marks", "settle", "resumes"), [((4, 4), 4, 4), ((5, 4), 5, 5), ((4, 5), 5, 5)], ids=str
)
def test_a_dead_worker_is_replaced_in_three_steps(marks: tuple[int, int], settle: int, resumes: int) -> None:
    script = Script().started()
    script.exit(Peer("worker", 0, 1))
    assert (script.worker.incarnation, script.worker.starts, script.worker.settle) == (2, False, -1)
    fenced = script.machine.view.number
    script.beat(
        "server", 0, view=fenced, marks=(WorkerMark(0, sequence=marks[0], kept=marks[0]), WorkerMark(1))
    )
    assert script.worker.settle == -1, "one server has not refused the old one yet"
    script.servers(*marks, staged=5)
    assert script.worker.settle == settle
    assert not script.worker.starts
    script.servers(resumes, resumes)
    assert script.worker.starts
    assert (script.worker.sequence, script.worker.batch) == (resumes, Position(0, resumes))


def test_without_atomic_pushes_the_half_batch_is_computed_again() -> None:
    script = Script(atomic=False).started()
    script.exit(Peer("worker", 0, 1))
    for _ in range(2):
        script.servers(5, 4)
    assert (script.worker.sequence, script.worker.settle) == (4, 5)
    assert script.worker.batch == Position(0, 4)


def test_the_exit_of_a_process_that_was_replaced_is_old_news() -> None:
    script = Script().started()
    script.exit(Peer("worker", 0, 1))
    script.exit(Peer("worker", 0, 1))
    assert script.worker.incarnation == 2


def test_a_supervisor_that_stood_still_blames_nobody() -> None:
    script = Script().started()
    script.machine.tick(100.0)
    assert [w.incarnation for w in script.machine.view.workers] == [1, 1]
    assert script.phase == "running"
    for tenth in range(1, 16):
        script.machine.tick(100.0 + tenth / 10)
    assert [w.incarnation for w in script.machine.view.workers] == [1, 1]
    script.machine.tick(101.6)
    assert script.machine.failure is not None, "they have been silent since"


def test_silence_is_death_and_beats_of_the_dead_do_not_count() -> None:
    script = Script().started()
    script.now = 1.0
    script.servers()
    script.beat("worker", 1, "working")
    for now in (0.5, 1.0, 1.4, 1.6):
        script.machine.tick(now)
    assert [w.incarnation for w in script.machine.view.workers] == [2, 1]
    script.now = 1.7
    script.beat("worker", 0, "working")
    assert script.machine.workers[0].heard is None


def test_a_worker_that_cannot_reach_a_server_is_replaced() -> None:
    """Hole 19: both give signs of life, but not to each other."""
    script = Script().started()
    script.beat("worker", 1, "working", stuck_on=(0,))
    assert [w.incarnation for w in script.machine.view.workers] == [1, 2]


def test_what_a_worker_said_of_a_server_before_it_began_does_not_count() -> None:
    script = Script().started()
    since = script.machine.view.servers[0].since
    script.beat("worker", 1, "working", stuck_on=(0,), view=msgspec.structs.replace(since, epoch=0))
    assert script.machine.view.workers[1].incarnation == 1


def replaced_server(script: Script) -> None:
    """Server 1 is killed; its successor takes over and lacks 8 rows."""
    script.exit(Peer("server", 1, 1))
    for _ in range(3):
        script.beat("server", 0, lanes=(LaneState(1, 1),))
        script.beat("server", 1, incarnation=2, redundancy=Redundancy(rows=8))


def said(script: Script, event: str) -> int:
    return [name for name, _ in script.machine.events].count(event)


def test_a_beat_that_comes_late_does_not_take_rows_away() -> None:
    script = Script(r=1).started()
    replaced_server(script)
    assert (said(script, "server_started"), said(script, "server_recovered")) == (1, 0)
    assert not script.machine.may_cut()
    for left in (3, 0, 3, 0, 0):
        script.beat("server", 1, incarnation=2, redundancy=Redundancy(rows=left, recovered=8 - left))
        assert script.machine.may_cut() == (said(script, "server_recovered") > 0)
    assert said(script, "server_recovered") == 1
    script.exit(Peer("server", 1, 2))
    assert not script.machine.may_cut()


@pytest.mark.parametrize(
    ("lacks", "replaced"),
    [
        (Redundancy(rows=8), False),
        (Redundancy(rows=2, not_installed=2), True),
        (Redundancy(recovered=8), True),
    ],
)
def test_a_worker_may_wait_for_rows_that_are_being_recovered(lacks: Redundancy, replaced: bool) -> None:
    """If they come from itself, it cannot be reached."""
    script = Script(r=1).started()
    replaced_server(script)
    script.beat("server", 1, incarnation=2, redundancy=lacks)
    script.beat("worker", 1, "working", stuck_on=(1,))
    assert script.machine.view.workers[1].incarnation == 1 + replaced


def test_a_supervisor_that_comes_back_makes_no_cut_without_rows() -> None:
    first = Script(r=1).started()
    replaced_server(first)
    since = [entry.since for entry in first.machine.view.servers]
    second = Script(first.storage, r=1)
    second.beat("server", 0, started=since[0])
    second.beat("server", 1, incarnation=2, started=since[1], redundancy=Redundancy(rows=5))
    assert second.phase == "running"
    assert not second.machine.may_cut()
    second.beat("server", 1, incarnation=2, redundancy=Redundancy(recovered=8))
    assert second.machine.may_cut()


def test_a_supervisor_that_comes_back_starts_a_replacement_again_that_others_have_heard_of() -> None:
    """The one before it died as it said so: the replacement has not heard it, and others have nothing to say
    any more of the server that died."""
    first = Script(r=1).started()
    replaced_server(first)
    since = [entry.since for entry in first.machine.view.servers]
    second = Script(first.storage, r=1)
    second.beat("server", 0, started=since[0], lanes=())
    second.beat("server", 1, incarnation=2, started=ViewNumber())
    entry = second.machine.view.servers[1]
    assert second.machine.failure is None
    assert entry == first.machine.view.servers[1]
    assert not second.machine.may_cut()
    second.beat("server", 1, incarnation=2, redundancy=Redundancy(rows=5))
    assert not second.machine.may_cut()
    second.beat("server", 1, incarnation=2, redundancy=Redundancy(recovered=8))
    assert second.machine.may_cut()


def test_epochs_rise_and_are_durable_before_use() -> None:
    storage = MemoryStorage()
    first = Script(storage).started()
    seen = {first.machine.view.number.epoch}
    first.exit(Peer("worker", 0, 1))
    assert storage.state is not None
    assert storage.state.epoch == first.machine.view.number.epoch
    assert storage.state.workers == (2, 1)
    seen.add(first.machine.view.number.epoch)
    second = Script(storage)
    assert second.machine.view.number.epoch not in seen
    assert second.machine.view.number > first.machine.view.number
    assert [w.incarnation for w in second.machine.view.workers] == [2, 1]


def test_a_supervisor_that_comes_back_finds_the_job_running() -> None:
    storage = MemoryStorage(Durable(epoch=4, servers=(1, 1), workers=(3, 1)))
    script = Script(storage)
    script.beat("worker", 0, "working", incarnation=3)
    for _ in range(3):
        script.servers(7, 7)
    assert script.phase == "running"
    assert (script.worker.incarnation, script.worker.starts, script.worker.sequence) == (3, True, 7)


def test_a_server_that_is_lost_ends_the_job() -> None:
    script = Script().started()
    script.exit(Peer("server", 1, 1))
    assert script.phase == "stopping"
    assert script.machine.failure is not None
    assert (script.machine.failure.kind, script.machine.failure.peer) == ("server", Peer("server", 1, 1))


def test_an_error_of_a_worker_ends_the_job() -> None:
    script = Script().started()
    script.beat("worker", 0, "failed", error="no such file")
    assert script.machine.failure is not None
    assert script.machine.failure.text == "no such file"


def test_a_cut_waits_for_all_workers_and_then_for_all_servers() -> None:
    script = Script().started()
    script.machine.request_cut(9)
    assert script.phase == "holding"
    script.beat("worker", 0, "held", batch=Position(0, 6))
    assert script.machine.view.cut == 0
    script.beat("worker", 1, "done", batch=Position(0, 5))
    assert script.machine.view.cut == 9
    script.beat("server", 0, cut=9)
    assert script.phase == "holding"
    script.beat("server", 1, cut=9)
    assert script.phase == "running"
    (cut,) = script.machine.cuts_made
    assert (cut.version, cut.positions) == (9, (Position(0, 6), Position(0, 5)))


def test_what_a_worker_said_before_it_heard_of_the_cut_does_not_count() -> None:
    script = Script().started()
    before = script.machine.view.number
    script.machine.request_cut(1)
    for slot in range(WORKERS):
        script.beat("worker", slot, "held", view=before)
    assert script.machine.view.cut == 0


def test_the_job_ends_with_a_test() -> None:
    script = Script().started()
    for slot in range(WORKERS):
        script.beat("worker", slot, "done")
    assert script.worker.test == 1
    assert script.phase == "running"
    script.beat("worker", 0, "done", tested=Evaluation(1, 0.7, 0.4, 10))
    assert script.machine.finished
    assert [t.auc for t in script.machine.tests] == [0.7]


def test_a_supervisor_that_comes_back_asks_for_tests_that_nobody_has_made() -> None:
    """The worker remembers those that it made for the one before, and does no number twice."""
    first = Script(test_every=3).started()
    first.servers(4, 4)
    first.beat("worker", 0, "working", tested=Evaluation(1, 0.7, 0.4, 10))
    first.servers(8, 8)
    old = Evaluation(first.worker.test, 0.8, 0.4, 10)
    assert [test.number for test in first.machine.tests] == [1]
    assert old.number == 2
    second = Script(first.storage, test_every=3)
    for _ in range(3):
        second.servers(9, 9)
    for slot in range(WORKERS):
        second.beat("worker", slot, "done", tested=old)
    assert second.worker.test > old.number
    second.beat("worker", 0, "done", tested=old)
    assert second.phase == "running"
    second.beat("worker", 0, "done", tested=msgspec.structs.replace(old, number=second.worker.test, auc=0.9))
    assert second.machine.finished
    assert [(test.auc, test.step) for test in second.machine.tests] == [(0.9, 9)]


def test_malformed_beats_are_ignored() -> None:
    script = Script()
    script.beat("server", 0, marks=())
    script.beat("server", 99)
    script.beat("worker", -1)
    script.machine.receive(Envelope(Peer("worker", 0, 1), script.machine.me, script.machine.view), 0.0)
    assert script.machine.servers[0].beat is None


def test_a_worker_that_dies_again_and_again_at_the_same_batch_ends_the_job() -> None:
    script = Script().started()
    script.machine.plan = msgspec.structs.replace(script.plan, most_deaths=2)
    for incarnation in range(1, 4):
        assert script.machine.failure is None
        script.exit(Peer("worker", 0, incarnation))
    assert script.machine.failure is not None
    assert script.machine.failure.kind == "worker"
