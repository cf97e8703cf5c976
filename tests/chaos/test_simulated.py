"""Many simulated jobs from one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.chaos import simulated
from holdfast.chaos.simulated import SimulatedResult, run_part, run_simulated
from holdfast.cli.app import app
from holdfast.errors import ConfigError
from holdfast.sim.schedule import ScheduleOutcome, simulate


def test_seeds_decide_everything_however_they_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_PART", 4)
    seen: list[int] = []
    together = run_simulated(30, 6, lambda result: seen.append(result.schedules))
    assert together.schedules == seen[-1] == 6
    assert len(seen) == 2, "each process had a part"
    parts = SimulatedResult()
    for first, count in ((30, 5), (35, 1)):
        parts.add(run_part(first, count))
    assert (together.faults, together.cuts, together.violations) == (parts.faults, parts.cuts, {})
    assert together.virtual_seconds == pytest.approx(parts.virtual_seconds)


def test_the_command_prints_what_it_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "holdfast.chaos.session.run_simulated", lambda first, count, show: run_part(first, count)
    )
    shown = CliRunner().invoke(
        app, ["chaos", "--simulated", "3", "--seed", "7", "--json", str(tmp_path / "f.json")]
    )
    assert shown.exit_code == 0, shown.output
    assert "3 schedules" in shown.output
    assert "nothing was lost" in shown.output
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    kinds = {name: count for name, count in figures.items() if name.startswith("faults.")}
    assert (figures["schedules"], figures["violations"]) == (3, 0)
    assert figures["faults"] == sum(kinds.values()) > 0


def test_a_schedule_that_shows_something_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_violation(seed: int, *, protected: bool) -> ScheduleOutcome:
        outcome = simulate(seed, protected=protected)
        outcome.violations += ["row 5 is 1"] if seed == 8 else []
        return outcome

    monkeypatch.setattr(simulated, "simulate", with_a_violation)
    monkeypatch.setattr(
        "holdfast.chaos.session.run_simulated", lambda first, count, show: run_part(first, count)
    )
    shown = CliRunner().invoke(app, ["chaos", "--simulated", "2", "--seed", "7"])
    assert shown.exit_code == 1
    assert "seed 8: row 5 is 1" in shown.output
    assert "nothing was lost" not in shown.output


@pytest.mark.parametrize(("first", "count"), [(-1, 5), (0, 0), (0, -3)])
def test_what_cannot_be_meant_is_refused(first: int, count: int) -> None:
    with pytest.raises(ConfigError, match="expected"):
        run_simulated(first, count)


def test_a_shape_is_refused() -> None:
    shown = CliRunner().invoke(app, ["chaos", "--simulated", "2", "--servers", "5"])
    assert isinstance(shown.exception, ConfigError)
    assert "takes only --seed and --json" in str(shown.exception)
