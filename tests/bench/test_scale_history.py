"""Histories are measured: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from holdfast.bench.harness import Report
from holdfast.bench.scale_history import measure_history


def test_every_claimed_figure(tmp_path: Path) -> None:
    report = Report("scale", quick=True, console=Console(file=io.StringIO()))
    measure_history(report, versions=(10, 100), folder=tmp_path, openings=1)
    assert set(report.figures) == {
        "scale.publish.bytes_per_version",
        "scale.open_seconds",
        *(
            f"scale.{name}.versions{count}"
            for count in (10, 100)
            for name in (
                "publish.bytes_per_version",
                "publish.seconds",
                "publish.cpu_seconds",
                "open_seconds",
                "list_seconds",
                "stored_segments",
            )
        ),
    }
    figures = report.figures
    assert all(value > 0 for name, value in figures.items() if "segments" not in name)
    few, many = (figures[f"scale.publish.bytes_per_version.versions{count}"] for count in (10, 100))
    assert figures["scale.publish.bytes_per_version"] == 1.0, (
        "there is nothing fewer than 100 to compare with"
    )
    assert 1000 < few < many < 20_000, "a manifest of some kilobytes, however many versions there are"
    assert figures["scale.stored_segments.versions100"] > 0
    assert not list(tmp_path.iterdir()), "the store is removed"
    report.to_json()
