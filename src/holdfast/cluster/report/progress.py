"""Progress of a job: convert the supervisor's status reports to figures and to text."""

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
    """The state of one process."""

    role: Role
    slot: int
    incarnation: int
    """1 for the first process in the slot, 2 for its first replacement, and so on."""
    state: str
    silent_seconds: float
    """Since its last heartbeat."""
    samples_per_second: float
    """Only for workers."""
    pushes_per_second: float
    """Only for servers: pushes applied."""
    rows: int
    """Only for servers: rows held."""
    memory_bytes: int
    machine: str = ""
    """Where it runs; "" if there is only one machine."""


@dataclass(frozen=True, slots=True)
class LackingServer:
    """A server that lacks rows or parities. Stripes with a record there tolerate fewer failures."""

    slot: int
    state: Literal["gone", "recovering", "rebuilding"]
    """Gone: its replacement is starting. Recovering: rows are being recovered. Rebuilding: it has all rows,
    parities are being rebuilt."""
    rows: int
    """Missing rows; 0 for a server that is gone."""
    parities: int
    restored: float
    """The part of its missing rows, then of its missing parities, that is restored: 0 to 1."""
    seconds_left: float | None
    """Estimated time until it has all rows and parities, from its speed over the last few seconds."""


@dataclass(frozen=True, slots=True)
class RedundancyStatus:
    """Whether a protected job can lose servers without losing data."""

    state: Literal["healthy", "degraded"]
    tolerates: int
    """How many servers, whichever they are, may die now without data loss."""
    lacking: tuple[LackingServer, ...]
    """Servers that lack rows or parities."""


@dataclass(frozen=True, slots=True)
class JobProgress(Progress):
    """Progress of a job. The loss is the mean of the workers' smoothed losses; speeds are of the last few
    seconds."""

    phase: str
    """Starting, running, holding (for a checkpoint), ending or stopping."""
    processes: tuple[ProcessStatus, ...]
    news: tuple[Happening, ...]
    """Events since the last report, named as in ``events.jsonl``."""
    redundancy: RedundancyStatus | None
    """None if servers are not protected."""
    stopped: bool
    """Whether the user has stopped it early."""
    last_checkpoint: int | None
    """The version that it could resume from; None if there is none."""
    saved_steps: int
    """Steps contained in that version."""


class Reports:
    """Converts the supervisor's reports to progress, and emits ``progress`` events.

    Args:
        config: the run's configuration.
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
        """Process the next report. ``stopped``: the user has stopped the job early."""
        # Not by time alone: the supervisor's report of an event may arrive after a later one of this process.
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
        """The completed part of the run, 0 to 1: of all workers' batches, or of ``max_steps``.

        Below 1 for a stopped job: whether its last batch is done is unknown.
        """
        for node in status.nodes:
            if node.peer.role == "worker":
                # A replaced worker reports 0 until its first batch.
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
            machine=node.machine,
        )

    def _redundancy(self, status: Status) -> RedundancyStatus | None:
        code = self._config.job.code
        if code is None or code.dense == "none":  # then the death of any server ends the job
            return None
        found = [self._lacking(node) for node in status.nodes if node.peer.role == "server"]
        lacking = tuple(one for one in found if one is not None)
        # Of servers that were just recovered, reports may arrive one by one.
        degraded = bool(lacking) or status.degraded
        return RedundancyStatus("degraded" if degraded else "healthy", max(0, code.r - len(lacking)), lacking)

    def _lacking(self, node: NodeStatus) -> LackingServer | None:
        has = node.redundancy
        (speed,) = self._speed(node.peer, has.recovered + has.rebuilt, of="redundancy")
        if node.state == "starting":  # a first incarnation has lost nothing
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
    """The growth per second of some counts, over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, tuple[int, ...]]] = deque()

    def note(self, counts: tuple[int, ...]) -> list[float]:
        now = time.monotonic()
        self._seen.append((now, counts))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        # Two reports may arrive at once, although their difference took longer.
        seconds = max(now - then, _LEAST_SECONDS)
        return [max(0.0, (count - old) / seconds) for count, old in zip(counts, before, strict=True)]


def _loss(status: Status) -> float:
    losses = [n.figures.loss for n in status.nodes if n.peer.role == "worker" and n.figures.steps]
    return sum(losses) / len(losses) if losses else math.nan


def _test(evaluation: Evaluation) -> Test:
    return Test(evaluation.step, evaluation.auc, evaluation.log_loss, evaluation.samples)


def _figures(progress: JobProgress) -> dict[str, Any]:
    figures = asdict(progress)
    del figures["news"]  # emitted as separate events
    return figures


