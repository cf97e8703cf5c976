"""The live view of a job: a table of all processes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.cluster.report.progress import JobProgress, LackingServer, ProcessStatus, RedundancyStatus, tell
from holdfast.screen import Columns
from holdfast.training.live import TimeLeft, TrainingView, describe, describe_step, duration, percent

_PLAIN_SECONDS = 5.0
_QUIET_SECONDS = 1.0
_BAR_WIDTH = 40
_STYLES = {
    "starting": "yellow", "held": "yellow", "recovering": "yellow", "rebuilding": "yellow",
    "failed": "bold red", "done": "dim",
}  # fmt: skip


def build_view(console: Console) -> TrainingView[JobProgress]:
    """A live table on a terminal, plain lines in a pipe or a log."""
    return LiveJobView(console) if console.is_terminal else PlainJobView(console)


class _Left:
    """Estimates the time left from the first batch on, as starting the processes takes extra time."""

    def __init__(self) -> None:
        self._left: TimeLeft | None = None
        self._first = 0.0

    def __call__(self, progress: JobProgress) -> float | None:
        if progress.step == 0:
            return None
        if self._left is None:
            self._left, self._first = TimeLeft(), progress.fraction
            return None
        if self._first >= 1:
            return None
        return self._left((progress.fraction - self._first) / (1 - self._first))


class LiveJobView:
    """A table of all processes above a progress bar with the run's figures; events scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._left = _Left()
        self._started = time.monotonic()
        self._live = Live(Text("starting"), console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, progress: JobProgress) -> None:
        """Redraw the table."""
        for happening in progress.news:
            text = tell(happening)
            if text:
                self._live.console.print(text, highlight=False)
        elapsed = time.monotonic() - self._started
        self._live.update(render(progress, self._left(progress), elapsed))


class PlainJobView:
    """Prints a line for each event, a progress line every few seconds, and one at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._left = _Left()
        self._last = time.monotonic()
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: JobProgress) -> None:
        """Print new events, and a progress line if one is due."""
        for happening in progress.news:
            text = tell(happening)
            if text:
                self._print(text)
        left = self._left(progress)
        now = time.monotonic()
        ended = progress.phase == "stopping" and self._phase != "stopping"
        if progress.phase == "running" and self._phase in ("", "starting"):
            self._print(f"{_count(progress, 'server')} and {_count(progress, 'worker')} are running")
        self._phase = progress.phase
        if progress.step and (now - self._last >= _PLAIN_SECONDS or ended):
            self._last = now
            self._print(f"{percent(progress.fraction):>4}  {_describe(progress, left)}")
            if progress.redundancy is not None and progress.redundancy.state == "degraded":
                self._print(f"      {describe_redundancy(progress.redundancy)}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def render(progress: JobProgress, seconds_left: float | None, elapsed_seconds: float) -> RenderableType:
    """The table and the lines below it; in 80 columns nothing is omitted. Processes of a machine stand
    together, if there are several."""
    many = any(process.machine for process in progress.processes)
    table = Columns(
        (*(("machine",) if many else ()), "process", "state", "speed", "rows held", "memory", "silent for"),
        words=("machine", "process", "state"),
        spare=("memory", "rows held", "silent for"),
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="dim",
    )  # fmt: skip
    redundancy = progress.redundancy
    lacking = {one.slot: one for one in redundancy.lacking} if redundancy is not None else {}
    before = None
    for process in sorted(progress.processes, key=lambda process: process.machine):
        cells = _cells(process, lacking.get(process.slot) if process.role == "server" else None)
        machine = process.machine if process.machine != before else ""
        table.add_row(*((machine,) if many else ()), *cells)
        before = process.machine
    line = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=progress.fraction, width=_BAR_WIDTH)
    line.add_row(bar, percent(progress.fraction), duration(elapsed_seconds))
    text = _describe(progress, seconds_left) if progress.step else progress.phase
    below: list[RenderableType] = [Text(text), line]
    if redundancy is not None and progress.phase != "starting":
        style = "green" if redundancy.state == "healthy" else "bold yellow"
        below.insert(0, Text(describe_redundancy(redundancy), style))
    return Group(table, Text(), *below)


def _describe(progress: JobProgress, seconds_left: float | None) -> str:
    return f"{describe_step(progress)}  stopping" if progress.stopped else describe(progress, seconds_left)


def describe_redundancy(redundancy: RedundancyStatus) -> str:
    """Describe in one line whether servers may die, or the progress of recovery."""
    if redundancy.state == "healthy":
        return f"redundancy is whole: any {_number(redundancy.tolerates, 'server')} may die"
    what = "; ".join(_describe_lacking(one) for one in redundancy.lacking)
    return f"redundancy is degraded: {what}" if what else "redundancy is degraded"


def _describe_lacking(one: LackingServer) -> str:
    if one.state == "gone":
        return f"server {one.slot} is gone, its replacement is starting"
    what = "rows" if one.state == "recovering" else "parities"
    left = "" if one.seconds_left is None else f", {duration(one.seconds_left)} left"
    return f"server {one.slot} has {one.restored:.0%} of its {what} back{left}"


def _cells(process: ProcessStatus, lacking: LackingServer | None) -> list[str | Text]:
    name = process.role if process.role == "supervisor" else f"{process.role} {process.slot}"
    if process.incarnation > 1:
        name += f" #{process.incarnation}"
    speed, rows = "", ""
    if process.role == "worker":
        speed = f"{process.samples_per_second:,.0f} samples/s"
    elif process.role == "server":
        speed, rows = f"{process.pushes_per_second:,.0f} pushes/s", f"{process.rows:,}"
    state, detail = process.state, ""
    if lacking is not None and lacking.state != "gone":
        state, detail = lacking.state, f" {lacking.restored:.0%}"
    quiet = process.silent_seconds >= _QUIET_SECONDS
    return [
        name,
        Text(state + detail, _STYLES.get(state, "green")),
        speed,
        rows,
        decimal(process.memory_bytes) if process.memory_bytes else "",
        Text(f"{process.silent_seconds:.0f} s" if quiet else "", "red"),
    ]


def _count(progress: JobProgress, role: str) -> str:
    return _number(sum(process.role == role for process in progress.processes), role)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")
