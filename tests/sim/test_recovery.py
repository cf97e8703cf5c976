"""Runs that can be followed by hand, and a slow twin for those that cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from holdfast.policy.erasure import CodeModel
from holdfast.policy.mechanisms import Mechanism, Parities, PartialRollback, Rollback, Saves, StartAnew
from holdfast.sim import recovery
from holdfast.sim.recovery import Run, lost, simulate
from holdfast.sim.traces import Failure, Renewals


def run(
    mechanism: Mechanism,
    failures: Sequence[tuple[float, Sequence[int]]],
    total: float = 10.0,
    servers: int = 5,
) -> Run:
    return simulate(
        mechanism,
        step_share=0.0,
        total_hours=total,
        failures=[Failure(hours, of) for hours, of in failures],
        servers=servers,
    )


STOPPING = Rollback(saves=Saves(interval_hours=2.0, stall_hours=0.5), load_hours=0.25, reschedule_hours=0.75)


def test_without_failures_only_saves_cost() -> None:
    """At 2, 4, 6 and 8 hours; not at the end."""
    assert run(STOPPING, []).overhead == pytest.approx(4 * 0.5 / 10)


def test_a_failure_costs_what_was_done_since_the_save() -> None:
    """Saved at 2, going on at 2.5; half an hour's work is lost at 3; from 4 there are 8 hours to go, with 3
    saves."""
    ended = run(STOPPING, [(3.0, [0])])
    assert ended.redone_hours == pytest.approx(0.5)
    assert ended.overhead == pytest.approx((4 + 8 + 1.5) / 10 - 1)
    assert ended.failures == 1


def test_a_failure_while_saving_leaves_the_save_before() -> None:
    assert run(STOPPING, [(2.25, [0])]).redone_hours == pytest.approx(2.0)


def test_a_failure_while_restarting_restarts_again() -> None:
    ended = run(STOPPING, [(3.0, [0]), (3.9, [1])])
    assert ended.redone_hours == pytest.approx(0.5)
    assert ended.overhead == pytest.approx((4.9 + 8 + 1.5) / 10 - 1)


def test_what_is_still_being_written_is_lost() -> None:
    """Copied from 2 to 2.1, written at 3.6: a failure at 3 goes back to the start, one at 4 does not."""
    saves = Saves(interval_hours=2.0, stall_hours=0.1, write_hours=1.5)
    background = Rollback(saves=saves, load_hours=0.0, reschedule_hours=0.0)
    assert run(background, [(3.0, [0])]).redone_hours == pytest.approx(2.9)
    assert run(background, [(4.0, [0])]).redone_hours == pytest.approx(1.9)


def test_partial_recovery_loses_no_work_but_samples() -> None:
    """Half an hour of 10 since the save, at one of 5 servers, then at two."""
    saves = Saves(interval_hours=2.0, stall_hours=0.5)
    partial = PartialRollback(saves=saves, load_hours=0.25, reschedule_hours=0.75, parts=5)
    ended = run(partial, [(3.0, [0])])
    assert ended.pls == pytest.approx(0.5 / 10 / 5)
    assert ended.overhead == pytest.approx((4 * 0.5 + 1.0) / 10)
    assert ended.redone_hours == 0
    assert run(partial, [(3.0, [0, 1])]).pls == pytest.approx(2 * 0.5 / 10 / 5)
    twice = run(partial, [(3.0, [0]), (3.5, [1])])  # the second while the first is being waited for
    assert twice.overhead == pytest.approx((4 * 0.5 + 1.5) / 10)


PARITIES = Parities(
    code=CodeModel(5, 4, 1), pause_hours=0.1, rebuild_hours=1.0, rebuild_drop=0.2, behind=STOPPING
)


def test_parities_pause_and_slow_down() -> None:
    """A tenth of an hour of standing still, and 0.9 hours, without a save, in which a fifth is missing."""
    ended = run(PARITIES, [(5.05, [3])])
    assert ended.losses == 0
    assert ended.overhead == pytest.approx((4 * 0.5 + 0.1 + 0.9 * 0.2) / 10)


def test_more_failures_than_parities_go_back_to_the_checkpoint() -> None:
    """Work of 3 hours is done at 3.5; the save at 2 is what is left, an hour later."""
    ended = run(PARITIES, [(3.5, [3]), (3.5, [0])])
    assert ended.losses == 1
    assert ended.redone_hours == pytest.approx(1.0)
    assert ended.overhead == pytest.approx((4.5 + 8 + 1.5) / 10 - 1)
    assert run(PARITIES, [(3.5, [3]), (4.6, [0])]).losses == 0  # it was rebuilt by then


def test_without_protection_all_is_done_again() -> None:
    anew = StartAnew(total_hours=10.0, reschedule_hours=1.0)
    assert run(anew, [(9.0, [0])]).overhead == pytest.approx((9 + 1 + 10) / 10 - 1)


def test_a_run_that_does_not_end_is_given_up() -> None:
    anew = StartAnew(total_hours=10.0, reschedule_hours=0.0)
    failures = [(float(hour), [0]) for hour in range(1, 1000, 5)]
    assert run(anew, failures).overhead == math.inf


def test_steps_that_take_longer() -> None:
    ended = simulate(STOPPING, step_share=0.25, total_hours=10.0, failures=[], servers=5)
    assert ended.overhead == pytest.approx((12.5 + 6 * 0.5) / 10 - 1)


@pytest.mark.parametrize("mechanism", [STOPPING, PARITIES], ids=["rollback", "parities"])
def test_intervals_are_skipped_without_a_trace(mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Renewals("exponential", 150.0)

    def runs() -> list[Run]:
        return [
            simulate(
                mechanism, step_share=0.03, total_hours=500.0, servers=5,
                failures=model.failures(5, np.random.default_rng(seed)),
            )
            for seed in range(20)
        ]  # fmt: skip

    quick = runs()
    monkeypatch.setattr(recovery.SimulatedProgress, "_skip_whole_intervals", lambda self, until, rate: None)
    for one, slow in zip(quick, runs(), strict=True):
        assert one.overhead == pytest.approx(slow.overhead)
        assert one.redone_hours == pytest.approx(slow.redone_hours)
        assert (one.failures, one.losses) == (slow.failures, slow.losses)


def test_which_servers_are_too_many() -> None:
    """12 servers in groups of 6: a stripe of 5 lies on all but one of them."""
    code = CodeModel(12, 4, 1)
    for a, b in combinations(range(12), 2):
        assert lost(code, [a, b]) == (a % 2 == b % 2)
    assert not lost(code, [3])
    wide = CodeModel(9, 2, 2)  # two groups, of 5 and 4: three of one group always share a stripe of 4
    assert lost(wide, [0, 2, 4])
    assert not lost(wide, [0, 2, 1, 3])
