"""Failures of servers, and throughput around them, collected from the supervisor's reports."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.cluster.protocol.messages import Happening, Peer
from holdfast.cluster.protocol.plan import JobPlan

_LOST_FOLDER = "lost"
_State = Literal["before", "degraded", "after"]


@dataclass(frozen=True, slots=True)
class ServerFailure:
    """A server that died, and its recovery. Seconds count from the detection of the failure; None: the job
    ended first."""

    slot: int
    reason: str
    step: int
    """The job's step at that time."""
    started_seconds: float | None = None
    """Until a replacement had taken over."""
    resumed_seconds: float | None = None
    """Until all workers that were working had resumed."""
    recovered_seconds: float | None = None
    """Until its replacement had all rows."""
    rows: int = 0
    """Rows recovered."""
    compared: int = 0
    """With ``job.compare_recovered``: how many of them were compared with the dead server's memory."""
    unequal: int = 0
    """How many of the compared rows were not bit-identical."""
    whole_seconds: float | None = None
    """Until all servers had all rows and parities, so that full redundancy was restored."""
    went_back: int = 0
    """Rows that were lost and went back to their last saved values."""
    what: str = ""
    """Which rows went back, if not all of the server's."""
    version: int | None = None
    """The version that they went back to; 0: their initial values."""
    samples_lost: int = 0
    """Samples trained on since that version, whose updates to these rows are lost."""


def lost_rows_path(folder: Path, server: Peer, plan: JobPlan) -> Path:
    """The file in the run's folder in which a replacement lists lost rows.

    With ``beyond: job`` the job ends as soon as one row is found lost, so the list may be incomplete; the
    name says so.
    """
    first = "" if plan.beyond == "rows" else "first-found-"
    return folder / _LOST_FOLDER / f"{first}server-{server.slot}-{server.incarnation}.csv"


class Failures:
    """Collects failures from events, which may arrive late and more than once."""

    def __init__(self) -> None:
        self._found: list[_Found] = []
        self._seen: set[tuple[float, str]] = set()

    def __call__(self) -> tuple[ServerFailure, ...]:
        """The failures so far, in order."""
        return tuple(found.failure for found in self._found)

    def note(self, happened: Iterable[Happening]) -> None:
        """Process recent events."""
        for happening in sorted(happened, key=lambda one: one.at):
            if (happening.at, happening.event) not in self._seen:
                self._seen.add((happening.at, happening.event))
                # Ignore malformed events: they must not end the job.
                with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                    self._take(happening.event, happening.at, happening.figures)

    def _take(self, event: str, at: float, figures: Mapping[str, Any]) -> None:
        match event:
            case "server_lost":
                failure = ServerFailure(figures["slot"], figures["reason"], figures["step"])
                self._found.append(_Found(at, figures["incarnation"], failure))
            case "server_started":
                self._add(figures, "started_seconds", at)
            case "training_resumed":
                self._add(figures, "resumed_seconds", at)
            case "server_recovered":
                some = {key: figures[key] for key in ("rows", "compared", "unequal") if key in figures}
                self._add(figures, "recovered_seconds", at, **some)
            case "server_rolled_back":
                some = {key: figures[key] for key in ("what", "version", "samples_lost")}
                self._add(figures, "recovered_seconds", at, went_back=figures["rows"], **some)
            case "redundancy_restored":
                for found in self._found:
                    if found.failure.recovered_seconds is not None and found.failure.whole_seconds is None:
                        found.add("whole_seconds", at)

    def _add(self, figures: Mapping[str, Any], name: str, at: float, **more: Any) -> None:
        """Add a replacement's figures to the last death of its predecessor."""
        for found in reversed(self._found):
            if (found.failure.slot, found.incarnation) == (figures["slot"], figures["incarnation"] - 1):
                found.add(name, at, **more)
                return


@dataclass
class _Found:
    at: float
    incarnation: int
    failure: ServerFailure

    def add(self, name: str, at: float, **more: Any) -> None:
        more[name] = round(at - self.at, 3)
        self.failure = replace(self.failure, **more)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Samples per second of a job in which servers died; None for a period that did not occur."""

    before: float | None
    """Before the first death."""
    degraded: float | None
    """From detection of a death until full redundancy was restored, all such periods together."""
    after: float | None
    """With full redundancy, after the first death."""


class SpeedMeter:
    """Measures ``Speeds`` from the supervisor's reports.

    Args:
        samples: count before this job's first batch.
        clock: returns the time in seconds.
    """

    def __init__(self, samples: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: _State = "before"
        self._seconds: defaultdict[_State, float] = defaultdict(float)
        self._samples: defaultdict[_State, int] = defaultdict(int)
        self._most = samples
        self._last: float | None = None
        self._idle: defaultdict[_State, float] = defaultdict(float)
        """Seconds since samples last grew; they count only if samples grow again."""

    def note(self, samples: int, *, degraded: bool) -> None:
        """Process the next report: samples that count, and whether redundancy is degraded after a death."""
        now = self._clock()
        grown = samples - self._most  # below 0 for a while when a server was replaced
        if self._last is not None:
            self._idle[self._state] += now - self._last
            if grown > 0:
                self._samples[self._state] += grown
                for state, seconds in self._idle.items():
                    self._seconds[state] += seconds
                self._idle.clear()
        if grown > 0 or self._last is not None:  # the time before the first batch is not training time
            self._last = now
        self._most = max(samples, self._most)
        if degraded:
            self._state = "degraded"
        elif self._state == "degraded":
            self._state = "after"

    def __call__(self) -> Speeds:
        """The speeds so far."""
        states: tuple[_State, ...] = ("before", "degraded", "after")
        return Speeds(
            *(
                self._samples[state] / self._seconds[state] if self._seconds[state] else None
                for state in states
            )
        )
