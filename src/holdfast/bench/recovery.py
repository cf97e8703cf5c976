"""``bench recovery``: a server is killed in the middle of training (kill -9).

Three times are measured from the kill on. Training *resumes* when every worker has begun a batch after the
replacement took over: it does that only when all servers, the new one included, have applied its last. Then
the replacement brings back the rows it lacks, those that somebody waits for at once and all others behind
the training's back; the recovery is *full* when rows and parities are all there. Speeds before and meanwhile
are of batches, when each of which began workers write down.

Checkpoints are compared as the papers do (ECRM §4.2, ECRec §5.3): on average, half an interval of work is
done again after the last one was read.

All of it twice. The papers' servers are on other machines than their workers: so here servers have one
processor and workers the others, and recovery is as fast as it can be. Then both *share* all processors, as
jobs do that are not told otherwise: what recovery takes, training lacks, so it is throttled.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import nn

from holdfast.bench.harness import Report, Spread
from holdfast.bench.live import BATCH, WORKERS, LiveJob, happened, preset_config, servers_of, with_servers
from holdfast.bench.proportion import full_checkpoint, interval_seconds
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.protocol.plan import CHUNK_BYTES, JobPlan
from holdfast.cluster.report.result import JobResult
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.data.reader import Reader
from holdfast.errors import HoldfastError
from holdfast.events import EventLog
from holdfast.models.factory import build
from holdfast.models.presets import PRESETS
from holdfast.options import ErasureCode, Kill, NoProtection
from holdfast.training.config import Config, OwnModelConfig

CHUNKS = {"512": 512, "usual": None, "all": 1 << 31}


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the measurement."""

    max_rows: tuple[int, ...]
    """Sizes of tables; the last is the one that figures are of."""
    ks: tuple[int, ...]
    servers: int | None
    """None: as few as a code needs."""
    kills: int
    """Of each job."""
    seconds: float
    """Training before a kill."""
    workers: int
    exact: tuple[tuple[int, int], ...]
    """Pairs of jobs that are compared to the bit: k, and how many servers die in one of them."""
    chunks: tuple[str, ...]
    chunk_k: int
    processors: tuple[int, ...] = ()
    """That servers have for themselves."""

    @property
    def prefix(self) -> str:
        """Of the figures' names."""
        return "recovery" if self.processors else "recovery.shared"


FULL = Scale(
    max_rows=(100_000, 300_000, 1_000_000),
    ks=(2, 4),
    servers=5,
    kills=5,
    seconds=5.0,
    workers=WORKERS,
    exact=((2, 1), (4, 1), (2, 3), (4, 3)),
    chunks=tuple(CHUNKS),
    chunk_k=4,
)
QUICK = Scale(
    max_rows=(2000,),
    ks=(2, 4),
    servers=None,
    kills=1,
    seconds=0.5,
    workers=1,
    exact=((2, 1),),
    chunks=("512", "usual"),
    chunk_k=2,
)


def run(report: Report) -> None:
    """Everything; or, quickly, each part of it once, on tables that are too small to say much."""
    measure(report, QUICK if report.quick else FULL)


def measure(report: Report, scale: Scale) -> None:
    """Equal to the bit; then times and speeds while training goes on; then how fast it could be."""
    report.settings.update(
        batch_size=BATCH, servers=scale.servers, workers=scale.workers, max_rows=scale.max_rows,
        kills=scale.kills, preset="kaggle", optimizer="adagrad",
    )  # fmt: skip
    _exact(report, scale)
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) > 1:
        _compare(report, dataclasses.replace(scale, processors=(processors[0],)))
    else:
        report.console.print("  (one processor: servers and workers cannot but share it)", highlight=False)
    _compare(report, dataclasses.replace(scale, max_rows=scale.max_rows[-1:]))
    _throttle(report, scale)
    _chunks(report, scale)


def _compare(report: Report, scale: Scale) -> None:
    full_seconds = _online(report, scale)
    report.save()
    _checkpoints(report, scale, full_seconds)
    report.save()


def _config(scale: Scale, max_rows: int, k: int, **code: Any) -> Config:
    config = preset_config("kaggle", max_rows)
    return with_servers(
        config, scale.servers or k + 1, workers=scale.workers, protection=ErasureCode(k, 1, **code),
        server_processors=scale.processors,
    )  # fmt: skip


# To the bit


