from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.events import EventLog, read_events


def test_events_are_on_disk_as_soon_as_they_happen(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.emit("one", figure=1.5, name="x", missing=float("nan"))
    (event,) = read_events(tmp_path)  # before close: a crash right here must not lose it
    assert event["event"] == "one"
    assert (event["figure"], event["name"], event["missing"]) == (1.5, "x", None)
    assert event["seconds"] >= 0
    log.close()
    log.emit("late")
    assert len(read_events(tmp_path)) == 1


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: object) -> None:
    EventLog(None).emit("one")
    assert list(tmp_path.iterdir()) == []


def test_all_who_write_to_a_log_count_from_the_start_of_the_run(tmp_path: Path) -> None:
    first = EventLog(tmp_path)
    first.emit("one")
    time.sleep(0.2)
    second = EventLog(tmp_path)
    second.emit("two")
    first.emit("three")
    one, two, three = (event["seconds"] for event in read_events(tmp_path))
    assert one + 0.19 <= two <= three + 0.01, "clocks of two kinds"


def test_figures_cannot_take_the_place_of_the_logs_own(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log, pytest.raises(ValueError, match=r"event one: seconds are reserved names"):
        log.emit("one", seconds=3.0)
    assert read_events(tmp_path) == []


def test_a_full_disk_takes_no_event_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path)
    log.emit("one")
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(log, "_file", full)
        log.emit("two")
        log.emit("three")
    assert [record.getMessage()[:27] for record in caplog.records] == ["could not log the event two"]
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"time":3')
    assert [event["event"] for event in read_events(tmp_path)] == ["one"]
