"""Sizes of incremental, quantized checkpoints: Check-N-Run's and IncrCP's arithmetic.

All sizes here are shares of the tables as they are in memory, so that they hold for any number of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError
from holdfast.options import RESTORES_THAT_BITS_BEAR

Strategy = Literal["full", "differential", "chunked"]

REWRITTEN_PER_SAVED = 2.7
"""``chunked``: bytes that are rewritten in the background for each byte saved (``bench checkpoint``)."""
READ_PER_LIVE = 1.22
"""``chunked``: bytes that a restore reads for each byte that it needs (``bench checkpoint``)."""
BEARABLE_AUC_LOSS = 1e-4
"""What the thresholds of ``AutoBits`` stay below (as in Check-N-Run, section 5.2.1): 0.01 %."""
_MOST_INTERVALS = 100_000


@dataclass(frozen=True, slots=True)
class Touches:
    """The share of rows that training touches in a given time.

    Args:
        share: of the rows that is touched at least once in ``hours``.
        hours: see there. The defaults are Check-N-Run's (section 4.1): 26 % in half an hour.
        exponent: in n times as long it is n ** exponent times the share: 0.32 makes it exceed a half after
            ten half hours, as in Check-N-Run's Figure 8.
    """

    share: float = 0.26
    hours: float = 0.5
    exponent: float = 0.32

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"the share of rows touched is {self.share:g}: expected above 0, at most 1")
        if not self.hours > 0 or not 0 < self.exponent <= 1:
            raise ConfigError("touched rows need a time above 0 and an exponent above 0, at most 1")

    def within(self, hours: float) -> float:
        """The share of rows that is touched at least once within ``hours``."""
        return min(1.0, self.share * math.pow(hours / self.hours, self.exponent))


@dataclass(frozen=True, slots=True)
class RowSize:
    """Sizes of a row.

    Args:
        dim: weights, of 4 bytes each.
        state_bytes: of the optimizer's state, which is stored as it is.
        id_bytes: of a changed row's number in an increment: Check-N-Run's is taken for 8, Holdfast stores
            gaps.
        grid_bytes: of the scale and zero point of a quantized row.
    """

    dim: int
    state_bytes: float = 0.0
    id_bytes: float = 1.0
    grid_bytes: float = 8.0

    def __post_init__(self) -> None:
        if self.dim < 1 or self.state_bytes < 0 or self.id_bytes < 0 or self.grid_bytes < 0:
            raise ConfigError(
                f"a row of {self.dim} weights and {self.state_bytes:g} bytes of state: expected more"
            )

    @property
    def raw(self) -> float:
        """Bytes in memory."""
        return 4 * self.dim + self.state_bytes

    def stored(self, bits: int | None) -> float:
        """Size in a full version, as a share of ``raw``; ``bits`` None: not quantized."""
        if bits is None:
            return 1.0
        return (self.dim * bits / 8 + self.grid_bytes + self.state_bytes) / self.raw

    def stored_with_id(self, bits: int | None) -> float:
        """Size in an increment, as a share of ``raw``."""
        return self.stored(bits) + self.id_bytes / self.raw


@dataclass(frozen=True, slots=True)
class IncrementSizes:
    """What a strategy writes, stores and reads, as shares of the tables in memory."""

    written: float
    """Written by a save, on average, background rewriting included."""
    stored: float
    """Maximum size of the newest version."""
    read: float
    """Read by a restore of the newest version, at most."""
    copied: float
    """Copied by a save while training waits, on average."""


def sizes(
    strategy: Strategy, touches: Touches, interval_hours: float, row: RowSize, bits: int | None = None
) -> IncrementSizes:
    """Sizes of a strategy with this save interval."""
    full, increment = row.stored(bits), row.stored_with_id(bits)
    if strategy == "full":
        return IncrementSizes(written=full, stored=full, read=full, copied=1.0)
    if strategy == "differential":
        shares = list(differential_cycle(touches, interval_hours))
        written, rewritten = sum(shares), 0.0
        live, read_per_live = shares[-1], 1.0
        copied = sum(shares)  # each increment whole: also what the one before it held already
    else:
        saved = touches.within(interval_hours)
        count = chunked_cycle(touches, interval_hours)
        written, rewritten = count * saved, count * saved * REWRITTEN_PER_SAVED
        live, read_per_live = touches.within(count * interval_hours), READ_PER_LIVE
        shares, copied = [saved] * count, count * saved
    saves = len(shares) + 1
    return IncrementSizes(
        written=(full + (written + rewritten) * increment) / saves,
        stored=full + live * increment,
        read=full + live * increment * read_per_live,
        copied=(1 + copied) / saves,
    )


def differential_cycle(touches: Touches, interval_hours: float) -> Iterator[float]:
    """The sizes S_1, S_2, … of the increments between two full versions, by Check-N-Run's rule.

    In place of increment i + 1 comes a full version if 1 + S_1 + … + S_i <= (i + 1) S_i (section 4.1.1).
    """
    total = 1.0
    for i in itertools.count(1):
        share = touches.within(i * interval_hours)
        yield share
        total += share
        if total <= (i + 1) * share or i == _MOST_INTERVALS:
            return


def chunked_cycle(touches: Touches, interval_hours: float) -> int:
    """Number of increments that IncrCP's rule writes between two full versions.

    A full one comes when writing and reading it is quicker than writing an increment and reading all that is
    live of those before (section 4.5); reading is taken to be as quick as writing.
    """
    saved = touches.within(interval_hours)
    return next(
        i
        for i in itertools.count(1)
        if saved + READ_PER_LIVE * touches.within(i * interval_hours) > 1 or i == _MOST_INTERVALS
    )


def quantized_auc_loss(bits: int | None, restores: float) -> float:
    """What so many restores from rows in so many bits cost in accuracy, at most, by ``AutoBits``' thresholds.

    Each restore is taken to cost as much as the next: 0.01 % for as many as the bits bear.
    """
    if bits is None:
        return 0.0
    bearable = next(most for most, of in RESTORES_THAT_BITS_BEAR if of == bits)
    return BEARABLE_AUC_LOSS * restores / bearable


def fewest_bits(restores: float, tolerated_auc_loss: float) -> int | None:
    """The fewest bits whose loss is tolerable; None if rows must not be quantized."""
    for _, bits in RESTORES_THAT_BITS_BEAR:
        if quantized_auc_loss(bits, restores) <= tolerated_auc_loss:
            return bits
    return None
