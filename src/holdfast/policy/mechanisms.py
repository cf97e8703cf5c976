"""The cost of failures for each way to recover: closed forms, which ``holdfast simulate`` checks.

Each value here holds all times that a failure's cost follows from, and gives it as terms that add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.policy.erasure import CodeModel, sets_of_a_failure
from holdfast.policy.interval import (
    exact_full_recovery_overhead,
    full_recovery_overhead,
    unprotected_overhead,
)
from holdfast.policy.pls import expected_pls
from holdfast.policy.units import show_hours, show_percent


@dataclass(frozen=True, slots=True)
class Term:
    """One term of an overhead."""

    what: str
    share: float
    """Share of the training time."""
    how: str
    """The arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Periodic checkpoints.

    Args:
        interval_hours: time between two saves.
        stall_hours: time for which a save stops training.
        write_hours: from then until it can be restored; 0 if training stands still until it can.
    """

    interval_hours: float
    stall_hours: float
    write_hours: float = 0.0

    @property
    def lost_hours(self) -> float:
        """Mean work lost by a failure: since the newest checkpoint that can be restored."""
        return self.interval_hours / 2 + self.write_hours

    def term(self) -> Term:
        """The cost of saving."""
        return Term(
            "saving",
            self.stall_hours / self.interval_hours,
            f"{show_hours(self.stall_hours)} of standing still every {show_hours(self.interval_hours)}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Full recovery: after a failure everything reverts to the newest checkpoint."""

    saves: Saves
    load_hours: float
    reschedule_hours: float

    @property
    def cost_hours(self) -> float:
        """The cost of one failure."""
        return self.saves.lost_hours + self.load_hours + self.reschedule_hours

    def terms(self, mtbf_hours: float) -> tuple[Term, ...]:
        """The terms of CPR's equation 1, and those that it neglects."""
        saves = self.saves
        times = {
            "save_hours": saves.stall_hours,
            "load_hours": self.load_hours + saves.write_hours,
            "reschedule_hours": self.reschedule_hours,
            "interval_hours": saves.interval_hours,
            "mtbf_hours": mtbf_hours,
        }
        beyond = exact_full_recovery_overhead(**times) - full_recovery_overhead(**times)
        return (
            saves.term(),
            Term(
                "work done again",
                saves.lost_hours / mtbf_hours,
                f"{show_hours(saves.lost_hours)} at each failure, every {show_hours(mtbf_hours)}",
            ),
            _restart(self.load_hours, self.reschedule_hours, mtbf_hours),
            Term(
                "failures of what is done again",
                beyond,
                "the exact value for exponential times, less the above",
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRollback:
    """Partial recovery: after a failure only the failed servers' rows revert (CPR)."""

    saves: Saves
    load_hours: float
    reschedule_hours: float
    parts: float
    """Number of servers divided by the servers per failure."""

    def terms(self, mtbf_hours: float) -> tuple[Term, ...]:
        """Equation 2 of CPR, and what it leaves out: failures while others are being recovered from."""
        saving = self.saves.term()
        restart = _restart(self.load_hours, self.reschedule_hours, mtbf_hours)
        exact = _compounded(saving.share, _exp(restart.share) - 1)
        beyond = exact - saving.share - restart.share
        return (
            saving,
            restart,
            Term("failures of what is recovering", beyond, "the same for exponential times"),
        )

    def pls(self, mtbf_hours: float) -> float:
        """The expected PLS by CPR's equation 4; unwritten data is lost, too."""
        return expected_pls(
            interval_hours=2 * self.saves.lost_hours, mtbf_hours=mtbf_hours, servers=self.parts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parities:
    """After a failure training continues while the lost data is rebuilt (ECRM, ECRec, replication).

    Args:
        pause_hours: until it goes on.
        rebuild_hours: until what was lost is back, and the next failure is borne again.
        rebuild_drop: how much slower training is meanwhile.
        behind: what happens when more is lost than the code bears.
        uncovered_per_hour: how often that is; None: as often as independent failures of servers make it.
    """

    code: CodeModel
    pause_hours: float
    rebuild_hours: float
    rebuild_drop: float
    behind: Rollback
    uncovered_per_hour: float | None = None

    def losses_per_hour(self, mtbf_hours: float, servers_per_failure: float = 1.0) -> float:
        """Rate of failures that the code does not cover."""
        if self.uncovered_per_hour is not None:
            return min(1 / mtbf_hours, self.uncovered_per_hour)
        code = self.code
        at_once = sets_of_a_failure(servers_per_failure, code.r + 1) * code.fatal_share / mtbf_hours
        each = servers_per_failure / (mtbf_hours * code.servers)
        return min(1 / mtbf_hours, at_once + code.losses_per_hour(each, self.rebuild_hours))

    def terms(self, mtbf_hours: float, servers_per_failure: float = 1.0) -> tuple[Term, ...]:
        """Pauses and slower training at failures, and the checkpoints behind it."""
        slower = self.rebuild_hours * self.rebuild_drop
        losses = self.losses_per_hour(mtbf_hours, servers_per_failure)
        rarely = 1 / losses if losses else math.inf
        return (
            Term(
                "failures",
                (self.pause_hours + slower) / mtbf_hours,
                f"{show_hours(self.pause_hours)} of standing still and {show_hours(self.rebuild_hours)} "
                f"{show_percent(self.rebuild_drop)} slower, every {show_hours(mtbf_hours)}",
            ),
            self.behind.saves.term(),
            Term(
                "more failures than the code bears",
                losses * self.behind.cost_hours,
                f"{show_hours(self.behind.cost_hours)} each, every {show_hours(rarely)}",
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAnew:
    """After a failure training restarts from scratch."""

    total_hours: float
    reschedule_hours: float

    def terms(self, mtbf_hours: float) -> tuple[Term, ...]:
        """All work, again and again, until none fails."""
        share = unprotected_overhead(
            total_hours=self.total_hours, reschedule_hours=self.reschedule_hours, mtbf_hours=mtbf_hours
        )
        how = (
            f"(exp(T / MTBF) - 1) MTBF / T - 1 with T = {show_hours(self.total_hours)} and "
            f"MTBF = {show_hours(mtbf_hours)}"
        )
        return (Term("work done again", share, how),)


Mechanism = Rollback | PartialRollback | Parities | StartAnew


def _restart(load_hours: float, reschedule_hours: float, mtbf_hours: float) -> Term:
    return Term(
        "restarting",
        (load_hours + reschedule_hours) / mtbf_hours,
        f"{show_hours(reschedule_hours)} for a machine and {show_hours(load_hours)} to load, every "
        f"{show_hours(mtbf_hours)}",
    )


def _compounded(a: float, b: float) -> float:
    return (1 + a) * (1 + b) - 1


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
