"""When to ask again for what has not been answered."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Retry:
    """A timer that is due at once, and then ``seconds`` after each time.

    With a ``factor``, each wait is that many times as long as the one before: a peer that is slow is not
    given ever more to do.
    """

    seconds: float
    factor: float = 1.0
    due: float = -math.inf
    """When to ask again."""
    _wait: float = field(init=False)

    def __post_init__(self) -> None:
        self._wait = self.seconds

    def is_due(self, now: float) -> bool:
        """Whether to ask again."""
        return now >= self.due

    def begin(self, now: float) -> None:
        """Asked for the first time."""
        self._wait = self.seconds
        self.due = now + self._wait

    def again(self, now: float) -> None:
        """Asked once more."""
        self._wait *= self.factor
        self.due = now + self._wait

    def ease(self, now: float) -> None:
        """Part of the answer has come: ask sooner again, though not sooner than at first."""
        self._wait = max(self.seconds, self._wait / self.factor)
        self.due = now + self._wait
