"""``holdfast chaos``: its options and its result. ``run_chaos`` is the main path."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.chaos.checker import Checker
from holdfast.chaos.counting import SAMPLES
from holdfast.chaos.processes import orphans
from holdfast.chaos.trial import Clock, Hang, Trial
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.plan import JobPlan, LaneOptions, Timing
from holdfast.cluster.runtime.transport.links import MOST_SLOTS
from holdfast.cluster.server.process import prepare
from holdfast.errors import ConfigError, DataLoss, JobFailed
from holdfast.options import ErasureCode, NoProtection, PartialRecovery, Replication, parse_protection
from holdfast.training.config import Config, load
from holdfast.training.session import make_folder

TIMING = Timing(
    beat_seconds=0.1, silent_seconds=2.5, retry_seconds=0.2, stuck_seconds=4.0, hopeless_seconds=45.0
)
LANES = LaneOptions(chunk_rows=128, scrub_seconds=1.0)
"""Recovery takes a second or two, so that something can happen meanwhile."""
SAVE_SECONDS = 5.0
PACE_SECONDS = 0.004
MOST_HOSTS = 50
_BATCHES = 1 << 40
_SEEDS_APART = 1_000_003
_MOST_SEED = 2**62


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of ``holdfast chaos``.

    Args:
        seed: seed of the faults.
        minutes: duration of the faults.
        servers: processes that hold rows.
        workers: processes that compute.
        protect: the code, "K+R" or "replicate", as ``holdfast train --protect`` takes it.
        atomic: whether a batch counts at all servers or at none.
        dense: who has copies of the network, "replicate" (servers) or "workers".
        beyond: whether more servers may be taken at once than the code covers.
        run: the run's folder; by default a new one under ``runs/``.
        engine: "local" for processes of this machine; "ray" for a lab of several hosts, to whose machines
            things happen.
        hosts: of the lab, the first of which is spared: it has Ray's head and the job's controller.
    """

    seed: int = 0
    minutes: float = 1.0
    servers: int = 4
    workers: int = 2
    protect: str = "2+1"
    atomic: bool = True
    dense: str = "replicate"
    beyond: bool = False
    run: str | None = None
    engine: Literal["local", "ray"] = "local"
    hosts: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= _MOST_SEED:
            raise ConfigError(f"the seed is {self.seed}: expected 0 to {_MOST_SEED}")
        if not 0 < self.minutes < math.inf:
            raise ConfigError(f"minutes are {self.minutes:g}: expected more than 0")
        for name, count in (("servers", self.servers), ("workers", self.workers)):
            if not 1 <= count <= MOST_SLOTS:
                raise ConfigError(f"there are {count} {name}: expected 1 to {MOST_SLOTS}")
        if self.engine not in ("local", "ray"):
            raise ConfigError(f"engine is {self.engine!r}: expected local or ray")
        if self.engine == "ray" and not 4 <= self.hosts <= MOST_HOSTS:
            raise ConfigError(f"there are {self.hosts} hosts: expected 4 to {MOST_HOSTS}")
        if self.engine == "ray" and self.servers > self.hosts - 1:
            raise ConfigError(
                f"{self.servers} servers on {self.hosts} hosts, of which one has Ray's head: use at most "
                f"{self.hosts - 1} servers, so that each has a machine of its own"
            )
        if self.engine == "ray" and self.beyond:
            raise ConfigError("beyond is for engine=local: a lab loses one machine at a time")
        if self.dense not in ("replicate", "workers"):
            raise ConfigError(f"dense is {self.dense!r}: expected replicate or workers")
        code = self.code
        if self.servers < code.k + code.r:
            raise ConfigError(
                f"there are {self.servers} servers, but a code of {code.k} + {code.r} needs "
                f"{code.k + code.r} or more: add servers, or choose a smaller code (--protect)"
            )

    @property
    def code(self) -> ErasureCode:
        """The erasure code that protects the servers."""
        protection = parse_protection(self.protect)
        if isinstance(protection, NoProtection | PartialRecovery):
            raise ConfigError(
                f"protection is {self.protect}, but no row may be lost when servers die: expected a code, "
                "such as 2+1"
            )
        code = protection.as_code() if isinstance(protection, Replication) else protection
        return msgspec.structs.replace(code, atomic=self.atomic, dense=self.dense)

    def config(self, store: Path) -> Config:
        """The configuration of the job."""
        # Of a network that comes from a worker the optimizer's state begins anew: SGD has none, so that its
        # weights tell how many batches have counted.
        counts = ["optimizer.name=sgd", f"optimizer.lr={1 / SAMPLES}"] if self.dense == "workers" else []
        return load(
            None,
            [
                *counts,
                "model=holdfast.chaos.counting:Counting",
                "data.build=holdfast.chaos.counting:Numbered",
                f"data.arguments={{batches: {_BATCHES}, pace_seconds: {PACE_SECONDS}}}",
            ],
            checkpoint={"path": str(store), "every_seconds": SAVE_SECONDS, "keep": 10},
            job={
                "servers": self.servers,
                "workers": self.workers,
                "protection": msgspec.to_builtins(self.code),
            },
            seed=self.seed,
        )


