"""What people see of a job, from reports made up here."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.cluster.messages import Evaluation, Figures, Happening, NodeStatus, Peer, Status
from holdfast.cluster.progress import JobProgress, Reports, tell
from holdfast.cluster.view import PlainJobView, render
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
            "worker 1 was replaced: process 2 in its place goes on behind its batch 80",
        ),
        ("process_started", {"role": "worker", "slot": 1}, None),
        ("process_started", {"role": "supervisor", "slot": 0}, "the supervisor was started again"),
        ("test", {"step": 5, "auc": 0.75, "log_loss": 0.4}, "test at step 5: AUC 0.7500, log loss 0.4000"),
        (
            "checkpoint_saved",
            {"version": 3, "step": 5, "bytes": 5_000_000},
            "saved version 3 at step 5: 5.0 MB",
        ),
        ("checkpoint_failed", {"error": "disk full"}, "checkpoint failed: disk full"),
        ("server_lost", {"slot": 1, "reason": "x"}, None),  # the error says it
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
