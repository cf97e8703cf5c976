"""``holdfast train --servers``: jobs as a user runs them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.events import read_events
from tests.e2e.commands import ENDLESS, PATIENCE_SECONDS, SMALL, Terminal, holdfast

JOB = [*SMALL, "--servers", "2", "--run", "r"]


def pids(events: list[dict[str, Any]]) -> list[int]:
    """Of all processes that a job ever had."""
    found = [e["pid"] for e in events if e["event"] == "process_started"]
    for event in events:
        if event["event"] == "job_started":
            found += [process["pid"] for process in event["processes"]]
    return found


def check_none_is_left(folder: Path) -> None:
    found = pids(read_events(folder))
    assert found
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := [pid for pid in found if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_job_learns_what_one_process_learns_though_a_worker_dies(tmp_path: Path) -> None:
    data = ["--set", "data.samples=40000", "--set", "optimizer.lr=0.03"]
    done = holdfast(
        "train", *JOB, *data, "--kill", "worker:1@step:60", "--kill", "server:0@step:99999",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in (
        "2 servers and 2 workers are running",
        "killing worker 1 at step",
        "worker 1 was killed by signal 9",
        "worker 1 restarted (incarnation 2), resuming after batch",
        "finished after 313 steps, 40,000 samples",
        "1 worker was replaced; every batch counted once",
        "kill server:0@step:99999 did not happen",
        "samples/s",
    ):
        assert part in done.stdout, part
    finished = read_events(tmp_path / "r")[-1]
    assert (finished["steps"], finished["samples"], finished["workers_replaced"]) == (313, 40_000, 1)
    assert finished["records"]
    check_none_is_left(tmp_path / "r")

    alone = holdfast("train", *SMALL, *data, "--run", "alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    test = read_events(tmp_path / "alone")[-1]["test"]
    assert test["auc"] > 0.7
    assert finished["auc"] == pytest.approx(test["auc"], abs=0.015)


def test_a_server_that_dies_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    done = holdfast("train", *JOB, ENDLESS, "--workers", "1", "--kill", "server:1@step:30", cwd=tmp_path)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "error: server 1 was killed by signal 9 after " in said
    assert " rows that it held are lost" in said
    assert "set checkpoint.path and checkpoint.every_steps" in said
    assert "Traceback" not in said
    failed = read_events(tmp_path / "r")[-1]
    assert (failed["event"], failed["error"]) == ("run_failed", "ServerLost")
    check_none_is_left(tmp_path / "r")


def test_a_protected_server_that_dies_is_replaced_while_training_goes_on(tmp_path: Path) -> None:
    more = ["--protect", "2+1", "--set", "job.compare_recovered=true", "--set", "plot=true"]
    done = holdfast(
        "train", *JOB, "--servers", "3", *more, "--set", "data.samples=100000", "--kill", "server:1@step:60",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in (
        "3 servers and 2 workers are running",
        "killing server 1 at step",
        "server 1 was killed by signal 9: recovering its rows while training continues",
        "training resumed after",
        "redundancy restored after",
        "finished after 782 steps, 100,000 samples",
        "bit-exact (",
        "compared with the memory of the process that died",
        "while redundancy was degraded",
        "throughput over time: r/throughput.png",
    ):
        assert part in done.stdout, part
    events = read_events(tmp_path / "r")
    order = ["killed", "server_lost", "server_started", "server_recovered", "redundancy_restored"]
    assert [e["event"] for e in events if e["event"] in order] == order
    states = [e["redundancy"]["state"] for e in events if e["event"] == "progress"]
    assert (states[0], states[-1]) == ("healthy", "healthy")
    finished = events[-1]
    assert (finished["steps"], finished["servers_replaced"]) == (782, 1)
    (failure,) = finished["failures"]
    assert failure["rows"] >= failure["compared"] > 0
    assert failure["unequal"] == 0
    assert 0 < failure["started_seconds"] <= failure["resumed_seconds"]
    assert failure["recovered_seconds"] <= failure["whole_seconds"]
    assert (tmp_path / "r" / "throughput.png").stat().st_size > 10_000
    assert not (tmp_path / "r" / "rows").exists()
    check_none_is_left(tmp_path / "r")


def test_the_live_view_on_a_terminal_and_a_clean_stop(tmp_path: Path) -> None:
    kill = ["--kill", "worker:1@step:40"]
    with Terminal("train", *JOB, ENDLESS, *kill, cwd=tmp_path, columns=100) as terminal:
        terminal.until("worker 1 #2")
        terminal.until("resuming after batch")
        terminal.stop()
        terminal.until("stopping…")
        assert terminal.end() == 130
    for part in (
        "process", "rows held", "supervisor", "server 1", "pushes/s", "samples/s", "MB", "loss ",
        "was killed by signal 9", "interrupted after", "test AUC",
    ):  # fmt: skip
        assert part.encode() in terminal.shown, part
    assert terminal.lines()[-1].startswith("nothing was saved: set checkpoint.path")
    assert b"100%" not in terminal.shown
    last = read_events(tmp_path / "r")[-1]
    assert (last["event"], last["interrupted"], last["signal"]) == ("run_finished", True, signal.SIGINT)
    assert last["steps"] > 40
    check_none_is_left(tmp_path / "r")


def test_a_second_signal_does_not_wait_for_the_test_part(tmp_path: Path) -> None:
    long = "--set=data.test_samples=50000000"
    with Terminal("train", *JOB, ENDLESS, long, cwd=tmp_path, columns=100) as terminal:
        terminal.until("loss ")
        terminal.stop()
        terminal.until("done")  # of the two workers one tests
        terminal.stop()
        assert terminal.end() == 130
    assert b"interrupted after" not in terminal.shown
    assert "stopped at once" in terminal.lines()
    assert terminal.lines()[-1].startswith("nothing was saved")
    check_none_is_left(tmp_path / "r")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kill", "server:0@step:3"], "job.kill (--kill) is set but job.servers is 0"),
        (["--workers", "4"], "job.workers (--workers) is set but job.servers is 0"),
        (["--protect", "none"], "job.protection (--protect) is set but job.servers is 0"),
        (["--set", "checkpoint.path=c"], "only jobs are saved by it: set job.servers (--servers)"),
    ],
)
def test_what_only_jobs_use_is_refused_without_servers(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = holdfast("train", *SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