def tell(happening: Happening) -> str | None:
    """Describe an event in words. None if users need not see it, or if its figures are malformed."""
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
                f"{who} restarted (incarnation {figures['incarnation']}), resuming after batch "
                f"{figures['sequence']:,}"
            )
        case "process_started" if figures["role"] == "supervisor":
            text = "the supervisor was restarted"
        case "test":
            text = (
                f"test at step {figures['step']:,}: AUC {figures['auc']:.4f}, "
                f"log loss {figures['log_loss']:.4f}"
            )
        case "checkpoint_saved" | "checkpoint_failed" | "checkpoint_tidy_failed" | "checkpoint_damaged":
            text = _tell_of_checkpoints(happening.event, figures)
        case "spread_lost" | "spread_restored" | "vaults_changed" | "controller_replaced":
            text = _tell_of_machines(happening.event, figures)
        case "machine_draining" | "machine_drained" | "server_moved" | "worker_moved" | "supervisor_moved":
            text = _tell_of_draining(happening.event, figures)
        case "store_not_opened" | "store_waited_for" | "store_locked":
            text = _tell_of_store(happening.event, figures)
        case _:
            text = _tell_of_servers(happening.event, figures)
    return text


def _tell_of_checkpoints(event: str, figures: Mapping[str, Any]) -> str | None:
    """Describe each cause of a failure once; repeated failures are counted and summarized at the end."""
    version = figures["version"]
    text = None
    match event:
        case "checkpoint_saved":
            text = f"saved version {version:,} at step {figures['step']:,}: {decimal(figures['bytes'])}"
        case "checkpoint_failed" if not figures["again"]:
            what = "a checkpoint" if version is None else f"version {version:,}"
            text = f"{what} was not saved, training continues: {figures['why']}"
        case "checkpoint_tidy_failed" if not figures["again"]:
            text = f"version {version:,} is saved, but files could not be rearranged: {figures['error']}"
        case "checkpoint_damaged":
            text = f"checkpoint damaged: {figures['error']}"
    return text


def _tell_of_machines(event: str, figures: Mapping[str, Any]) -> str:
    if event == "spread_lost":
        return "the code does not cover the loss of every machine now: servers share machines"
    if event == "spread_restored":
        return "the code covers the loss of any machine again"
    if event == "vaults_changed":
        count = len(figures["machines"])
        return f"{count} machines keep the supervisor's state: any {(count - 1) // 2} of them may be lost"
    return f"the controller was lost; another one, on {figures['machine']}, has taken over"


def _tell_of_draining(event: str, figures: Mapping[str, Any]) -> str:
    machine = figures["machine"]
    if event == "machine_draining":
        seconds = figures["seconds_left"]
        when = "soon" if seconds is None else f"in {seconds:.0f} s"
        return f"machine {machine} will be taken away {when}: its processes leave"
    if event == "machine_drained":
        return f"nothing of the job runs on machine {machine} any more: it may be taken away"
    role = event.removesuffix("_moved")
    who = "the supervisor" if role == "supervisor" else f"{role} {figures['slot']}"
    return f"{who} on {machine} is ended, to start anew on another machine"


def _tell_of_store(event: str, figures: Mapping[str, Any]) -> str:
    if event == "store_not_opened":
        return f"{figures['message']}; retrying"
    most, why = f"at most {figures['most_seconds']:.0f} s", figures["message"]
    return f"waiting for the store, {most}" + (f": {why}" if why else "")


def _tell_of_servers(event: str, figures: Mapping[str, Any]) -> str | None:
    who = f"server {figures.get('slot')}"
    text = None
    match event:
        case "server_lost" if figures["protected"] and figures.get("partial"):
            text = f"{who} {figures['reason']}: its rows go back to their last saved values, others do not"
        case "recovery_chosen" if figures["recovery"] == "full":
            text = f"if a server dies, the whole job goes back to its last checkpoint: {figures['reason']}"
        case "server_rolled_back":
            to = f"version {figures['version']:,}" if figures["version"] else "their initial values"
            what = figures["what"] or f"{figures['rows']:,} rows"
            text = f"{who}: {what} went back to {to}"
            if figures["pls"] is not None:
                text += f"; portion of lost samples so far {figures['pls']:.4f}"
        case "server_lost" if figures["protected"]:  # otherwise the error message says so
            text = f"{who} {figures['reason']}: recovering its rows while training continues"
        case "training_resumed":
            text = f"training resumed{_after(figures)}, with a replacement for {who}"
        case "server_recovered":
            found = compared(figures["rows"], figures.get("compared", 0), figures.get("unequal", 0))
            text = f"{who}: {figures['rows']:,} rows recovered{_after(figures, 'in')}{found}"
        case "redundancy_restored":
            text = f"redundancy restored{_after(figures)}"
        case "network_updates_lost":
            text = f"{who}: {figures['updates']:,} network updates are lost, only a dead worker had them"
        case "parities_wrong":
            text = (
                f"{who}: {figures['wrong']:,} parities did not match their rows, "
                f"{figures['repaired']:,} of them were repaired"
            )
        case "data_lost":
            text = f"data was lost: {figures['message']}"
        case "job_restored" | "job_resumed":  # after a loss, or as it starts
            text = f"resuming from version {figures['version']:,}, step {figures['step']:,}"
    return text


def compared(rows: int, count: int, unequal: int) -> str:
    """The result of comparing recovered rows with the dead server's memory, if that was done."""
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
