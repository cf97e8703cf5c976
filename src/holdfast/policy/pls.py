"""The portion of lost samples (PLS) of partial recovery: CPR's equations 3 and 4, and when to use it.

After a failure only the failed servers' rows go back to the last checkpoint. What their rows had learned
since is lost for good; the portion of all samples, times the portion of all rows, is the PLS. What it costs
in accuracy is about proportional to it (CPR, section 6.5).
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.policy.interval import (
    full_recovery_overhead,
    optimal_interval,
    partial_recovery_overhead,
)
from holdfast.policy.units import show_hours, show_percent

AUC_LOSS_PER_PLS = {None: 0.004, "ssu": 0.002, "mfu": 0.002, "scar": 0.002}
"""The most that section 6.1 reports for a PLS of 0.1, over it: 0.0003 to 0.0004 without prioritised saving,
none to 0.0002 with it."""


def add_failure(
    pls: float, *, samples: float, samples_at_last_save: float, total_samples: float, servers: float
) -> float:
    """Equation 3: the PLS after a failure of one server."""
    return pls + (samples - samples_at_last_save) / (total_samples * servers)


def expected_pls(*, interval_hours: float, mtbf_hours: float, servers: float) -> float:
    """Equation 4: 0.5 T_save / (T_fail N).

    Where a failure takes several servers at once, N is all servers over those of a failure.
    """
    return 0.5 * interval_hours / (mtbf_hours * servers)


def interval_for_pls(*, target_pls: float, mtbf_hours: float, servers: float) -> float:
    """The T_save with this expected PLS: 2 PLS N T_fail."""
    return 2 * target_pls * servers * mtbf_hours


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to use partial recovery, and with which interval."""

    partial: bool
    interval_hours: float
    """Between saves, for the way that was decided on."""
    partial_overhead: float
    full_overhead: float
    reason: str


def decide_recovery(
    *,
    target_pls: float,
    servers: float,
    mtbf_hours: float,
    save_hours: float,
    load_hours: float,
    reschedule_hours: float,
    partial_load_hours: float | None = None,
) -> Decision:
    """Partial recovery at the target's interval, or full recovery at its best one: whichever costs less time.

    ``partial_load_hours`` is O_load where only the failed part is read; by default it is the same.
    """
    interval = interval_for_pls(target_pls=target_pls, mtbf_hours=mtbf_hours, servers=servers)
    best = optimal_interval(save_hours=save_hours, mtbf_hours=mtbf_hours)
    partial = partial_recovery_overhead(
        save_hours=save_hours,
        load_hours=load_hours if partial_load_hours is None else partial_load_hours,
        reschedule_hours=reschedule_hours,
        interval_hours=interval,
        mtbf_hours=mtbf_hours,
    )
    full = full_recovery_overhead(
        save_hours=save_hours,
        load_hours=load_hours,
        reschedule_hours=reschedule_hours,
        interval_hours=best,
        mtbf_hours=mtbf_hours,
    )
    said = (
        f"partial recovery costs {show_percent(partial)} with a save every {show_hours(interval)} (PLS "
        f"{target_pls:g}), full recovery {show_percent(full)} with one every {show_hours(best)}"
    )
    return Decision(
        partial=partial < full,
        interval_hours=interval if partial < full else best,
        partial_overhead=partial,
        full_overhead=full,
        reason=said,
    )
