"""``holdfast chaos`` as a user runs it: its progress, its summary, its figures.

``run`` is for real processes, ``run_on_virtual_time`` for simulated ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from holdfast.bench.harness import Report, check_json_path
from holdfast.chaos.machines import DESCRIPTIONS as MACHINE_DESCRIPTIONS
from holdfast.chaos.machines import run_on_machines
from holdfast.chaos.run import ChaosOptions, ChaosProgress, ChaosResult, run_chaos
from holdfast.chaos.schedule import DESCRIPTIONS
from holdfast.chaos.simulated import SimulatedResult, run_simulated
from holdfast.training.live import duration, progress_line

_PLAIN_SECONDS = 10.0
_PHASES = {
    "starting": "starting",
    "faults": "faults",
    "recovering": "no more faults: recovering",
    "checking": "checking all stripes",
    "ending": "ending",
}


def run(options: ChaosOptions, json_path: Path | None, console: Console) -> ChaosResult:
    """Run chaos tests, show progress, and write the figures."""
    check_json_path(json_path)
    code = f"{options.code.k} + {options.code.r}"
    console.print(
        f"chaos for {options.minutes:g} minutes, seed {options.seed}: {options.servers} servers, "
        f"{options.workers} workers, a code of {code}{', and beyond it' if options.beyond else ''}"
        f"{', the network copied by workers' if options.dense == 'workers' else ''}",
        highlight=False,
    )
    if options.engine == "ray":
        console.print(f"a lab of {options.hosts} hosts, with Ray", highlight=False)
        result = run_on_machines(
            options, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)
        )
    else:
        with _shown(console) as show:
            result = run_chaos(options, show)
    _report(options, result, Report("chaos", False, console, json_path=json_path))
    for problem in result.problems:
        console.print(f"[red]problem:[/] {problem}", highlight=False, soft_wrap=True)
    done = (
        f"{result.faults.total()} faults, {result.recoveries} recoveries, "
        f"{result.updates_checked:,} updates checked"
    )
    console.print(f"{done}: {verdict(result)}", highlight=False, soft_wrap=True)
    console.print(f"events and logs: {result.folder}", highlight=False, soft_wrap=True)
    return result


def _report(options: ChaosOptions, result: ChaosResult, report: Report) -> None:
    """Print all figures, and write them to the report's file."""
    report.settings = asdict(options)
    del report.settings["run"]
    report.figure("faults", result.faults.total())
    for kind, count in sorted(result.faults.items()):
        report.figure(f"faults.{kind}", count, (DESCRIPTIONS | MACHINE_DESCRIPTIONS).get(kind, ""))
    if options.engine == "ray":
        report.figure("machine_losses", result.machine_losses, "with all that they had in memory")
    report.figure("recoveries", result.recoveries, "servers that took over and brought all rows back")
    report.figure("workers_replaced", result.workers_replaced)
    report.figure("supervisors_restarted", result.supervisors_restarted)
    report.figure("batches", result.batches, "each once, in all servers")
    if options.engine == "local":  # nobody collects on other machines what workers were told
        report.figure("acknowledged", result.acknowledged, "of them workers were told so")
    report.figure("updates_checked", result.updates_checked, "of rows, against a twin, to the bit")
    report.figure("versions_checked", result.versions_checked, "checkpoints restored and compared")
    report.figure("stripes_checked", result.stripes_checked, "parities against their members")
    report.figure("data_losses", result.data_losses, "announced, of what no copy was left of")
    for name in ("lost", "wrong", "hangs", "orphans"):
        report.figure(name, getattr(result, name))
    report.figure("seconds", result.seconds)
    report.raw["problems"] = result.problems
    report.save()


def run_on_virtual_time(seed: int, count: int, json_path: Path | None, console: Console) -> SimulatedResult:
    """The same for simulated jobs: so many schedules, the seed of the first of which is ``seed``."""
    check_json_path(json_path)
    console.print(f"chaos on virtual time: {count:,} schedules, from seed {seed} on", highlight=False)
    shown = 0.0
    told: set[int] = set()

    def show(result: SimulatedResult) -> None:
        nonlocal shown
        for at in sorted(result.violations.keys() - told):
            told.add(at)
            found = result.violations[at]
            console.print(f"[red]seed {at}:[/] {found[0]} (of {len(found)})", highlight=False, soft_wrap=True)
        now = time.monotonic()
        if now - shown >= _PLAIN_SECONDS:
            shown = now
            console.print(
                f"{result.schedules / count:4.0%}  {result.schedules:,} schedules  "
                f"{result.faults.total():,} faults  {len(result.violations)} with violations",
                highlight=False,
            )

    result = run_simulated(seed, count, show)
    show(result)
    report = Report("chaos", False, console, json_path=json_path)
    report.settings = {"seed": seed, "simulated": count}
    report.figure("schedules", result.schedules, "whole jobs, from start to end")
    report.figure("faults", result.faults.total())
    for kind, number in sorted(result.faults.items()):
        report.figure(f"faults.{kind}", number)
    report.figure("cuts_checked", result.cuts, "consistent cuts compared")
    report.figure("virtual_hours", result.virtual_seconds / 3600)
    report.figure("violations", len(result.violations), "schedules that showed something wrong")
    report.figure("seconds", result.seconds)
    report.figure("schedules_per_minute", result.per_minute, "on all processors")
    report.raw["violations"] = {str(at): found for at, found in result.violations.items()}
    report.save()
    count_bad = len(result.violations)
    console.print(
        f"{result.schedules:,} schedules, {result.faults.total():,} faults: "
        + (f"{count_bad} showed something wrong" if count_bad else "nothing was lost, and nothing is wrong"),
        highlight=False,
    )
    return result


def verdict(result: ChaosResult) -> str:
    """The verdict in one sentence."""
    if result.good and result.data_losses:
        times = "once" if result.data_losses == 1 else f"{result.data_losses} times"
        return f"data was lost {times}, as said, and the job went back; nothing else is lost or wrong"
    if result.good:
        return "nothing was lost, and nothing is wrong"
    found = [
        f"lost: {result.lost:,} updates" if result.lost else "",
        f"wrong: {result.wrong:,}" if result.wrong else "",
        "the job hung" if result.hangs else "",
        f"left behind: {result.orphans} processes" if result.orphans else "",
    ]
    return "; ".join(text for text in found if text) or "problems, see above"


def describe(progress: ChaosProgress) -> str:
    """One line."""
    text = (
        f"{_PHASES[progress.phase]}  {progress.faults} faults  {progress.recoveries} recoveries  "
        f"{progress.batches:,} batches  {duration(progress.seconds_left)} left"
    )
    lacking = ", ".join(map(str, progress.degraded))
    return f"{text}  servers not whole: {lacking}" if lacking else text


@contextlib.contextmanager
def _shown(console: Console) -> Iterator[Callable[[ChaosProgress], None]]:
    """A live line on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield _Plain(console)
        return
    with progress_line(console) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda progress: bar.update(task, completed=progress.fraction, description=describe(progress))


class _Plain:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase, self._last = "", 0.0

    def __call__(self, progress: ChaosProgress) -> None:
        now = time.monotonic()
        if progress.phase != self._phase or now - self._last >= _PLAIN_SECONDS:
            self._phase, self._last = progress.phase, now
            self._console.print(
                f"{progress.fraction:4.0%}  {describe(progress)}", highlight=False, soft_wrap=True
            )
