"""A run as a user starts it: its folder, its view, its signals, its summary."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast.errors import ConfigError
from holdfast.events import EventLog
from holdfast.screen import say
from holdfast.stopping import Notice, Stopped, stop_on_signals
from holdfast.training.config import Config, to_yaml
from holdfast.training.live import build_view, duration
from holdfast.training.plots import PLOT_FILE, plot_run, require_matplotlib
from holdfast.training.trainer import Progress, Result, Trainer, refuse_checkpoint

_OF_A_RUN = ("events.jsonl", "job-1")
"""One of them is in every run's folder; the second in those of ``holdfast chaos``."""
NOTHING_SAVED = "nothing was saved: one process makes no checkpoints, jobs do (--servers, checkpoint.path)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, where its figures are, and the signal that stopped it early, if one did."""

    result: Result
    folder: Path
    signal: int | None


def run(config: Config, console: Console, notice: Notice) -> Outcome:
    """Train as configured, with a view on the console and a folder that keeps every figure.

    The first Ctrl-C (or SIGTERM) ends training after the step under way, tests, and returns; a second
    one ends it at once: ``Stopped``.
    """
    refuse_checkpoint(config)
    try:
        return _run(config, console, notice)
    except KeyboardInterrupt:
        how = "at once" if notice.then else "before training began"
        raise Stopped(f"stopped {how}", NOTHING_SAVED) from None


def _run(config: Config, console: Console, notice: Notice) -> Outcome:
    with open_run(config) as (folder, events, board):
        try:
            trainer = Trainer(config, events)
            with stop_on_signals() as received, build_view(console) as view:
                notice.then = "finishing the step, testing; Ctrl-C again ends at once"

                def on_progress(progress: Progress) -> None:
                    view.update(progress)
                    board(progress)

                result = trainer.run(on_progress, lambda: bool(received))
        except BaseException as error:
            events.emit("run_failed", error=type(error).__name__, message=str(error))
            raise
    _print_summary(console, result, folder)
    if received:
        say(console, NOTHING_SAVED)
    return Outcome(result, folder, received[0] if received else None)


@contextlib.contextmanager
def open_run(config: Config) -> Iterator[tuple[Path, EventLog, Callable[[Progress], None]]]:
    """A new run: its folder with the configuration in it, its log, and who writes for TensorBoard.

    At the end its plot is drawn, if one is wanted and nothing was raised.
    """
    if config.plot:
        require_matplotlib()
    folder = make_folder(config.run)
    with _writing_to(folder):
        (folder / "config.yaml").write_text(to_yaml(config))
    with EventLog(folder) as events, _tensorboard(config, folder) as board:
        events.emit("config", **msgspec.to_builtins(config))
        yield folder, events, board
    if config.plot:
        plot_run(folder)


def free_folder(folder: Path) -> Path:
    """One beside it that is not there: FOLDER-2, or the next number."""
    name, dash, number = folder.name.rpartition("-")
    stem, first = (
        (name, int(number) + 1) if dash and len(number) < 4 and number.isdecimal() else (folder.name, 2)
    )
    return next(
        free for n in itertools.count(first) if not (free := folder.with_name(f"{stem}-{n}")).exists()
    )


def make_folder(wanted: str | None) -> Path:
    """The run's folder, made new; one that holds an earlier run is refused."""
    folder = Path(wanted) if wanted else Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    if wanted is None and folder.exists():
        folder = free_folder(folder)
    try:
        if any((folder / name).exists() for name in _OF_A_RUN):
            raise ConfigError(f"{folder} holds an earlier run: name another folder, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the run's folder {folder} cannot be made: {why}") from None
    with _writing_to(folder):
        tempfile.TemporaryFile(dir=folder).close()
    return folder


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's folder {folder} cannot be written to: {error.strerror}; name another with --run"
        ) from None


@contextlib.contextmanager
def _tensorboard(config: Config, folder: Path) -> Iterator[Callable[[Progress], None]]:
    """Writes the same figures for TensorBoard, if asked to."""
    if not config.tensorboard:
        yield lambda progress: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (slow to import, seldom wanted)
    except ImportError:
        raise ConfigError(
            "tensorboard is set but not installed: pip install 'holdfast[tensorboard]'"
        ) from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(progress: Progress) -> None:
        writer.add_scalar("train/loss", progress.loss, progress.step)
        writer.add_scalar("train/samples_per_second", progress.samples_per_second, progress.step)
        if progress.test is not None and progress.test.step == progress.step:
            writer.add_scalar("test/auc", progress.test.auc, progress.step)

    try:
        yield write
    finally:
        writer.close()


def _print_summary(console: Console, result: Result, folder: Path) -> None:
    how = "interrupted" if result.interrupted else "finished"
    lines = [
        f"{how} after {result.steps:,} steps, {result.samples:,} samples, "
        f"{duration(result.train_seconds)} of training",
        f"test AUC {result.test.auc:.4f}   log loss {result.test.log_loss:.4f}   "
        f"({result.test.samples:,} samples)",
        f"{result.samples_per_second:,.0f} samples/s",
    ]
    if result.bad_lines:
        was = "line was" if result.bad_lines == 1 else "lines were"
        lines.append(f"{result.bad_lines:,} bad {was} skipped:")
        lines += [f"  {message}" for message in result.first_bad_lines]
    if (folder / PLOT_FILE).exists():
        lines.append(f"throughput over time: {folder / PLOT_FILE}")
    lines.append(f"run log: {folder / 'events.jsonl'}")
    say(console, *lines)
