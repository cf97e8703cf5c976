"""Rows that changed without the tracker noticing: finding them, and the versions that may lack them.

Digests of rows tell (``memory/digests.py``), and so does whoever announces a change too late. Such rows are
marked, so that the next version has them. Versions that may lack them are flagged as unverified in the next
manifest. A version whose rows are read while training goes on (``memory/copy_on_write.py``) may also have
*too much*: a row that changed unannounced before it was read. It is void, or flagged if it exists.

The writing thread calls what ``on_read`` returns, and the methods from ``begin_writing`` on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.records import Group, Rows, SampledRows
from holdfast.checkpoint.memory.copy_on_write import CopyOnWrite, OnRead
from holdfast.checkpoint.memory.digests import RowDigests, UnseenChange
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.memory.tracker import FindChanged, Tracker
from holdfast.errors import SaveVoid
from holdfast.events import EventLog
from holdfast.options import Full, Policy

log = logging.getLogger("holdfast.checkpoint")

UNSEEN_ADVICE = (
    "something wrote to them without PyTorch's version counter (weight.data, NumPy, an extension) or with an "
    "optimizer that the Checkpointer does not have: call Checkpointer.mark() after such writes"
)


class UnseenChanges:
    """What is known of rows that changed unseen.

    Args:
        policy: whether rows have digests.
        events: the log that gets every finding.
    """

    def __init__(self, policy: Policy, events: EventLog) -> None:
        self._keeps_digests = policy.verify != 0 and not isinstance(policy.strategy, Full)
        self._events = events
        self._tables = LiveTables((), lambda table: ())
        self._tracker = Tracker(())
        self._digests: RowDigests | None = None
        self.digests_known = False
        """Whether digests tell how rows were when they were last saved."""
        self.unverified: dict[int, str] = {}
        """Versions for the next manifest to flag, and why."""
        self.announced_late: set[str] = set()
        """Tables whose rows have changed unannounced while a baseline was written, or may do so."""
        self._flagged: set[int] = set()
        self._in_baseline: dict[str, int] = {}
        """How many rows of tables were found to have changed unseen when a baseline read them."""

    def bind(self, tables: LiveTables, tracker: Tracker) -> None:
        """Set the tables, and what tracks them. The digests of other groups are unknown."""
        if tables.groups != self._tables.groups:
            self._digests = RowDigests(tables.groups) if self._keeps_digests else None
            self.digests_known = False
        self._tables, self._tracker = tables, tracker

    def begin_restore(self, groups: Sequence[Group]) -> RowDigests | None:
        """All rows are about to be replaced by those of a version with these groups: where to note their
        digests, if they are wanted."""
        self.digests_known = False
        if not self._keeps_digests:
            return None
        known = self._digests
        return known if known is not None and known.groups == tuple(groups) else RowDigests(groups)

    def note_restored(self, digests: RowDigests | None, version: int) -> None:
        """All rows in memory are as in this version, and these are their digests."""
        if digests is not None and digests.groups == self._tables.groups:
            digests.verified(None, version)
            self._digests, self.digests_known = digests, True

    # Looking for them

    def check(self, names: Collection[str], version: int, last_version: int) -> list[UnseenChange]:
        """Compare the unmarked rows of these tables with their digests, and mark those that differ.

        ``version`` is the last one that contains all rows as they are now, except for marked ones.
        """
        if self._digests is None or not self.digests_known:
            return []
        checks = [self._digests.check_table(self._tables, name, self._tracker, version) for name in names]
        return self._note([change for change in checks if change is not None], last_version)

    def check_some(
        self, seconds: float, may_check: Callable[[str], bool], last_version: int
    ) -> list[UnseenChange]:
        """The same for some rows, for about ``seconds``; continues where the last call ended."""
        if self._digests is None or not self.digests_known:
            return []
        found = self._digests.check_some(self._tables, self._tracker, last_version, seconds, may_check)
        return self._note(found, last_version)

    def find_changed(self, baseline: bool) -> FindChanged | None:
        """Finds the changed rows of tables in which any row may have changed."""
        if baseline:
            return lambda group, begin, end, marked: 0  # a baseline holds all rows anyway
        if self._digests is None:
            return None
        return partial(self._digests.find_changed, self._tables)

    # What others noticed

    def note_missed(self, table: str, why: str, complete: int, last_version: int) -> bool:
        """Versions after ``complete`` may lack changes of a table. False: ``check`` it, to know more."""
        snapshot = self._tracker.snapshot
        if snapshot is not None and complete >= last_version:  # it has missed none before the snapshot
            snapshot.changed_unannounced(table, why)
        if self._digests is not None:
            return False  # they tell which rows, and in which versions
        self._tracker.suspect(table, late=why)
        versions = self._note_unverified(table, complete, last_version, why)
        if versions:
            log.warning("%s: %s: versions %d to %d may lack changes", table, why, versions[0], versions[-1])
            self._events.emit("checkpoint_unseen_change", table=table, rows=None, versions=versions)
        return True

    def _note_unverified(self, table: str, after: int, last_version: int, why: str) -> list[int]:
        """Let the next manifest flag the versions after this one; returns their numbers."""
        missing = range(after + 1, last_version + 1)
        for version in missing:
            self.unverified.setdefault(version, f"{table}: {why}")
        return list(missing)

    def _note(self, changes: list[UnseenChange], last_version: int) -> list[UnseenChange]:
        for change in changes:
            why = f"{change.rows} rows had changed unseen"
            if self._tracker.snapshot is not None:
                self._tracker.snapshot.changed_unannounced(change.table, why)
            versions = self._note_unverified(change.table, change.verified, last_version, why)
            log.warning(
                "%d rows of %s have changed unseen; the next version will contain them, and %s: %s",
                change.rows,
                change.table,
                f"versions {versions[0]} to {versions[-1]} may lack them"
                if versions
                else "no version lacks them",
                UNSEEN_ADVICE,
            )
            self._events.emit(
                "checkpoint_unseen_change", table=change.table, rows=change.rows, versions=versions
            )
        return changes

    # A version while it is written

    def begin_version(self, version: int) -> None:
        """Rows of this version are about to be taken: a suspected table is compared completely."""
        if self._digests is not None:
            self._digests.verified(self._tracker.suspects, version)

    def on_read(self, baseline: bool) -> OnRead:
        """Notes the digests of rows that were read. Of a baseline's rows, those that neither had changed
        since the last version nor have changed since the snapshot must match their digests."""
        digests = self._digests
        if digests is None:
            return lambda group, rows, logged: None
        if not (baseline and self.digests_known):
            return lambda group, rows, logged: digests.note(group, rows)
        changed = self._tracker.taken_rows()
        suspects = self._tracker.taken_suspects()

        def note(group: int, rows: Rows, logged: NDArray[np.bool_]) -> None:
            found = digests.note_unchanged(group, rows, ~logged & ~changed[group].contains(rows.ids))
            for table, count in found.items():
                if table not in suspects:
                    self._in_baseline[table] = self._in_baseline.get(table, 0) + count

        return note

    def note_unannounced(
        self, frozen: CopyOnWrite, version: int, last_version: int, *, is_durable: bool
    ) -> None:
        """Note which rows of a version changed before they were read; flag it if it exists."""
        for table, count in self._in_baseline.items():
            assert self._digests is not None
            self._note([UnseenChange(table, count, self._digests.last_verified(table))], last_version)
        self._in_baseline.clear()
        for table, why in frozen.unannounced.items():
            self.announced_late.add(table)
            if is_durable and version not in self._flagged:
                self._flagged.add(version)
                self.unverified.setdefault(version, f"{table}: {why}")
                log.warning("version %d is unverified: %s: %s", version, table, why)

    def begin_writing(self, copied: Sequence[SampledRows]) -> None:
        """A version is about to be written, of these rows if they were copied."""
        # Before the version is durable: if it fails, these rows are marked again, and marked rows are not
        # compared.
        if self._digests is not None:
            for group, rows in enumerate(copied):
                for part in rows.parts():
                    self._digests.note(group, part)
        self._in_baseline.clear()

    def raise_if_found(self) -> None:
        """Raise SaveVoid if the baseline that has been read contains rows that had changed unseen."""
        if self._in_baseline:
            table, count = next(iter(self._in_baseline.items()))
            raise SaveVoid(f"{count} rows of {table} changed unseen, perhaps while it was written")

    def note_baseline(self, version: int) -> None:
        """Digests match the rows of this baseline."""
        if self._digests is not None:
            self._digests.verified(self._tracker.tables, version)
            self.digests_known = True
