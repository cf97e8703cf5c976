"""``bench job``: servers and workers on one machine against the plain PyTorch loop, and what they cost.

Both sides take turns: while one runs, the other's processes are stopped. A job's speed is that of all its
workers together, over windows that begin and end with every worker between two batches, so that samples are
counted exactly.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path

import torch

from holdfast.bench import server_start
from holdfast.bench.harness import Report, Spread, interleave, ratio, stopwatch
from holdfast.bench.live import BATCH, PARTS, WORKERS, LiveJob, cpu_ms, preset_config, with_servers
from holdfast.bench.train import PlainLoop
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.events import EventLog
from holdfast.tables.lookup import Placer
from holdfast.training.config import Config, load
from holdfast.training.readers import build_readers
from holdfast.training.trainer import Trainer

MAX_ROWS = 100_000


def run(report: Report) -> None:
    """The start of a server; both presets against plain PyTorch; then shapes of jobs; then accuracy."""
    rounds, seconds = (3, 4.0) if report.quick else (7, 6.0)
    report.settings.update(
        batch_size=BATCH, max_rows=MAX_ROWS, rounds=rounds, window_seconds=seconds, optimizer="adagrad",
        servers=4, workers=WORKERS,
    )  # fmt: skip
    plan = plan_job(with_servers(preset_config("kaggle", MAX_ROWS), 4))
    server_start.measure(report, plan, rounds=2 * rounds)
    for preset in ("kaggle", "terabyte"):
        _compare(report, preset, rounds, seconds)
    _cpu_of_shapes(report, rounds, seconds)
    _accuracy(report)


def _compare(report: Report, preset: str, rounds: int, seconds: float) -> None:
    config = preset_config(preset, MAX_ROWS)
    torch.set_num_threads(2)
    reader, _ = build_readers(config)
    plain = PlainLoop(f"criteo-{preset}", reader, lr=config.optimizer.rate)
    costs: list[dict[str, float]] = []
    moved: list[float] = []
    with LiveJob(with_servers(config, 4)) as job:

        def ours() -> float:
            before, after, elapsed = job.window(seconds)
            costs.append(cpu_ms(before, after))
            moved.append(_bytes_per_step(before, after))
            return (after.samples - before.samples) / elapsed

        def theirs() -> float:
            steps = max(2, round(seconds / plain_step))
            return steps * BATCH / stopwatch(lambda: plain.train(steps))

        plain_step = stopwatch(lambda: plain.train(2)) / 2
        sides = {"job": ours, "plain": theirs}
        interleave(sides, 1)
        costs.clear()
        moved.clear()
        speeds = interleave(sides, rounds)
    report.raw[f"job.{preset}"] = {**speeds, "cpu_ms": costs, "bytes_per_step": moved}
    report.figure(
        f"job.{preset}.ratio", ratio(speeds["job"], speeds["plain"]), "job / plain PyTorch, two threads"
    )
    report.figure(f"job.{preset}.samples_per_second", Spread.of(speeds["job"]))
    for part in PARTS:
        report.figure(f"job.{preset}.cpu_ms.{part}", Spread.of([cost[part] for cost in costs]), "a step")
    least = _least_bytes(config, job.plan)
    worst = Spread.of([each / least for each in moved])
    name = "job.bytes_over_minimum" if preset == "kaggle" else f"job.{preset}.bytes_over_minimum"
    report.figure(name, worst, "weights in, gradients out, ids once")


def _cpu_of_shapes(report: Report, rounds: int, seconds: float) -> None:
    """The processor time of a step with 2, 4 and 8 servers, and with ten times the rows, in turns."""
    shapes = {
        "servers2": (preset_config("kaggle", MAX_ROWS), 2),
        "servers4": (preset_config("kaggle", MAX_ROWS), 4),
        "servers8": (preset_config("kaggle", MAX_ROWS), 8),
        "rows10": (preset_config("kaggle", 10 * MAX_ROWS), 4),
    }
    jobs = {name: LiveJob(with_servers(config, servers)) for name, (config, servers) in shapes.items()}
    try:

        def cost(name: str) -> float:
            before, after, _ = jobs[name].window(seconds)
            return sum(cpu_ms(before, after).values())

        sides = {name: functools.partial(cost, name) for name in jobs}
        interleave(sides, 1)
        costs = interleave(sides, rounds)
    finally:
        for job in jobs.values():
            job.close()
    report.raw["job.shapes.cpu_ms"] = costs
    report.figure(
        "job.servers8_over_servers2.cpu", ratio(costs["servers8"], costs["servers2"]), "CPU of a step"
    )
    report.figure("job.servers4_over_servers2.cpu", ratio(costs["servers4"], costs["servers2"]))
    rows = {name: _rows_of_a_batch(config) for name, (config, _) in shapes.items()}
    report.settings["rows_of_a_batch"] = rows
    touched = rows["rows10"] / rows["servers4"]
    note = f"tables of up to ten times the rows, of which a batch touches {touched:.2f} times as many"
    report.figure("job.tables10x.cpu", ratio(costs["rows10"], costs["servers4"]), note)


def _rows_of_a_batch(config: Config) -> float:
    reader, _ = build_readers(config)
    plan = plan_job(with_servers(config, 4))
    placer = Placer(plan.groups[0], plan.placement)
    rows = [placer.place(batch.ids).unique for batch, _ in zip(reader.split(0, 1), range(20), strict=False)]
    return sum(rows) / len(rows)


def _accuracy(report: Report) -> None:
    """AUC of the reference trainer and of a job on the same seeds."""
    seeds, samples = (2, 60_000) if report.quick else (5, 300_000)
    ours: list[float] = []
    theirs: list[float] = []
    for seed in range(seeds):
        config = load(None, [f"data.samples={samples}", f"seed={seed}"])
        theirs.append(Trainer(config).run().test.auc)
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, EventLog(Path(name)) as events:
            folder = Path(name)
            plan = plan_job(with_servers(config, 4))
            ours.append(Runner(plan, LocalLauncher(folder), folder, events).run().auc)
    report.raw["job.auc"] = {"job": ours, "trainer": theirs}
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    report.figure("job.auc_minus_trainer", Spread.of(differences), f"{seeds} seeds, {samples:,} samples")
    report.figure("job.trainer_seed_noise", statistics.stdev(theirs), "standard deviation over seeds")


def _bytes_per_step(before: Status, after: Status) -> float:
    """What workers received and sent."""
    total = 0
    for old, new in zip(before.nodes, after.nodes, strict=True):
        if new.peer.role == "worker":
            total += new.figures.bytes_in + new.figures.bytes_out
            total -= old.figures.bytes_in + old.figures.bytes_out
    return total / (after.steps - before.steps)


def _least_bytes(config: Config, plan: JobPlan) -> float:
    """What must move for a batch: each different row's weights and gradient, its id once, the network
    twice."""
    tables, network = plan.groups[0], plan.groups[-1]
    return _rows_of_a_batch(config) * (tables.dim * 8 + 4) + 8 * network.rows * network.dim
