"""A job as a user of the command starts it: its view and its summary."""

from __future__ import annotations

from rich.console import Console

from holdfast.cluster.api import Job
from holdfast.cluster.job import JobResult
from holdfast.cluster.view import build_view
from holdfast.training.config import Config
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
    if result.versions:
        saved = _times(len(result.versions), "checkpoint")
        lines.append(f"{saved} saved, the last as version {result.versions[-1]:,}")
    lines += [f"a checkpoint could not be saved: {error}" for error in result.save_errors]
    lines += [f"kill {kill} did not happen: the job had ended" for kill in result.kills_missed]
    if result.bad_lines:
        lines.append(f"{_times(result.bad_lines, 'bad line')} skipped: the workers' logs name the first")
    lines.append(f"figures: {result.folder / 'events.jsonl'}, logs: {result.folder / 'logs'}")
    return lines


def _times(count: int, what: str) -> str:
    return f"{count:,} {what} was" if count == 1 else f"{count:,} {what}s were"
