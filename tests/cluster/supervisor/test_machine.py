"""The supervisor's decisions, message by message (holes 15, 18, 19)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Collect,
    Evaluation,
    Exit,
    Instant,
    LaneState,
    LauncherBeat,
    Peer,
    Position,
    Redundancy,
    Saved,
    ServerBeat,
    View,
    ViewNumber,
    WorkerBeat,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.cluster.supervisor.members import JobFailure
from holdfast.cluster.supervisor.views import Durable
from holdfast.sim.cluster import counting_plan
from holdfast.sim.storage import MemoryStorage

SERVERS, WORKERS = 2, 2


class Script:
    """A supervisor, and nodes that say what a test wants them to say."""

    def __init__(
        self,
        storage: MemoryStorage | None = None,
        atomic: bool = True,
        r: int = 0,
        plan: JobPlan | None = None,
        **options: Any,
    ) -> None:
        self.storage = storage or MemoryStorage()
        self.plan = plan or counting_plan(servers=SERVERS, workers=WORKERS, atomic=atomic, r=r)
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


def failure_of(script: Script) -> JobFailure | None:
    return script.machine.failure


def launcher(script: Script, state: Any) -> None:
    beat = LauncherBeat(state, script.machine.view.number)
    script.machine.receive(Envelope(Peer("launcher"), script.machine.me, beat), script.now)


def sent(script: Script, kind: type) -> list[Peer]:
    """To whom something of this kind is on its way."""
    found = [e.target for e in script.machine.outbox if isinstance(e.message, kind)]
    script.machine.outbox.clear()
    return found


def figures(script: Script, event: str) -> dict[str, Any]:
    (found,) = [figures for name, figures in script.machine.events if name == event]
    return found


class TestLaunchers:
    def beat(self, script: Script, incarnation: int, *exited: Exit) -> list[Peer]:
        """A launcher reports; to whom the supervisor sends views for it."""
        script.machine.outbox.clear()
        source = Peer("launcher", 0, incarnation)
        message = LauncherBeat("ready", ViewNumber(), exited=exited)
        script.machine.receive(Envelope(source, script.machine.me, message), script.now)
        return sent(script, View)

    def test_the_newest_one_counts(self) -> None:
        script = Script().started()
        assert self.beat(script, 0) == [Peer("launcher", 0, 0)]
        before = script.machine.view.number
        assert Peer("launcher", 0, 2) in self.beat(script, 2)
        assert script.machine.view.launcher == 2
        assert script.machine.view.number.epoch > before.epoch
        assert script.machine.launcher == Peer("launcher", 0, 2)

    def test_an_earlier_one_is_told_and_not_heard(self) -> None:
        script = Script().started()
        self.beat(script, 2)
        assert self.beat(script, 1, Exit(Peer("worker", 0, 1), -9)) == [Peer("launcher", 0, 1)]
        assert script.machine.view.launcher == 2
        assert script.worker.incarnation == 1
        self.beat(script, 2, Exit(Peer("worker", 0, 1), -9))
        assert script.worker.incarnation == 2

    def test_the_next_supervisor_knows_which_one_counts(self) -> None:
        """Else an earlier launcher and the newest one could start the same incarnation."""
        script = Script().started()
        self.beat(script, 2)
        script.machine = Supervisor(script.machine.plan, script.storage, script.now)
        assert script.machine.view.launcher == 2
        self.beat(script, 1)
        assert script.machine.view.launcher == 2


class Keeper:
    """Who saves the job; notes what it hears."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.advanced = 0
        self.saved = False

    def receive(self, slot: int, message: Any, frames: Any) -> None:
        self.received.append(slot)

    def advance(self, supervisor: Supervisor, now: float) -> None:
        self.advanced += 1

    def may_stop(self, supervisor: Supervisor, now: float) -> bool:
        return self.saved


