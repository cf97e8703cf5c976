"""``bench scale``: how costs grow with the size of tables, the number of versions, and the size of servers.

Four parts, each in a file of its own: ``scale_baseline`` (what a baseline costs while it is written),
``scale_history`` (publishing and opening by number of versions), ``scale_restore`` (``restore()`` in a new
process) and ``scale_servers`` (the servers of a job). A plot of all growth is written beside the JSON file.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.bench.harness import Report, Spread
from holdfast.bench.scale_baseline import measure_baseline
from holdfast.bench.scale_history import measure_history
from holdfast.bench.scale_restore import measure_restore
from holdfast.bench.scale_servers import measure_servers
from holdfast.errors import ConfigError
from holdfast.training.plots import require_matplotlib

PANELS = (
    ("Longest step, in median steps", "size of the tables, GB",
     r"scale\.baseline\.gb(?P<x>[\d.]+)\.(?P<line>stall_over_step|torch_save_over_step)"),
    ("While a baseline is written", "size of the tables, GB",
     r"scale\.baseline\.gb(?P<x>[\d.]+)\.(?P<line>slowdown_percent|extra_memory_percent)"),
    ("Bytes that a publication writes", "versions",
     r"scale\.publish\.(?P<line>bytes_per_version)\.versions(?P<x>\d+)"),
    ("Opening a store", "versions", r"scale\.(?P<line>open_seconds)\.versions(?P<x>\d+)"),
    ("restore() of the newest version, over reading it", "versions",
     r"scale\.restore\.(?P<line>newest_over_read)\.versions(?P<x>\d+)"),
    ("Servers of a job, seconds", "size of a server, GB",
     r"scale\.servers\.gb(?P<x>[\d.]+)\.(?P<line>hold_seconds|resume_seconds|full_seconds)"),
)  # fmt: skip
"""Title, horizontal axis, and which figures: lines by name over ``x``."""


def run(report: Report) -> None:
    """All parts; or, quickly, each of them once at sizes that are too small to say much."""
    if report.quick:
        measure_baseline(report, gigabytes=(0.05,), rounds=1, folder=None)
        measure_history(report, versions=(10, 100), openings=1)
        measure_restore(report, versions=(5, 20), rows=20_000, touched=100, rounds=1)
        measure_servers(report, gigabytes=(0.02,), kills=1, folder=None)
    else:
        measure_baseline(report, gigabytes=(1, 4, 12), rounds=3, folder=None)
        report.save()
        measure_history(report)
        report.save()
        measure_restore(report)
        report.save()
        measure_servers(report, gigabytes=(0.3, 1, 3), kills=2, folder=None)
    if report.json_path is not None:
        draw(report, report.json_path.with_suffix(".png"))


def draw(report: Report, path: Path) -> None:
    """Plot how each cost grows, with quartiles; says so and does nothing without matplotlib."""
    try:
        require_matplotlib()
    except ConfigError as error:
        report.console.print(f"  (no plot: {error})", highlight=False)
        return
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(14, 8), layout="constrained", dpi=110)
    for (title, label, pattern), axes in zip(PANELS, figure.subplots(2, 3).flat, strict=True):
        for line, points in _lines(report, pattern).items():
            xs, middles, lows, highs = zip(*points, strict=True)
            axes.plot(xs, middles, marker="o", label=line.replace("_", " "))
            axes.fill_between(xs, lows, highs, alpha=0.2)
        axes.set(title=title, xlabel=label, xscale="log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path)
    report.console.print(f"  plot: {path}", highlight=False, soft_wrap=True)


def _lines(report: Report, pattern: str) -> dict[str, list[tuple[float, float, float, float]]]:
    """The figures that match, by line: x, median and quartiles."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for name, value in report.figures.items():
        match = re.fullmatch(pattern, name)
        if match:
            spread = report.spreads.get(name, Spread(value, value, value))
            point = float(match["x"]), spread.median, spread.low, spread.high
            found.setdefault(match["line"], []).append(point)
    return {line: sorted(points) for line, points in found.items()}
