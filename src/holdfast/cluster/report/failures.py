"""What a job's end says of servers that died, gathered from the supervisor's reports while it ran."""

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
    """A server that died and what became of it. Seconds count from when its death was noticed; None: the job
    ended before."""

    slot: int
    reason: str
    step: int
    """Of the job, then."""
    started_seconds: float | None = None
    """Until another process had taken its place."""
    resumed_seconds: float | None = None
    """Until all workers that were at work had gone on."""
    recovered_seconds: float | None = None
    """Until it had all rows."""
    rows: int = 0
    """How many were recovered."""
    compared: int = 0
    """With ``job.compare_recovered``: how many of them were compared with the dead server's memory, …"""
    unequal: int = 0
    """… and how many were not the same to the bit."""
    whole_seconds: float | None = None
    """Until all servers had all rows and parities, so that more could die."""
    went_back: int = 0
    """How many were lost and went back to what was last saved of them, …"""
    what: str = ""
    """… which, where that were not all of its rows, …"""
    version: int | None = None
    """… the version that they went back to (0: to their first values), …"""
    samples_lost: int = 0
    """… and how many samples had been trained on since: what they taught those rows is lost."""


def lost_rows_path(folder: Path, server: Peer, plan: JobPlan) -> Path:
    """Where in the run's folder a server that took over writes which rows are lost.

    With ``beyond: job`` the job ends as soon as a row is found lost, and nobody looks for more: the name says
    so.
    """
    first = "" if plan.beyond == "rows" else "first-found-"
    return folder / _LOST_FOLDER / f"{first}server-{server.slot}-{server.incarnation}.csv"


class Failures:
    """Gathers them. Events may come late and more than once."""

    def __init__(self) -> None:
        self._found: list[_Found] = []
        self._seen: set[tuple[float, str]] = set()

    def __call__(self) -> tuple[ServerFailure, ...]:
        """Those so far, in order."""
        return tuple(found.failure for found in self._found)

    def note(self, happened: Iterable[Happening]) -> None:
        """Take what has happened lately."""
        for happening in sorted(happened, key=lambda one: one.at):
            if (happening.at, happening.event) not in self._seen:
                self._seen.add((happening.at, happening.event))
                # A report that cannot be understood tells nothing; it must not end the job.
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
        """What is said of a replacement belongs to the last death of its predecessor."""
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
    """Samples per second of a job in which servers died; None where no time passed."""

    before: float | None
    """Before the first one did."""
    degraded: float | None
    """From when a death was noticed until all rows and parities were back, all such times together."""
    after: float | None
    """With full redundancy, after the first death."""


class SpeedMeter:
    """Measures them, report by report.

    Args:
        samples: before this job's first batch.
        clock: tells the time.
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
        """Take the next report: samples that count, and whether redundancy is lacking after a death."""
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
        """So far."""
        states: tuple[_State, ...] = ("before", "degraded", "after")
        return Speeds(
            *(
                self._samples[state] / self._seconds[state] if self._seconds[state] else None
                for state in states
            )
        )