class TestTelling:
    def test_a_new_view_goes_to_everybody_who_is_known_to_listen(self) -> None:
        script = Script()
        script.beat("server", 0)
        script.machine.outbox.clear()
        script.machine.announce(committed=3)
        assert sent(script, View) == [Peer("server", 0, 1), Peer("launcher")]

    def test_what_becomes_of_versions_is_announced_until_the_end(self) -> None:
        script = Script().started()
        script.machine.announce(committed=3)
        script.machine.announce(tidied=2)
        assert (script.machine.view.committed, script.machine.view.tidied) == (3, 2)
        script.exit(Peer("server", 1, 1))
        script.machine.announce(committed=4)
        assert script.machine.view.committed == 3

    def test_something_for_a_server_goes_to_the_one_that_is_there(self) -> None:
        script = Script(r=1).started()
        script.exit(Peer("server", 1, 1))
        script.machine.outbox.clear()
        script.machine.send(1, Collect(3))
        assert sent(script, Collect) == [Peer("server", 1, 2)]

    def test_most_beats_say_what_the_last_one_said(self) -> None:
        keeper = Keeper()
        script = Script(keeper=keeper).started()
        script.beat("worker", 0, "working", sequence=1)
        before = keeper.advanced
        script.beat("worker", 0, "working", sequence=1)
        assert keeper.advanced == before
        script.beat("worker", 0, "working", sequence=2)
        assert keeper.advanced == before + 1

    def test_what_a_server_has_saved_goes_to_whoever_saves(self) -> None:
        keeper = Keeper()
        script = Script(r=1, keeper=keeper).started()
        script.exit(Peer("server", 1, 1))
        for slot, incarnation in ((0, 1), (1, 1), (1, 2)):
            source = Peer("server", slot, incarnation)
            script.machine.receive(Envelope(source, script.machine.me, Saved(3, False, b""), [b""]), 0.0)
        assert keeper.received == [0, 1]
        without = Script().started()
        without.machine.receive(
            Envelope(Peer("server", 0, 1), without.machine.me, Saved(3, False, b""), [b""]), 0.0
        )


class TestHolding:
    def test_the_launcher_lets_the_job_wait_and_go_on(self) -> None:
        script = Script().started()
        launcher(script, "held")
        assert script.phase == "holding"
        launcher(script, "held")
        assert script.phase == "holding"
        launcher(script, "ready")
        assert script.phase == "running"

    def test_after_a_cut_workers_wait_on_if_they_are_to(self) -> None:
        script = Script().started()
        script.machine.request_cut(1)
        launcher(script, "held")
        for slot in range(WORKERS):
            script.beat("worker", slot, "held")
        for slot in range(SERVERS):
            script.beat("server", slot, cut=1)
        assert script.phase == "holding"
        assert len(script.machine.cuts_made) == 1

    def test_the_launcher_ends_the_job(self) -> None:
        script = Script().started()
        script.machine.request_cut(1)
        launcher(script, "done")
        assert script.phase == "ending"
        assert script.machine.cut is None
        launcher(script, "done")
        assert script.phase == "ending"

    def test_a_job_that_has_not_begun_is_not_ended(self) -> None:
        script = Script()
        script.machine.request_stop()
        assert script.phase == "starting"


