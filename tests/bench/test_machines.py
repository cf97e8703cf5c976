"""What the bench of machines makes of a log; the jobs themselves are in ``tests/lab``."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.bench.machines import SCENARIOS, _longest_pause, _resumed_at
from holdfast.testing.ray_cluster import RayJob


class Log:
    """A job whose steps were logged at these times."""

    def __init__(self, *times: float) -> None:
        self._times = times

    def times(self) -> list[float]:
        return list(self._times)


@pytest.mark.parametrize(
    ("times", "failed", "resumed"),
    [
        ((1, 2, 3, 9, 10, 11), 3.5, 9),
        ((1, 2, 3, 9, 10, 11), 2.9, 9),
        ((1, 2, 7, 8, 9, 10, 14, 15), 6.9, 14),  # what was before does not count
    ],
)
def test_when_training_went_on(times: tuple[float, ...], failed: float, resumed: float) -> None:
    job: Any = Log(*times)
    assert _resumed_at(cast(RayJob, job), failed) == resumed


def test_the_longest_pause() -> None:
    assert _longest_pause([1.0, 1.5, 4.0, 4.5]) == 2.5


def test_scenarios() -> None:
    assert set(SCENARIOS) == {"speed", "losses", "controller", "exact"}
