"""The simulated twin of ``holdfast chaos``: many jobs of protected servers, on virtual time.

The machines are those that real processes run; shapes of jobs, weather and faults come from seeds, so any
schedule that shows something wrong can be run again to the last message.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import dataclass, field

from holdfast.errors import ConfigError
from holdfast.sim.schedule import simulate
from holdfast.stopping import WorkerPool

_PART = 20
"""Schedules that a process runs before it says how they went."""


@dataclass
class SimulatedResult:
    """The result of simulated schedules."""

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    cuts: int = 0
    """Consistent cuts that were compared with what they must be."""
    virtual_seconds: float = 0.0
    seconds: float = 0.0
    violations: dict[int, list[str]] = field(default_factory=dict)
    """Violations by seed."""

    @property
    def per_minute(self) -> float:
        """Schedules; 0 if nobody has taken the time."""
        return 60 * self.schedules / self.seconds if self.seconds else 0.0

    def add(self, other: SimulatedResult) -> None:
        """Take the result of other schedules in."""
        self.schedules += other.schedules
        self.faults += other.faults
        self.cuts += other.cuts
        self.virtual_seconds += other.virtual_seconds
        self.violations |= other.violations


def run_part(first: int, count: int) -> SimulatedResult:
    """Run the schedules of so many seeds."""
    result = SimulatedResult()
    for seed in range(first, first + count):
        outcome = simulate(seed, protected=True)
        result.schedules += 1
        result.faults += outcome.faults
        result.cuts += outcome.cuts
        result.virtual_seconds += outcome.virtual_seconds
        if outcome.violations:
            result.violations[seed] = outcome.violations
    return result


def run_simulated(
    first: int, count: int, on_progress: Callable[[SimulatedResult], None] = lambda result: None
) -> SimulatedResult:
    """Run the schedules of so many seeds, the first one being ``first``, on all processors."""
    if first < 0:
        raise ConfigError(f"the seed is {first}: expected 0 or more")
    if count < 1:
        raise ConfigError(f"there are {count} simulated schedules: expected 1 or more")
    started = time.monotonic()
    result = SimulatedResult()
    parts = [(at, min(_PART, first + count - at)) for at in range(first, first + count, _PART)]
    processes = min(len(parts), os.cpu_count() or 1)
    with WorkerPool(processes) as pool:
        for done in as_completed([pool.submit(run_part, *part) for part in parts]):
            result.add(done.result())
            on_progress(result)
    result.seconds = time.monotonic() - started
    return result
