"""What people see of a job, from reports made up here."""

from __future__ import annotations

import io
import math
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from holdfast.cluster.protocol.messages import (
    Evaluation,
    Figures,
    Happening,
    NodeStatus,
    Peer,
    Redundancy,
    Status,
)
from holdfast.cluster.report.live import PlainJobView, describe_redundancy, render
from holdfast.cluster.report.progress import JobProgress, RedundancyStatus, Reports, tell
from holdfast.events import EventLog, read_events
from holdfast.training.config import load

SERVER = NodeStatus(
    Peer("server", 0, 1), "ready", 2.4, Figures(steps=9, rows=1_234_567, memory_bytes=432 << 20)
)
TEST = Evaluation(1, 0.75, 0.4, 1000, step=5)


def status(
    steps: int,
    *losses: float,
    progress: float = 0.0,
    happened: tuple[Happening, ...] = (),
    phase: str = "running",
) -> Status:
    workers = [
        NodeStatus(
            Peer("worker", slot, slot + 1), "working", 0.1, Figures(10, steps, loss, progress, memory_bytes=1)
        )
        for slot, loss in enumerate(losses)
    ]
    nodes = (NodeStatus(Peer("supervisor"), "watching", 0.0), SERVER, *workers)
    return Status(
        phase, steps, steps * 10, nodes, tests=(TEST,), finished=phase == "stopping", happened=happened
    )


def test_a_narrow_screen_cuts_no_number() -> None:
    console = Console(file=io.StringIO(), width=50)
    console.print(render(progress(), 123.4, 88.0))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    assert "too narrow for: " in text
    wide = Console(file=io.StringIO(), width=80)
    wide.print(render(progress(), 123.4, 88.0))
    assert isinstance(wide.file, io.StringIO)
    speeds = re.findall(r"[\d,]+ (?:samples|pushes)/s", wide.file.getvalue())
    assert speeds
    assert all(speed in " ".join(text.split()) for speed in speeds)


def test_loss_and_share_done() -> None:
    reports = Reports(load(None, ["max_steps=100"]), EventLog(None))
    assert math.isnan(reports.note(status(0, 0.0)).loss)
    half = reports.note(status(20, 0.4, 0.6, progress=0.5))
    assert (half.loss, half.fraction, half.samples) == (0.5, 0.5, 200)
    assert half.test is not None
    assert (half.test.step, half.test.auc) == (5, 0.75)
    assert reports.note(status(20, 0.4, 0.6, progress=0.0)).fraction == 0.5, "a worker that was replaced"
    assert reports.note(status(80, 0.4, 0.6, progress=0.6)).fraction == 0.8, "max_steps comes first"
    assert reports.note(status(90, 0.4, phase="stopping")).fraction == 1.0


def test_a_job_that_was_stopped_is_not_done() -> None:
    for progress in (0.5, 0.999, 1.0):
        reports = Reports(load(), EventLog(None))
        reports.note(status(20, 0.5, progress=progress))
        stopped = reports.note(status(20, 0.5, progress=progress, phase="stopping"), stopped=True)
        assert stopped.fraction < 1
        for view in (render(stopped, 3.0, 5.0), plain(stopped)):
            text = shown(view)
            assert "100%" not in text
            assert ("50%" if progress == 0.5 else "99%") in text
            assert "stopping" in text
            assert "left" not in text


