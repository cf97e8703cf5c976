"""``bench overhead``: what protection costs while nothing fails, in time, processor time, memory and load.

No protection, ECRM's way, ECRec's way, copies, and checkpoints train the same model in the same number of
servers, in turns, while the processes of all others are stopped. Overhead is as the papers have it: by how
much longer the same samples take, compared with the windows without protection just before and just after,
for the speed of a shared machine drifts. Servers and workers share the machine's cores here, so all processor
time that protection takes shows, and is told apart by where it is spent.

Checkpoints (``proportion`` says at which intervals) are begun at the start of a window that is as long as the
interval; jobs write them while training goes on. One that stops training costs 9.0 % and 4.5 % by
the definition of the intervals.
"""

from __future__ import annotations

import statistics
import tempfile
import tracemalloc
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.bench.harness import Report, Spread
from holdfast.bench.live import (
    BATCH,
    WORKERS,
    LiveJob,
    cpu_ms,
    preset_config,
    server_cpu_ms,
    servers_of,
    with_servers,
)
from holdfast.bench.proportion import full_checkpoint, interval_seconds
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.server.machine import Server
from holdfast.options import ErasureCode, NoProtection, Protection, Replication
from holdfast.tables.lookup import Placer
from holdfast.training.config import Config
from holdfast.training.readers import build_readers
from holdfast.training.saving import CheckpointConfig

SERVERS = 5
KS = (2, 4)
Mode = Literal["none", "ecrm", "ecrec", "replication", "checkpointer", "full30", "full60"]
CODED: tuple[Mode, ...] = ("ecrm", "ecrec")
OTHERS: tuple[Mode, ...] = ("none", "checkpointer", "full30", "full60", "replication")


