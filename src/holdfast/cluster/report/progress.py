"""Where a job stands, as people and programs want to know it: from the supervisor's reports to figures."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.filesize import decimal

from holdfast.cluster.protocol.messages import Evaluation, Happening, NodeStatus, Peer, Role, Status
from holdfast.events import EventLog
from holdfast.training.config import Config
from holdfast.training.trainer import Progress, Test

_WINDOW_SECONDS = 3.0
_LEAST_SECONDS = 0.25
_NEARLY = 0.999


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of a job."""

    role: Role
    slot: int
    incarnation: int
    """The how-manieth process it is to fill its slot."""
    state: str
    silent_seconds: float
    """Since its last sign of life."""
    samples_per_second: float
    """Of a worker."""
    pushes_per_second: float
    """Of a server: batches of which it has applied its part."""
    rows: int
    """That a server holds."""
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LackingServer:
    """A server of a protected job that does not have all that it is to hold: stripes with a record there can
    do without fewer others."""

    slot: int
    state: Literal["gone", "recovering", "rebuilding"]
    """Gone: its replacement is starting. Recovering: rows come back. Rebuilding: those are there, parities
    come back."""
    rows: int
    """Rows that it lacks; of one that is gone, that is not counted."""
    parities: int
    restored: float
    """How much of the rows, then of the parities, has come back, 0 to 1."""
    seconds_left: float | None
    """Until it has all rows and parities, at its speed of the last few seconds."""


@dataclass(frozen=True, slots=True)
class RedundancyStatus:
    """Whether servers of a protected job may die."""

    state: Literal["healthy", "degraded"]
    tolerates: int
    """How many may die now, whichever they are, before something is lost."""
    lacking: tuple[LackingServer, ...]
    """Servers that do not have all rows and parities."""


@dataclass(frozen=True, slots=True)
class JobProgress(Progress):
    """Where a job stands. The loss is each worker's, smoothed over its last batches, and the mean of those;
    speeds are of the last few seconds."""

    phase: str
    """Starting, running, holding (for a checkpoint), ending or stopping."""
    processes: tuple[ProcessStatus, ...]
    news: tuple[Happening, ...]
    """What happened since the last report, by the names of ``events.jsonl``."""
    redundancy: RedundancyStatus | None
    """None: servers are not protected."""
    stopped: bool
    """Whether it was told to end before its time."""
    last_checkpoint: int | None
    """The version that it could go on from; None: there is none."""
    saved_steps: int
    """Batches that are in it."""


