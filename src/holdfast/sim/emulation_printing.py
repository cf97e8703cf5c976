"""What ``holdfast emulate`` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from rich.console import Console

from holdfast.policy.units import show_hours, show_percent
from holdfast.screen import Columns
from holdfast.sim.emulator import Emulation
from holdfast.sim.student import Lesson
from holdfast.sim.timeline import EmulatedCluster

_COLUMNS = (
    "way", "costs", "saving", "lost work", "recovering", "saves every", "PLS", "updates lost", "AUC lost"
)  # fmt: skip
_SPARE = ("recovering", "saving", "lost work", "saves every", "updates lost")


def show_emulations(
    found: Sequence[Emulation], lesson: Lesson, cluster: EmulatedCluster, console: Console
) -> None:
    """A line for each way: means over the seeds."""
    seeds = list(dict.fromkeys(one.seed for one in found))
    console.print(
        f"{lesson.steps:,} steps of {lesson.batch_size} samples on {sum(lesson.table_rows):,} rows stand for "
        f"{show_hours(cluster.hours)}; {len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}",
        highlight=False,
        soft_wrap=True,
    )
    for seed in seeds:
        failures = next(one.failures for one in found if one.seed == seed)
        said = ", ".join(f"{show_hours(f.hours)} (server {_listed(f.servers)})" for f in failures)
        console.print(f"failures of seed {seed}: {said or 'none'}", highlight=False, soft_wrap=True)
    look = {"box": None, "header_style": "bold", "pad_edge": False}
    table = Columns(_COLUMNS, words=("way",), spare=_SPARE, **look)
    for way in dict.fromkeys(one.way for one in found):
        table.add_row(*_cells([one for one in found if one.way == way], cluster))
    console.print(table)
    plain = [next(one.plain for one in found if one.seed == seed) for seed in seeds]
    changes = np.mean([outcome.access_change for outcome in plain])
    updates = np.mean([outcome.access_update for outcome in plain])
    console.print(
        f"lookups of a row and how far it moves: correlation {changes:.3f}; "
        f"with the sizes of all its updates added up {updates:.3f}",
        highlight=False,
        soft_wrap=True,
    )
    for reason in dict.fromkeys(one.way.reason for one in found if one.way.reason):
        console.print(reason, highlight=False, soft_wrap=True)
    fallen_back = sorted(
        {one.way.name for one in found if one.way.name.startswith("cpr") and not one.way.partial}
    )
    if fallen_back:
        console.print(
            f"{', '.join(fallen_back)}: partial recovery does not pay here, so that everything goes back",
            highlight=False,
            soft_wrap=True,
        )


def _cells(of_way: Sequence[Emulation], cluster: EmulatedCluster) -> list[str]:
    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    def share(values: Sequence[float]) -> str:
        return show_percent(mean(values) / cluster.hours)

    costs = [one.costs for one in of_way]
    losses = [one.auc_loss for one in of_way]
    error = f" ± {np.std(losses, ddof=1) / len(losses) ** 0.5:.5f}" if len(losses) > 1 else ""
    return [
        of_way[0].way.name,
        share([one.hours for one in costs]),
        share([one.saving for one in costs]),
        share([one.lost for one in costs]),
        share([one.loading + one.rescheduling for one in costs]),
        show_hours(of_way[0].way.interval_hours),
        f"{mean([one.pls for one in costs]):.3f}",
        show_percent(mean([one.outcome.updates_lost for one in of_way])),
        f"{mean(losses):.5f}{error}",
    ]


def _listed(servers: Sequence[int]) -> str:
    return ", ".join(str(server) for server in servers)


def emulations_json(found: Sequence[Emulation], lesson: Lesson, cluster: EmulatedCluster) -> str:
    """All of it; names are the attributes'."""
    runs = [
        {
            **asdict(one),
            "auc_loss": one.auc_loss,
            "overhead": one.costs.hours / cluster.hours,
            "failures": [f._asdict() for f in one.failures],
        }
        for one in found
    ]
    return json.dumps({"lesson": asdict(lesson), "cluster": asdict(cluster), "runs": runs}, indent=2)