class TestCuts:
    def test_all_rows_if_nobody_says_otherwise(self) -> None:
        script = Script().started()
        script.machine.request_cut(2)
        assert (script.machine.view.baseline, script.machine.view.whole) == (True, True)

    def test_while_the_job_ends_workers_finish_their_batch_anyway(self) -> None:
        script = Script().started()
        script.machine.request_stop()
        assert script.machine.may_cut()
        script.machine.request_cut(2, baseline=False, whole=False)
        assert script.phase == "ending"
        assert (script.machine.view.baseline, script.machine.view.whole) == (False, False)
        assert script.machine.cut is not None
        for slot in range(WORKERS):
            script.beat("worker", slot, "done", batch=Position(0, slot))
        for slot in range(SERVERS):
            script.beat("server", slot, cut=2)
        assert script.phase == "ending"
        assert [cut.version for cut in script.machine.cuts_made] == [2]

    def test_one_at_a_time_and_only_while_the_job_runs(self) -> None:
        script = Script()
        assert not script.machine.may_cut()
        script.started()
        script.servers()
        assert script.machine.may_cut()
        script.machine.request_cut(1)
        assert not script.machine.may_cut()

    def test_all_servers_must_have_heard_of_this_supervisor(self) -> None:
        script = Script().started()
        script.beat("server", 1, view=ViewNumber(0))
        assert not script.machine.may_cut()

    def test_what_is_ahead_is_caught_up_with_first(self) -> None:
        script = Script().started()
        script.beat("server", 1, redundancy=Redundancy(updates_ahead=1))
        assert not script.machine.may_cut()
        script.machine.request_stop()
        script.beat("server", 1, redundancy=Redundancy(updates_ahead=1))
        assert script.machine.may_cut()

    def test_what_is_in_it_is_counted_when_all_have_copied(self) -> None:
        script = Script().started()
        script.machine.request_cut(3)
        for slot in range(WORKERS):
            script.beat("worker", slot, "held")
        for slot in range(SERVERS):
            marks = (WorkerMark(0, sequence=4, samples=40), WorkerMark(1, sequence=5, samples=50))
            script.beat("server", slot, cut=3 if slot else 4, marks=marks)
        (cut,) = script.machine.cuts_made
        assert (cut.steps, cut.samples) == (9, 90)

    def test_a_server_that_dies_takes_it_along(self) -> None:
        script = Script(r=1).started()
        script.machine.request_cut(3)
        script.exit(Peer("server", 1, 1))
        assert script.machine.cut is None
        assert script.phase == "running"
        assert script.machine.servers[1].since_view == script.machine.view.number, "others hear of it at once"

    def test_a_worker_that_dies_does_not(self) -> None:
        script = Script(r=1).started()
        script.machine.request_cut(3)
        script.exit(Peer("worker", 1, 1))
        assert script.machine.cut is not None
        assert script.phase == "holding"


class TestSilence:
    def tick(self, script: Script, now: float, until: float, *beating: tuple[str, int]) -> None:
        while now < until:
            script.now = now
            for role, slot in beating:
                script.beat(role, slot, "ready" if role == "server" else "working")
            script.machine.tick(now)
            now += 0.25

    def test_a_process_has_longer_for_its_first_sign_of_life(self) -> None:
        script = Script(r=1).started()
        script.exit(Peer("worker", 1, 1))
        others = ("server", 0), ("server", 1), ("worker", 0)
        self.tick(script, 0.0, 10.25, *others)
        assert script.machine.view.workers[1].incarnation == 2
        self.tick(script, 10.25, 10.5, *others)
        assert script.machine.view.workers[1].incarnation == 3
        assert said(script, "worker_lost") == 2

    def test_silence_is_told_with_its_length(self) -> None:
        script = Script(r=1).started()
        self.tick(script, 0.0, 1.75, ("server", 0), ("server", 1), ("worker", 0))
        assert said(script, "worker_lost") == 0
        self.tick(script, 1.75, 2.0, ("server", 0), ("server", 1), ("worker", 0))
        assert figures(script, "worker_lost")["reason"] == "sent no heartbeat for 1.8 s"

    def test_standing_still_is_forgiven_from_half_a_silence_on(self) -> None:
        script = Script(r=1).started()
        for now in (0.5, 1.25):
            script.machine.tick(now)
        assert script.machine.workers[0].heard == 0.0
        script.machine.tick(2.25)
        assert script.machine.workers[0].heard == 1.0
        assert script.machine.workers[0].since == 1.0
        assert [w.incarnation for w in script.machine.view.workers] == [1, 1]

    def test_whoever_saves_is_asked_at_every_tick(self) -> None:
        keeper = Keeper()
        script = Script(keeper=keeper).started()
        before = keeper.advanced
        script.machine.tick(0.1)
        script.machine.tick(0.2)
        assert keeper.advanced == before + 2


