"""Plot the overhead over the number of servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.policy.protections import KINDS
from holdfast.policy.units import show_hours
from holdfast.sim.scaling import Point
from holdfast.training.plots import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000", "#ee7733", "#888888")
_MARKS = "osD^vPX*d"
_HIGHEST = 300.0
_LOWEST = 1e-4


def check_plot(path: Path) -> None:
    """Raise ``ConfigError`` if the plot cannot be written."""
    require_matplotlib()
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: expected a name that ends in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")


def plot_points(points: Sequence[Point], path: Path, title: str) -> None:
    """One panel for each way to fail: lines are closed forms, marks are simulated runs."""
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.lines import Line2D  # noqa: PLC0415

    panels = list(dict.fromkeys(point.failures for point in points))
    present = {point.kind for point in points}
    kinds = [kind for kind in KINDS if kind in present]
    figure = Figure(figsize=(1.2 + 5.2 * len(panels), 5.2), layout="constrained", dpi=120)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, ax in zip(panels, axes, strict=True):
        of_panel = [point for point in points if point.failures == panel]
        for number, kind in enumerate(kinds):
            _draw([point for point in of_panel if point.kind == kind], ax, number)
        mtbfs = [point.mtbf_hours for point in of_panel]
        ends = f"MTBF {show_hours(mtbfs[0])} to {show_hours(mtbfs[-1])}"
        ax.set(xscale="log", yscale="log", xlabel="servers", title=f"{panel}\n{ends}")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.grid(visible=True, which="major", alpha=0.3)
    shown = [100 * p.expected for p in points] + [100 * p.simulated for p in points]
    inside = [value for value in shown if _LOWEST <= value <= _HIGHEST]
    if inside:
        axes[0].set_ylim(max(_LOWEST, min(inside) / 1.5), min(_HIGHEST, max(inside) * 1.5))
    axes[0].set_ylabel("added to the training time")
    handles = [
        Line2D([], [], color=_colour(number), marker=_MARKS[number % len(_MARKS)], markersize=4.5, label=kind)
        for number, kind in enumerate(kinds)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(kinds), 4), frameon=False)
    figure.suptitle(f"{title}\nlines: closed forms; marks: simulated, with standard errors", fontsize=11)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _draw(points: Sequence[Point], ax: Axes, number: int) -> None:
    colour = _colour(number)
    finite = [point for point in points if math.isfinite(point.expected)]
    ax.plot(
        [point.servers for point in finite],
        [100 * point.expected for point in finite],
        color=colour,
        linewidth=1.4,
    )
    marked = [point for point in points if math.isfinite(point.simulated) and point.simulated > 0]
    ax.errorbar(
        [point.servers for point in marked],
        [100 * point.simulated for point in marked],
        yerr=[0.0 if math.isnan(point.error) else 100 * point.error for point in marked],
        fmt=_MARKS[number % len(_MARKS)],
        color=colour,
        markersize=4.5,
        capsize=2,
        linewidth=0.9,
    )


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