class Reports:
    """Makes progress of the supervisor's reports, and events of some of it.

    Args:
        config: the run's.
        events: gets a ``progress`` event every ``report_every`` steps.
    """

    def __init__(self, config: Config, events: EventLog) -> None:
        self._config = config
        self._events = events
        self._speeds: dict[tuple[Peer | None, str], _Speed] = {}
        self._done: dict[int, float] = {}
        self._seen: set[tuple[float, str]] = set()
        self._reported = 0

    def note(self, status: Status, *, stopped: bool = False) -> JobProgress:
        """Take the next report of a job that was told to end before its time, or not."""
        # Not by their time alone: the supervisor's report of an event may come behind a later one of ours.
        news = tuple(h for h in status.happened if (h.at, h.event) not in self._seen)
        self._seen |= {(h.at, h.event) for h in news}
        (speed,) = self._speed(None, status.samples)
        progress = JobProgress(
            step=status.steps,
            samples=status.samples,
            loss=_loss(status),
            samples_per_second=speed,
            fraction=self._fraction(status, stopped),
            test=_test(status.tests[-1]) if status.tests else None,
            phase=status.phase,
            processes=tuple(self._process(node) for node in status.nodes),
            news=news,
            redundancy=self._redundancy(status),
            stopped=stopped,
            last_checkpoint=status.last_version or None,
            saved_steps=status.saved_steps,
        )
        if status.steps - self._reported >= self._config.report_every or (
            status.finished and status.steps > self._reported
        ):
            self._reported = status.steps
            self._events.emit("progress", **_figures(progress))
        return progress

    def _fraction(self, status: Status, stopped: bool) -> float:
        """How much of the run is done, 0 to 1: of each worker's part, or of ``max_steps``.

        Of one that was stopped it is less than 1: nobody knows that its last batch is done.
        """
        for node in status.nodes:
            if node.peer.role == "worker":
                # A worker that was replaced says 0 until its first batch.
                slot = node.peer.slot
                self._done[slot] = max(self._done.get(slot, 0.0), node.figures.progress)
        by_parts = sum(self._done.values()) / max(1, len(self._done))
        by_steps = status.steps / self._config.max_steps if self._config.max_steps else 0.0
        if status.finished and not stopped:
            return 1.0
        return min(_NEARLY if stopped else 1.0, max(by_parts, by_steps))

    def _process(self, node: NodeStatus) -> ProcessStatus:
        peer, figures = node.peer, node.figures
        samples, steps = self._speed(peer, figures.samples, figures.steps)
        return ProcessStatus(
            role=peer.role,
            slot=peer.slot,
            incarnation=peer.incarnation,
            state=node.state,
            silent_seconds=round(node.silent_seconds, 3),
            samples_per_second=samples,
            pushes_per_second=steps if peer.role == "server" else 0.0,
            rows=figures.rows,
            memory_bytes=figures.memory_bytes,
        )

    def _redundancy(self, status: Status) -> RedundancyStatus | None:
        code = self._config.job.code
        if code is None or code.dense == "none":  # then the loss of any server ends the job
            return None
        found = [self._lacking(node) for node in status.nodes if node.peer.role == "server"]
        lacking = tuple(one for one in found if one is not None)
        # Of those that have just come back, reports may say so one by one.
        degraded = bool(lacking) or status.degraded
        return RedundancyStatus("degraded" if degraded else "healthy", max(0, code.r - len(lacking)), lacking)

    def _lacking(self, node: NodeStatus) -> LackingServer | None:
        has = node.redundancy
        (speed,) = self._speed(node.peer, has.recovered + has.rebuilt, of="redundancy")
        if node.state == "starting":  # the first of its slot has lost nothing
            slot = node.peer.slot
            return LackingServer(slot, "gone", 0, 0, 0.0, None) if node.peer.incarnation > 1 else None
        left = has.rows + has.parities
        if not left:
            return None
        back, lack = (has.recovered, has.rows) if has.rows else (has.rebuilt, has.parities)
        return LackingServer(
            node.peer.slot,
            "recovering" if has.rows else "rebuilding",
            has.rows,
            has.parities,
            back / (back + lack),
            left / speed if speed else None,
        )

    def _speed(self, who: Peer | None, *counts: int, of: str = "training") -> list[float]:
        return self._speeds.setdefault((who, of), _Speed()).note(counts)


