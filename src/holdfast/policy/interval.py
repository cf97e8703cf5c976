"""The save interval and the cost of recovery: CPR's equations 1 and 2, and an exact form of the first.

The names of the paper (section 2.2): O_save is the time that a save stops training for, O_load the time to
read a checkpoint, O_res the time until a replacement is there, T_fail the mean time between failures, T_save
the time between saves. What is returned is O_total / T_total, a share of the training time.
"""

from __future__ import annotations

import math


def optimal_interval(*, save_hours: float, mtbf_hours: float) -> float:
    """The optimal T_save of full recovery: sqrt(2 O_save T_fail)."""
    return math.sqrt(2 * save_hours * mtbf_hours)


def full_recovery_overhead(
    *,
    save_hours: float,
    load_hours: float,
    reschedule_hours: float,
    interval_hours: float,
    mtbf_hours: float,
) -> float:
    """Equation 1: O_save / T_save + (O_load + T_save / 2 + O_res) / T_fail.

    A good approximation as long as all times are small compared to T_fail.
    """
    lost = interval_hours / 2
    return save_hours / interval_hours + (load_hours + lost + reschedule_hours) / mtbf_hours


def partial_recovery_overhead(
    *,
    save_hours: float,
    load_hours: float,
    reschedule_hours: float,
    interval_hours: float,
    mtbf_hours: float,
) -> float:
    """Equation 2: the same without the lost work, O_save / T_save + (O_load + O_res) / T_fail."""
    return save_hours / interval_hours + (load_hours + reschedule_hours) / mtbf_hours


def exact_full_recovery_overhead(
    *,
    save_hours: float,
    load_hours: float,
    reschedule_hours: float,
    interval_hours: float,
    mtbf_hours: float,
) -> float:
    """What equation 1 approaches, for failures at exponentially distributed times, however frequent.

    A stretch of T_save and its save are done when no failure comes between; each one costs what was done of
    them, and a recovery, which itself must come through: the mean time of a stretch is exp(R / T_fail)
    (exp((T_save + O_save) / T_fail) - 1) T_fail, with R = O_load + O_res (Daly 2006, equation 13).
    Infinite if that is beyond a float.
    """
    restart = load_hours + reschedule_hours
    try:
        stretch = mtbf_hours * math.expm1((interval_hours + save_hours) / mtbf_hours)
        return math.exp(restart / mtbf_hours) * stretch / interval_hours - 1
    except OverflowError:
        return math.inf


def unprotected_overhead(*, total_hours: float, reschedule_hours: float, mtbf_hours: float) -> float:
    """The cost of restarting from scratch after every failure."""
    return exact_full_recovery_overhead(
        save_hours=0.0,
        load_hours=0.0,
        reschedule_hours=reschedule_hours,
        interval_hours=total_hours,
        mtbf_hours=mtbf_hours,
    )


def mtbf_of_nodes(nodes: int, failures_per_node_hour: float) -> float:
    """MTBF in hours if each node fails in an hour with this probability, whatever the others do:
    1 / (1 - (1 - p)^n). Nodes that fail in the same hour count as one failure (CPR, section 6.6)."""
    return 1 / -math.expm1(nodes * math.log1p(-failures_per_node_hour))


def failures_per_node_hour(nodes: int, mtbf_hours: float) -> float:
    """The probability p at which ``mtbf_of_nodes`` gives this MTBF, which must be above an hour."""
    return -math.expm1(math.log1p(-1 / mtbf_hours) / nodes)
