"""The supervisor's durable file, and what it reports to the launcher."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cluster.protocol.envelope import Counters, Envelope
from holdfast.cluster.protocol.messages import (
    Figures,
    Happening,
    Peer,
    Redundancy,
    SaveFailure,
    ServerBeat,
    Status,
    ViewNumber,
    WorkerBeat,
)
from holdfast.cluster.runtime.loop import TICK_SECONDS
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.cluster.supervisor.members import JobFailure, ServerMember, WorkerMember
from holdfast.cluster.supervisor.process import FileStorage, _node_status, _status, _Watch
from holdfast.cluster.supervisor.views import Durable
from holdfast.events import EventLog, read_events
from holdfast.sim.cluster import counting_plan
from holdfast.sim.storage import MemoryStorage

STATE = Durable(epoch=3, servers=(1, 2), workers=(1,), began=True)


class TestStorage:
    def test_what_was_saved_last(self, tmp_path: Path) -> None:
        storage = FileStorage(tmp_path)
        assert storage.load() is None
        storage.save(Durable(epoch=2))
        storage.endpoint = "tcp://here"
        storage.save(STATE)
        loaded = FileStorage(tmp_path).load()
        assert loaded is not None
        assert (loaded.epoch, loaded.servers, loaded.endpoint) == (3, (1, 2), "tcp://here")
        assert [path.name for path in tmp_path.iterdir()] == ["supervisor.json"]

    def test_an_endpoint_that_was_known_stays_known(self, tmp_path: Path) -> None:
        storage = FileStorage(tmp_path)
        storage.save(Durable(epoch=2, endpoint="tcp://old"))
        loaded = storage.load()
        assert loaded is not None
        assert loaded.endpoint == "tcp://old"

    def test_it_is_nobody_elses_business(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            (tmp_path / "supervisor.new").touch(0o666)
            FileStorage(tmp_path).save(STATE)
        finally:
            os.umask(before)
        assert (tmp_path / "supervisor.json").stat().st_mode & 0o777 == 0o600

    def test_it_is_durable_before_it_takes_the_place_of_the_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        rename = Path.rename
        handles = len(os.listdir("/proc/self/fd"))

        def fsync(handle: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            done.append(f"{path.name} {path.stat().st_size > 0}" if path.is_file() else "folder")

        def renamed(path: Path, target: Path) -> Path:
            done.append("rename")
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", renamed)
        FileStorage(tmp_path).save(STATE)
        assert done == ["supervisor.new True", "rename", "folder"]
        assert len(os.listdir("/proc/self/fd")) == handles


class Keeper:
    """Who saves the job; it lets go of the store when it is closed."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.saved = [3, 4]
        self.last_version = 4
        self.saved_steps = 40
        self.failures: Any = Failures()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Failures:
    unsaved = True

    def __call__(self) -> tuple[Any, ...]:
        return (SaveFailure("the disk is full", "full", 1),)


class Transport:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Envelope] = []
        self.counters = Counters()

    def send(self, envelope: Envelope) -> None:
        self.sent.append(envelope)

    def flush(self) -> None:
        pass

    def statuses(self) -> list[Status]:
        found = [envelope.message for envelope in self.sent if isinstance(envelope.message, Status)]
        self.sent.clear()
        return found


