"""Monitor the supervisor: the launcher expects its reports, and restarts it when they stop."""

from __future__ import annotations

from holdfast.cluster.protocol.plan import Timing


class SupervisorWatch:
    """Measures how long a supervisor has been silent.

    Args:
        timing: the job's timing: a supervisor has the same timeouts as any node.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._heard: float | None = None
        self._since: float | None = None
        self._ticked: float | None = None

    def start(self, now: float) -> None:
        """Note that a process was started: its first report may take a while."""
        self._heard, self._since = None, now

    def hear(self, now: float) -> None:
        """Note a report."""
        self._heard = now

    def silence(self, now: float) -> float:
        """Seconds of silence, if it is longer than allowed; else 0.0."""
        since = self._heard if self._heard is not None else self._since
        stood_still = now - (now if self._ticked is None else self._ticked)
        self._ticked = now
        if since is None:
            self._since = now
            return 0.0
        if stood_still > self._timing.silent_seconds / 2:
            # This process was suspended itself, so it cannot tell who was silent.
            self.start(now)
            self._heard = now
            return 0.0
        limit = self._timing.silent_seconds if self._heard is not None else self._timing.start_seconds
        return now - since if now - since > limit else 0.0