def shown(what: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(progress: JobProgress) -> str:
    console = Console(file=io.StringIO(), width=120)
    PlainJobView(console).update(progress)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_events_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    with EventLog(tmp_path) as events:
        reports = Reports(load(None, ["report_every=10"]), events)
        for steps in (0, 9, 12, 15, 23, 24):
            reports.note(status(steps, 0.5))
        reports.note(status(24, 0.5, phase="stopping"))
        reports.note(status(24, 0.5, phase="stopping"))
    written = read_events(tmp_path)
    assert [event["step"] for event in written] == [12, 23, 24]
    assert written[0]["processes"][1]["rows"] == 1_234_567
    assert "news" not in written[0]


def test_each_piece_of_news_is_told_once_even_if_it_comes_late() -> None:
    reports = Reports(load(), EventLog(None))
    ours = Happening(20.0, "killed", {"role": "worker", "slot": 1, "step": 7})
    late = Happening(19.9, "worker_lost", {"slot": 1, "reason": "was killed by signal 9"})
    told = [
        reports.note(status(1, 0.5, happened=happened)).news
        for happened in ((ours,), (late, ours), (late, ours))
    ]
    assert told == [(ours,), (late,), ()]


@pytest.mark.parametrize(
    ("event", "figures", "text"),
    [
        ("killed", {"role": "server", "slot": 2, "step": 1300}, "killing server 2 at step 1,300, as asked"),
        ("worker_lost", {"slot": 1, "reason": "ended with code 3"}, "worker 1 ended with code 3"),
        ("worker_started", {"slot": 1, "incarnation": 1, "sequence": 0}, None),
        (
            "worker_started",
            {"slot": 1, "incarnation": 2, "sequence": 80},
            "worker 1 restarted (incarnation 2), resuming after batch 80",
        ),
        ("process_started", {"role": "worker", "slot": 1}, None),
        ("process_started", {"role": "supervisor", "slot": 0}, "the supervisor was restarted"),
        ("spread_lost", {}, "the code does not cover the loss of every machine now: servers share machines"),
        ("spread_restored", {}, "the code covers the loss of any machine again"),
        (
            "vaults_changed",
            {"machines": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]},
            "3 machines keep the supervisor's state: any 1 of them may be lost",
        ),
        (
            "server_moved",
            {"slot": 2, "machine": "m", "step": 3},
            "server 2 on m is ended, to start anew on another machine",
        ),
        (
            "worker_moved",
            {"slot": 1, "machine": "m", "step": 3},
            "worker 1 on m is ended, to start anew on another machine",
        ),
        (
            "supervisor_moved",
            {"machine": "m", "step": 3},
            "the supervisor on m is ended, to start anew on another machine",
        ),
        (
            "machine_draining",
            {"machine": "m", "seconds_left": 29.6},
            "machine m will be taken away in 30 s: its processes leave",
        ),
        (
            "machine_draining",
            {"machine": "m", "seconds_left": None},
            "machine m will be taken away soon: its processes leave",
        ),
        (
            "machine_drained",
            {"machine": "m"},
            "nothing of the job runs on machine m any more: it may be taken away",
        ),
        ("test", {"step": 5, "auc": 0.75, "log_loss": 0.4}, "test at step 5: AUC 0.7500, log loss 0.4000"),
        (
            "checkpoint_saved",
            {"version": 3, "step": 5, "bytes": 5_000_000},
            "saved version 3 at step 5: 5.0 MB",
        ),
        (
            "checkpoint_failed",
            {"version": 3, "error": "two disks full", "why": "disk full", "again": False},
            "version 3 was not saved, training continues: disk full",
        ),
        (
            "checkpoint_failed",
            {"version": None, "error": "", "why": "no store", "again": False},
            "a checkpoint was not saved, training continues: no store",
        ),
        ("checkpoint_failed", {"version": 3, "error": "", "why": "disk full", "again": True}, None),
        (
            "checkpoint_tidy_failed",
            {"version": 3, "error": "disk full", "again": False},
            "version 3 is saved, but files could not be rearranged: disk full",
        ),
        ("checkpoint_tidy_failed", {"version": 3, "error": "disk full", "again": True}, None),
        ("checkpoint_damaged", {"version": None, "error": "bad"}, "checkpoint damaged: bad"),
        ("store_not_opened", {"message": "the store is gone"}, "the store is gone; retrying"),
        (
            "store_waited_for",
            {"message": "", "most_seconds": 120.0},
            "waiting for the store, at most 120 s",
        ),
        ("server_lost", {"slot": 1, "reason": "x", "protected": False}, None),  # the error says it
        (
            "server_lost",
            {"slot": 1, "reason": "was killed by signal 9", "protected": True},
            "server 1 was killed by signal 9: recovering its rows while training continues",
        ),
        ("server_started", {"slot": 1, "incarnation": 2, "after_seconds": 0.3}, None),
        (
            "training_resumed",
            {"slot": 1, "incarnation": 2, "after_seconds": 0.66},
            "training resumed after 0.7 s, with a replacement for server 1",
        ),
        (
            "server_recovered",
            {"slot": 1, "rows": 210_600, "after_seconds": None},  # by a supervisor that came back
            "server 1: 210,600 rows recovered",
        ),
        (
            "server_recovered",
            {"slot": 1, "rows": 210_600, "after_seconds": 2.16, "compared": 210_600, "unequal": 0},
            "server 1: 210,600 rows recovered in 2.2 s, bit-exact (210,600 compared with the memory of the "
            "process that died)",
        ),
        (
            "server_recovered",
            {"slot": 1, "rows": 210_600, "after_seconds": 2.16, "compared": 210_000, "unequal": 0},
            "server 1: 210,600 rows recovered in 2.2 s, bit-exact (210,000 compared with the memory of the "
            "process that died, the other 600 had updates that workers sent again)",
        ),
        (
            "server_recovered",
            {"slot": 1, "rows": 210_600, "after_seconds": 2.16, "compared": 210_000, "unequal": 3},
            "server 1: 210,600 rows recovered in 2.2 s; 3 of 210,000 that were compared with the memory of "
            "the process that died DIFFER",
        ),
        ("redundancy_restored", {"after_seconds": 3.5}, "redundancy restored after 3.5 s"),
        (
            "parities_wrong",
            {"slot": 2, "wrong": 3, "repaired": 2},
            "server 2: 3 parities did not match their rows, 2 of them were repaired",
        ),
        (
            "network_updates_lost",
            {"slot": 2, "updates": 3},
            "server 2: 3 network updates are lost, only a dead worker had them",
        ),
        ("data_lost", {"message": "server 1 died"}, "data was lost: server 1 died"),
        (
            "store_locked",
            {"message": "s3://a is locked", "most_seconds": 90.0},
            "waiting for the store, at most 90 s: s3://a is locked",
        ),
        ("job_restored", {"version": 4, "step": 900}, "resuming from version 4, step 900"),
    ],
)
def test_news_in_words(event: str, figures: dict[str, object], text: str | None) -> None:
    assert tell(Happening(1.0, event, figures)) == text