class TestStatus:
    def machine(self) -> Supervisor:
        return Supervisor(counting_plan(servers=1, workers=2, atomic=False), MemoryStorage(), 0.0)

    def test_of_a_job_that_is_not_saved(self) -> None:
        machine = self.machine()
        machine.workers[0].incarnation = 3
        machine.workers[1].incarnation = 2
        status = _status(machine, None, 5.0, [Happening(1.0, "x", {})], dropped=7)
        assert (status.phase, status.steps, status.samples) == ("starting", 0, 0)
        assert [node.peer.role for node in status.nodes] == ["supervisor", "server", "worker", "worker"]
        assert status.nodes[0].figures.dropped == 7
        assert status.nodes[0].figures.memory_bytes > 0
        assert (status.versions, status.save_failures, status.last_version, status.saved_steps) == (
            (),
            (),
            0,
            0,
        )
        assert status.replaced == 3
        assert (status.finished, status.failure, status.unsaved, status.degraded) == (
            False,
            None,
            False,
            False,
        )
        assert [happening.event for happening in status.happened] == ["x"]

    def test_of_one_that_is_and_has_failed(self) -> None:
        machine = self.machine()
        machine.failure = JobFailure("server", Peer("server", 0, 1), "was killed")
        keeper: Any = Keeper()
        status = _status(machine, keeper, 5.0, [], dropped=0)
        assert (status.versions, status.last_version, status.saved_steps) == ((3, 4), 4, 40)
        assert [failure.kind for failure in status.save_failures] == ["full"]
        assert status.unsaved
        assert status.failure == ("server", Peer("server", 0, 1), "was killed")

    def test_of_a_node(self) -> None:
        figures, lacks = Figures(rows=5), Redundancy(rows=3)
        beat = ServerBeat("ready", ViewNumber(1), redundancy=lacks, figures=figures)
        server = ServerMember("server", 0, 1, heard=4.0, beat=beat)
        status = _node_status(server, 5.5)
        assert (status.state, status.silent_seconds, status.figures, status.redundancy) == (
            "ready",
            1.5,
            figures,
            lacks,
        )
        worker = WorkerMember("worker", 0, 1, heard=4.0, beat=WorkerBeat("held", ViewNumber(1)))
        assert _node_status(worker, 5.5).redundancy == Redundancy()
        worker.heard = None
        assert _node_status(worker, 5.5).state == "starting"
        assert _node_status(ServerMember("server", 0, 1, heard=4.0), 5.5).state == "starting"


class Watching:
    """The loop of a supervisor without its sockets."""

    def __init__(self, folder: Path, *, saves: bool = False) -> None:
        self.plan = counting_plan(servers=1, workers=1, atomic=False)
        self.machine = Supervisor(self.plan, MemoryStorage(), 0.0)
        self.keeper: Any = Keeper() if saves else None
        self.transport = Transport()
        self.runs = ThreadPoolExecutor(1)
        self.folder = folder
        self.events = EventLog(folder)
        transport: Any = self.transport
        keeper: Any = self.keeper
        self.watch = _Watch(self.machine, keeper, transport, self.events, self.runs, lambda: None)

    def close(self) -> None:
        self.runs.shutdown()
        self.events.close()


