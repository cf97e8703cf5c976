"""The progress display of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from holdfast.training.trainer import Progress as TrainingProgress

_PLAIN_SECONDS = 5.0
_WIDE = 110


_Shown_contra = TypeVar("_Shown_contra", contravariant=True)


class TrainingView(Protocol[_Shown_contra]):
    """Shows the progress of a run or a job. A context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, progress: _Shown_contra) -> None:
        """Show the progress."""


def build_view(console: Console) -> TrainingView[TrainingProgress]:
    """The live view on a terminal, plain lines in a pipe or a log."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def progress_line(console: Console) -> Progress:
    """A bar with figures beside it; where it is narrow, without the bar, and the figures in several lines."""
    bar = (BarColumn(bar_width=24),) if console.width >= _WIDE else ()
    text = TextColumn("{task.description}", table_column=Column(overflow="fold"))
    return Progress(*bar, _Percent(), text, TimeElapsedColumn(), console=console)


class _Percent(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{percent(task.completed / (task.total or 1.0)):>4}", "progress.percentage")


def percent(fraction: float) -> str:
    """Format a share, such as "42%"; "100%" only when everything is done."""
    return f"{int(100 * fraction)}%"


def describe(progress: TrainingProgress, seconds_left: float | None) -> str:
    """Loss, test AUC, samples/s and time left in one line."""
    left = "–" if seconds_left is None else duration(seconds_left)
    return f"{describe_step(progress)}  {left} left"


def describe_step(progress: TrainingProgress) -> str:
    """The same without the time left."""
    auc = "–" if progress.test is None else f"{progress.test.auc:.4f}"
    return (
        f"step {progress.step:,}  loss {progress.loss:.4f}  test AUC {auc}  "
        f"{progress.samples_per_second:,.0f} samples/s"
    )


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TimeLeft:
    """Extrapolates from the share that is done, tests included: they come at a steady rate."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, fraction: float) -> float | None:
        """Estimated seconds left, given the share done; None if it is 0."""
        if fraction <= 0:
            return None
        return (time.monotonic() - self._started) * (1 - fraction) / fraction


class LiveView:
    """A progress bar with the figures beside it."""

    def __init__(self, console: Console) -> None:
        self._left = TimeLeft()
        self._bar = progress_line(console)
        self._task = self._bar.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: TrainingProgress) -> None:
        """Redraw the bar."""
        text = describe(progress, self._left(progress.fraction))
        self._bar.update(self._task, completed=progress.fraction, description=text)


class PlainView:
    """A line every few seconds, and one at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._left = TimeLeft()
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: TrainingProgress) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        if now - self._last >= _PLAIN_SECONDS or progress.fraction >= 1:
            self._last = now
            text = describe(progress, self._left(progress.fraction))
            self._console.print(f"{percent(progress.fraction):>4}  {text}", highlight=False)
