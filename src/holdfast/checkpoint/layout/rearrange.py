"""Rearrange the records of an era in the background, so that restores read less.

One module for each layout of ``Chunked``: ``rearrange_rounds`` and ``rearrange_two_d``. It knows files; what
goes where is decided by its pure part, ``rounds`` and ``two_d``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.checkpoint.format.manifest import Era
from holdfast.checkpoint.layout.bundles import StoreChange
from holdfast.checkpoint.store import Store


class Rearranger(Protocol):
    """Keeps the files of one shard arranged; called by ``Shard`` only.

    1. ``begin`` at every baseline, or ``resume`` for an era that another process wrote.
    2. ``note_written`` for every change that a durable manifest holds, its own ones included.
    3. ``tidy`` after a version was committed and noted. What it returns may fail to be committed: until it
       is noted, nothing has changed.
    """

    def begin(self, base: int) -> None:
        """Start an era: a baseline has been written."""

    def resume(self, store: Store, era: Era) -> None:
        """Continue an era that another process wrote."""

    def note_written(self, change: StoreChange) -> None:
        """Record a change that a durable manifest contains."""

    def tidy(self, store: Store, version: int, kept_versions: Sequence[int]) -> StoreChange | None:
        """Write rearranged files; None if there is nothing to do.

        ``kept_versions`` are those that must stay restorable, ascending, this one included.
        """

    def live_bytes(self) -> int:
        """Bytes beyond the baseline that a restore of the newest version reads."""
