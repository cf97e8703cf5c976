"""When an emulated run saves and goes back, and what that costs: hours of a cluster, without training.

The names are CPR's (sections 2 and 5.1): *full* recovery puts everything back to the last save, which comes
after each sqrt(2 O_save T_fail); naive *partial* recovery puts the failed servers' rows back and saves as
often; *cpr* saves only as often as the target PLS asks for, and *cpr-mfu*, *cpr-ssu* and *cpr-scar* save a
fraction of the rows after the same fraction of that time, those first that matter most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from holdfast.errors import ConfigError
from holdfast.options import PRIORITIZED_FRACTION, PriorityName
from holdfast.policy.interval import optimal_interval
from holdfast.policy.pls import add_failure, decide_recovery
from holdfast.sim.traces import Failure

WayName = Literal["full", "partial", "cpr", "cpr-scar", "cpr-mfu", "cpr-ssu"]
WAYS: tuple[WayName, ...] = ("full", "partial", "cpr", "cpr-scar", "cpr-mfu", "cpr-ssu")
_MOST = 100_000
"""Servers and failures of an emulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCluster:
    """The cluster whose hours are counted. The defaults are those of CPR's section 5.1 with Criteo Kaggle.

    The paper does not state the times. They follow from its overheads: full recovery loses 8.5 - 4.4 % to
    lost work, which is T_save / (2 T_fail), and as much to saving; the rest goes to loading and rescheduling.

    Args:
        hours: of the whole training.
        failures: that are expected in it; ``hours`` over them is T_fail.
        servers: that hold the tables.
        servers_per_failure: that go down together.
        save_hours: O_save, for all rows; a part of them takes a part of it.
        load_hours: O_load.
        reschedule_hours: O_res.
        target_pls: of cpr.
        fraction: of the rows that prioritised saving saves at a time.
        share: of all bytes, that the tables have whose rows are prioritised.
    """

    hours: float = 56.0
    failures: float = 2.0
    servers: int = 8
    servers_per_failure: int = 1
    save_hours: float = 0.0942
    load_hours: float = 0.04
    reschedule_hours: float = 0.044
    target_pls: float = 0.1
    fraction: float = PRIORITIZED_FRACTION
    share: float = 0.996

    def __post_init__(self) -> None:
        may_be_zero = ("load_hours", "reschedule_hours")
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in may_be_zero):
                expected = "0 or more" if field.name in may_be_zero else "above 0"
                raise ConfigError(f"{field.name} is {value:g}: expected {expected}")
        for name in ("target_pls", "fraction", "share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} is {getattr(self, name):g}: it is a portion, expected at most 1")
        for name in ("servers", "failures"):
            if getattr(self, name) > _MOST:
                raise ConfigError(f"{name} is {getattr(self, name):g}: expected at most {_MOST:,}")
        if self.servers_per_failure > self.servers:
            raise ConfigError(
                f"a failure takes {self.servers_per_failure} servers down but there are {self.servers}"
            )

    @property
    def mtbf_hours(self) -> float:
        """T_fail."""
        return self.hours / self.failures

    @property
    def parts(self) -> float:
        """N of the equations: of how many parts a failure takes one."""
        return self.servers / self.servers_per_failure


@dataclass(frozen=True, slots=True)
class Way:
    """How a run saves and recovers.

    ``interval_hours`` is the time in which as many bytes are saved as all tables have. ``reason`` says how a
    way of cpr was decided on.
    """

    name: WayName
    partial: bool
    interval_hours: float
    prioritize: PriorityName | None = None
    reason: str = ""


class Save(NamedTuple):
    """What is to be saved is saved; it has been this long in training."""

    hours: float


class RecoveryCosts(NamedTuple):
    """These servers are lost. ``back_to`` is when everything was last saved, or would have been."""

    hours: float
    servers: Sequence[int]
    back_to: float


@dataclass(frozen=True, slots=True)
class TimelineCosts:
    """Hours that a run takes more than training alone, and its portion of lost samples."""

    saving: float = 0.0
    loading: float = 0.0
    rescheduling: float = 0.0
    lost: float = 0.0
    pls: float = 0.0

    @property
    def hours(self) -> float:
        """All together."""
        return self.saving + self.loading + self.rescheduling + self.lost


def parse_ways(text: str) -> list[WayName]:
    """Names that commas separate, each once."""
    known = {str(name): name for name in WAYS}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no way {name!r}: there are {', '.join(WAYS)}")
    return [known[name] for name in dict.fromkeys(names)]


def way_of(name: WayName, cluster: EmulatedCluster) -> Way:
    """How runs of this name save and recover on the cluster."""
    best = optimal_interval(save_hours=cluster.save_hours, mtbf_hours=cluster.mtbf_hours)
    if name in ("full", "partial"):
        return Way(name, name == "partial", best)
    decision = decide_recovery(
        target_pls=cluster.target_pls,
        servers=cluster.parts,
        mtbf_hours=cluster.mtbf_hours,
        save_hours=cluster.save_hours,
        load_hours=cluster.load_hours,
        reschedule_hours=cluster.reschedule_hours,
    )
    prioritize: dict[str, PriorityName] = {"cpr-scar": "scar", "cpr-mfu": "mfu", "cpr-ssu": "ssu"}
    return Way(
        name,
        decision.partial,
        decision.interval_hours,
        prioritize.get(name) if decision.partial else None,
        decision.reason,
    )


def timeline(
    way: Way, failures: Sequence[Failure], cluster: EmulatedCluster
) -> Iterator[Save | RecoveryCosts]:
    """All that happens to a run, in order. ``hours`` is what has been trained for the first time: with full
    recovery, training goes on at ``back_to``, and what follows is past the hour of the failure again."""
    step = way.interval_hours * (cluster.fraction if way.prioritize else 1.0)
    saves = 1
    for failure in [*sorted(failures), None]:
        end = cluster.hours if failure is None else failure.hours
        if end > cluster.hours:
            break
        # What is saved at the very moment of a failure is saved; at the end nobody needs it.
        while saves * step < end or (failure is not None and saves * step == end):
            yield Save(saves * step)
            saves += 1
        if failure is not None:
            whole = math.floor(failure.hours / way.interval_hours) * way.interval_hours
            yield RecoveryCosts(failure.hours, failure.servers, whole)


def costs(way: Way, failures: Sequence[Failure], cluster: EmulatedCluster) -> TimelineCosts:
    """What a timeline comes to. The PLS of prioritised saving is that of its bytes saved in any other order:
    what it loses is less."""
    one_save = cluster.save_hours
    if way.prioritize:
        one_save *= cluster.fraction * cluster.share + (1 - cluster.share)
    total = TimelineCosts()
    for event in timeline(way, failures, cluster):
        if isinstance(event, Save):
            total = replace(total, saving=total.saving + one_save)
            continue
        pls, lost = total.pls, total.lost
        if way.partial:
            for _ in event.servers:
                pls = add_failure(
                    pls, samples=event.hours, samples_at_last_save=event.back_to,
                    total_samples=cluster.hours, servers=cluster.servers,
                )  # fmt: skip
        else:
            lost += event.hours - event.back_to
        total = replace(
            total,
            loading=total.loading + cluster.load_hours,
            rescheduling=total.rescheduling + cluster.reschedule_hours,
            pls=pls,
            lost=lost,
        )
    return total