def _exact(report: Report, scale: Scale) -> None:
    """Jobs of one worker that waits for its rows are equal to the bit; so are those of which servers die."""
    equal = []
    for k, deaths in scale.exact:
        config = _config(scale, 2000, k)
        job = replace(config.job, workers=1, staleness=0)
        config = replace(config, job=job, max_steps=20 * (deaths + 1), seed=k)
        # Further round the ring each time, so that rows are also recovered from recovered ones.
        kills = [Kill("server", 2 * death % job.servers, 10 + 20 * death) for death in range(deaths)]
        whole, failed = _run(config, []), _run(config, kills)
        if failed.kills_missed or not whole.records or not failed.records:
            raise HoldfastError("a job ended before all its kills, or did not tell what its records are")
        equal.append(whole.records == failed.records)
    report.figure("recovery.bit_exact", float(all(equal)), f"{len(equal)} jobs and twins that nobody killed")


def _run(config: Config, kills: list[Kill]) -> JobResult:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, EventLog(Path(name)) as events:
        folder = Path(name)
        return Runner(plan_job(config), LocalLauncher(folder), folder, events, kills=kills).run()


# While training goes on


def traced_network(reader: Reader, preset: str, folder: str) -> nn.Module:
    """A preset's network that writes down when it begins a batch, in a file of this process."""
    network = build("dlrm", PRESETS[preset], reader.dense_features, len(reader.table_rows))
    path = Path(folder) / str(os.getpid())

    def note(module: nn.Module, _: Any) -> None:
        if module.training:
            with path.open("ab") as file:
                file.write(np.float64(time.time()).tobytes())

    network.register_forward_pre_hook(note)
    return network


@dataclass(frozen=True, slots=True)
class Death:
    """What came after a server was killed."""

    resume_seconds: float
    rows_seconds: float
    """Until all rows were back."""
    full_seconds: float
    """Until all parities were, too."""
    before: float
    """Batches a second before, …"""
    meanwhile: float
    """… and between the resumption and the full recovery."""

    @property
    def drop_percent(self) -> float:
        """How much slower training was."""
        return (1 - self.meanwhile / self.before) * 100


@dataclass(frozen=True, slots=True)
class Idle:
    """What came after a server was killed while workers waited, from when its replacement took over."""

    full_seconds: float
    megabytes_per_second: float
    """Of rows."""
    megabytes_per_cpu_second: float
    """Of rows, by the processor time of the replacement alone, its start included."""


class Victims:
    """A job of which servers are killed, one after the other.

    Use as a context manager.
    """

    def __init__(self, config: Config) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-bench-")
        model = OwnModelConfig(
            build="holdfast.bench.recovery:traced_network",
            arguments={"preset": "criteo-kaggle", "folder": self._folder.name},
        )
        self.job = LiveJob(replace(config, model=model), spares=True)
        self._next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.job.close()
        self._folder.cleanup()

    def kill(self) -> tuple[int, float, Status]:
        """Kill the next server and let it come back: which one, when, and how things were in the end."""
        slot, self._next = self._next, (self._next + 1) % self.job.plan.servers
        at = self.job.kill_server(slot)
        return slot, at, self.job.wait(lambda status: _is_whole(status, slot, at), "the recovery of a server")

    def idle(self) -> Idle:
        """One death while no worker does anything."""
        self.job.hold()
        self.job.wait_for_spares()
        slot, killed, whole = self.kill()
        full = time.time()
        (started,), (recovered,) = (
            happened(whole, f"server_{what}", killed) for what in ("started", "recovered")
        )
        megabytes = _server_bytes(self.job.plan, slot) / 1e6
        used = self.job.server_cpu_seconds(slot)
        return Idle(full - started.at, megabytes / (recovered.at - started.at), megabytes / used)

    def death(self, seconds: float) -> Death:
        """One death, after so long, while workers train."""
        job, some = self.job, 4 * self.job.plan.workers
        before = job.hold()
        job.wait_for_spares()
        since = time.time()
        job.go_on()
        time.sleep(seconds)
        job.wait(lambda status: status.steps > before.steps + some, "some steps")
        _, killed, whole = self.kill()
        full = time.time()
        job.wait(lambda status: status.steps > whole.steps + some, "further steps")
        job.hold()
        (started,), (recovered,) = (
            happened(whole, f"server_{what}", killed) for what in ("started", "recovered")
        )
        begun = [np.fromfile(path) for path in Path(self._folder.name).iterdir()]
        resumed = max(float(times[times > started.at][0]) for times in begun)

        def speed(first: float, last: float) -> float:
            return sum(batches_between(times, first, last) for times in begun) / (last - first)

        first = min(float(times[times > since][0]) for times in begun)
        before_speed, meanwhile = speed(first, killed), speed(resumed, max(full, resumed + 0.1))
        return Death(resumed - killed, recovered.at - killed, full - killed, before_speed, meanwhile)


