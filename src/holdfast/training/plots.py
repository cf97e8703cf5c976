"""Throughput over time as a picture, from a run's events alone: any run's folder can be drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from holdfast.events import read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "throughput.png"

_SHORT_SECONDS = 1.0
_LONG_SECONDS = 5.0
_AROUND = (4.0, 8.0)
_STEP_SECONDS = 0.1
_LINE, _FAINT, _SHADE = "#4477aa", "#a9c3dc", "#eeeeee"
_MARKS = {
    "killed": ("#cc3311", "-", "{who} killed"),
    "server_lost": ("#cc3311", ":", "loss noticed"),
    "training_resumed": ("#ee7733", "-", "training goes on"),
    "server_recovered": ("#228833", "-", "{rows:,} rows back"),
    "server_rolled_back": ("#228833", "-", "{rows:,} rows went back"),
    "redundancy_restored": ("#228833", "--", "all parities back"),
}

Event = Mapping[str, Any]
Times = NDArray[np.float64]


def require_matplotlib() -> None:
    """ConfigError if pictures cannot be drawn."""
    try:
        import matplotlib as _  # noqa: F401, PLC0415
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'holdfast[plots]'") from None


def plot_run(folder: Path) -> Path | None:
    """Draw a run's throughput, with what happened to its servers: where that is; None if there is too little.

    Its times are those of ``progress`` events: a small ``report_every`` makes it fine.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    events = read_events(folder)
    progress = [event for event in events if event["event"] == "progress"]
    if len(progress) < 3:
        return None
    start = progress[0]["seconds"]
    times = np.array([event["seconds"] for event in progress]) - start
    # Below what it was for a while when a server was replaced.
    samples = np.maximum.accumulate([float(event["samples"]) for event in progress])
    last = int(np.searchsorted(samples, samples[-1]))  # the test at the end is no training
    times, samples = times[: last + 1], samples[: last + 1]
    marks = [{**e, "at": e["seconds"] - start} for e in events if e["event"] in _MARKS]
    figure = Figure(figsize=(9, 3.6 if not marks else 6.4), layout="constrained", dpi=130)
    axes = figure.subplots(2 if marks else 1, 1, squeeze=False)[:, 0]
    _draw(axes[0], times, samples, _LONG_SECONDS, marks)
    axes[0].set_title(_title(events), loc="left", fontsize=11)
    axes[0].set_xlim(0, times[-1])
    if marks:
        _draw_close(axes[1], times, samples, marks)
    axes[-1].set_xlabel("seconds of training")
    figure.savefig(folder / PLOT_FILE)
    return folder / PLOT_FILE


def _draw_close(ax: Axes, times: Times, samples: Times, marks: Sequence[Event]) -> None:
    """The time round the first failure."""
    begin = marks[0]["at"]
    whole = next((mark["at"] for mark in marks if mark["event"] == "redundancy_restored"), begin)
    _draw(ax, times, samples, _SHORT_SECONDS, marks)
    ax.set_xlim(max(0.0, begin - _AROUND[0]), min(times[-1], max(whole, begin) + _AROUND[1]))
    ax.set_title("the same, closer", loc="left", fontsize=11)
    labels = [(mark, _MARKS[mark["event"]]) for mark in marks]
    for mark, (colour, style, text) in labels:
        who = f"{mark.get('role', 'server')} {mark.get('slot', '')}"
        later = mark["at"] - begin
        after = f" after {later:.1f} s" if later > 0 else ""
        label = text.format(**{**mark, "who": who}) + after
        ax.axvline(mark["at"], color=colour, linestyle=style, linewidth=1.4, label=label)
    ax.legend(loc="lower right", fontsize=8.5, framealpha=0.95)


def _draw(ax: Axes, times: Times, samples: Times, smooth: float, marks: Sequence[Event]) -> None:
    for begin, end in degraded(marks, times[-1]):
        ax.axvspan(begin, end, color=_SHADE, zorder=0)
    grid = np.arange(0.0, times[-1], _STEP_SECONDS)
    for seconds, colour, width in ((_SHORT_SECONDS, _FAINT, 1.2), (smooth, _LINE, 1.8)):
        ax.plot(grid, speed(times, samples, grid, seconds), color=colour, linewidth=width)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"samples/s, over {smooth:g} s")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.grid(visible=True, axis="y", alpha=0.3)


def speed(times: Times, samples: Times, at: Times, seconds: float) -> Times:
    """Samples per second in the time round each of these."""
    first, last = np.maximum(at - seconds / 2, times[0]), np.minimum(at + seconds / 2, times[-1])
    done = np.interp(last, times, samples) - np.interp(first, times, samples)
    speed: Times = done / np.maximum(last - first, 1e-9)
    return speed


def degraded(marks: Sequence[Event], end: float) -> list[tuple[float, float]]:
    """The times in which redundancy was lacking."""
    found: list[tuple[float, float]] = []
    since = None
    for mark in marks:
        if mark["event"] == "redundancy_restored" and since is not None:
            found.append((since, mark["at"]))
            since = None
        elif mark["event"] == "server_lost" and since is None:
            since = mark["at"]
    return found if since is None else [*found, (since, end)]


def _title(events: Sequence[Event]) -> str:
    config = next((event for event in events if event["event"] == "config"), {})
    job = config.get("job", {})
    if not job.get("servers"):
        return "throughput"
    protection = job.get("protection", {})
    kinds = {
        "erasure-code": "a code of {k} + {r}",
        "replication": "{copies} copies of each row",
        "partial": "partial recovery",
        "none": "no protection",
    }
    code = kinds[protection.get("kind", "none")].format(**protection)
    title = f"{job['servers']} servers, {job['workers']} workers, {code}"
    finished = next((event for event in events if event["event"] == "run_finished"), {})
    names = {"before": "before", "degraded": "while redundancy was lacking", "after": "after"}
    speeds = finished.get("speeds") or {}
    means = [f"{speeds[key]:,.0f} {name}" for key, name in names.items() if speeds.get(key)]
    return f"{title}\nsamples/s: {', '.join(means)}" if means else title
