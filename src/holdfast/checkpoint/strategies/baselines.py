"""When to write everything again: the two papers' rules, as arithmetic, and one that heeds the space."""

from __future__ import annotations

import math
from collections.abc import Sequence

_FURTHEST = 200


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


def early_baseline_is_due(increments: Sequence[float], extra_writes: float) -> bool:
    """Would a full version now, and after as many versions again, add at most this share to the writing?

    The average over a round of a full version and i more, A_i = (1 + S_1 + … + S_i) / (i + 1), hardly depends
    on i near its least, but what lies in the store at the end of a round, 1 + S_i, does. The sizes to come
    are taken to go on as the number of different rows does in most data, by a power of the versions:
    S_j = S_1 * j**p, with the p that S_i gives. One increment says nothing of p.
    """
    count = len(increments)
    if count < 2 or not 0 < increments[0] <= increments[-1]:
        return False
    power = math.log(increments[-1] / increments[0]) / math.log(count)
    total = 1.0 + sum(increments)
    least = average = total / (count + 1)
    for j in range(count + 1, _FURTHEST):
        size = increments[0] * j**power
        if size >= total / j:  # from here on the average grows
            break
        total += size
        least = total / (j + 1)
    return average <= (1 + extra_writes) * least


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


class Speeds:
    """Bytes a second, as measured; until something was, a guess that favours neither side."""

    def __init__(self) -> None:
        self.write = 200e6
        self._read: float | None = None

    @property
    def read(self) -> float:
        """When restoring."""
        return self._read if self._read is not None else self.write

    def wrote(self, bytes_: int, seconds: float) -> None:
        """So much was written."""
        if bytes_ > 1 << 20 and seconds > 0:  # small writes measure the latency
            self.write = bytes_ / seconds

    def has_read(self, bytes_: int, seconds: float) -> None:
        """So much was read."""
        if bytes_ > 1 << 20 and seconds > 0:
            self._read = bytes_ / seconds