@dataclass
class ChaosResult:
    """The result of a chaos run."""

    faults: Counter[str] = field(default_factory=Counter)
    recoveries: int = 0
    """Replaced servers whose rows were all recovered."""
    workers_replaced: int = 0
    supervisors_restarted: int = 0
    batches: int = 0
    acknowledged: int = 0
    """Batches that were acknowledged to workers."""
    updates_checked: int = 0
    """Updates of rows by those batches; every row was compared with its twin's."""
    versions_checked: int = 0
    stripes_checked: int = 0
    """Parities that servers compared with their members, again and again."""
    lost: int = 0
    wrong: int = 0
    machine_losses: int = 0
    """Machines that lost their memory."""
    hangs: int = 0
    orphans: int = 0
    data_losses: int = 0
    """That were announced as such when more servers were taken than the code covers, or no worker had the
    network that was left without other copies."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    folder: Path = Path()

    @property
    def good(self) -> bool:
        """Whether nothing is lost or wrong, nothing hung, and no process is left behind."""
        return not (self.problems or self.lost or self.wrong or self.hangs or self.orphans)


@dataclass(frozen=True, slots=True)
class ChaosProgress:
    """The progress of a chaos run."""

    phase: str
    fraction: float
    seconds_left: float
    faults: int
    recoveries: int
    batches: int
    degraded: tuple[int, ...]
    """Servers that are not fully recovered."""


def run_chaos(
    options: ChaosOptions, on_progress: Callable[[ChaosProgress], None] = lambda progress: None
) -> ChaosResult:
    """Run the job under faults and check it. No process is left behind, whatever happens."""
    started = time.monotonic()
    result = ChaosResult(folder=make_folder(options.run))
    prepare()  # compiles what servers need, once: the first time it takes long
    clock = Clock(options.minutes * 60)
    plan = plan_chaos(options, result.folder)
    checker = Checker(plan)
    for number in itertools.count():
        trial = Trial(
            plan,
            options.seed + number * _SEEDS_APART,
            result.folder / f"job-{number + 1}",
            checker,
            clock,
            lambda trial: on_progress(_progress(trial, result, clock, options)),
            beyond=options.beyond,
        )
        if not _run(trial, result) or not clock.left:
            break
        plan = plan_chaos(options, result.folder)  # from the last version on, if there is one
    result.lost, result.wrong, result.versions_checked = checker.lost, checker.wrong, checker.versions
    result.batches, result.updates_checked = len(checker.batches), checker.updates
    result.problems += checker.problems
    left = orphans()
    result.orphans = len(left)
    if left:
        result.problems.append(f"processes were left behind: {', '.join(map(str, left))}")
    result.seconds = time.monotonic() - started
    return result


def plan_chaos(options: ChaosOptions, folder: Path) -> JobPlan:
    """Of a job that goes on from the last version in the folder, if there is one."""
    plan = plan_job(options.config(folder.absolute() / "store"), timing=TIMING, lanes=LANES)
    return msgspec.structs.replace(plan, most_deaths=1 << 30)  # dying is what they are here for


def _run(trial: Trial, result: ChaosResult) -> bool:
    """Run one job and add it up; whether another one is to go on from what it has saved."""
    announced = False
    try:
        trial.run()
    except Hang as error:
        result.hangs += 1
        trial.problems.append(str(error))
    except DataLoss:
        result.data_losses += 1
        announced = trial.loss_is_right
    except JobFailed as error:
        trial.problems.append(f"the job failed: {error}")
    events = trial.events()
    result.faults += trial.injector.done
    result.recoveries += events["server_recovered"]
    result.workers_replaced += events["worker_lost"]
    result.supervisors_restarted += events["supervisor_started"]
    result.stripes_checked += trial.stripes_checked
    result.acknowledged += trial.acknowledged
    result.problems += trial.problems
    return announced and not trial.problems


def _progress(trial: Trial, result: ChaosResult, clock: Clock, options: ChaosOptions) -> ChaosProgress:
    return ChaosProgress(
        phase=trial.phase,
        fraction=1 - clock.left / (options.minutes * 60),
        seconds_left=clock.left,
        faults=result.faults.total() + trial.injector.done.total(),
        recoveries=result.recoveries + trial.recoveries,
        batches=trial.status.steps if trial.status is not None else 0,
        degraded=tuple(sorted(trial.injector.degraded())) if trial.phase != "starting" else (),
    )
