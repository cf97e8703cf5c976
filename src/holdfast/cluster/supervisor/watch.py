"""Who watches the supervisor: whoever started it expects its reports, and starts another when they end."""

from __future__ import annotations

from holdfast.cluster.protocol.plan import Timing


class SupervisorWatch:
    """How long a supervisor has been silent.

    Args:
        timing: of the job: a supervisor has as long as any node before it is taken for dead.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._heard: float | None = None
        self._since: float | None = None
        self._ticked: float | None = None

    def start(self, now: float) -> None:
        """A process was started: its first report may take a while."""
        self._heard, self._since = None, now

    def hear(self, now: float) -> None:
        """A report has come."""
        self._heard = now

    def silence(self, now: float) -> float:
        """For how many seconds it has been silent, if that is longer than it may be; 0.0: it is not."""
        since = self._heard if self._heard is not None else self._since
        stood_still = now - (now if self._ticked is None else self._ticked)
        self._ticked = now
        if since is None:
            self._since = now
            return 0.0
        if stood_still > self._timing.silent_seconds / 2:
            # Whoever does not listen cannot tell who was silent.
            self.start(now)
            self._heard = now
            return 0.0
        limit = self._timing.silent_seconds if self._heard is not None else self._timing.start_seconds
        return now - since if now - since > limit else 0.0
