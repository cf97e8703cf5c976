"""What machines write arrives in the run's folder, once, whoever collects it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.cluster.runtime.engines.collected import Collected
from holdfast.cluster.runtime.files import written
from holdfast.events import EventLog, read_events


def collect(collected: Collected, machine: Path, ahead: float = 0.0, most_bytes: int = 1 << 20) -> None:
    while parts := written(machine, collected.offsets, most_bytes):
        for part in parts:
            collected.write(part, ahead)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    folder = tmp_path / "machine"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "server-0-1.log").write_text("it was I")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("most_bytes", [7, 1 << 20])
def test_events_have_their_machine_and_this_clock(machine: Path, run: Path, most_bytes: int) -> None:
    with EventLog(run) as log, EventLog(machine) as other:
        log.emit("job_started")
        other.emit("server_lost", slot=1)
        other.emit("redundancy_restored")
        collect(Collected(run, "10.0.0.2"), machine, 100.0, most_bytes)
    first, lost, restored = read_events(run)
    assert (lost["event"], lost["host"], restored["event"]) == (
        "server_lost",
        "10.0.0.2",
        "redundancy_restored",
    )
    assert lost["time"] == pytest.approx(time.time() + 100.0, abs=30.0)
    assert lost["seconds"] == pytest.approx(lost["time"] - first["time"] + first["seconds"])
    assert (run / "logs" / "10.0.0.2" / "server-0-1.log").read_text() == "it was I"


def test_another_collector_adds_only_what_the_log_lacks(machine: Path, run: Path) -> None:
    """Its copy of the run's log may lack the last events, and it gets each agent's files from the start."""
    with EventLog(run) as log, EventLog(machine) as other:
        log.emit("machine_found", machine="10.0.0.2")
        other.emit("a")
        collect(Collected(run, "10.0.0.2"), machine)
        log.emit("machine_lost", machine="10.0.0.3")
        other.emit("b")
        collect(Collected(run, "10.0.0.2", again=True), machine)
    assert [event["event"] for event in read_events(run)] == ["machine_found", "a", "machine_lost", "b"]


def test_an_agent_that_took_the_place_of_another_begins_anew(machine: Path, run: Path) -> None:
    with EventLog(run) as log, EventLog(machine) as other:
        other.emit("a")
        collect(Collected(run, "10.0.0.2"), machine)
        (machine / "events.jsonl").unlink()  # the machine was lost, and is back
        log.emit("machine_found", machine="10.0.0.2")
    with EventLog(machine) as other:
        other.emit("b")
    collect(Collected(run, "10.0.0.2", again=True), machine)
    assert [event["event"] for event in read_events(run)] == ["a", "machine_found", "b"]
