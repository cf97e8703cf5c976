"""When to write a new baseline: the two papers' rules, and one that limits the size of the store."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.checkpoint.format.manifest import Era, Manifest
from holdfast.options import Chunked, Differential, Full, Policy

_FURTHEST = 200
_GUESSED_SPEED = 200e6
_MEASURED_BYTES = 1 << 20  # less measures the latency


class Baselines:
    """Records the costs of the versions of an era, and decides when to start a new one.

    Args:
        policy: of the store.

    Attributes:
        write_speed: bytes a second, of the last version; 0: not known.
        read_speed: bytes a second, of the last restore, or as measured; 0: not known.
    """

    def __init__(self, policy: Policy) -> None:
        assert not isinstance(policy.strategy, str)  # Policy turns names into values
        self._strategy = policy.strategy
        self._keeps_few = policy.keeps_few
        self._sizes: list[float] = []  # as shares of a full version, with what was rewritten after each
        self._last_bytes = 0
        self.write_speed = 0.0
        self.read_speed = 0.0

    def wants_measured(self, bytes_: int) -> bool:
        """Whether reading so many bytes would tell something on which it depends when a baseline is due."""
        weighs_reading = isinstance(self._strategy, Chunked) and self._strategy.reset == "auto"
        return weighs_reading and bytes_ > _MEASURED_BYTES

    def due(self, full_bytes: int, beyond_bytes: int) -> bool:
        """Whether the next version should be a baseline.

        ``full_bytes`` is what that takes, ``beyond_bytes`` what a restore of the newest version reads beyond
        its era's full one.
        """
        strategy = self._strategy
        if isinstance(strategy, Full):
            return True
        if isinstance(strategy, Differential):
            return strategy.baseline == "intermittent" and (
                intermittent_baseline_is_due(self._sizes) or self._early(strategy.extra_writes)
            )
        if isinstance(strategy, Chunked) and strategy.reset == "auto" and self._sizes:
            if strategy.layout == "rounds" and self._early(strategy.extra_writes):
                return True
            write_speed = self.write_speed or _GUESSED_SPEED
            # As long as nothing has been read, reading is taken to be as quick: that favours neither side.
            read_speed = self.read_speed or write_speed
            return reset_is_due(full_bytes, self._last_bytes, beyond_bytes, write_speed, read_speed)
        return False

    def _early(self, extra_writes: float) -> bool:
        return extra_writes > 0 and self._keeps_few and early_baseline_is_due(self._sizes, extra_writes)

    def note(self, bytes_: int, full_bytes: int, seconds: float, *, baseline: bool) -> None:
        """Record the bytes and the duration of a written version."""
        self._sizes = [] if baseline else [*self._sizes, bytes_ / max(full_bytes, 1)]
        self._last_bytes = bytes_
        if bytes_ > _MEASURED_BYTES and seconds > 0:
            self.write_speed = bytes_ / seconds

    def note_read(self, bytes_: int, seconds: float) -> None:
        """Record the bytes and the duration of a restore, or of a measurement."""
        if bytes_ > _MEASURED_BYTES and seconds > 0:
            self.read_speed = bytes_ / seconds

    def note_tidied(self, bytes_: int, full_bytes: int) -> None:
        """Record the bytes rewritten after the last version."""
        if self._sizes:
            # A new list: another thread may be looking at the old one.
            *others, last = self._sizes
            self._sizes = [*others, last + bytes_ / max(full_bytes, 1)]

    def resume(self, manifest: Manifest, era: Era) -> None:
        """Continue an era that another process began."""
        self._sizes = []
        if isinstance(self._strategy, Differential):
            full = sum(f.bytes for f in era.files if f.kind == "baseline")
            siblings = [v for v in manifest.versions if v.era == era.number and not v.baseline]
            self._sizes = [v.bytes / max(full, 1) for v in siblings]


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
