"""When a save is due."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.saving.schedule import SaveSchedule
from holdfast.options import Policy


def due(schedule: SaveSchedule, steps: range, now: float = 0.0) -> list[int]:
    """The steps at which a save is due, each of which is saved."""
    found = []
    for step in steps:
        if schedule.is_due(step, now):
            found.append(step)
            schedule.note(step, now)
    return found


def test_by_steps_from_the_first_that_is_asked_about() -> None:
    assert due(SaveSchedule(Policy(every_steps=3), 0.0), range(20)) == [2, 5, 8, 11, 14, 17]
    assert due(SaveSchedule(Policy(every_steps=3), 0.0), range(7, 14)) == [9, 12]
    assert due(SaveSchedule(Policy(every_steps=1), 0.0), range(3)) == [0, 1, 2]


def test_by_steps_from_a_given_one() -> None:
    assert due(SaveSchedule(Policy(every_steps=3), 0.0, step=10), range(10, 20)) == [13, 16, 19]


def test_by_time_whatever_the_clock_says() -> None:
    schedule = SaveSchedule(Policy(every_seconds=5.0), 1000.0)
    assert not schedule.is_due(1, 1004.9)
    assert schedule.is_due(1, 1005.0)
    schedule.note(1, 1005.0)
    assert not schedule.is_due(2, 1009.9)
    assert schedule.is_due(2, 1010.0)


def test_whichever_comes_first() -> None:
    schedule = SaveSchedule(Policy(every_steps=10, every_seconds=5.0), 0.0)
    assert not schedule.is_due(0, 1.0)
    assert schedule.is_due(3, 5.0)
    assert schedule.is_due(9, 1.0)


def test_never_if_the_policy_says_neither() -> None:
    assert due(SaveSchedule(Policy(), 0.0), range(100), now=1e9) == []


@pytest.mark.parametrize(("fraction", "steps"), [(0.5, [3, 7, 11]), (0.25, [1, 3, 5, 7, 9, 11])])
def test_a_fraction_of_the_rows_after_that_fraction_of_the_time(fraction: float, steps: list[int]) -> None:
    policy = Policy(every_steps=8, every_seconds=8.0, prioritize="mfu", fraction=fraction)
    assert due(SaveSchedule(policy, 0.0), range(12)) == steps
    by_time = SaveSchedule(policy, 0.0)
    assert (by_time.is_due(0, 8 * fraction - 0.1), by_time.is_due(0, 8 * fraction)) == (False, True)
    assert due(SaveSchedule(Policy(every_steps=8, fraction=fraction), 0.0), range(12)) == [7]


def test_a_caller_that_counts_anew() -> None:
    schedule = SaveSchedule(Policy(every_steps=3), 0.0)
    schedule.note(50, 0.0)
    assert due(schedule, range(6)) == [2, 5]


def test_a_restored_run_counts_from_its_step_and_its_time_goes_on() -> None:
    schedule = SaveSchedule(Policy(every_steps=3, every_seconds=10.0), 0.0)
    schedule.begin_at(7)
    assert not schedule.is_due(9, 9.0)
    assert schedule.is_due(10, 9.0)
    assert schedule.is_due(8, 10.0)
