"""Moving the records of an era about behind the trainer's back, so that restores find less in their way.

One module for each layout of ``Chunked``: ``rearrange_rounds`` and ``rearrange_two_d``. It knows files; what
goes where is decided by its pure part, ``rounds`` and ``two_d``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.checkpoint.format.manifest import Era
from holdfast.checkpoint.layout.bundles import ShardChange
from holdfast.checkpoint.store import Store


class Rearranger(Protocol):
    """Keeps the files of one shard arranged; called by ``Shard`` only.

    1. ``begin`` at every baseline, or ``resume`` for an era that another process wrote.
    2. ``note_written`` for every change that a durable manifest holds, its own ones included.
    3. ``tidy`` after a version was committed and noted. What it returns may fail to be committed: until it
       is noted, nothing has changed.
    """

    def begin(self, base: int) -> None:
        """A baseline has been written: what was known of the era before is of no use."""

    def resume(self, store: Store, era: Era) -> None:
        """Take up an era as if this process had written it."""

    def note_written(self, change: ShardChange) -> None:
        """A change is part of the store."""

    def tidy(self, store: Store, version: int, kept_versions: Sequence[int]) -> ShardChange | None:
        """Write rearranged files; None if there is nothing to do.

        ``kept_versions`` are those that must stay restorable, ascending, this one included.
        """

    def live_bytes(self) -> int:
        """Bytes beyond the baseline that a restore of the newest version reads."""
