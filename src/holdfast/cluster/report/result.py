"""How a job ended, for people: its result, and which of its checkpoints could not be saved."""

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
"""In short, by kind."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job ends with."""

    steps: int
    """Batches that were trained on, each once."""
    samples: int
    train_seconds: float
    """From when workers began to the end of the last step, with the tests between."""
    samples_per_second: float
    test: Evaluation
    """The last one."""
    tests: tuple[Evaluation, ...]
    workers_replaced: int
    """Workers that died and were replaced."""
    bad_lines: int
    """Lines of the data that were skipped; those that a worker skipped before it was replaced are missing."""
    kills_missed: tuple[Kill, ...]
    """Kills that were asked for and did not happen, as the job had ended by then."""
    records: str
    """A checksum over all servers' records: equal for equal jobs; "" if a server did not tell it in time."""
    folder: Path
    """The run's: its configuration, events and logs."""
    interrupted: bool
    """Whether it ended before its time."""
    signal: int | None = None
    """The signal that ended it then."""
    versions: tuple[int, ...] = ()
    """Checkpoints that were saved."""
    save_failures: tuple[SaveFailure, ...] = ()
    """Why others could not be, and how many: the job went on without them."""
    unsaved: bool = False
    """Whether the last one that was to be saved, at the end or before, was not."""
    last_checkpoint: int | None = None
    """The version that the job can go on from, this run's or an earlier one's; None: there is none."""
    unsaved_steps: int = 0
    """Batches that are not in it; all of them if there is none."""
    losses: tuple[str, ...] = ()
    """What was lost each time that more servers died than the code covers, and the job went back to its last
    checkpoint."""

    failures: tuple[ServerFailure, ...] = ()
    """Each server that died, and how the job came back."""
    speeds: Speeds | None = None
    """Samples per second before, between and after; None if no server died."""
    pls: float = 0.0
    """The portion of lost samples of partial recovery: samples since the last save times the server's share
    of the rows, summed over all servers that died, of all samples."""
    parities_checked: int = 0
    """How often a parity was compared with its rows (``scrub_seconds``), by servers that lived to the end."""
    parities_wrong: int = 0
    """How often they did not agree."""
    messages_dropped: int = 0
    """Messages that came to processes which lived to the end, and did not count: damaged, malformed, or not
    from who may send them."""

    @property
    def auc(self) -> float:
        """On the test part, at the end."""
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
    """Adds up what supervisors report, one after the other; each begins at nothing.

    Attributes:
        unsaved: whether the last version that was to be saved was not.
    """

    def __init__(self) -> None:
        self.unsaved = False
        self._before: tuple[SaveFailure, ...] = ()
        self._now: tuple[SaveFailure, ...] = ()
        self._newest = 0

    def __call__(self) -> tuple[SaveFailure, ...]:
        """Those so far."""
        return _sum((*self._before, *self._now))

    def note(self, status: Status) -> None:
        """Take the next report."""
        told = status.save_failures
        if count(told) < count(self._now):
            self._before, self._now = self(), ()
        if count(told) > count(self._now) or status.last_version > self._newest:
            self.unsaved = status.unsaved
        self._now, self._newest = told, status.last_version

    def end(self) -> None:
        """The job begins again from a checkpoint."""
        self._before, self._now = self(), ()


def count(failures: Iterable[SaveFailure]) -> int:
    """Versions that were not saved."""
    return sum(failure.count for failure in failures)


def in_short(failures: Iterable[SaveFailure]) -> str:
    """Why, without what to do about it: that was said when it happened."""
    return "; ".join(dict.fromkeys(REASONS.get(one.kind, one.why) for one in failures))


def describe_lack(result: JobResult) -> str:
    """What is to be said of a job whose last checkpoint could not be saved."""
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
