"""Checkpoints of a job that could not be saved: each cause once, with how often it came."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.checkpoint.manifest import DATA_FOLDERS
from holdfast.cluster.protocol.messages import SaveFailure, Status
from holdfast.errors import StoreFull, StoreLocked, StoreUnreachable

if TYPE_CHECKING:
    from holdfast.cluster.runtime.runner import JobResult

log = logging.getLogger("holdfast.job")

_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_FILE = re.compile(rf"'(?:{'|'.join([*DATA_FOLDERS, 'manifests/'])})[^']*'")
REASONS = {
    "full": "no space left",
    "locked": "another writer has the store",
    "denied": "no permission",
    "unreachable": "the store cannot be reached",
}
"""In short, by kind."""


def kind_of(error: BaseException | None) -> str:
    """Which of ``REASONS`` an error is; "" if none."""
    kinds = {StoreFull: "full", StoreLocked: "locked", StoreUnreachable: "unreachable"}
    for kind, name in kinds.items():
        if isinstance(error, kind):
            return name
    cause = error if error is None or isinstance(error, OSError) else error.__cause__
    return "denied" if isinstance(cause, OSError) and cause.errno in _NO_PERMISSION else ""


def cause_of(message: str) -> str:
    """An error's message without the name of the file, which is another one each time."""
    return _FILE.sub("a file", message)


class SaveFailures:
    """Counts them, in the order in which their causes first came.

    Attributes:
        unsaved: whether the last version that was to be saved was not.
    """

    def __init__(self) -> None:
        self.unsaved = False
        self._found: dict[str, SaveFailure] = {}
        self._last = ""

    def __call__(self) -> tuple[SaveFailure, ...]:
        """Those so far."""
        return tuple(self._found.values())

    def note(self, why: str, kind: str) -> bool:
        """A version was not saved; whether why is news."""
        before = self._found.get(why, SaveFailure(why, kind))
        self._found[why] = replace(before, count=before.count + 1)
        self.unsaved = True
        return self.is_news(why)

    def is_news(self, why: str) -> bool:
        """Whether this was not the last that was said, since a version was saved; from now on it is."""
        news, self._last = self._last != why, why
        return news

    def note_saved(self) -> None:
        """A version was saved."""
        self._last, self.unsaved = "", False


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
