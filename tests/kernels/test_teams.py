"""Threads that share a loop: every part once, all done at the end, errors included."""

from __future__ import annotations

import sys
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

from holdfast.kernels import teams
from holdfast.kernels.teams import ALONE, LEAST_BYTES, Team


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_each_part_runs_once_and_the_first_here(threads: int) -> None:
    team = Team(threads)
    for parts in range(1, threads + 1):
        ran: dict[int, int] = {}

        def loop(part: int, ran: dict[int, int] = ran, parts: int = parts) -> None:
            if part == parts - 1:
                time.sleep(0.01)  # the caller waits for the last
            assert part not in ran
            ran[part] = threading.get_ident()

        team.run(loop, parts)
        assert sorted(ran) == list(range(parts))
        assert ran[0] == threading.get_ident()


def test_parts_run_side_by_side() -> None:
    meet = threading.Barrier(3, timeout=10)
    Team(3).run(lambda part: meet.wait(), 3)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_nobody_waits_for_a_helper_that_has_no_processor(wrong: int | None) -> None:
    team = Team(3)
    free, team._work = team._work, [SimpleQueue(), SimpleQueue()]
    done: list[tuple[int, int]] = []

    def loop(part: int) -> None:
        done.append((part, threading.get_ident()))
        if part == wrong:
            raise ValueError(f"part {part}")

    if wrong is None:
        team.run(loop, 3)
    else:
        with pytest.raises(ValueError, match=f"part {wrong}"):
            team.run(loop, 3)
    assert done == [(part, threading.get_ident()) for part in range(3)]
    late, team._work = team._work, free
    for work, helper in zip(late, free, strict=True):
        helper.put(work.get())  # they come too late: nothing is left
    team.run(lambda part: done.append((part, 0)), 3)
    assert len(done) == 6


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_is_raised_when_all_are_done(wrong: int) -> None:
    team = Team(3)
    done: list[int] = []

    def loop(part: int) -> None:
        if part == wrong:
            raise ValueError(f"part {part}")
        time.sleep(0.01)
        done.append(part)

    with pytest.raises(ValueError, match=f"part {wrong}"):
        team.run(loop, 3)
    assert sorted(done) == sorted({0, 1, 2} - {wrong})
    done.clear()
    team.run(done.append, 3)  # it works on
    assert sorted(done) == [0, 1, 2]


def test_of_several_errors_the_callers_own_is_raised() -> None:
    def loop(part: int) -> None:
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part 0"):
        Team(3).run(loop, 3)


def test_little_work_is_not_shared() -> None:
    team = Team(3)
    assert [team.parts(LEAST_BYTES * n + more) for n, more in [(0, 0), (1, 0), (2, -1), (2, 0), (9, 0)]] == [
        1, 1, 1, 2, 3,
    ]  # fmt: skip
    assert ALONE.parts(1 << 40) == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_slices_are_the_whole(threads: int, count: int) -> None:
    for nbytes in (0, 1 << 30):
        hits = np.zeros(count, np.int64)

        def add(some: slice, hits: np.ndarray = hits) -> None:
            hits[some] += 1

        Team(threads).run_slices(add, count, nbytes)
        assert (hits == 1).all()


def test_helpers_keep_nothing_and_end_with_their_team() -> None:
    before = set(threading.enumerate())
    array = np.zeros(1)
    references = sys.getrefcount(array)
    team = Team(4)
    helpers = set(threading.enumerate()) - before
    assert sorted(helper.name for helper in helpers) == ["team-1", "team-2", "team-3"]
    for _ in range(100):
        team.run(lambda part: array.sum(), 4)
        assert sys.getrefcount(array) == references  # ``Changes`` relies on it
    del team
    for helper in helpers:
        helper.join(60)
    assert not any(helper.is_alive() for helper in helpers)


def test_one_thread_starts_none() -> None:
    count = threading.active_count()
    Team(1).run(lambda part: None, 1)
    assert threading.active_count() == count
    assert teams.ALONE.threads == 1
