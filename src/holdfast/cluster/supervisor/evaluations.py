"""Tests of the model while a job runs: when the next one is due, and what came of those before."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Evaluation

_TESTS_OF_AN_EPOCH = 1 << 20


class Evaluations:
    """The tests that one supervisor asks for, one after the other.

    Args:
        epoch: the supervisor's first: the worker that tests does each number once, so they begin beyond all
            that the supervisor before can have given.
        every: batches between tests; 0: only at the end.
        steps: batches that count already.

    Attributes:
        every: as given.
        results: of those that are done.
    """

    def __init__(self, epoch: int, every: int, steps: int) -> None:
        self.results: list[Evaluation] = []
        self._number = self._before = (epoch - 1) * _TESTS_OF_AN_EPOCH
        self.every = every
        self._asked_at = steps

    @property
    def waiting(self) -> bool:
        """Whether one is under way."""
        return self._number > self._last()

    def take(self, tested: Evaluation | None) -> Evaluation | None:
        """What a worker says of its last test; the result if it is a new one."""
        if tested is None or not self._last() < tested.number <= self._number:
            return None
        self.results.append(replace(tested, step=self._asked_at))
        return self.results[-1]

    def has_tested(self, steps: int) -> bool:
        """Whether the last one asked for was of this very state."""
        return self._number > self._before and self._asked_at == steps

    def is_due(self, steps: int) -> bool:
        """Whether it is time for the next one."""
        return bool(self.every) and steps - self._asked_at >= self.every

    def begin(self, steps: int) -> int:
        """The number of the next one."""
        self._number += 1
        self._asked_at = steps
        return self._number

    def _last(self) -> int:
        return self.results[-1].number if self.results else self._before