class TestDeaths:
    @pytest.mark.parametrize(
        ("code", "reason"),
        [(-9, "was killed by signal 9"), (3, "ended with code 3"), (0, "ended with code 0")],
    )
    def test_how_is_told(self, code: int, reason: str) -> None:
        script = Script().started()
        script.servers(4, 4)
        script.exit(Peer("worker", 0, 1), code)
        assert figures(script, "worker_lost") == {"slot": 0, "incarnation": 1, "reason": reason, "step": 4}

    @pytest.mark.parametrize(
        ("r", "changed", "protected", "failure"),
        [
            (0, {}, False, "server"),
            (1, {}, True, None),
            (1, {"dense": "none"}, False, "server"),
            (0, {"partial": "partial"}, True, None),
            (0, {"partial": "full"}, True, "lost"),
        ],
    )
    def test_a_server_is_replaced_if_something_protects_it(
        self, r: int, changed: dict[str, Any], protected: bool, failure: str | None
    ) -> None:
        plan = msgspec.structs.replace(counting_plan(servers=2, workers=2, atomic=True, r=r), **changed)
        script = Script(plan=plan).started()
        script.exit(Peer("server", 1, 1))
        told = figures(script, "server_lost")
        assert told["protected"] is protected
        assert ("partial" in told) is ("partial" in changed)
        found = script.machine.failure
        assert (found.kind if found is not None else None) == failure
        assert script.machine.view.servers[1].incarnation == (1 if failure else 2)

    def test_before_servers_have_begun_nothing_protects_them(self) -> None:
        script = Script(r=1)
        script.beat("server", 0)
        script.exit(Peer("server", 1, 1))
        assert script.machine.failure is not None
        assert script.machine.failure.kind == "server"

    def test_deaths_at_another_batch_are_counted_anew(self) -> None:
        plan = msgspec.structs.replace(counting_plan(servers=2, workers=2, atomic=True), most_deaths=1)
        script = Script(plan=plan).started()
        for incarnation in (1, 2, 3):
            script.servers(incarnation, incarnation)
            script.beat("worker", 0, "working", incarnation=incarnation, sequence=incarnation)
            script.exit(Peer("worker", 0, incarnation))
        assert failure_of(script) is None
        script.exit(Peer("worker", 0, 4))
        assert failure_of(script) is not None

    def test_a_server_that_dies_again_and_again_ends_the_job(self) -> None:
        plan = msgspec.structs.replace(counting_plan(servers=2, workers=2, atomic=True, r=1), most_deaths=1)
        script = Script(plan=plan).started()
        script.exit(Peer("server", 1, 1))
        assert failure_of(script) is None
        script.exit(Peer("server", 1, 2))
        failure = failure_of(script)
        assert failure is not None
        assert failure.kind == "server"

    def test_after_the_end_nobody_is_lost(self) -> None:
        script = Script().started()
        script.exit(Peer("server", 1, 1))
        number = script.machine.view.number
        script.exit(Peer("worker", 0, 1))
        script.beat("worker", 1, "failed", error="late")
        script.machine.tick(100.0)
        script.machine.tick(200.0)
        assert script.machine.view.number == number
        assert script.machine.failure is not None
        assert script.machine.failure.kind == "server"
        assert said(script, "worker_lost") == 0

    def test_an_exit_of_nobody(self) -> None:
        script = Script().started()
        for peer in (Peer("worker", 9, 1), Peer("worker", -1, 1), Peer("launcher"), Peer("worker", 0, 2)):
            script.exit(peer)
        assert not script.machine.events or said(script, "worker_lost") == 0