@dataclass(frozen=True, slots=True)
class Case:
    """Sides that are compared with each other."""

    preset: str
    optimizer: str
    sides: tuple[tuple[Mode, int], ...]
    """Modes and k; 0 for those that have none. The first is ("none", 0)."""
    rounds: int
    servers: int = SERVERS


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the measurement."""

    max_rows: int
    seconds: float
    """Of a window without checkpoints."""
    workers: int
    cases: tuple[Case, ...]


def run(report: Report) -> None:
    """All modes, presets and optimizers; or, quickly, each of them once."""
    measure(report, QUICK if report.quick else FULL)


def _full_cases() -> tuple[Case, ...]:
    coded = (("none", 0), *((mode, k) for mode in CODED for k in KS))
    others = tuple((mode, 0) for mode in OTHERS)
    return tuple(
        Case(preset, optimizer, sides, rounds)
        for preset in ("kaggle", "terabyte")
        for optimizer in ("momentum", "adagrad")
        for sides, rounds in ((coded, 7), (others, 3))
    )


FULL = Scale(100_000, 5.0, WORKERS, _full_cases())
QUICK = Scale(
    2000,
    0.5,
    1,
    (
        Case("kaggle", "momentum", (("none", 0), ("ecrm", 2), ("ecrec", 4)), 2),
        Case("terabyte", "adagrad", tuple((mode, 0) for mode in OTHERS), 1, 2),
    ),
)


def measure(report: Report, scale: Scale) -> None:
    """Memory and load, which need no job, then all cases."""
    report.settings.update(
        batch_size=BATCH, max_rows=scale.max_rows, servers=SERVERS, workers=scale.workers,
        window_seconds=scale.seconds, rounds=[case.rounds for case in scale.cases],
    )  # fmt: skip
    held = _memory(report, scale.max_rows)
    _load(report, scale.max_rows)
    by_mode: dict[Mode, list[float]] = defaultdict(list)
    for case in scale.cases:
        for side in _compare(report, case, scale, held):
            by_mode[side.mode] += side.longer
        report.save()
    for mode, longer in by_mode.items():
        report.figure(f"overhead.{mode}.percent", Spread.of(longer), f"all {len(longer)} windows together")


def protection(mode: Mode, k: int) -> Protection:
    """What keeps rows in memory in a mode."""
    match mode:
        case "ecrm":
            return ErasureCode(k, 1, atomic=False, dense="workers")
        case "ecrec":
            return ErasureCode(k, 1, atomic=True, dense="replicate")
        case "replication":
            return Replication(2)
    return NoProtection()


# Time


@dataclass
class _Side:
    """A job and what its windows have cost."""

    mode: Mode
    k: int
    job: LiveJob
    seconds: float
    cpu: list[dict[str, float]] = field(default_factory=list)
    servers: list[list[float]] = field(default_factory=list)
    """Processor time of a step at each."""
    memory: list[int] = field(default_factory=list)
    """Of all servers."""
    versions: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    """Samples/s."""
    longer: list[float] = field(default_factory=list)
    """Percent of time, and of processor time, that a window takes more than those before and after it."""
    more_cpu: list[float] = field(default_factory=list)

    def run(self) -> None:
        """One window."""
        before, after, elapsed = self.job.window(self.seconds)
        self.cpu.append(cpu_ms(before, after))
        self.servers.append(server_cpu_ms(before, after))
        self.memory.append(sum(node.figures.memory_bytes for node in servers_of(after)))
        self.versions.append(len(after.versions) - len(before.versions))
        self.speeds.append((after.samples - before.samples) / elapsed)

    def compare(self, none: _Side) -> None:
        """Compare the last window with the last two of another side, one of them before it, one after."""
        self.longer.append((statistics.mean(none.speeds[-2:]) / self.speeds[-1] - 1) * 100)
        usual = statistics.mean(sum(cost.values()) for cost in none.cpu[-2:])
        self.more_cpu.append((sum(self.cpu[-1].values()) / usual - 1) * 100)

    def warm_up(self) -> None:
        """Windows that do not count; the first version is a full one, whatever the strategy."""
        saves = self.job.plan.saving is not None
        self.run()
        while saves and not sum(self.versions):
            self.run()
        for measured in (self.cpu, self.servers, self.memory, self.versions, self.speeds):
            measured.clear()


def _compare(report: Report, case: Case, scale: Scale, held: dict[str, float]) -> list[_Side]:
    """The figures of a case; all its sides but that without protection."""
    config = with_servers(
        preset_config(case.preset, scale.max_rows, case.optimizer), case.servers, workers=scale.workers
    )
    where = f"{case.preset}.{case.optimizer}"
    pause = 0.0
    if any(mode in ("checkpointer", "full30", "full60") for mode, _ in case.sides):
        pause = full_checkpoint(config, 1 if report.quick else 3).pause_seconds
        report.figure(
            f"overhead.{where}.pause_seconds", pause, "a full checkpoint, training stopped: 9.0 % of full30"
        )
    with ExitStack() as stack:
        sides = [_start(stack, config, mode, k, scale.seconds, pause) for mode, k in case.sides]
        for side in sides:
            side.warm_up()
        none, *others = sides
        none.run()
        for number in range(case.rounds):
            for side in others if number % 2 == 0 else reversed(others):
                side.run()
                none.run()
                side.compare(none)
    report.raw[f"overhead.{where}.{sides[-1].mode}"] = {
        _name(side.mode, side.k): {
            "samples_per_second": side.speeds, "percent": side.longer, "cpu_percent": side.more_cpu,
            "cpu_ms": side.cpu, "server_cpu_ms": side.servers, "server_memory_bytes": side.memory,
            "versions": side.versions, "window_seconds": side.seconds,
        }
        for side in sides
    }  # fmt: skip
    report.figure(f"overhead.{where}.none.samples_per_second", Spread.of(none.speeds))
    _cpu(report, f"overhead.{where}.none", none)
    for side in others:
        _figures(report, where, side, none, held)
    return others


def _start(stack: ExitStack, config: Config, mode: Mode, k: int, seconds: float, pause: float) -> _Side:
    config = replace(config, job=replace(config.job, protection=protection(mode, k)))
    if mode in ("checkpointer", "full30", "full60"):
        seconds = interval_seconds(pause, 60 if mode == "full60" else 30)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-"))
        saving = CheckpointConfig(
            path=f"{folder}/store",
            every_seconds=1.05 * seconds,  # not again before the window is over
            strategy="chunked" if mode == "checkpointer" else "full",
            keep=2,
        )
        config = replace(config, checkpoint=saving)
    return _Side(mode, k, stack.enter_context(LiveJob(config)), seconds)


def _name(mode: Mode, k: int) -> str:
    return f"{mode}.k{k}" if k else mode


def _names(mode: Mode, k: int) -> list[str]:
    """Under which names it is told: what has no k is the same for all."""
    return [f"{mode}.k{each}" for each in ([k] if k else KS)]


def _figures(report: Report, where: str, side: _Side, none: _Side, held: dict[str, float]) -> None:
    memory = statistics.median(side.memory) - statistics.median(none.memory)
    for name in _names(side.mode, side.k):
        full = f"overhead.{where}.{name}"
        report.figure(f"{full}.percent", Spread.of(side.longer), "longer for the same samples")
        report.figure(f"{full}.cpu_percent", Spread.of(side.more_cpu), "more processor time, all processes")
        _cpu(report, full, side)
        if side.job.plan.r:
            percent = memory / held[where] * 100
            report.figure(f"{full}.memory_percent", percent, "more memory of servers, of tables without")


def _cpu(report: Report, name: str, side: _Side) -> None:
    for place in ("server", "worker"):
        used = [
            sum(ms for part, ms in cost.items() if (part == "server") == (place == "server"))
            for cost in side.cpu
        ]
        report.figure(f"{name}.cpu_ms.{place}", Spread.of(used), "a step")


# Memory and load: what a placement makes of them, on any machine


def _plan(preset: str, optimizer: str, max_rows: int, mode: Mode, k: int) -> JobPlan:
    config = preset_config(preset, max_rows, optimizer)
    return plan_job(with_servers(config, SERVERS, protection=protection(mode, k)))


def _memory(report: Report, max_rows: int) -> dict[str, float]:
    """Bytes that servers without protection hold, by preset and optimizer."""
    held = {
        f"{preset}.{optimizer}": _held_bytes(_plan(preset, optimizer, max_rows, "none", 0))
        for preset in ("kaggle", "terabyte")
        for optimizer in ("momentum", "adagrad")
    }
    for mode, k in [*((mode, k) for mode in CODED for k in KS), ("replication", 0)]:
        bytes_held = _held_bytes(_plan("terabyte", "adagrad", max_rows, mode, k))
        percent = (bytes_held / held["terabyte.adagrad"] - 1) * 100
        for name in _names(mode, k):
            report.figure(f"memory.{name}.percent", percent, "more than without: rows, parities, bitmaps")
    return held


def _held_bytes(plan: JobPlan) -> float:
    """What the servers' arrays take when a job starts."""
    total = 0
    for slot in range(plan.servers):
        tracemalloc.start()
        try:
            server = Server(Peer("server", slot, 1), plan)
            total += tracemalloc.get_traced_memory()[0]
            del server
        finally:
            tracemalloc.stop()
    return total


