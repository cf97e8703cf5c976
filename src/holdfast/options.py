"""Small frozen option values, checked once where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{name} is {value}: expected at least {least:g}")


@dataclass(frozen=True, slots=True)
class Full:
    """Everything in every version: simple, and large."""


@dataclass(frozen=True, slots=True)
class Differential:
    """All rows changed since the last full version (Check-N-Run).

    Args:
        baseline: "one-shot" keeps the first full version for good; "intermittent" writes a new one when
            the rows changed since the last are expected to cost more than that.
    """

    baseline: Literal["one-shot", "intermittent"] = "intermittent"

    def __post_init__(self) -> None:
        if self.baseline not in ("one-shot", "intermittent"):
            raise ConfigError(f"baseline is {self.baseline!r}: expected 'one-shot' or 'intermittent'")


@dataclass(frozen=True, slots=True)
class Incremental:
    """Only the rows changed since the version before: least to write, most to read."""


@dataclass(frozen=True, slots=True)
class Chunked:
    """As ``Incremental``, and in the background replaced rows are moved out of the way of later restores.

    Two layouts do that. "rounds" waits until enough of a file has been replaced: it rewrites about as much as
    was saved, makes few files, and a restore reads little that was replaced. "2d" is IncrCP's
    two-dimensional list: after each version it compares the new rows with all that is current. With
    ``threshold=0`` a restore reads each row once, for several times the rewriting and many small pieces;
    each step of the threshold trades the one for the other. A restore from "2d" holds all rows that changed
    since the full version in memory, one from "rounds" a few megabytes. Changing the layout of a store
    begins with a new full version.

    Args:
        layout: "rounds" sorts rows out every ``round_versions``, in files of which more than
            ``dead_fraction`` has been replaced; "2d" takes them out of older chunks after each version.
        round_versions: versions between two rounds ("rounds").
        dead_fraction: how much of a file must have been replaced before it is rewritten ("rounds").
        threshold: IncrCP's R: chunks are compared further only if more than this share of the newer one's
            rows is in the older one ("2d").
        reset: "auto" writes a new full version when that is expected to save more time at a restore than
            it costs to write (IncrCP's rule); "never" keeps the first for good.
    """

    layout: Literal["rounds", "2d"] = "rounds"
    round_versions: int = 4
    dead_fraction: float = 0.15
    threshold: float = 0.02
    reset: Literal["auto", "never"] = "auto"

    def __post_init__(self) -> None:
        if self.layout not in ("rounds", "2d"):
            raise ConfigError(f"layout is {self.layout!r}: expected 'rounds' or '2d'")
        if self.reset not in ("auto", "never"):
            raise ConfigError(f"reset is {self.reset!r}: expected 'auto' or 'never'")
        _at_least("round_versions", self.round_versions, 1)
        if not 0 <= self.dead_fraction < 1 or not 0 <= self.threshold < 1:
            raise ConfigError("dead_fraction and threshold are shares: expected 0 to 1")


Strategy = Full | Differential | Incremental | Chunked
_BY_NAME = {
    "full": Full(),
    "differential": Differential(),
    "incremental": Incremental(),
    "chunked": Chunked(),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """When a ``Checkpointer`` saves, how, and what it keeps.

    Args:
        every_steps: save in ``step()`` when this many steps have passed since the last save.
        every_seconds: or this many seconds; with neither, only ``save()`` saves.
        strategy: a name, or an option value such as ``Chunked(round_versions=4)``.
        keep: keep the newest so many versions; None keeps all.
        keep_every: keep every version whose number this divides, too.
        keep_seconds: keep every version younger than this, too.
        when_busy: what a save does while the one before is still being written: "wait" for it, or
            "skip" (the rows stay marked and are in the next one).
        deletion_delay_seconds: how long files that no version needs any more are kept for restores that
            may still be reading them. On a local disk open files stay readable, so 0 is safe there.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    strategy: Strategy | Literal["full", "differential", "incremental", "chunked"] = "chunked"
    keep: int | None = None
    keep_every: int | None = None
    keep_seconds: float | None = None
    when_busy: Literal["wait", "skip"] = "wait"
    deletion_delay_seconds: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str):
            if self.strategy not in _BY_NAME:
                raise ConfigError(f"strategy is {self.strategy!r}: expected one of {', '.join(_BY_NAME)}")
            object.__setattr__(self, "strategy", _BY_NAME[self.strategy])
        if self.when_busy not in ("wait", "skip"):
            raise ConfigError(f"when_busy is {self.when_busy!r}: expected 'wait' or 'skip'")
        _at_least("every_steps", self.every_steps, 1)
        _at_least("every_seconds", self.every_seconds, 0)
        _at_least("keep", self.keep, 1)
        _at_least("keep_every", self.keep_every, 1)
        _at_least("keep_seconds", self.keep_seconds, 0)
        _at_least("deletion_delay_seconds", self.deletion_delay_seconds, 0)
