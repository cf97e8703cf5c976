"""What a server's process does round its machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdfast.cluster.protocol.messages import Peer, ServerInView, View, ViewNumber
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.report.failures import lost_rows_path
from holdfast.cluster.saving import resume
from holdfast.cluster.server import process
from holdfast.cluster.server.process import _Connect, _LostRows, _Opening, _Pressure
from holdfast.sim.cluster import counting_plan
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan

ME = Peer("server", 1, 2)


class TestLostRows:
    @pytest.fixture
    def lost(self, tmp_path: Path) -> Any:
        tables = (TablePlan("users", 10), TablePlan("items", 5))
        group = GroupPlan(name="t", dim=2, tables=tables, optimizer=OptimizerPlan(name="sgd", lr=0.1))
        plan = JobPlan(job="j", seed=1, groups=(group, group), servers=2, workers=1)
        return SimpleNamespace(folder=str(tmp_path), me=ME, plan=plan)

    def test_they_are_named_by_table(self, lost: Any) -> None:
        write = _LostRows(lost)
        write(0, np.array([0, 9, 10, 14]))
        write(1, np.array([3]))
        path = lost_rows_path(Path(lost.folder), lost.me, lost.plan)
        assert path.read_text() == "table,row\nusers,0\nusers,9\nitems,0\nitems,4\nusers,3\n"

    def test_a_job_that_went_back_begins_anew(self, lost: Any) -> None:
        for _ in range(2):
            _LostRows(lost)(0, np.array([1]))
        path = lost_rows_path(Path(lost.folder), lost.me, lost.plan)
        assert path.read_text() == "table,row\nusers,1\n"

    def test_a_full_disk_is_no_reason_to_lose_more(
        self, lost: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*arguments: Any, **named: Any) -> None:
            raise OSError("No space left on device")

        write = _LostRows(lost)
        with monkeypatch.context() as broken:
            broken.setattr(Path, "open", fail)
            write(0, np.array([1]))
        assert "No space left" in capfd.readouterr().err
        write(0, np.array([2]))
        path = lost_rows_path(Path(lost.folder), lost.me, lost.plan)
        assert path.read_text() == "table,row\nusers,2\n"


def test_servers_are_connected_whenever_a_view_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[Any] = []
    monkeypatch.setattr(process, "connect_servers", lambda *what: connected.append(what))
    plan = counting_plan(servers=4, workers=1, atomic=False)
    first, second = (View(ViewNumber(n), "running", (ServerInView(0, 1),)) for n in (1, 2))
    server: Any = SimpleNamespace(plan=plan, me=ME, view=first)
    connect = _Connect(server, "transport")  # type: ignore[arg-type]
    connect()
    connect()
    server.view = second
    connect()
    assert [(transport, view.number.epoch) for transport, view, _ in connected] == [
        ("transport", 1),
        ("transport", 2),
    ]
    assert connected[0][2] == plan.neighbours[1]


class TestOpening:
    class Server:
        plan = "plan"
        me = ME
        shards = ("shards",)

        def __init__(self) -> None:
            self.told: list[Any] = []

        def open(self, opened: Any) -> None:
            self.told.append(("open", opened))

        def fail(self, error: str) -> None:
            self.told.append(("fail", error))

    def test_the_server_is_told_once_when_it_is_done(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        go = threading.Event()

        def open_rows(*what: Any) -> str:
            asked.append(what)
            assert go.wait(60)
            return "opened"

        monkeypatch.setattr(resume, "open_rows", open_rows)
        server: Any = self.Server()
        opening = _Opening(server)
        opening.hand_over()
        assert server.told == []
        go.set()
        opening.join(60)
        opening.hand_over()
        opening.hand_over()
        assert server.told == [("open", "opened")]
        assert asked == [("plan", ME, ("shards",))]
        assert opening.daemon

    def test_what_went_wrong_ends_the_job(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def open_rows(*what: Any) -> str:
            raise OSError("no such store")

        monkeypatch.setattr(resume, "open_rows", open_rows)
        server: Any = self.Server()
        opening = _Opening(server)
        opening.join(60)
        opening.hand_over()
        ((kind, error),) = server.told
        assert kind == "fail"
        assert "no such store" in error
        assert "Traceback" in capfd.readouterr().err


def test_a_spare_is_prepared_once_for_every_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(process, "_prepared", False)
    monkeypatch.setattr(
        process, "_warm_up", lambda groups, *codes: warmed.append(([g.name for g in groups], codes))
    )
    process.load()
    assert not process._prepared
    process.prepare()
    ((names, codes),) = warmed
    assert {"sgd", "adagrad", "adam"} <= set(names)
    assert codes == ((2, 1), (2, 2))
    assert process._prepared


class TestPressure:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The time, and how long the process has run and waited for a processor."""
        clock = SimpleNamespace(now=100.0, used=(5.0, 1.0))
        monkeypatch.setattr(time, "monotonic", lambda: clock.now)
        monkeypatch.setattr(process, "_run_and_wait_seconds", lambda: clock.used)
        return clock

    def test_it_is_the_share_of_the_time_that_the_process_waited(self, clock: Any) -> None:
        pressure = _Pressure()
        clock.used = 5.3, 1.1
        assert pressure() == pytest.approx(0.25)
        clock.now, clock.used = 100.2, (6.0, 9.0)
        assert pressure() == pytest.approx(0.25), "not yet measured again"
        clock.now = 100.3
        assert pressure() == pytest.approx(7.9 / 8.6)
        clock.now = 101.0
        assert pressure() == pytest.approx(7.9 / 8.6), "it has not run since"

    def test_if_the_kernel_does_not_tell_processors_count_as_scarce(self, clock: Any) -> None:
        clock.used = None
        assert _Pressure()() == 1

    def test_the_kernel_tells(self) -> None:
        found = process._run_and_wait_seconds()
        assert found is None or found[0] > 0
