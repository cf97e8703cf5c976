"""Simulate a training run under failures, event by event.

Between two failures nothing happens by chance, so a run of months costs a few operations a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.policy.erasure import CodeModel, lie_close
from holdfast.policy.mechanisms import (
    Mechanism,
    Parities,
    PartialRollback,
    Rollback,
    Saves,
    StartAnew,
)
from holdfast.sim.traces import Failure

MOST_TIMES = 10.0
"""A run that takes so many times as long as without failures is given up."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a simulated run."""

    overhead: float
    """Share of its length that failures and protection added; infinite if it was given up."""
    failures: int
    redone_hours: float = 0.0
    pls: float = 0.0
    losses: int = 0
    """Number of failures that the protection did not cover."""


class SimulatedProgress:
    """The work done and saved so far.

    Attributes:
        now: hours since the start.
        work: hours of training that are done, as they count without any protection.
    """

    def __init__(self, total_hours: float, saves: Saves, rate: float) -> None:
        self.now = 0.0
        self.work = 0.0
        self.total = total_hours
        self._saves = saves
        self._interval = saves.interval_hours * rate
        self._next_save = self._interval
        self._stalled_until: float | None = None
        # What a failure leaves: the newest version, which may still be being written, and the one before.
        self._newest, self._newest_at, self._durable = 0.0, 0.0, 0.0

    @property
    def saved(self) -> float:
        """Work in the newest version that can be restored."""
        return self._newest if self._newest_at <= self.now else self._durable

    def run(self, until: float, rate: float) -> bool:
        """Train until then at so much work an hour; whether it has come to its end, at ``now``."""
        while self.now < until:
            if self._stalled_until is not None:
                if self._stalled_until > until:
                    self.now = until
                    return False
                self.now = max(self.now, self._stalled_until)
                self._stalled_until = None
                self._durable = self.saved
                self._newest, self._newest_at = self.work, self.now + self._saves.write_hours
                self._skip_whole_intervals(until, rate)
            target = min(self._next_save, self.total)
            arrival = self.now + (target - self.work) / rate
            if arrival > until:
                self.work += (until - self.now) * rate
                self.now = until
                return False
            self.now, self.work = arrival, target
            if target >= self.total:
                return True
            self._next_save += self._interval
            self._stalled_until = self.now + self._saves.stall_hours
        return False

    def _skip_whole_intervals(self, until: float, rate: float) -> None:
        """Pass intervals that nothing disturbs, all at once; only right after a save."""
        length = self._interval / rate + self._saves.stall_hours
        left = min((until - self.now) / length, (self.total - self.work) / self._interval)
        count = math.floor(left) - 1
        if count > 0:
            self.now += count * length
            self.work += count * self._interval
            self._next_save += count * self._interval
            self._durable = self.work - self._interval
            self._newest, self._newest_at = self.work, self.now + self._saves.write_hours

    def go_back(self) -> float:
        """Drop unsaved work. Returns how much it was."""
        lost = self.work - self.saved
        self._newest = self._durable = self.work = self.saved
        self._newest_at = self.now
        self._next_save = self.work + self._interval
        self._stalled_until = None
        return lost

    def stand_still(self, hours: float) -> None:
        """Advance the time without work."""
        self.now += hours
        if self._stalled_until is not None:
            self._stalled_until += hours


def simulate(
    mechanism: Mechanism, *, step_share: float, total_hours: float, failures: Iterable[Failure], servers: int
) -> Run:
    """One run; ``step_share`` is what the protection adds to every step."""
    rate = 1 / (1 + step_share)
    match mechanism:
        case Rollback():
            return _rollback(mechanism, rate, total_hours, failures)
        case PartialRollback():
            return _partial(mechanism, rate, total_hours, failures, servers)
        case Parities():
            return _parities(mechanism, rate, total_hours, failures)
        case StartAnew():
            never = Saves(interval_hours=math.inf, stall_hours=0.0)
            anew = Rollback(saves=never, load_hours=0.0, reschedule_hours=mechanism.reschedule_hours)
            return _rollback(anew, rate, total_hours, failures)


def _rollback(mechanism: Rollback, rate: float, total: float, failures: Iterable[Failure]) -> Run:
    progress = SimulatedProgress(total, mechanism.saves, rate)
    restart = mechanism.load_hours + mechanism.reschedule_hours
    redone, count = 0.0, 0
    for failure in failures:
        if progress.run(failure.hours, rate):
            break
        if failure.hours >= progress.now:
            redone += progress.go_back()
        count += 1
        progress.now = failure.hours + restart  # one that fails while it restarts restarts again
        if progress.now > MOST_TIMES * total:
            return Run(math.inf, count, redone)
    else:
        progress.run(math.inf, rate)
    return Run(progress.now / total - 1, count, redone)


def _partial(
    mechanism: PartialRollback, rate: float, total: float, failures: Iterable[Failure], servers: int
) -> Run:
    progress = SimulatedProgress(total, mechanism.saves, rate)
    restart = mechanism.load_hours + mechanism.reschedule_hours
    pls, count = 0.0, 0
    for failure in failures:
        if progress.run(failure.hours, rate):
            break
        count += 1
        pls += len(failure.servers) * (progress.work - progress.saved) / (total * servers)
        progress.stand_still(failure.hours + restart - progress.now)
        if progress.now > MOST_TIMES * total:
            return Run(math.inf, count, pls=pls)
    else:
        progress.run(math.inf, rate)
    return Run(progress.now / total - 1, count, pls=pls)


def _parities(mechanism: Parities, rate: float, total: float, failures: Iterable[Failure]) -> Run:
    behind = mechanism.behind
    progress = SimulatedProgress(total, behind.saves, rate)
    slower = rate * (1 - mechanism.rebuild_drop)
    down: dict[int, float] = {}  # servers that are being rebuilt, and until when
    redone, losses, count = 0.0, 0, 0
    restarting_until = 0.0

    def run_until(hours: float) -> bool:
        """Train until then, more slowly as long as something is being rebuilt; whether it has come to its
        end."""
        rebuilt = max(down.values(), default=0.0)
        return progress.run(min(rebuilt, hours), slower) or progress.run(hours, rate)

    for failure in failures:
        if run_until(failure.hours):
            break
        count += 1
        down = {server: until for server, until in down.items() if until > failure.hours}
        down.update(dict.fromkeys(failure.servers, failure.hours + mechanism.rebuild_hours))
        if failure.hours < restarting_until or lost(mechanism.code, down):
            losses += failure.hours >= restarting_until
            redone += progress.go_back() if failure.hours >= restarting_until else 0.0
            restarting_until = failure.hours + behind.load_hours + behind.reschedule_hours
            progress.now = restarting_until
            down.clear()
        else:
            progress.stand_still(max(0.0, failure.hours + mechanism.pause_hours - progress.now))
        if progress.now > MOST_TIMES * total:
            return Run(math.inf, count, redone, losses=losses)
    else:
        run_until(math.inf)
    return Run(progress.now / total - 1, count, redone, losses=losses)


def lost(code: CodeModel, down: Iterable[int]) -> bool:
    """Whether these servers take more of some stripe with them than the code bears."""
    groups: dict[int, list[int]] = {}
    for server in down:
        groups.setdefault(server % code.groups, []).append(server // code.groups)
    return any(
        len(members) > code.r
        and lie_close(sorted(members), code.group_size(group), code.k + code.r, code.r + 1)
        for group, members in groups.items()
    )
