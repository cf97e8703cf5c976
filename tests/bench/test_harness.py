from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.bench import harness
from holdfast.bench.harness import Report, Spread, interleave, ratio, run_bench
from holdfast.errors import ConfigError


def test_sides_take_turns_in_both_orders() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    results = interleave({"a": lambda: side("a"), "b": lambda: side("b")}, rounds=3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_ratio_compares_round_by_round() -> None:
    """A machine that is half as fast in one round must not show."""
    spread = ratio([10, 5, 20], [5, 2.5, 10])
    assert (spread.low, spread.median, spread.high) == (2, 2, 2)


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([1, 2, 3, 4, 100]) == Spread(median=3, low=2, high=4)


def test_json_has_the_agreed_shape() -> None:
    report = Report("name", quick=True, console=Console(file=io.StringIO()))
    report.settings["rounds"] = 3
    report.figure("a.b", Spread(2.0, 1.0, 3.0))
    report.figure("c", 7)
    report.raw["times"] = [1.5]
    written = json.loads(report.to_json())
    assert set(written) == {"bench", "machine", "settings", "figures", "raw"}
    assert written["figures"] == {"a.b": 2.0, "c": 7}
    assert written["settings"] == {"quick": True, "rounds": 3}
    assert written["raw"]["times"] == [1.5]
    assert written["raw"]["spreads"]["a.b"] == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert {"cpu", "cores", "memory_gib", "python", "torch"} <= set(written["machine"])


def test_mistakes_are_named(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigError, match=r"unknown bench 'trian': expected one of .*train"):
        run_bench("trian", quick=True, json_path=None, console=console)
    with pytest.raises(ConfigError, match="there is no folder"):
        run_bench("train", quick=True, json_path=tmp_path / "no" / "f.json", console=console)
    with pytest.raises(ConfigError, match="is a folder: expected the name of a file"):
        run_bench("train", quick=True, json_path=tmp_path, console=console)
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        run_bench("train", quick=True, json_path=tmp_path / ("f" * 255), console=console)
    assert not list(tmp_path.iterdir())


def test_every_bench_has_its_file() -> None:
    for name in harness.BENCHES:
        assert (Path(harness.__file__).parent / f"{name.replace('-', '_')}.py").exists()
