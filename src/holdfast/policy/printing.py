"""What ``holdfast plan`` prints: a table for people, the same values as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.policy.lifetimes import Fit
from holdfast.policy.machines import OnMachines
from holdfast.policy.planner import Plan
from holdfast.policy.protections import KINDS, Estimate
from holdfast.policy.units import show_bytes, show_hours, show_percent
from holdfast.screen import Columns

_PLAIN_WIDTH = 200  # for files and pipes: wide enough to truncate nothing


def make_console() -> Console:
    """Standard output; without line wrapping if it is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def show_plan(plan: Plan, console: Console, *, explain: bool) -> None:
    """Print all protections, the best first, and the recommendation."""
    situation = plan.situation
    console.print(
        f"{show_bytes(situation.table_bytes)} of tables on {situation.servers} servers, "
        f"{situation.workers} workers, {show_hours(situation.hours)} of training, a failure every "
        f"{show_hours(situation.mtbf_hours)}: {situation.failures:.3g} are expected",
        soft_wrap=True,
    )
    if situation.machine_mtbf_hours is not None:
        of_machines = situation.failures - situation.hours * situation.process_failures_per_hour
        console.print(
            f"of these, {of_machines:.3g} are of machines: there are {situation.machines}, and each fails "
            f"every {show_hours(situation.machine_mtbf_hours)}",
            soft_wrap=True,
        )
    table = Columns(tuple(_COLUMNS), words=("protection",), spare=_SPARE, **_LOOK)
    for one in plan.ranked:
        cells = (cell(one) for cell in _COLUMNS.values())
        table.add_row(*cells, style=None if one.objection is None else "dim")
    console.print(table)
    show_machines(plan, console)
    for one in plan.ranked:
        if one.objection is not None:
            console.print(f"not {escape(one.name)}: {escape(one.objection)}", soft_wrap=True)
    if explain:
        for one in plan.ranked:
            show_terms(one, console)
    best = plan.best
    console.print(
        f"[bold]Use {escape(best.name)}[/]: {KINDS[best.kind]}; it is expected to add "
        f"{show_percent(best.overhead)} to the training time.",
        soft_wrap=True,
    )
    if best.machines is not None and best.machines.objection is None:
        console.print(_machines_in_words(best.machines), soft_wrap=True)


_LOOK: Mapping[str, Any] = {"box": None, "header_style": "bold", "pad_edge": False}


def _rate(size: float) -> str:
    return f"{show_bytes(size)}/s" if size else "–"


_COLUMNS: Mapping[str, Callable[[Estimate], str]] = {
    "protection": lambda one: one.name,
    "costs": lambda one: show_percent(one.overhead),
    "saves": lambda one: "–" if one.interval_hours is None else show_hours(one.interval_hours),
    "memory": lambda one: f"+{show_percent(one.memory_share)}" if one.memory_share else "–",
    "stored": lambda one: show_bytes(one.stored_bytes) if one.stored_bytes else "–",
    "to store": lambda one: _rate(one.storage_rate),
    "to servers": lambda one: _rate(one.traffic_rate),
    "redone": lambda one: show_hours(one.redone_hours) if one.redone_hours else "–",
    "AUC lost": lambda one: f"{one.auc_loss:.1e}" if one.auc_loss else "–",
    "loss": lambda one: show_percent(one.loss_chance) if one.loss_chance else "–",
}
_SPARE = ("to servers", "to store", "stored", "redone", "memory", "loss", "AUC lost")


def show_machines(plan: Plan, console: Console) -> None:
    """Print what codes need of machines, and what the loss of one costs."""
    rows = {
        one.name.removesuffix(", atomic"): one.machines for one in plan.ranked if one.machines is not None
    }
    if not rows:
        return
    there = plan.situation.machines
    where = "as few machines as it needs" if there is None else f"{there} machine{'s' * (there != 1)}"
    console.print(f"\n[bold]The loss of a machine[/], with each code's servers on {where}:", soft_wrap=True)
    table = Columns(("", *_MACHINES), words=("",), spare=_SPARE_OF_MACHINES, **_LOOK)
    for name, one in rows.items():
        cells = (cell(one) for cell in _MACHINES.values())
        table.add_row(name, *cells, style=None if one.objection is None else "dim")
    console.print(table)
    console.print()