def _load(report: Report, max_rows: int, batches: int = 200) -> None:
    """Rows that servers update, and parities: the most of any server over the least."""
    for mode, k in [("none", 0), *((mode, k) for mode in CODED for k in KS), ("replication", 0)]:
        plan = _plan("terabyte", "momentum", max_rows, mode, k)
        load = _updates(plan, batches)
        spread = float(load.max() / load.min())
        for name in _names(mode, k) if mode != "none" else ["none"]:
            report.figure(f"load_max_over_min.{name}", spread, "rows and parities updated")


def _updates(plan: JobPlan, batches: int) -> NDArray[np.int64]:
    """By server: rows at every push, and parities once for all pushes that go to them together."""
    reader, _ = build_readers(msgspec.convert(plan.training, Config))
    tables, placement = plan.groups[0], plan.placement
    placer = Placer(tables, placement)
    together = plan.lanes.pushes * plan.workers
    load = np.zeros(plan.servers, np.int64)
    changed: list[list[NDArray[np.uint32]]] = [[] for _ in range(plan.servers)]
    for number, batch in zip(range(1, batches + 1), reader, strict=False):
        placed = placer.place(batch.ids)
        load += np.diff(placed.starts)
        for server, places in enumerate(np.split(placed.places, placed.starts[1:-1])):
            changed[server].append(places)
        if placement.r and number % together == 0:
            for server, found in enumerate(changed):
                members = np.bincount(np.unique(np.concatenate(found)) % placement.k)
                for member, rows in enumerate(members):
                    load[placement.parity_server(server, member, 0)] += rows
                found.clear()
    return load
