"""When a save is due: after so many steps, or so many seconds."""

from __future__ import annotations

import math
import sys

from holdfast.options import Policy


class SaveSchedule:
    """Counts from the last save that was begun.

    Args:
        policy: says how often.
        now: the time, of any clock; later calls use the same one.
        step: the last one before the count begins; by default the one before the first that is asked about.
    """

    def __init__(self, policy: Policy, now: float, step: int = sys.maxsize) -> None:
        self.step, self._time = step, now
        self._every_steps, self._every_seconds = policy.every_steps, policy.every_seconds
        # A save of a fraction of the rows comes after a fraction of the time.
        self._part = policy.fraction if policy.prioritize is not None else 1.0

    def is_due(self, step: int, now: float) -> bool:
        """Whether to save, now that a step is done."""
        if step < self.step:  # the caller counts anew
            self.step = step - 1
        by_steps = self._every_steps is not None and step - self.step >= self._part * self._every_steps
        by_time = self._every_seconds is not None and now - self._time >= self._part * self._every_seconds
        return by_steps or by_time

    def steps_left(self, step: int, *, saved: bool) -> int | None:
        """After how many steps the next save is due by steps; None: never. ``saved``: one begins now."""
        if self._every_steps is None:
            return None
        since = 0 if saved else step - self.step
        return 1 if since < 0 else max(1, math.ceil(self._part * self._every_steps) - since)

    def seconds_left(self, now: float, *, saved: bool) -> float | None:
        """In how many seconds the next save is due by time; None: never."""
        if self._every_seconds is None:
            return None
        return self._part * self._every_seconds - (0.0 if saved else now - self._time)

    def note(self, step: int, now: float) -> None:
        """A save of this step was begun, or left out: count from here."""
        self.step, self._time = step, now

    def begin_at(self, step: int) -> None:
        """Count steps from this one; the time goes on."""
        self.step = step
