"""Draws throughput-through-a-failure.png from the folder of a run:

    make demo
    .venv/bin/python docs/images/draw_failure.py runs/<the run's folder>

The run's own throughput.png has the same events in more detail.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from holdfast.events import read_events

PICTURE = Path(__file__).with_name("throughput-through-a-failure.png")
SECONDS = 1.0
BEFORE, AFTER = 5.0, 7.0  # seconds round the failure
LINE, SHADE = "#3366aa", "#ececec"
MARKS = {  # colour, text, and how high it stands
    "killed": ("#cc3311", "a server is killed (SIGKILL)", 0.05),
    "training_resumed": ("#cc6600", "all workers train again after {:.1f} s", 0.33),
    "server_recovered": ("#228833", "all rows recovered after {:.1f} s", 0.19),
    "redundancy_restored": ("#228833", "protected again after {:.1f} s", 0.05),
}


def draw(folder: Path) -> None:
    events = read_events(folder)
    progress = [event for event in events if event["event"] == "progress"]
    times = np.array([event["seconds"] for event in progress])
    samples = np.maximum.accumulate([float(event["samples"]) for event in progress])
    at = {name: next(e["seconds"] for e in events if e["event"] == name) for name in MARKS}
    killed = at["killed"]
    last = times[int(np.searchsorted(samples, samples[-1]))] - 1.0  # workers end one after the other
    grid = np.arange(max(times[0] + SECONDS, killed - BEFORE), min(last, killed + AFTER), 0.05)
    # Over the second before each instant: nothing shows before it has happened.
    speed = (np.interp(grid, times, samples) - np.interp(grid - SECONDS, times, samples)) / SECONDS

    figure = Figure(figsize=(8, 2.9), layout="constrained", dpi=144)
    ax = figure.subplots()
    ax.axvspan(0, at["redundancy_restored"] - killed, color=SHADE, zorder=0)
    ax.plot(grid - killed, speed, color=LINE, linewidth=2.2)
    top = speed.max() * 1.06
    for name, (colour, text, height) in MARKS.items():
        when = at[name] - killed
        side, shift = ("right", -0.08) if name == "killed" else ("left", 0.08)
        ax.axvline(when, color=colour, linewidth=1.5)
        ax.text(
            when + shift, top * height, text.format(when), color=colour, fontsize=10, ha=side, va="bottom",
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    ax.set_xlim(grid[0] - killed, grid[-1] - killed)
    ax.set_ylim(0, top)
    ax.set_xlabel("seconds after the kill")
    ax.set_ylabel("samples/s, last second")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.grid(visible=True, axis="y", alpha=0.3)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
