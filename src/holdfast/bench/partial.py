"""``bench partial``: what partial recovery costs and saves (CPR, sections 4 and 6).

``overhead.*`` are percent of the training time in the paper's setting: 2 failures in 56 hours, each of one of
8 servers, target PLS 0.1. They are means over thousands of random times of failures, counted by the emulator
without training.

``auc_loss.*`` are differences of AUC between the same training without failures and with two: same samples,
same start; *vanilla* is CPR without priorities, those that end in *.eighth* save an eighth of the rows at a
time, as CPR does, the others as much as is usual here. Means over seeds, with their 95 % intervals (Student's
t); each seed is another teacher, other samples, another start and other failures.

``pls_correlation`` is between the portion of lost samples and the AUC lost, over runs with 1 to 32 failures
of a sixteenth to a half of the servers and random intervals (section 6.5), without priorities, all on the
data of the first seed.
``access_change_correlation`` is between the lookups of a row and the Euclidean norm of what that changed in
it (section 4.2, Figure 6), over the rows of the large tables.

``tracking.*`` is what the priorities of the large tables take for a batch, in percent of a training step of
a DLRM of Kaggle sizes, in turns; ``memory.*`` what they allocate, in percent of the weights.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from holdfast.bench.harness import Report, Spread, interleave, stopwatch
from holdfast.bench.quantize_accuracy import mean_with_interval
from holdfast.checkpoint.memory.priority import MostUsed, Priority, SubSampled, large_tables
from holdfast.options import PRIORITIZED_FRACTION
from holdfast.sim.changes import correlation
from holdfast.sim.draws import UniformFailures
from holdfast.sim.emulator import EmulationOutcome, Run, large_share, train
from holdfast.sim.student import Lesson
from holdfast.sim.timeline import EmulatedCluster, Way, WayName, costs, way_of
from holdfast.training.config import load
from holdfast.training.parallel import run_all
from holdfast.training.trainer import Trainer

WAYS: Mapping[str, tuple[WayName, float]] = {
    "vanilla": ("cpr", PRIORITIZED_FRACTION),
    "mfu": ("cpr-mfu", PRIORITIZED_FRACTION),
    "ssu": ("cpr-ssu", PRIORITIZED_FRACTION),
    "scar": ("cpr-scar", PRIORITIZED_FRACTION),
    "mfu.eighth": ("cpr-mfu", 1 / 8),
    "ssu.eighth": ("cpr-ssu", 1 / 8),
}
"""How the trainings of a figure recover, and which fraction of the rows they save at a time."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the measurement."""

    lesson: Lesson
    seeds: int
    random_runs: int
    patterns: int
    rounds: int
    max_rows: int


def run(report: Report) -> None:
    """All of it, or a bit of each."""
    if report.quick:
        lesson = Lesson(scale=2000.0, samples=40_000, test_samples=20_000)
        measure(report, Size(lesson, seeds=3, random_runs=4, patterns=2000, rounds=2, max_rows=10_000))
    else:
        lesson = Lesson()
        measure(
            report, Size(lesson, seeds=24, random_runs=40, patterns=20_000, rounds=40, max_rows=1_000_000)
        )


def measure(report: Report, size: Size, processes: int | None = None) -> None:
    """The parts one after the other."""
    cluster = replace(EmulatedCluster(), share=large_share(size.lesson))
    report.settings.update(
        lesson=asdict(size.lesson), steps=size.lesson.steps, rows=sum(size.lesson.table_rows),
        seeds=size.seeds, random_runs=size.random_runs, cluster=asdict(cluster),
    )  # fmt: skip
    _overheads(report, cluster, size.patterns)
    _accuracy(report, size, cluster, processes)
    _tracking(report, size)


def _overheads(report: Report, cluster: EmulatedCluster, patterns: int) -> None:
    rng = np.random.default_rng(0)
    drawn = [UniformFailures(int(cluster.failures)).draw(cluster, rng) for _ in range(patterns)]
    names: Sequence[WayName] = ("full", "partial", "cpr", "cpr-mfu")
    for name in names:
        way = way_of(name, cluster)
        hours = [costs(way, failures, cluster).hours for failures in drawn]
        report.figure(
            f"overhead.{name}.percent",
            100 * float(np.mean(hours)) / cluster.hours,
            f"mean of {patterns:,} patterns of failures; a save every {way.interval_hours:.3g} h",
        )


def random_run(number: int, lesson: Lesson) -> Run:
    """A run of section 6.5: random numbers of failures and of servers that fail, a random interval.

    The interval is at most half of the training, so that every run saves. All are of one lesson, as the
    paper's are of one data set: how much a lost sample costs differs between teachers.
    """
    rng = np.random.default_rng([number, 66])
    cluster = EmulatedCluster(
        servers=16,
        servers_per_failure=int(2 ** rng.integers(0, 4)),
        failures=int(2 ** rng.integers(0, 6)),
        share=large_share(lesson),
    )
    interval = rng.uniform(0.01, 0.5) * cluster.hours
    failures = UniformFailures(int(cluster.failures)).draw(cluster, rng)
    return Run(lesson, cluster, Way("cpr", True, interval), failures)


