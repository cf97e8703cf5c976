"""A job started from the command line: its live view and its summary."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast.cluster.job import Job, find_job, list_jobs
from holdfast.cluster.report.failures import ServerFailure, Speeds
from holdfast.cluster.report.live import build_view
from holdfast.cluster.report.progress import JobProgress, compared
from holdfast.cluster.report.result import JobResult, describe_lack, in_short
from holdfast.cluster.saving.failures import log as unsaved_log
from holdfast.options import Ray
from holdfast.screen import say, say_error
from holdfast.stopping import Notice, Stopped
from holdfast.training.config import Config, to_yaml
from holdfast.training.live import duration
from holdfast.training.plots import PLOT_FILE
from holdfast.training.session import free_folder


def run(config: Config, console: Console, notice: Notice) -> JobResult:
    """Run the configured job, with a live view on the console.

    Raises ``Stopped`` if a signal ends it at once.
    """
    unsaved_log.addHandler(logging.NullHandler())  # printed below instead
    job = Job.from_config(config)
    last: JobProgress | None = None

    def show(progress: JobProgress) -> None:
        nonlocal last
        last = progress
        notice.then = "" if progress.phase == "starting" else _then(config)
        view.update(progress)

    try:
        with build_view(console) as view:
            result = job.run(show)
        _tell(job, result, console)
    except KeyboardInterrupt:
        at = 0 if last is None else last.step
        version, saved = (None, 0) if last is None else (last.last_checkpoint, last.saved_steps)
        how = "at once" if notice.then else "before training began"
        raise Stopped(f"stopped {how}", *resuming(job, version, saved, at - saved, config.job.kill)) from None
    return result


def attach(name: str, address: str, run: str | None, console: Console, notice: Notice) -> JobResult:
    """Watch a job on a cluster, with a live view on the console.

    Raises ``Stopped`` on Ctrl-C, which the job does not notice.
    """
    found, remote = find_job(Ray(address=address), name)
    job = Job.from_config(msgspec.structs.replace(found.config, run=run))
    notice.then = "the job goes on"
    try:
        with build_view(console) as view:
            result = job.attach(remote, view.update)
    except KeyboardInterrupt:
        raise Stopped("no longer watching", f"the job goes on: holdfast attach {name}") from None
    _tell(job, result, console)
    return result


def stop(name: str, address: str) -> str:
    """Stop a job on a cluster in an orderly way; one that has ended is removed. What was done, for people."""
    _, remote = find_job(Ray(address=address), name)
    if remote.state() == "running":
        remote.stop()
        return f"{name} is stopping: workers finish their batch, then it tests and saves"
    remote.kill()
    return f"{name} had ended, and is removed"


def jobs(address: str) -> dict[str, str]:
    """The state of each job on a cluster, by name."""
    return {name: remote.state() for name, remote in list_jobs(Ray(address=address)).items()}


def _tell(job: Job, result: JobResult, console: Console) -> None:
    say(console, *summary(result))
    if result.unsaved:
        say_error(describe_lack(result))
    if result.interrupted or (result.unsaved and result.last_checkpoint is not None):
        kills, saved = [str(kill) for kill in result.kills_missed], result.steps - result.unsaved_steps
        say(console, *resuming(job, result.last_checkpoint, saved, result.unsaved_steps, kills))


def _then(config: Config) -> str:
    saved = config.checkpoint is not None and config.checkpoint.save_last
    return f"finishing batches, testing{', saving' if saved else ''}; Ctrl-C again ends at once"


def resuming(
    job: Job, version: int | None, saved_steps: int, unsaved_steps: int, kills: Sequence[str]
) -> list[str]:
    """Explain how to resume from a version, and what it lacks; the last line is the command."""
    config = job.config
    if version is None:
        cure = (
            "" if config.checkpoint is not None else ": set checkpoint.path, so that the job can be resumed"
        )
        return [f"nothing was saved{cure}"]
    if unsaved_steps > 0:
        lost = "step is" if unsaved_steps == 1 else f"{unsaved_steps:,} steps are"
        said = f"the last {lost} not saved; resume from step {saved_steps:,} (version {version:,}) with:"
    else:
        said = f"saved up to step {saved_steps:,} (version {version:,}); resume with:"
    secret = (
        ["config.yaml has *** in place of passwords: insert them first"] if "***" in to_yaml(config) else []
    )
    return [*secret, said, resume_command(config, job.folder, kills)]


def resume_command(config: Config, folder: Path | None, kills: Sequence[str]) -> str:
    """The command that resumes a run in another folder; it repeats only kills that have not happened."""
    assert folder is not None
    here = Path(sys.argv[0]).name == "holdfast"
    words = ["holdfast"] if here else [sys.executable, "-m", "holdfast"]
    words += ["train", str(folder / "config.yaml")]
    if config.run is not None:
        words += ["--run", str(free_folder(folder))]
    if tuple(kills) != config.job.kill:
        words += ["--set", f"job.kill={json.dumps(list(kills))}"]
    return shlex.join(words)


def summary(result: JobResult) -> list[str]:
    """The lines printed at the end of a job."""
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
        f"data was lost, and the job restarted from its last checkpoint: {loss}" for loss in result.losses
    ]
    if result.versions:
        saved = _times(len(result.versions), "checkpoint")
        lines.append(f"{saved} saved, the last as version {result.versions[-1]:,}")
    if result.save_failures and not result.unsaved:
        failed = _times(result.checkpoints_failed, "checkpoint")
        lines.append(f"{failed} not saved ({in_short(result.save_failures)}); later ones were")
    lines += [f"kill {kill} did not happen: the job had ended" for kill in result.kills_missed]
    if result.bad_lines:
        lines.append(f"{_times(result.bad_lines, 'bad line')} skipped: the workers' logs name the first")
    if result.parities_checked:
        agree = f"{result.parities_wrong:,} did not match" if result.parities_wrong else "all matched"
        lines.append(f"{result.parities_checked:,} checks of a parity against its rows: {agree}")
    if (result.folder / PLOT_FILE).exists():
        lines.append(f"throughput over time: {result.folder / PLOT_FILE}")
    lines.append(f"run log: {result.folder / 'events.jsonl'}, logs: {result.folder / 'logs'}")
    return lines


def _failure(failure: ServerFailure) -> list[str]:
    """How the job recovered from the death of a server."""
    later = [
        f"{what} after {seconds:.1f} s"
        for what, seconds in (
            ("training resumed", failure.resumed_seconds),
            ("redundancy was restored", failure.whole_seconds),
        )
        if seconds is not None
    ]
    how = f": {', '.join(later)}" if later else ""
    lines = [f"server {failure.slot} {failure.reason} at step {failure.step:,}{how}"]
    if failure.recovered_seconds is not None and (failure.rows or failure.version is None):
        recovered = f"recovered {failure.rows:,} rows in {failure.recovered_seconds:.1f} s"
        lines.append(recovered + compared(failure.rows, failure.compared, failure.unequal))
    if failure.version is not None:
        to = f"version {failure.version:,}" if failure.version else "their initial values"
        what = failure.what or f"its {failure.went_back:,} rows"
        lines.append(f"{what} went back to {to}: updates from {failure.samples_lost:,} samples are lost")
    return lines


def _speeds(speeds: Speeds) -> str:
    names = {"before": speeds.before, "while redundancy was degraded": speeds.degraded, "after": speeds.after}
    shown = [f"{value:,.0f} {name}" for name, value in names.items() if value is not None]
    return f"samples/s: {', '.join(shown)}"


def _times(count: int, what: str) -> str:
    return f"{count:,} {what} was" if count == 1 else f"{count:,} {what}s were"
