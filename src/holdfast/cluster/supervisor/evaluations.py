"""Tests of the model while a job runs: when the next one is due, and their results."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Evaluation

_TESTS_OF_AN_EPOCH = 1 << 20


class Evaluations:
    """The tests that one supervisor requests, one at a time.

    Args:
        epoch: the supervisor's first epoch. The testing worker runs each number once, so numbers start beyond
            all that an earlier supervisor can have used.
        every: batches between tests; 0: only at the end.
        steps: batches that already count.

    Attributes:
        every: as given.
        results: results of the completed tests.
    """

    def __init__(self, epoch: int, every: int, steps: int) -> None:
        self.results: list[Evaluation] = []
        self._number = self._before = (epoch - 1) * _TESTS_OF_AN_EPOCH
        self.every = every
        self._asked_at = steps

    @property
    def waiting(self) -> bool:
        """Whether a test is running."""
        return self._number > self._last()

    def take(self, tested: Evaluation | None) -> Evaluation | None:
        """Process a worker's last test result. Returns it if it is new."""
        if tested is None or not self._last() < tested.number <= self._number:
            return None
        self.results.append(replace(tested, step=self._asked_at))
        return self.results[-1]

    def has_tested(self, steps: int) -> bool:
        """Whether the last requested test was of this state."""
        return self._number > self._before and self._asked_at == steps

    def is_due(self, steps: int) -> bool:
        """Whether the next test is due."""
        return bool(self.every) and steps - self._asked_at >= self.every

    def begin(self, steps: int) -> int:
        """Start the next test. Returns its number."""
        self._number += 1
        self._asked_at = steps
        return self._number

    def _last(self) -> int:
        return self.results[-1].number if self.results else self._before