class TestReplacedWorkers:
    def test_it_starts_when_nothing_of_it_can_be_lost_any_more(self) -> None:
        """Nobody has its pushes: what a server that died had not kept would be gone."""
        script = Script(r=1).started()
        script.exit(Peer("worker", 0, 1))
        for slot in range(SERVERS):
            script.beat("server", slot, marks=(WorkerMark(0, sequence=4, kept=4), WorkerMark(1)))
        assert script.worker.settle == 4
        for slot in range(SERVERS):
            kept = 4 - slot
            mark = WorkerMark(0, sequence=4, kept=kept, contained=3 + slot)
            script.beat("server", slot, marks=(mark, WorkerMark(1)))
        assert not script.worker.starts
        for slot, contained in ((0, 5), (1, 6)):
            mark = WorkerMark(0, sequence=4, kept=4, contained=contained)
            script.beat("server", slot, marks=(mark, WorkerMark(1)))
        assert script.worker.starts
        assert script.worker.owes == 6, "some server has it already"
        assert ("worker_started", {"slot": 0, "incarnation": 2, "sequence": 4}) in script.machine.events

    def test_all_servers_must_have_started(self) -> None:
        script = Script(r=1).started()
        script.exit(Peer("server", 1, 1))
        script.exit(Peer("worker", 0, 1))
        script.servers(4, 4)
        assert script.worker.settle == -1


class TestReplacedServers:
    def test_it_is_fenced_settled_and_started(self) -> None:
        script = Script(r=1).started()
        script.servers(4, 4)
        script.exit(Peer("server", 1, 1))
        server: Any = script.machine.servers[1]
        assert server.stage == "fencing"
        script.beat("server", 0, lanes=(LaneState(1, 1),), view=ViewNumber(0))
        assert server.stage == "fencing", "the other one has not heard of it"
        script.beat("server", 0, lanes=(LaneState(1, 1, Instant(7)),))
        assert server.stage == "settling"
        assert script.machine.view.servers[1].counts_until == Instant(7)
        assert not script.machine.view.servers[1].starts
        script.beat("server", 1, "restoring", incarnation=2, started=ViewNumber(), endpoint="new")
        script.beat("server", 0, lanes=(LaneState(1, 1, Instant(7)),))
        assert server.stage == "settling", "it reads from a checkpoint"
        script.beat("server", 1, incarnation=2, started=ViewNumber(), endpoint="new")
        assert server.stage == "started"
        entry = script.machine.view.servers[1]
        assert (entry.starts, entry.endpoint, entry.incarnation) == (True, "new", 2)
        assert said(script, "server_started") == 1

    def test_the_job_ends_if_nobody_has_its_parities(self) -> None:
        script = Script(r=1).started()
        script.exit(Peer("server", 1, 1))
        script.beat("server", 0, lanes=())
        assert script.machine.failure is not None
        assert script.machine.failure.kind == "lost"

    def test_one_that_lost_everything_ends_the_job(self) -> None:
        script = Script(r=1).started()
        replaced_server(script)
        script.beat("server", 1, incarnation=2, redundancy=Redundancy(rows=8, lost="8 rows"))
        assert script.machine.failure is not None
        assert "could not recover 8 rows" in script.machine.failure.text

    def test_a_replacement_does_not_begin_with_the_first_ones(self) -> None:
        """A supervisor that comes back: one server was replaced before any had begun, as it seems."""
        storage = MemoryStorage(Durable(epoch=4, servers=(1, 2), workers=(1, 1), began=True))
        script = Script(storage, r=1)
        script.beat("server", 1, incarnation=2, started=ViewNumber())
        script.beat("server", 0, started=ViewNumber())
        first, second = script.machine.view.servers
        assert (first.incarnation, first.starts) == (1, True)
        assert (second.incarnation, second.starts) == (2, False)