def batches_between(begun: NDArray[np.float64], first: float, last: float) -> float:
    """How many batches that began at these times a worker did; of one under way, the part that is done."""
    done = np.interp([first, last], begun, np.arange(len(begun)))
    return float(done[1] - done[0])


def _is_whole(status: Status, slot: int, since: float) -> bool:
    left = servers_of(status)[slot].redundancy
    return bool(happened(status, "server_recovered", since)) and not left.rows and not left.parities


def _online(report: Report, scale: Scale) -> dict[int, float]:
    """Sizes and k; the seconds of a full recovery by k, of the largest tables."""
    slowest: dict[int, float] = {}
    prefix = scale.prefix
    resume: list[float] = []
    drop: list[float] = []
    for k in scale.ks:
        for max_rows in scale.max_rows:
            with Victims(_config(scale, max_rows, k)) as victims:
                deaths = [victims.death(scale.seconds) for _ in range(scale.kills)]
                held = _server_bytes(victims.job.plan, 0)
            full = Spread.of([death.full_seconds for death in deaths])
            report.raw[f"{prefix}.k{k}.rows{max_rows}"] = deaths
            note = f"rows and parities of a server with {held / 1e6:.0f} MB of rows"
            report.figure(f"{prefix}.k{k}.rows{max_rows}.full_seconds", full, note)
            name = f"{prefix}.k{k}.rows{max_rows}.seconds_per_gigabyte"
            report.figure(name, full.median / held * 1e9, "of rows; the same for all sizes, if it is linear")
            resume += [death.resume_seconds for death in deaths]
        slowest[k] = full.median
        report.figure(f"{prefix}.k{k}.full_seconds", full, "of the largest tables")
        rows = Spread.of([death.rows_seconds for death in deaths])
        report.figure(f"{prefix}.k{k}.rows_seconds", rows, "until all rows are back")
        drop += [death.drop_percent for death in deaths]
    report.figure(f"{prefix}.resume_seconds", Spread.of(resume), "from the kill until all workers go on")
    report.figure(f"{prefix}.resume_seconds.worst", max(resume), f"of {len(resume)}")
    report.figure(f"{prefix}.drop_percent", Spread.of(drop), "of the speed, from then until all is back")
    return slowest


def _server_bytes(plan: JobPlan, slot: int) -> int:
    """Of the records of a server that parities protect."""
    return sum(
        int((placement.owner(np.arange(group.rows)) == slot).sum()) * group.words * 4
        for group, placement in zip(plan.groups, plan.placements, strict=True)
        if placement.r
    )


# Checkpoints in proportion


def _checkpoints(report: Report, scale: Scale, full_seconds: dict[int, float]) -> None:
    config = _config(scale, scale.max_rows[-1], 2)
    unprotected = replace(config, job=replace(config.job, protection=NoProtection()))
    found = full_checkpoint(unprotected, 1 if report.quick else 3)
    prefix = scale.prefix
    report.figure(f"{prefix}.checkpoint.pause_seconds", found.pause_seconds, "to write all, training stopped")
    report.figure(f"{prefix}.checkpoint.restore_seconds", found.restore_seconds, "to read it on all cores")
    for minutes in (30, 60):
        average = interval_seconds(found.pause_seconds, minutes) / 2 + found.restore_seconds
        report.figure(f"{prefix}.checkpoint{minutes}.average_seconds", average, "half an interval again")
        for k in scale.ks:
            name = f"{prefix}.k{k}.checkpoint{minutes}_average_over_ec"
            report.figure(name, average / full_seconds[k])
    best = report.figures[f"{prefix}.k2.checkpoint60_average_over_ec"]
    report.figure(f"{prefix}.checkpoint_average_over_ec", best, "as the papers' 9.8: k = 2, 60 minutes")


# What the throttle costs and gains


