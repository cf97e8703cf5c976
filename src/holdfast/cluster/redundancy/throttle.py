"""How fast a server recovers rows and parities in the background: what training leaves.

Work comes in *bursts* of a few chunks. After a burst, a pause follows that makes its time a share of all
time: all of it while training is paused or workers are idle, and while nobody waits for a processor; the
plan's share when workers are busy and processors are scarce.
"""

from __future__ import annotations

from collections.abc import Callable

_QUIET_SECONDS = 0.5
"""Workers that have sent nothing for this long are idle, …"""
_QUIET_GAPS = 2.0
"""… and for this many times the longest gap between two of their recent requests."""
_MOST_GAP_SECONDS = 10.0
_FORGET_GAP = 0.95
"""A gap counts for less with each request after it."""
_SCARCE = 0.25
"""If a process waits for a processor for this share of the time in which it could run, all are busy."""
_MOST_BURST_SECONDS = 0.25
"""A burst that takes longer waits for a lost message or a slow server. That uses no resources: no pause is
due for it."""


class Throttle:
    """Says when the next chunk may begin. All times are those of the caller's clock.

    Args:
        share: share of the time that bursts may use while workers are busy and processors are scarce.
        pressure: returns for which share of the time in which this process could run it had to wait for a
            processor, recently; 1 if that is not known.
    """

    def __init__(self, share: float, pressure: Callable[[], float] = lambda: 1.0) -> None:
        self.hurry = False
        """Whether training is paused, so that recovery may use all of the time."""
        self._share = share
        self._pressure = pressure
        self._requested: float | None = None
        self._gap = 0.0
        self._burst = self._begun = self._under_way = 0
        self._since = self._ended = self._next = 0.0

    def note_request(self, now: float) -> None:
        """Note a worker's request."""
        if self._requested is not None:
            gap = min(now - self._requested, _MOST_GAP_SECONDS)
            self._gap = max(gap, self._gap * _FORGET_GAP)
        self._requested = now

    def share(self, now: float) -> float:
        """The share of the time that bursts may use now."""
        if self._share == 1.0 or self.is_quiet(now):
            return 1.0
        free = 1.0 - min(self._pressure() / _SCARCE, 1.0)
        return self._share + (1.0 - self._share) * free

    def is_quiet(self, now: float) -> bool:
        """Whether no worker waits for this server: training is paused, or workers are idle."""
        if self.hurry or self._requested is None:
            return True
        return now - self._requested > max(_QUIET_SECONDS, _QUIET_GAPS * self._gap)

    def allows(self, now: float, most: int) -> bool:
        """Whether a chunk may begin; while there are pauses, ``most`` of them are a burst."""
        if self.share(now) == 1.0:
            return True
        if self._begun and now - self._since > _MOST_BURST_SECONDS:
            self._pause(now)
        return now >= self._next and self._begun < most

    def begin(self, now: float) -> int:
        """Note that a chunk begins. Returns the number of its burst."""
        if not self._begun:
            self._since = self._ended = now
            self._burst += 1
        self._begun += 1
        self._under_way += 1
        return self._burst

    def end(self, burst: int, now: float) -> None:
        """Note that a chunk of a burst is done."""
        if burst == self._burst and self._begun:
            self._under_way -= 1
            self._ended = now
            if not self._under_way:
                self._pause(now)

    def _pause(self, now: float) -> None:
        taken = min(self._ended - self._since, _MOST_BURST_SECONDS)
        self._next = now + taken * (1.0 / self.share(now) - 1.0)
        self._begun = self._under_way = 0