class TestBrokenLinks:
    def test_a_server_that_another_cannot_reach_is_replaced_if_the_code_covers_it(self) -> None:
        script = Script(r=1).started()
        script.beat("server", 0, stuck_on=(1,))
        assert [s.incarnation for s in script.machine.view.servers] == [1, 2]
        assert figures(script, "server_lost")["reason"] == "cannot be reached by server 0"

    def test_one_that_lacks_parities_leaves_no_room_for_another(self) -> None:
        script = Script(r=1).started()
        script.beat("server", 0, redundancy=Redundancy(parities=3))
        script.beat("server", 0, stuck_on=(1,), redundancy=Redundancy(parities=3))
        assert [s.incarnation for s in script.machine.view.servers] == [1, 1]

    def test_what_it_said_before_the_other_began_does_not_count(self) -> None:
        script = Script(r=1).started()
        script.beat("server", 0, stuck_on=(1, 7, -1), view=ViewNumber(0))
        assert [s.incarnation for s in script.machine.view.servers] == [1, 1]

    def test_a_worker_waits_for_a_server_that_is_being_replaced(self) -> None:
        script = Script(r=1).started()
        script.exit(Peer("server", 1, 1))
        script.beat("worker", 1, "working", stuck_on=(1,))
        script.beat("worker", 0, "working", stuck_on=(0, 1))
        assert [w.incarnation for w in script.machine.view.workers] == [1, 1]
        script.beat("worker", 0, "working", stuck_on=(0,))
        assert [w.incarnation for w in script.machine.view.workers] == [2, 1]
        assert figures(script, "worker_lost")["reason"] == "cannot reach server 0"


class TestTests:
    def test_every_so_many_batches(self) -> None:
        script = Script(test_every=5).started()
        script.servers(4, 4)
        assert script.worker.test == 0
        script.servers(5, 5)
        assert script.worker.test == 1
        script.servers(20, 20)
        assert script.worker.test == 1, "one after the other"
        script.beat("worker", 0, "working", tested=Evaluation(1, 0.7, 0.4, 10))
        assert script.worker.test == 2
        assert figures(script, "test")["step"] == 5

    def test_the_end_waits_for_what_is_lacking_and_for_the_last_save(self) -> None:
        keeper = Keeper()
        script = Script(r=1, keeper=keeper).started()
        script.beat("server", 1, redundancy=Redundancy(not_installed=3))
        for slot in range(WORKERS):
            script.beat("worker", slot, "done")
        assert script.worker.test == 0
        script.beat("server", 1)
        assert script.worker.test == 1
        script.beat("worker", 0, "done", tested=Evaluation(1, 0.7, 0.4, 10))
        assert script.phase == "running"
        keeper.saved = True
        script.beat("server", 1, redundancy=Redundancy(updates_ahead=2))
        assert script.machine.finished
        assert script.phase == "stopping"
        assert figures(script, "network_updates_lost") == {"slot": 1, "incarnation": 1, "updates": 2}

    def test_it_is_not_over_before_all_workers_are_done(self) -> None:
        script = Script().started()
        script.beat("worker", 0, "done")
        assert script.worker.test == 0
        script.exit(Peer("worker", 1, 1))
        script.beat("worker", 1, "done", incarnation=2)
        assert script.worker.test == 0, "it has not even started"


def test_a_job_that_stalls_is_given_up() -> None:
    script = Script(r=1).started()
    script.beat("server", 1, redundancy=Redundancy(parities=3))
    now = 0.0
    while now < 20.5 and script.machine.failure is None:
        now += 0.25
        script.now = now
        script.beat("server", 0)
        script.beat("server", 1, redundancy=Redundancy(parities=3))
        for slot in range(WORKERS):
            script.beat("worker", slot, "working")
        script.machine.tick(now)
    assert script.machine.failure is not None
    assert script.machine.failure.kind == "stalled"
    assert now > 20.0