def _further(one: OnMachines) -> str:
    """What may be lost until a machine's servers are back."""
    if one.further_machines:
        return f"{one.further_machines} machine{'s' * (one.further_machines != 1)}"
    return (
        f"{one.further_servers} server{'s' * (one.further_servers != 1)}"
        if one.further_servers
        else "nothing"
    )


_MACHINES: Mapping[str, Callable[[OnMachines], str]] = {
    "needs": lambda one: f"{one.needed} machines",
    "servers each": lambda one: "–".join(str(count) for count in sorted(set(one.servers_each))),
    "memory each": lambda one: show_bytes(one.memory_bytes),
    "lost servers": lambda one: str(one.lost_servers),
    "lost rows": lambda one: f"{one.lost_rows:,.0f}",
    "to read": lambda one: show_bytes(one.read_bytes),
    "back in": lambda one: show_hours(one.recovery_hours),
    "until then": _further,
    "at once": lambda one: str(one.at_once),
    "in turn": lambda one: str(one.in_turn),
}
_SPARE_OF_MACHINES = ("to read", "lost rows", "servers each", "memory each", "in turn")


def _machines_in_words(one: OnMachines) -> str:
    """What the best code does where a machine is lost, after the recommendation."""
    each = "–".join(str(count) for count in sorted(set(one.servers_each)))
    servers = f"{one.lost_servers} server{'s' * (one.lost_servers != 1)}"
    return (
        f"It needs {one.needed} machines. On {one.machines}, with {each} server{'s' * (each != '1')} each, "
        f"the loss of a machine takes {servers}, {show_bytes(one.lost_bytes)} of rows and parities, which "
        f"are back in {show_hours(one.recovery_hours)}; until then, {_further(one)} more may be lost. At "
        f"once, {one.at_once} may be lost; one after the other, {one.in_turn} if none is replaced."
    )


def show_terms(one: Estimate, console: Console) -> None:
    """Print the terms of an overhead."""
    console.print(f"\n[bold]{escape(one.name)}[/]: {KINDS[one.kind]}", soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for term in one.terms:
        table.add_row(term.what, show_percent(term.share), escape(term.how))
    table.add_row("together", show_percent(one.overhead), "of the training time", style="bold")
    console.print(table)
    if one.save_memory_share:
        peak = show_percent(one.memory_share + one.save_memory_share)
        console.print(f"memory: {peak} of the tables' more while a full version is copied")
    if one.pls:
        console.print(
            f"portion of lost samples {one.pls:.3g}, {one.auc_loss / one.pls:.3g} of AUC for each 1"
        )


def show_basis(
    assumed: Sequence[str], measured: Sequence[str], fits: Sequence[Fit], console: Console
) -> None:
    """Print the assumptions."""
    if fits:
        best, *others = fits
        console.print(
            f"failures: {_fit(best)} fits best, median {show_hours(best.lifetime.median_hours)}; "
            + ", ".join(_fit(one) for one in others),
            soft_wrap=True,
        )
    if measured:
        console.print(f"measured here: {', '.join(measured)}", soft_wrap=True)
    if assumed:
        console.print(f"assumed: {', '.join(assumed)}", soft_wrap=True)


def _fit(one: Fit) -> str:
    shape = "" if one.lifetime.name == "exponential" else f"shape {one.lifetime.shape:.2g}, "
    mtbf = show_hours(one.lifetime.mean_hours)
    return f"{one.lifetime.name} ({shape}MTBF {mtbf}, RMSE {show_percent(one.rmse)})"


def plan_json(plan: Plan, assumed: Sequence[str], fits: Sequence[Fit]) -> str:
    """The plan as JSON; keys are attribute names."""
    values: dict[str, Any] = {
        "situation": asdict(plan.situation),
        "assumed": list(assumed),
        "fits": [
            {**asdict(one.lifetime), "mean_hours": one.lifetime.mean_hours, "aic": one.aic, "rmse": one.rmse}
            for one in fits
        ],
        "ranked": [_estimate(one) for one in plan.ranked],
    }
    return json.dumps(values, indent=2)


def _estimate(one: Estimate) -> dict[str, Any]:
    plain = (
        "kind", "name", "overhead", "interval_hours", "memory_share", "save_memory_share", "stored_bytes",
        "storage_rate", "traffic_rate", "redone_hours", "pls", "auc_loss", "loss_chance", "settings",
        "objection",
    )  # fmt: skip
    machines = None if one.machines is None else asdict(one.machines)
    terms = [asdict(term) for term in one.terms]
    return {name: getattr(one, name) for name in plain} | {"machines": machines, "terms": terms}
