"""Checkpoints of a job that could not be saved: each cause once, with how often it came."""

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
