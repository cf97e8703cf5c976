"""Timer for retries of unanswered requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Retry:
    """A timer that is due at once, and then ``seconds`` after each attempt.

    With a ``factor``, each wait is that many times as long as the previous one (exponential backoff), so as
    not to overload a slow peer, but at most ``longest`` seconds.
    """

    seconds: float
    factor: float = 1.0
    due: float = -math.inf
    """Time of the next attempt."""
    longest: float = math.inf
    _wait: float = field(init=False)

    def __post_init__(self) -> None:
        self._wait = self.seconds

    def is_due(self, now: float) -> bool:
        """Whether to send the request again."""
        return now >= self.due

    def begin(self, now: float) -> None:
        """Note the first attempt, and reset the backoff."""
        self._wait = self.seconds
        self.due = now + self._wait

    def again(self, now: float) -> None:
        """Note another attempt, and back off."""
        self._wait = min(self._wait * self.factor, max(self.longest, self.seconds))
        self.due = now + self._wait

    def ease(self, now: float) -> None:
        """Note a partial answer: back off less, but not below ``seconds``."""
        self._wait = max(self.seconds, self._wait / self.factor)
        self.due = now + self._wait
