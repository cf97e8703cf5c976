"""The picture of a run, from events made up here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.events import EventLog
from holdfast.stopping import Notice
from holdfast.training import plots
from holdfast.training.config import load

PNG = b"\x89PNG\r\n\x1a\n"


def size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == PNG
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def write(folder: Path, *others: str, count: int = 6) -> None:
    with EventLog(folder) as events:
        events.emit("config", job={"servers": 0})
        for number in range(count):
            events.emit("progress", samples=100 * number)
            for event in others if number == 2 else ():
                events.emit(event, slot=1, role="server", rows=50, reason="x")


def test_a_run_with_and_without_a_failure(tmp_path: Path) -> None:
    for name in ("calm", "killed", "unfinished"):
        (tmp_path / name).mkdir()
    write(tmp_path / "calm")
    events = ("killed", "server_lost", "training_resumed", "server_recovered", "redundancy_restored")
    write(tmp_path / "killed", *events)
    write(tmp_path / "unfinished", *events[:2])
    found = {name: plots.plot_run(tmp_path / name) for name in ("calm", "killed", "unfinished")}
    assert all(path == tmp_path / name / "throughput.png" for name, path in found.items())
    sizes = {name: size(path) for name, path in found.items() if path is not None}
    assert sizes["calm"][0] == sizes["killed"][0] == sizes["unfinished"][0]
    assert sizes["calm"][1] < sizes["killed"][1] == sizes["unfinished"][1], "there is no closer look"


def test_too_little_to_draw(tmp_path: Path) -> None:
    write(tmp_path, count=2)
    assert plots.plot_run(tmp_path) is None


def test_speeds_are_of_the_time_round_an_instant() -> None:
    times = np.array([0.0, 1.0, 2.0, 4.0])
    samples = np.array([0.0, 100.0, 200.0, 800.0])
    at = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    assert plots.speed(times, samples, at, 1.0) == pytest.approx([100, 100, 200, 300, 300])


def test_times_in_which_redundancy_was_lacking() -> None:
    marks = [
        {"event": name, "at": at}
        for name, at in [
            ("killed", 1.0), ("server_lost", 2.0), ("server_lost", 3.0), ("redundancy_restored", 5.0),
            ("server_lost", 8.0),
        ]
    ]  # fmt: skip
    assert plots.degraded(marks, 9.0) == [(2.0, 5.0), (8.0, 9.0)]


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.training.session import run  # loads torch

    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[plots\]'"):
        run(load(None, ["plot=true"]), None, Notice())  # type: ignore[arg-type]


@pytest.mark.parametrize("protection", ["2+1", "replicate", "partial", "none"])
def test_every_protection_has_a_name(tmp_path: Path, protection: str) -> None:
    values = [f"job.protection={protection}", "job.servers=3", "checkpoint.path=x"]
    config = msgspec.to_builtins(load(None, values))
    assert plots._title([{"event": "config", **config}]).startswith("3 servers")
