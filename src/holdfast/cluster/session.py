"""A job as a user of the command starts it: its view and its summary."""

from __future__ import annotations

from rich.console import Console

from holdfast.cluster.api import Job
from holdfast.cluster.failures import ServerFailure, Speeds
from holdfast.cluster.job import JobResult
from holdfast.cluster.progress import compared
from holdfast.cluster.view import build_view
from holdfast.training.config import Config
from holdfast.training.plots import PLOT_FILE
from holdfast.training.view import duration


def run(config: Config, console: Console) -> JobResult:
    """Run the job that the configuration describes, with a view on the console."""
    with build_view(console) as view:
        result = Job.from_config(config).run(view.update)
    for line in summary(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return result


def summary(result: JobResult) -> list[str]:
    """What the user reads at the end."""
    how = "interrupted" if result.interrupted else "finished"
    test = result.test
    lines = [
        f"{how} after {result.steps:,} steps, {result.samples:,} samples, "
        f"{duration(result.train_seconds)} of training",
        f"test AUC {test.auc:.4f}   log loss {test.log_loss:.4f}   ({test.samples:,} samples)",
        f"{result.samples_per_second:,.0f} samples/s",
    ]
    if result.workers_replaced:
        lines.append(f"{_times(result.workers_replaced, 'worker')} replaced; every batch counted once")
    for failure in result.failures:
        lines += _failure(failure)
    if result.pls:
        lines.append(f"portion of lost samples (PLS): {result.pls:.4f}")
    if result.speeds is not None:
        lines.append(_speeds(result.speeds))
    lines += [
        f"data was lost, and the job went back to its last checkpoint: {loss}" for loss in result.losses
    ]
    if result.versions:
        saved = _times(len(result.versions), "checkpoint")
        lines.append(f"{saved} saved, the last as version {result.versions[-1]:,}")
    lines += [f"a checkpoint could not be saved: {error}" for error in result.save_errors]
    lines += [f"kill {kill} did not happen: the job had ended" for kill in result.kills_missed]
    if result.bad_lines:
        lines.append(f"{_times(result.bad_lines, 'bad line')} skipped: the workers' logs name the first")
    if result.parities_checked:
        agree = f"{result.parities_wrong:,} did not agree" if result.parities_wrong else "all agreed"
        lines.append(f"{result.parities_checked:,} times a parity was checked against its rows: {agree}")
    if (result.folder / PLOT_FILE).exists():
        lines.append(f"throughput over time: {result.folder / PLOT_FILE}")
    lines.append(f"figures: {result.folder / 'events.jsonl'}, logs: {result.folder / 'logs'}")
    return lines


def _failure(failure: ServerFailure) -> list[str]:
    """How the job came back from it."""
    later = [
        f"{what} after {seconds:.1f} s"
        for what, seconds in (
            ("training went on", failure.resumed_seconds),
            ("redundancy was whole again", failure.whole_seconds),
        )
        if seconds is not None
    ]
    how = f": {', '.join(later)}" if later else ""
    lines = [f"server {failure.slot} {failure.reason} at step {failure.step:,}{how}"]
    if failure.recovered_seconds is not None and (failure.rows or failure.version is None):
        recovered = f"recovered {failure.rows:,} rows in {failure.recovered_seconds:.1f} s"
        lines.append(recovered + compared(failure.rows, failure.compared, failure.unequal))
    if failure.version is not None:
        to = f"version {failure.version:,}" if failure.version else "their first values"
        what = failure.what or f"its {failure.went_back:,} rows"
        lines.append(
            f"{what} went back to {to}: what {failure.samples_lost:,} samples had taught them is lost"
        )
    return lines


def _speeds(speeds: Speeds) -> str:
    names = {"before": speeds.before, "while redundancy was lacking": speeds.degraded, "after": speeds.after}
    shown = [f"{value:,.0f} {name}" for name, value in names.items() if value is not None]
    return f"samples/s: {', '.join(shown)}"


def _times(count: int, what: str) -> str:
    return f"{count:,} {what} was" if count == 1 else f"{count:,} {what}s were"
