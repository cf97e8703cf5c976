"""When to write everything again: the two papers' rules, as arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def intermittent_baseline_is_due(increments: Sequence[float]) -> bool:
    """Check-N-Run, section 4.1.1: is a full version due after these differential ones?

    ``increments`` are the sizes S_1 … S_i of the versions since the last full one, as shares of it. If the
    next i + 1 versions repeat the past ones from a new full version, they cost F_c = 1 + S_1 + … + S_i; if
    not, at least I_c = (i + 1) * S_i. A full version is due when F_c <= I_c.
    """
    if not increments:
        return False
    full = 1.0 + sum(increments)
    stay = (len(increments) + 1) * increments[-1]
    return full <= stay


def reset_is_due(
    full_bytes: float, increment_bytes: float, beyond_bytes: float, write_speed: float, read_speed: float
) -> bool:
    """IncrCP, section 4.5: is a full version due, if a failure came right after this one?

    With a full version now: T_base = C_base + R_base. Without: T_incre = C_incre + R_base + R_i. C are the
    times to write, R to read; R_i reads what lies beyond the baseline, ``beyond_bytes``. Speeds are bytes a
    second, as measured; R_base is the same on both sides.
    """
    t_base = full_bytes / write_speed
    t_incre = increment_bytes / write_speed + beyond_bytes / read_speed
    return t_base < t_incre