class _Speed:
    """How fast counts grow, over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, tuple[int, ...]]] = deque()

    def note(self, counts: tuple[int, ...]) -> list[float]:
        now = time.monotonic()
        self._seen.append((now, counts))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        # Two reports may come at once, and what they differ by took longer.
        seconds = max(now - then, _LEAST_SECONDS)
        return [max(0.0, (count - old) / seconds) for count, old in zip(counts, before, strict=True)]


def _loss(status: Status) -> float:
    losses = [n.figures.loss for n in status.nodes if n.peer.role == "worker" and n.figures.steps]
    return sum(losses) / len(losses) if losses else math.nan


def _test(evaluation: Evaluation) -> Test:
    return Test(evaluation.step, evaluation.auc, evaluation.log_loss, evaluation.samples)


def _figures(progress: JobProgress) -> dict[str, Any]:
    figures = asdict(progress)
    del figures["news"]  # events of their own
    return figures


def tell(happening: Happening) -> str | None:
    """An event in words, for those that a person wants to see, and whose figures can be understood."""
    try:
        return _tell(happening)
    except (KeyError, TypeError, ValueError):
        return None


def _tell(happening: Happening) -> str | None:
    figures = happening.figures
    who = f"{figures.get('role', 'worker')} {figures.get('slot')}"
    text = None
    match happening.event:
        case "killed":
            text = f"killing {who} at step {figures['step']:,}, as asked"
        case "worker_lost":
            text = f"{who} {figures['reason']}"
        case "worker_started" if figures["incarnation"] > 1:
            text = (
                f"{who} was replaced: process {figures['incarnation']} in its place goes on behind its batch "
                f"{figures['sequence']:,}"
            )
        case "process_started" if figures["role"] == "supervisor":
            text = "the supervisor was started again"
        case "test":
            text = (
                f"test at step {figures['step']:,}: AUC {figures['auc']:.4f}, "
                f"log loss {figures['log_loss']:.4f}"
            )
        case "checkpoint_saved" | "checkpoint_failed" | "checkpoint_tidy_failed" | "checkpoint_damaged":
            text = _tell_of_checkpoints(happening.event, figures)
        case "store_not_opened" | "store_waited_for" | "store_locked":
            text = _tell_of_store(happening.event, figures)
        case _:
            text = _tell_of_servers(happening.event, figures)
    return text


def _tell_of_checkpoints(event: str, figures: Mapping[str, Any]) -> str | None:
    """Once for each cause: what comes again is counted, and said at the end."""
    version = figures["version"]
    text = None
    match event:
        case "checkpoint_saved":
            text = f"saved version {version:,} at step {figures['step']:,}: {decimal(figures['bytes'])}"
        case "checkpoint_failed" if not figures["again"]:
            what = "a checkpoint" if version is None else f"version {version:,}"
            text = f"{what} was not saved, training goes on: {figures['why']}"
        case "checkpoint_tidy_failed" if not figures["again"]:
            text = f"version {version:,} is saved, but files could not be rearranged: {figures['error']}"
        case "checkpoint_damaged":
            text = f"checkpoint damaged: {figures['error']}"
    return text


def _tell_of_store(event: str, figures: Mapping[str, Any]) -> str:
    if event == "store_not_opened":
        return f"{figures['message']}; it is tried again"
    most, why = f"at most {figures['most_seconds']:.0f} s", figures["message"]
    return f"the job waits for its store, {most}" + (f": {why}" if why else "")


def _tell_of_servers(event: str, figures: Mapping[str, Any]) -> str | None:
    who = f"server {figures.get('slot')}"
    text = None
    match event:
        case "server_lost" if figures["protected"] and figures.get("partial"):
            text = f"{who} {figures['reason']}: its rows go back to what was last saved, all others go on"
        case "recovery_chosen" if figures["recovery"] == "full":
            text = f"if a server dies, the whole job goes back: {figures['reason']}"
        case "server_rolled_back":
            to = f"version {figures['version']:,}" if figures["version"] else "their first values"
            what = figures["what"] or f"{figures['rows']:,} rows"
            text = f"{who}: {what} went back to {to}"
            if figures["pls"] is not None:
                text += f"; portion of lost samples so far {figures['pls']:.4f}"
        case "server_lost" if figures["protected"]:  # otherwise the error says it
            text = f"{who} {figures['reason']}: its rows are recovered while training goes on"
        case "training_resumed":
            text = f"training goes on{_after(figures)}, with another process as {who}"
        case "server_recovered":
            found = compared(figures["rows"], figures.get("compared", 0), figures.get("unequal", 0))
            text = f"{who}: {figures['rows']:,} rows recovered{_after(figures, 'in')}{found}"
        case "redundancy_restored":
            text = f"all rows and parities are there again{_after(figures)}"
        case "network_updates_lost":
            text = f"{who}: its network lacks {figures['updates']:,} updates, whose only copy a worker had"
        case "parities_wrong":
            text = (
                f"{who}: {figures['wrong']:,} parities did not agree with their rows, "
                f"{figures['repaired']:,} of them were put right"
            )
        case "data_lost":
            text = f"data was lost: {figures['message']}"
        case "job_restored" | "job_resumed":  # after a loss, or as it starts
            text = f"the job goes on from version {figures['version']:,}, step {figures['step']:,}"
    return text


def compared(rows: int, count: int, unequal: int) -> str:
    """What comparing recovered rows with the memory of the dead server has shown, if that was done."""
    if not count:
        return ""
    if unequal:
        return (
            f"; {unequal:,} of {count:,} that were compared with the memory of the process that died DIFFER"
        )
    newer = rows - count
    rest = f", the other {newer:,} had updates that workers sent again" if newer else ""
    return f", bit-exact ({count:,} compared with the memory of the process that died{rest})"


def _after(figures: Mapping[str, Any], word: str = "after") -> str:
    seconds = figures["after_seconds"]
    return "" if seconds is None else f" {word} {seconds:.1f} s"