def progress() -> JobProgress:
    return Reports(load(), EventLog(None)).note(status(3120, 0.4, 0.5, progress=0.43))


def test_the_table_fits_80_columns() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(progress(), 123.4, 88.0))
    shown = console.export_text()
    assert "…" not in shown
    for part in (
        "server 0     ready",
        "1,234,567",
        "453.0 MB",
        "2 s",
        "worker 1 #2",
        "43%",
        "2:03 left",
        "1:28",
    ):
        assert part in shown, part


def protected(*servers: NodeStatus, degraded: bool = True) -> RedundancyStatus:
    reports = Reports(
        load(None, ["job.servers=4", "job.protection={kind: erasure-code, k: 2, r: 2}"]), EventLog(None)
    )
    found = reports.note(Status("running", 5, 50, servers, degraded=degraded)).redundancy
    assert found is not None
    return found


def server(slot: int, incarnation: int = 2, state: str = "ready", **lacks: Any) -> NodeStatus:
    return NodeStatus(Peer("server", slot, incarnation), state, 0.0, redundancy=Redundancy(**lacks))


@pytest.mark.parametrize(
    ("servers", "tolerates", "text"),
    [
        ([server(0, 1), server(1, recovered=9)], 2, "redundancy is whole: any 2 servers may die"),
        (
            [server(0, 1), server(1, state="starting")],
            1,
            "redundancy is degraded: server 1 is gone, its replacement is starting",
        ),
        (
            [server(0, rows=30, recovered=10, parities=5), server(1, parities=1, rebuilt=3)],
            0,
            "redundancy is degraded: server 0 has 25% of its rows back; "
            "server 1 has 75% of its parities back",
        ),
        (
            [server(0, 1, parities=9), server(1, 1)],
            1,
            "redundancy is degraded: server 0 has 0% of its parities back",
        ),
    ],
    ids=["whole", "gone", "two of them", "from a checkpoint"],
)
def test_redundancy(servers: list[NodeStatus], tolerates: int, text: str) -> None:
    found = protected(*servers, degraded=tolerates < 2)
    assert describe_redundancy(found) == text
    assert found.state == ("healthy" if tolerates == 2 else "degraded")
    assert found.tolerates == tolerates


