"""The result of a job, and a ledger of the checkpoints that could not be saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Evaluation, SaveFailure, Status
from holdfast.cluster.report.failures import ServerFailure, Speeds
from holdfast.options import Kill

REASONS = {
    "full": "no space left",
    "locked": "another writer has the store",
    "denied": "no permission",
    "unreachable": "the store cannot be reached",
}
"""Short descriptions, by ``SaveFailure.kind``."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of ``Job.run``."""

    steps: int
    """Batches trained on; each counts once."""
    samples: int
    train_seconds: float
    """From the workers' start to the end of the last step, including tests in between."""
    samples_per_second: float
    test: Evaluation
    """The last test."""
    tests: tuple[Evaluation, ...]
    workers_replaced: int
    """Workers that died and were replaced."""
    bad_lines: int
    """Lines of the data that were skipped, without those that a worker skipped before it was replaced."""
    kills_missed: tuple[Kill, ...]
    """Requested kills that did not happen because the job had ended."""
    records: str
    """A checksum of all servers' records, equal for equal jobs; "" if a server did not report one in time."""
    folder: Path
    """The run's folder: its configuration, events and logs."""
    interrupted: bool
    """Whether the job was stopped early."""
    signal: int | None = None
    """The signal that stopped it early."""
    versions: tuple[int, ...] = ()
    """Checkpoints saved."""
    save_failures: tuple[SaveFailure, ...] = ()
    """Why other checkpoints could not be saved, with counts; the job continued without them."""
    unsaved: bool = False
    """Whether the last checkpoint that was due, at the end or before, could not be saved."""
    last_checkpoint: int | None = None
    """The version to resume from, saved by this run or an earlier one; None if there is none."""
    unsaved_steps: int = 0
    """Steps that it does not contain; all of them if there is none."""
    losses: tuple[str, ...] = ()
    """A description of each data loss after which the job restarted from its last checkpoint."""

    failures: tuple[ServerFailure, ...] = ()
    """Each server that died, and how it was recovered."""
    speeds: Speeds | None = None
    """Samples per second before, during and after degraded redundancy; None if no server died."""
    pls: float = 0.0
    """The portion of lost samples with partial recovery: samples since the last save times the server's share
    of the rows, summed over all servers that died, divided by all samples."""
    parities_checked: int = 0
    """Comparisons of a parity with its rows (``scrub_seconds``), by servers that lived to the end."""
    parities_wrong: int = 0
    """How many of these did not match."""
    messages_dropped: int = 0
    """Messages dropped by processes that lived to the end: damaged, malformed, or from a sender that may not
    send them."""

    @property
    def auc(self) -> float:
        """AUC of the last test."""
        return self.test.auc

    @property
    def checkpoints_failed(self) -> int:
        """Checkpoints that could not be saved."""
        return count(self.save_failures)

    @property
    def servers_replaced(self) -> int:
        """Servers that died and were replaced."""
        return sum(failure.started_seconds is not None for failure in self.failures)


class SaveLedger:
    """Adds up the failed saves that successive supervisors report; each of them starts counting at zero.

    Attributes:
        unsaved: whether the last version that was due could not be saved.
    """

    def __init__(self) -> None:
        self.unsaved = False
        self._before: tuple[SaveFailure, ...] = ()
        self._now: tuple[SaveFailure, ...] = ()
        self._newest = 0

    def __call__(self) -> tuple[SaveFailure, ...]:
        """The failures so far, with counts."""
        return _sum((*self._before, *self._now))

    def note(self, status: Status) -> None:
        """Process the next report."""
        told = status.save_failures
        if count(told) < count(self._now):
            self._before, self._now = self(), ()
        if count(told) > count(self._now) or status.last_version > self._newest:
            self.unsaved = status.unsaved
        self._now, self._newest = told, status.last_version

    def end(self) -> None:
        """Finish a run: the job restarts from a checkpoint, with a new supervisor."""
        self._before, self._now = self(), ()


def count(failures: Iterable[SaveFailure]) -> int:
    """The number of versions that were not saved."""
    return sum(failure.count for failure in failures)


def in_short(failures: Iterable[SaveFailure]) -> str:
    """The reasons, without remedies: those were printed when the failures happened."""
    return "; ".join(dict.fromkeys(REASONS.get(one.kind, one.why) for one in failures))


def describe_lack(result: JobResult) -> str:
    """Describe the state of a job whose last checkpoint could not be saved."""
    failed, saved = result.checkpoints_failed, len(result.versions)
    if saved:
        what = f"{failed:,} of {failed + saved:,} checkpoints failed, the last among them"
    else:
        what = "the only checkpoint failed" if failed == 1 else f"all {failed:,} checkpoints failed"
    rest = ", and there is no checkpoint to resume from" if result.last_checkpoint is None else ""
    why = in_short(result.save_failures)
    return f"{what} ({why}): the state after step {result.steps:,} is not saved{rest}"


def _sum(failures: Iterable[SaveFailure]) -> tuple[SaveFailure, ...]:
    found: dict[str, SaveFailure] = {}
    for failure in failures:
        known = found.get(failure.why)
        found[failure.why] = failure if known is None else replace(known, count=known.count + failure.count)
    return tuple(found.values())
