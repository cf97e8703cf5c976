"""What a person sees while a run goes on: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from holdfast.training.trainer import Progress as TrainingProgress

_PLAIN_SECONDS = 5.0


_Shown_contra = TypeVar("_Shown_contra", contravariant=True)


class View(Protocol[_Shown_contra]):
    """Shows the progress of a run or a job; a context manager round it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, progress: _Shown_contra) -> None:
        """Show where it stands."""


def build_view(console: Console) -> View[TrainingProgress]:
    """The live view on a terminal, plain lines in a pipe or a log."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def describe(progress: TrainingProgress, seconds_left: float | None) -> str:
    """Loss, test AUC, samples/s and time left in one line."""
    auc = "–" if progress.test is None else f"{progress.test.auc:.4f}"
    left = "–" if seconds_left is None else duration(seconds_left)
    return (
        f"step {progress.step:,}  loss {progress.loss:.4f}  test AUC {auc}  "
        f"{progress.samples_per_second:,.0f} samples/s  {left} left"
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
        """Seconds, now that this share is done; None before anything is."""
        if fraction <= 0:
            return None
        return (time.monotonic() - self._started) * (1 - fraction) / fraction


class LiveView:
    """A progress bar with the figures beside it."""

    def __init__(self, console: Console) -> None:
        self._left = TimeLeft()
        self._bar = Progress(
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
        )
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
            self._console.print(f"{progress.fraction:4.0%}  {text}", highlight=False)
