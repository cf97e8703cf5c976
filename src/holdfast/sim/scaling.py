"""Protections on clusters of any size: closed forms compared with simulated runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.errors import ConfigError
from holdfast.policy.failure_log import FailureLog
from holdfast.policy.increments import RowSize
from holdfast.policy.planner import plan
from holdfast.policy.protections import KINDS, Estimate, Wishes
from holdfast.policy.situation import Situation
from holdfast.sim.recovery import Run, simulate
from holdfast.sim.traces import FailureModel, HourlyChance, LinearMtbf, Recorded, Renewals

_WORTH_SIMULATING = [kind for kind in KINDS if kind != "none"]
_MOST_NODES = 1_000_000


@dataclass(frozen=True, slots=True)
class Point:
    """One protection on one cluster."""

    failures: str
    """How servers fail: the model's title."""
    servers: int
    mtbf_hours: float
    kind: str
    name: str
    expected: float
    """Overhead by the closed forms."""
    simulated: float
    """Mean overhead of the runs; infinite if one was given up."""
    error: float
    """Standard error of that mean."""
    expected_pls: float
    simulated_pls: float
    losses: float
    """Of a run, on average: more was lost than the protection bears."""
    failures_of_a_run: float

    @property
    def off(self) -> float:
        """How far the closed form is off, of the runs' time: (1 + expected) / (1 + simulated) - 1."""
        return (1 + self.expected) / (1 + self.simulated) - 1


def scaled(situation: Situation, servers: int, model: FailureModel, *, one_each: bool = False) -> Situation:
    """The same for another number of servers, each with as much to hold and as fast as before.

    ``one_each``: take every failure for one of a single server, as CPR's equations do.
    """
    factor = servers / situation.servers
    return replace(
        situation,
        servers=servers,
        workers=max(1, round(situation.workers * factor)),
        table_bytes=situation.table_bytes * factor,
        write_rate=situation.write_rate * factor,
        read_rate=situation.read_rate * factor,
        mtbf_hours=model.mtbf_hours(servers),
        servers_per_failure=1.0 if one_each else max(1.0, model.servers_per_failure(servers)),
    )


def scale(
    situation: Situation,
    models: Sequence[FailureModel],
    nodes: Sequence[int],
    *,
    wishes: Wishes | None = None,
    among: Collection[str] = (),
    runs: int = 10,
    seed: int = 0,
    one_each: bool = False,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> list[Point]:
    """Every kind of protection but none at all, the best of each, on every cluster.

    The same run number meets the same failures under each protection.
    """
    if runs < 1:
        raise ConfigError(f"{runs} runs: expected at least one")
    points: list[Point] = []
    pairs = [(model, servers) for model in models for servers in nodes]
    for done, (model, servers) in enumerate(pairs, 1):
        cluster = scaled(situation, servers, model, one_each=one_each)
        for estimate in _best_of_each_kind(plan(cluster, wishes, among or _WORTH_SIMULATING).ranked):
            made = [_run(estimate, cluster, model, seed + number) for number in range(runs)]
            points.append(_point(estimate, cluster, model, made))
        on_done(done, len(pairs))
    return points


def parse_nodes(text: str) -> list[int]:
    """Numbers of servers: ``10,100,1000``; in order, each once."""
    try:
        nodes = sorted({int(part.replace("_", "")) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--nodes is {text!r}: expected numbers of servers such as 10,100,1000") from None
    if nodes[0] < 1:
        raise ConfigError(f"--nodes begins with {nodes[0]}: expected at least one server")
    if nodes[-1] > _MOST_NODES:
        raise ConfigError(f"--nodes ends with {nodes[-1]}: expected at most {_MOST_NODES:,} servers")
    return nodes


def parse_models(
    text: str, situation: Situation, nodes: Sequence[int], log: FailureLog | None
) -> list[FailureModel]:
    """Ways to fail by name, all with the situation's MTBF where it has as many servers.

    ``linear`` has it on the smallest cluster, and 14/30 of it on the largest: CPR's clusters had 30 to 14
    hours (section 3.1).
    """
    return [_model(part.strip(), situation, nodes, log) for part in text.split(",")]


def _model(name: str, situation: Situation, nodes: Sequence[int], log: FailureLog | None) -> FailureModel:
    kind, _, number = name.partition("=")
    mtbf = situation.mtbf_hours
    if name == "linear":
        return LinearMtbf(nodes[0], nodes[-1], mtbf, mtbf * 14 / 30)
    if name == "hourly":
        return HourlyChance.from_mtbf(situation.servers, mtbf)
    if name == "exponential":
        return Renewals("exponential", mtbf * situation.servers)
    if name == "log":
        if log is None or not log.trace:
            raise ConfigError("--failures log: give --failure-log with a file of times and servers")
        return Recorded(log.trace)
    if kind in ("gamma", "weibull"):
        try:
            return Renewals(
                "gamma" if kind == "gamma" else "weibull", mtbf * situation.servers, float(number)
            )
        except ValueError:
            pass
    raise ConfigError(
        f"--failures {name}: expected linear, hourly, exponential, log, gamma=SHAPE or weibull=SHAPE"
    )


FIGURE_13 = Situation(
    table_bytes=1e12, row=RowSize(64, 4), servers=10, workers=11, hours=10_000, mtbf_hours=30,
    reschedule_hours=0.0, write_rate=1e12 / (0.0565 * 3600), read_rate=1e18, stop_to_write=True,
    tolerated_auc_loss=1.0,
)  # fmt: skip
"""CPR's production cluster (section 6.2) scaled as in section 6.6: a save stops training for 0.0565 hours,
which is what 2.12 % of the time between one every 2 and one every 8 hours come to; loading and rescheduling
took none. The smallest cluster has the longest MTBF of section 3.1."""


def _best_of_each_kind(ranked: Sequence[Estimate]) -> list[Estimate]:
    best: dict[str, Estimate] = {}
    for estimate in ranked:
        best.setdefault(estimate.kind, estimate)
    return list(best.values())


def _run(estimate: Estimate, cluster: Situation, model: FailureModel, seed: int) -> Run:
    rng = np.random.default_rng([seed, cluster.servers])
    return simulate(
        estimate.mechanism,
        step_share=estimate.step_share,
        total_hours=cluster.hours,
        failures=model.failures(cluster.servers, rng),
        servers=cluster.servers,
    )


def _point(estimate: Estimate, cluster: Situation, model: FailureModel, runs: Sequence[Run]) -> Point:
    overheads = [run.overhead for run in runs]
    mean = sum(overheads) / len(runs)
    spread = float(np.std(overheads, ddof=1)) if len(runs) > 1 and math.isfinite(mean) else math.nan
    return Point(
        failures=model.title,
        servers=cluster.servers,
        mtbf_hours=cluster.mtbf_hours,
        kind=estimate.kind,
        name=estimate.name,
        expected=estimate.overhead,
        simulated=mean,
        error=spread / math.sqrt(len(runs)),
        expected_pls=estimate.pls,
        simulated_pls=sum(run.pls for run in runs) / len(runs),
        losses=sum(run.losses for run in runs) / len(runs),
        failures_of_a_run=sum(run.failures for run in runs) / len(runs),
    )
