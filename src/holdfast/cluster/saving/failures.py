"""Checkpoints of a job that could not be saved: each cause once, with a count."""

from __future__ import annotations

import errno
import logging
import re

from msgspec.structs import replace

from holdfast.checkpoint.format.manifest import DATA_FOLDERS
from holdfast.cluster.protocol.messages import SaveFailure
from holdfast.errors import StoreFull, StoreLocked, StoreUnreachable

log = logging.getLogger("holdfast.job")

_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_FILE = re.compile(rf"'(?:{'|'.join([*DATA_FOLDERS, 'manifests/'])})[^']*'")


def kind_of(error: BaseException | None) -> str:
    """The key of ``REASONS`` for an error; "" if there is none."""
    kinds = {StoreFull: "full", StoreLocked: "locked", StoreUnreachable: "unreachable"}
    for kind, name in kinds.items():
        if isinstance(error, kind):
            return name
    cause = error if error is None or isinstance(error, OSError) else error.__cause__
    return "denied" if isinstance(cause, OSError) and cause.errno in _NO_PERMISSION else ""


def cause_of(message: str) -> str:
    """An error message without the name of the file, which differs each time."""
    return _FILE.sub("a file", message)


class SaveFailures:
    """Counts failed saves by cause, in the order in which causes first occurred.

    Attributes:
        unsaved: whether the last version that was due could not be saved.
    """

    def __init__(self) -> None:
        self.unsaved = False
        self._found: dict[str, SaveFailure] = {}
        self._last = ""

    def __call__(self) -> tuple[SaveFailure, ...]:
        """The failures so far."""
        return tuple(self._found.values())

    def note(self, why: str, kind: str) -> bool:
        """Note that a version was not saved. Returns whether the cause is news."""
        before = self._found.get(why, SaveFailure(why, kind))
        self._found[why] = replace(before, count=before.count + 1)
        self.unsaved = True
        return self.is_news(why)

    def is_news(self, why: str) -> bool:
        """Whether this cause differs from the last one noted since a version was saved; notes it."""
        news, self._last = self._last != why, why
        return news

    def note_saved(self) -> None:
        """Note that a version was saved."""
        self._last, self.unsaved = "", False
