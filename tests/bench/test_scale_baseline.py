"""What a baseline costs: every figure that is claimed is there, and says what it should."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from holdfast.bench import scale_baseline
from holdfast.bench.harness import Report
from holdfast.bench.scale_baseline import Round, _Step, _steps, _window, max_rows_for, measure_baseline
from holdfast.data.criteo_shape import TERABYTE_ROWS


def window(*steps: float, disturbed: tuple[float, ...] = ()) -> scale_baseline.Window:
    return _window([*(_Step(s, False) for s in steps), *(_Step(s, True) for s in disturbed)])


def test_every_claimed_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = Round(
        plain=window(0.1, 0.1, 0.1, disturbed=(0.3, 0.4)),
        saving=window(0.1, 0.15, disturbed=(0.25, 0.5)),
        extra_bytes=50_000_000, save_call_seconds=0.01, write_seconds=2.0, copied_bytes=1, waited_seconds=0.0,
    )  # fmt: skip
    found = {"tables_bytes": 1_000_000_000, "torch_save_seconds": 3.0, "rounds": [asdict(round_)]}
    monkeypatch.setattr(scale_baseline, "_in_a_new_process", lambda *_: found)
    report = Report("scale", quick=True, console=Console(file=io.StringIO()))
    measure_baseline(report, gigabytes=(1,), rounds=1, folder=None)
    expected = {
        "stall_over_step": 5.0,
        "plain_stall_over_step": 4.0,
        "torch_save_over_step": 30.0,
        "slowdown_percent": 20.0,
        "extra_memory_percent": 5.0,
        "undisturbed_stall_over_step": 1.5,
        "undisturbed_plain_stall_over_step": 1.0,
        "undisturbed_slowdown_percent": 20.0,
        "disturbed_steps_percent": 50.0,
        "write_megabytes_per_second": 500.0,
    }
    figures: dict[str, Any] = report.figures
    for name, value in expected.items():
        assert figures[f"scale.baseline.gb1.{name}"] == pytest.approx(value), name
    headlines = {name.removeprefix("scale.baseline.") for name in figures if ".gb1." not in name}
    assert headlines == {
        "stall_over_step", "undisturbed_stall_over_step", "slowdown_percent", "undisturbed_slowdown_percent",
        "extra_memory_percent",
    }  # fmt: skip
    report.to_json()


def test_a_window_in_which_all_steps_were_disturbed() -> None:
    found = window(disturbed=(0.1, 0.3))
    assert (found.steps, found.undisturbed_steps) == (2, 0)
    assert found.undisturbed_longest_seconds == found.longest_seconds == 0.3


def test_steps_are_disturbed_if_the_host_takes_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    stolen = iter([0.0, 0.0, 0.0, 0.5, 0.5, 0.5])
    monkeypatch.setattr(scale_baseline, "_stolen_seconds", lambda: next(stolen))
    steps = _steps(lambda: 0.2, lambda seconds: seconds < 0.6, first=lambda: 0.3)
    assert steps == [_Step(0.3, False), _Step(0.2, True), _Step(0.2, False)]


def test_the_host_never_gives_back_what_it_took() -> None:
    assert 0 <= scale_baseline._stolen_seconds() <= scale_baseline._stolen_seconds()


def test_tables_have_about_the_wanted_size() -> None:
    rows = sum(min(rows, max_rows_for(2.0)) for rows in TERABYTE_ROWS)
    assert rows * scale_baseline.RECORD_BYTES == pytest.approx(2e9, rel=0.01)