def test_servers_that_have_yet_to_start_have_lost_nothing() -> None:
    assert protected(server(0, 1, "starting"), degraded=False).state == "healthy"


def test_without_protection_there_is_no_redundancy() -> None:
    assert progress().redundancy is None


def test_time_left_until_all_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reports = Reports(load(None, ["job.servers=3", "job.protection=2+1"]), EventLog(None))
    left = []
    for now[0], rows, recovered in ((100.0, 100, 0), (101.0, 60, 40), (102.0, 20, 80)):
        lacking = server(1, rows=rows, recovered=recovered, parities=20)
        found = reports.note(Status("running", 5, 50, (lacking,), degraded=True)).redundancy
        assert found is not None
        left.append(found.lacking[0].seconds_left)
    assert left == [None, 80 / 40, 40 / 40]


def test_the_table_of_a_protected_job_fits_80_columns() -> None:
    lacking = server(3, 12, rows=30, recovered=10)
    shown = msgspec.structs.replace(lacking, figures=SERVER.figures, silent_seconds=12.3)
    state = msgspec.structs.replace(status(3120, 0.4, 0.5, progress=0.43), degraded=True)
    state = msgspec.structs.replace(state, nodes=(*state.nodes, shown))
    reports = Reports(load(None, ["job.servers=4", "job.protection=2+1"]), EventLog(None))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(reports.note(state), 123.4, 88.0))
    text = console.export_text()
    assert "…" not in text
    assert "server 3 #12  recovering 25%" in text
    assert "redundancy is degraded: server 3 has 25% of its rows back" in text


def test_plain_lines_say_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = Console(width=200, file=io.StringIO(), record=True)
    reports = Reports(load(None, ["job.servers=4", "job.protection=2+1"]), EventLog(None))
    with PlainJobView(console) as view:
        for now[0], rows in ((100.0, 0), (106.0, 30), (112.0, 0)):
            lacking = server(1, rows=rows, recovered=10)
            view.update(reports.note(Status("running", 5, 50, (lacking,), degraded=rows > 0)))
    _, first, second, third = console.export_text().splitlines()
    assert first.startswith("  0%  step 5")
    assert second.startswith("      redundancy is degraded: server 1 has 25% of its rows back")
    assert third.startswith("  0%  step 5")


def test_plain_lines() -> None:
    console = Console(width=20, file=io.StringIO(), record=True)
    reports = Reports(load(), EventLog(None))
    with PlainJobView(console) as view:
        for report in (
            status(0, 0.0, 0.0, phase="starting"),
            status(1, 0.5, 0.5),
            status(2, 0.5, 0.5, happened=(Happening(1.0, "worker_lost", {"slot": 1, "reason": "[b]ended"}),)),
            status(3, 0.5, 0.5, phase="stopping"),
            status(3, 0.5, 0.5, phase="stopping"),
        ):
            view.update(reports.note(report))
    first, second, last = console.export_text().splitlines()
    assert (first, second) == ("1 server and 2 workers are running", "worker 1 [b]ended")
    assert last.startswith("100%  step 3  loss 0.5000  test AUC 0.7500  ")


def test_processes_of_a_machine_stand_together() -> None:
    reports = Reports(load(None, ["max_steps=100"]), EventLog(None))
    one = status(20, 0.4, 0.6)
    at = {"supervisor": "10.0.0.2", "server": "10.0.0.1", "worker": "10.0.0.2"}
    nodes = tuple(replace(node, machine=at[node.peer.role]) for node in one.nodes)
    console = Console(file=io.StringIO(), width=80)
    console.print(render(reports.note(replace(one, nodes=nodes)), 123.4, 88.0))
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()[:3]) for line in console.file.getvalue().splitlines()]
    assert [line for line in lines if line.startswith(("machine", "10.", "worker"))] == [
        "machine process state",
        "10.0.0.1 server 0",
        "10.0.0.2 supervisor watching",
        "worker 0 working",
        "worker 1 #2",
    ]