@pytest.fixture
def watching(tmp_path: Path) -> Any:
    made: list[Watching] = []

    def make(**options: Any) -> Watching:
        made.append(Watching(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


class TestWatching:
    def test_a_report_every_so_often_and_at_every_change(self, watching: Any) -> None:
        case = watching()
        told = []
        for now in (10.0, 10.1, 10.2, 10.3):
            case.watch._pass_time(now)
            told.append(len(case.transport.statuses()))
        assert told == [1, 0, 0, 1]
        case.machine._views.change(cut=3)
        case.watch._pass_time(10.31)
        assert len(case.transport.statuses()) == 1
        case.machine.workers[0].beat = WorkerBeat("working", ViewNumber(1))
        case.watch._pass_time(10.32)
        assert len(case.transport.statuses()) == 1
        case.watch._pass_time(10.33)
        assert case.transport.statuses() == []

    def test_the_machine_is_told_the_time(self, watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        case = watching()
        ticks: list[float] = []
        monkeypatch.setattr(case.machine, "tick", ticks.append)
        tick = TICK_SECONDS
        for part in (0.0, 0.5, 1.01, 1.5, 2.02):
            case.watch._pass_time(10.0 + part * tick)
        assert ticks == [10.0 + part * tick for part in (0.0, 1.01, 2.02)]

    def test_events_are_written_down_and_reported(self, watching: Any) -> None:
        case = watching(saves=True)
        case.machine.events.append(("worker_lost", {"slot": 1}))
        case.keeper.events.append(("version_saved", {"version": 3}))
        case.watch._tell()
        case.watch._tell()
        assert case.machine.events == case.keeper.events == []
        case.watch._pass_time(10.0)
        (status,) = case.transport.statuses()
        assert [(h.event, h.figures) for h in status.happened] == [
            ("worker_lost", {"slot": 1}),
            ("version_saved", {"version": 3}),
        ]
        case.events.close()
        assert [event["event"] for event in read_events(case.folder)][-2:] == ["worker_lost", "version_saved"]

    def test_what_a_tick_leads_to_is_sent_and_reported_at_once(
        self, watching: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = watching()
        view = Envelope(case.machine.me, Peer("worker", 0, 1), case.machine.view)

        def tick(now: float) -> None:
            case.machine.events.append(("worker_lost", {"slot": 1}))
            case.machine.outbox.append(view)

        monkeypatch.setattr(case.machine, "tick", tick)
        case.watch._pass_time(10.0)
        assert view in case.transport.sent
        assert case.machine.outbox == []
        (status,) = case.transport.statuses()
        assert [happening.event for happening in status.happened] == ["worker_lost"]

    def test_what_a_message_leads_to_is_sent_before_the_next_is_read(
        self, watching: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not at the next tick: nodes wait for it."""
        case = watching()
        beat = Envelope(
            Peer("worker", 0, 1), case.machine.me, WorkerBeat("working", case.machine.view.number)
        )
        answer = Envelope(case.machine.me, beat.source, case.machine.view)
        sent: list[bool] = []

        def receive(envelope: Envelope, now: float) -> None:
            sent.append(answer in case.transport.sent)
            case.machine.outbox.append(answer)

        def poll(seconds: float) -> list[Envelope]:
            case.machine._views.change(phase="stopping")
            clock[0] += 4.0
            return [beat, beat]

        clock = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(case.machine, "receive", receive)
        case.transport.poll = poll
        case.watch.run()
        assert sent[:2] == [False, True]

    def test_only_the_last_few_events_are_reported(self, watching: Any) -> None:
        case = watching()
        case.machine.events += [("x", {"number": number}) for number in range(40)]
        case.watch._tell()
        case.watch._pass_time(10.0)
        (status,) = case.transport.statuses()
        assert [h.figures["number"] for h in status.happened] == list(range(24, 40))

    def test_messages_that_did_not_count_are_counted(self, watching: Any) -> None:
        case = watching()
        case.machine.admission.dropped = 2
        case.transport.counters.malformed = 3
        case.watch._pass_time(10.0)
        assert case.transport.statuses()[0].nodes[0].figures.dropped == 5

    def test_the_end_is_told_when_the_store_is_free(self, watching: Any) -> None:
        """Whoever hears of it may start the job again at once."""
        case = watching(saves=True)
        release = case.runs.submit(lambda: None)
        release.result()
        case.machine.finished = True
        case.machine._views.change(phase="stopping")
        blocked = SimpleNamespace(done=lambda: False)
        case.watch._letting_go, case.watch._let_go_by = blocked, 12.0
        case.watch._pass_time(10.0)
        assert [status.finished for status in case.transport.statuses()] == [False]
        blocked.done = lambda: True
        case.watch._pass_time(10.01)
        assert [status.finished for status in case.transport.statuses()] == [True]

    def test_a_store_that_is_too_slow_is_not_waited_for(self, watching: Any) -> None:
        case = watching(saves=True)
        case.watch._letting_go, case.watch._let_go_by = SimpleNamespace(done=lambda: False), 12.0
        assert not case.watch._has_let_go(12.0)
        assert case.watch._has_let_go(12.1)

    def test_the_store_is_closed_once_behind_what_is_being_written(self, watching: Any) -> None:
        case = watching(saves=True)
        case.watch._has_let_go(10.0)
        assert case.watch._let_go_by == 12.0
        case.runs.submit(lambda: None).result()
        assert case.watch._has_let_go(10.0)
        assert case.watch._has_let_go(11.0)
        assert case.keeper.closed == 1

    def test_after_the_end_it_stays_for_a_farewell(
        self, watching: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever did not hear of the end asks again."""
        case = watching()
        clock = [100.0]
        polled: list[float] = []
        beat = Envelope(
            Peer("worker", 0, 1), case.machine.me, WorkerBeat("working", case.machine.view.number)
        )

        def poll(seconds: float) -> list[Envelope]:
            polled.append(seconds)
            assert len(polled) < 50
            clock[0] += 0.5
            if len(polled) == 4:
                case.machine._views.change(phase="stopping")
            return [beat] if len(polled) == 2 else []

        case.transport.poll = poll
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        case.watch.run()
        assert case.machine.workers[0].beat == beat.message
        assert case.machine.workers[0].heard == 101.0
        assert clock[0] == 102.0 + 3.5  # more than three seconds
        assert polled == [pytest.approx(TICK_SECONDS)] * len(polled)

    def test_without_a_store_there_is_nothing_to_let_go(self, watching: Any) -> None:
        assert watching().watch._has_let_go(0.0)
