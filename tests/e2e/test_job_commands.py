"""``holdfast train --servers``: jobs as a user runs them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.events import read_events
from tests.e2e.test_commands import HOLDFAST, SMALL, holdfast

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
    deadline = time.monotonic() + 5
    while left := [pid for pid in found if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def started(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """A job that would go on for hours, once it trains."""
    process = subprocess.Popen(
        [*HOLDFAST, "train", *JOB, "--set", "data.samples=100000000", *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    events = cwd / "r" / "events.jsonl"
    deadline = time.monotonic() + 90
    while not (events.exists() and b'"progress"' in events.read_bytes()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


def test_a_job_learns_what_one_process_learns_though_a_worker_dies(tmp_path: Path) -> None:
    data = ["--set", "data.samples=40000", "--set", "optimizer.lr=0.03"]
    done = holdfast(
        "train", *JOB, *data, "--kill", "worker:1@step:60", "--kill", "server:0@step:99999",
        cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in (
        "2 servers and 2 workers are running",
        "killing worker 1 at step",
        "worker 1 was killed by signal 9",
        "worker 1 was replaced: process 2 in its place goes on behind its batch",
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
    done = holdfast(
        "train", *JOB, "--set", "data.samples=100000000", "--kill", "server:1@step:30",
        cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "error: server 1 was killed by signal 9 after " in said
    assert " rows that it held are lost" in said
    assert "set checkpoint.path and checkpoint.every_steps" in said
    assert "Traceback" not in said
    failed = read_events(tmp_path / "r")[-1]
    assert (failed["event"], failed["error"]) == ("run_failed", "ServerLost")
    check_none_is_left(tmp_path / "r")


def test_ctrl_c_stops_cleanly_and_twice_at_once(tmp_path: Path) -> None:
    process = started(cwd=tmp_path)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted after" in output
    assert "test AUC" in output
    last = read_events(tmp_path / "r")[-1]
    assert (last["event"], last["interrupted"], last["signal"]) == ("run_finished", True, signal.SIGINT)
    assert last["steps"] > 0
    check_none_is_left(tmp_path / "r")

    # A test part that takes long: the second signal does not wait for it.
    (tmp_path / "again").mkdir()
    process = started("--set", "data.test_samples=50000000", cwd=tmp_path / "again")
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    check_none_is_left(tmp_path / "again" / "r")


def test_the_live_view_on_a_terminal(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*HOLDFAST, "train", *JOB, "--set", "data.samples=20000", "--kill", "worker:1@step:40"],
        cwd=tmp_path, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        shown += piece
    os.close(parent)
    assert process.wait(timeout=60) == 0
    for part in (
        "process", "rows held", "supervisor", "server 1", "worker 1 #2", "pushes/s", "samples/s", "MB",
        "loss ", "was killed by signal 9", "finished after 157 steps",
    ):  # fmt: skip
        assert part.encode() in shown, part


def test_a_kill_without_processes_is_refused(tmp_path: Path) -> None:
    done = holdfast("train", *SMALL, "--kill", "server:0@step:3", cwd=tmp_path)
    assert done.returncode == 1
    assert "job.servers is 0" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