def _accuracy(report: Report, size: Size, cluster: EmulatedCluster, processes: int | None) -> None:
    """All trainings, and the figures that come of them."""
    tasks: dict[str, Run] = {}
    for seed in range(size.seeds):
        lesson = replace(size.lesson, seed=seed)
        failures = UniformFailures(int(cluster.failures)).draw(cluster, np.random.default_rng([seed, 7]))
        tasks[f"plain.{seed}"] = Run(lesson, cluster, None, ())
        for name, (way, fraction) in WAYS.items():
            saving = replace(cluster, fraction=fraction)
            tasks[f"{name}.{seed}"] = Run(lesson, saving, way_of(way, saving), failures)
    for number in range(size.random_runs):
        tasks[f"random.{number}"] = random_run(number, size.lesson)
    done = _outcomes(report, tasks, processes)

    def loss(name: str) -> float:
        return done[f"plain.{tasks[name].lesson.seed}"].auc - done[name].auc

    for name in WAYS:
        runs = [f"{name}.{seed}" for seed in range(size.seeds)]
        losses = [loss(run) for run in runs]
        report.raw[f"auc_loss.{name}.by_seed"] = losses
        report.raw[f"updates_lost.{name}.by_seed"] = [done[run].updates_lost for run in runs]
        note = f"mean, 95 % interval, {len(losses)} seeds"
        report.figure(f"auc_loss.{name}", mean_with_interval(losses), note)
    pairs = [(_pls(tasks[run]), loss(run)) for run in tasks if run.startswith("random.")]
    report.raw["pls_and_loss"] = pairs
    report.figure("pls_correlation", correlation(*zip(*pairs, strict=True)), f"{len(pairs)} random runs")
    plain = [done[f"plain.{seed}"] for seed in range(size.seeds)]
    of_updates = Spread.of([outcome.access_update for outcome in plain]).median
    report.figure(
        "access_change_correlation",
        Spread.of([outcome.access_change for outcome in plain]),
        f"without failures; {of_updates:.3f} with the sizes of all updates",
    )


def _outcomes(report: Report, tasks: Mapping[str, Run], processes: int | None) -> dict[str, EmulationOutcome]:
    """What became of each training: those that an interrupted run of the bench left, and the others."""
    done = {name: EmulationOutcome(**values) for name, values in report.kept_runs().items()}
    report.raw.update(unfinished=True, runs=done)
    names = {run: name for name, run in tasks.items()}
    missing = [run for run, name in names.items() if name not in done]
    missing.sort(key=lambda run: run.lesson.seed)  # trainings of a seed share batches
    for run, outcome in run_all(train, missing, processes):
        done[names[run]] = outcome
        report.save()
        report.console.print(f"  ({len(done)} of {len(tasks)} trainings)", highlight=False)
    del report.raw["unfinished"]
    return done


def _pls(run: Run) -> float:
    assert run.way is not None
    return costs(run.way, run.failures, run.cluster).pls


def _tracking(report: Report, size: Size) -> None:
    """Priorities of the large tables against a step: DLRM of Kaggle sizes, batch 2048, on all cores."""
    trainer = Trainer(load(None, ["data.samples=10000000", f"data.max_rows={size.max_rows}"]))
    rows = trainer.train_reader.table_rows
    large = large_tables(rows)
    weights = sum(table.numel() * table.element_size() for table in trainer.model.tables.parameters())
    batches = iter(trainer.train_reader.split(0, 1))
    report.settings["tracking"] = {"rows": sum(rows), "large_tables": len(large)}
    makers: dict[str, Callable[[int], Priority]] = {
        "mfu": lambda count: MostUsed(count, PRIORITIZED_FRACTION),
        "ssu": lambda count: SubSampled(count, PRIORITIZED_FRACTION),
    }
    sides: dict[str, Callable[[], float]] = {}
    for name, make in makers.items():
        tracemalloc.start()
        priorities = {table: make(rows[table]) for table in large}
        allocated, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        report.figure(f"memory.{name}.percent", 100 * allocated / weights, f"{len(large)} tables")
        sides[name] = _touching(priorities, lambda: next(batches).ids)

    def step() -> float:
        batch = next(batches)
        return stopwatch(lambda: trainer.train_step(batch))

    sides["step"] = step
    interleave(sides, 2)
    times = interleave(sides, size.rounds)
    report.raw["tracking"] = times
    for name in makers:
        percent = [100 * mine / of for mine, of in zip(times[name], times["step"], strict=True)]
        report.figure(f"tracking.{name}.percent", Spread.of(percent), "of a step")


def _touching(
    priorities: Mapping[int, Priority], next_ids: Callable[[], Sequence[np.ndarray]]
) -> Callable[[], float]:
    """Seconds for a batch, on average over two: every second one is left out by some."""

    def touch() -> float:
        two = [next_ids(), next_ids()]
        return 0.5 * stopwatch(lambda: _touch_all(priorities, two))

    return touch


def _touch_all(priorities: Mapping[int, Priority], batches: Sequence[Sequence[np.ndarray]]) -> None:
    for ids in batches:
        for table, priority in priorities.items():
            priority.touched(ids[table])