def _throttle(report: Report, scale: Scale) -> None:
    """With the usual throttle and without any, in turn, on shared processors: while workers are idle, and
    while they are busy."""
    config = _config(scale, scale.max_rows[-1], scale.chunk_k)
    free = _config(scale, scale.max_rows[-1], scale.chunk_k, recovery_share=1.0)
    idle: dict[str, list[Idle]] = {"usual": [], "unthrottled": []}
    busy: dict[str, list[Death]] = {"usual": [], "unthrottled": []}
    with Victims(config) as usual, Victims(free) as unthrottled:
        sides = {"usual": usual, "unthrottled": unthrottled}
        for victims in sides.values():
            victims.job.hold()
            victims.job.wait_for_spares()
            victims.job.freeze()
        for _ in range(scale.kills):
            for name, victims in sides.items():
                victims.job.thaw()
                idle[name].append(victims.idle())
                busy[name].append(victims.death(scale.seconds))
                victims.job.freeze()
    report.raw["recovery.shared.throttle"] = {"idle": idle, "busy": busy}
    prefix, k = "recovery.shared", scale.chunk_k
    full = {name: Spread.of([one.full_seconds for one in found]) for name, found in idle.items()}
    report.figure(f"{prefix}.idle.full_seconds", full["usual"], f"{k} + 1, while workers wait")
    report.figure(f"{prefix}.idle.unthrottled.full_seconds", full["unthrottled"])
    pairs = zip(idle["usual"], idle["unthrottled"], strict=True)
    ratios = [one.full_seconds / other.full_seconds for one, other in pairs]
    report.figure(f"{prefix}.idle.full_over_unthrottled", Spread.of(ratios))
    rows = [one.megabytes_per_second for one in idle["unthrottled"]]
    report.figure(f"{prefix}.idle.unthrottled.megabytes_per_second", Spread.of(rows), "of rows")
    for name, deaths in busy.items():
        beside = f"{prefix}.busy" if name == "usual" else f"{prefix}.busy.unthrottled"
        report.figure(f"{beside}.full_seconds", Spread.of([death.full_seconds for death in deaths]))
        report.figure(f"{beside}.drop_percent", Spread.of([death.drop_percent for death in deaths]))
    pairs_busy = zip(busy["usual"], busy["unthrottled"], strict=True)
    ratios = [one.full_seconds / other.full_seconds for one, other in pairs_busy]
    report.figure(f"{prefix}.busy.full_over_unthrottled", Spread.of(ratios))
    report.save()


# How fast it could be


def _chunks(report: Report, scale: Scale) -> None:
    """The papers compare one lock for all rows with ten; here, rows that are recovered at a time, on shared
    processors."""
    for name in scale.chunks:
        code = {"chunk_rows": CHUNKS[name], "recovery_share": 1.0}
        with Victims(_config(scale, scale.max_rows[-1], scale.chunk_k, **code)) as victims:
            deaths = [victims.death(scale.seconds) for _ in range(scale.kills)]
            decoded = []
            if name == "usual":
                decoded = [victims.idle() for _ in range(scale.kills)]
        report.raw[f"recovery.chunk_{name}"] = {"deaths": deaths, "decoded": decoded}
        full = Spread.of([death.full_seconds for death in deaths])
        what = f"{CHUNK_BYTES >> 20} MB of" if name == "usual" else name
        report.figure(f"recovery.chunk_{name}.full_seconds", full, f"{what} rows at a time, unthrottled")
        drop = Spread.of([death.drop_percent for death in deaths])
        report.figure(f"recovery.chunk_{name}.drop_percent", drop)
        if name == "usual":
            average = report.figures["recovery.shared.checkpoint60.average_seconds"]
            figure = f"recovery.shared.k{scale.chunk_k}.checkpoint60_average_over_ec.unthrottled"
            report.figure(figure, average / full.median, "with no regard for the training meanwhile")
        if decoded:
            speeds = [one.megabytes_per_second for one in decoded]
            note = "of records, unthrottled, while workers wait; all servers share the processors"
            report.figure("recovery.decode_megabytes_per_second", Spread.of(speeds), note)
            alone = [one.megabytes_per_cpu_second for one in decoded]
            note = "by the replacement's processor time: if it had a processor of its own"
            report.figure("recovery.decode_megabytes_per_cpu_second", Spread.of(alone), note)
