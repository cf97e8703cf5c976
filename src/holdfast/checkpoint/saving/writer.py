"""Saving in the background: copy changed rows, return, and write them from another thread.

``Writer.save`` is the main path. In the trainer's thread it decides which rows the version holds and copies
them (the *snapshot*; training waits for nothing else). The background thread writes the files, publishes the
manifest, and then lets the shard rearrange its files; no save waits for that. The rows of a large version are
not copied: the background thread reads them while training goes on (``memory/copy_on_write.py``).

The next save may cancel a save until its manifest is published: the trainer sets a flag that the background
thread checks between files and blocks (``Cancellation``).

Thread ownership: only the trainer's thread uses the tracker. While a save is in progress, only the background
thread uses catalog and shard. The trainer's next call collects the outcome of a save.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.background import Background, Latch
from holdfast.checkpoint.format.encoding import Encoder
from holdfast.checkpoint.format.manifest import Era, Version
from holdfast.checkpoint.format.records import Group, SampledRows
from holdfast.checkpoint.layout.bundles import Puts, ShardChange
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.memory.copy_on_write import CopyOnWrite
from holdfast.checkpoint.memory.digests import RowDigests, UnseenChange
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.memory.priority import Priority, large_tables, make_priority
from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.checkpoint.reading.speed import measure_reading
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.saving.publisher import NewVersion, Publisher
from holdfast.checkpoint.saving.row_copies import RowCopies, RowCopy, file_bytes
from holdfast.checkpoint.saving.shard_rows import (
    Cancellation,
    IncrementRows,
    SaveCancelled,
    write_rows,
)
from holdfast.checkpoint.saving.unseen import UnseenChanges
from holdfast.checkpoint.store import Store
from holdfast.errors import (
    CheckpointError,
    CorruptCheckpoint,
    ObjectMissing,
    SaveFailed,
    SaveVoid,
    StoreError,
    StoreFull,
    StoreLocked,
    message_of,
)
from holdfast.events import EventLog
from holdfast.options import AutoBits, BitsChoice, Full, Policy

log = logging.getLogger("holdfast.checkpoint")


class CapturedState(Protocol):
    """A copy of everything that is saved besides rows."""

    def parts(self) -> Sequence[Any]:
        """The buffers of the dense file. Called in the background, again if a save is retried."""


class Source(Protocol):
    """The state to save. ``Writer.save`` calls ``look``, then ``capture``, in the trainer's thread."""

    def look(self) -> tuple[LiveTables, Collection[str]]:
        """The current tables, and the names of those in which any row may have changed."""

    def unannounced(self) -> Collection[str]:
        """Tables of which any row may change without the tracker hearing of it first."""

    def capture(self) -> CapturedState:
        """Copy everything that is not rows; training continues when this returns."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did and what it cost."""

    version: int
    step: int
    baseline: bool
    rows: int
    bytes: int
    """Bytes written for this version, without the manifest."""
    stall_seconds: float
    """How long the trainer waited: for the previous save, if necessary, and for the snapshot."""
    snapshot_seconds: float
    write_seconds: float
    tidied_bytes: int = 0
    tidy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time of the background thread."""
    waited_seconds: float = 0.0
    """How long training waited, after the save had returned, for rows to be read from memory, because copies
    of changed rows would have exceeded ``Policy.max_memory``."""
    copied_bytes: int = 0
    """The most bytes that copies of rows took at a time, which training changed before they were written."""


@dataclass
class _Outcome:
    """A save in progress, and its outcome."""

    version: int
    step: int
    baseline: bool
    may_be_cancelled: bool
    known: Latch = field(default_factory=Latch)
    noted: Latch = field(default_factory=Latch)
    """Opened when the digests match the rows of this version."""
    error: BaseException | None = None
    job: Callable[[], None] | None = None
    wanted: Cancellation = field(default_factory=Cancellation)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Copies of what a version holds."""

    baseline: bool
    rows: Sequence[SampledRows]
    state: CapturedState
    frozen: CopyOnWrite | None
    """The rows, if they are read from the tables' memory while the version is written."""


@dataclass(frozen=True, slots=True)
class _Copying:
    """Rows of a version while they are copied."""

    baseline: bool
    copy: RowCopy


class _MakesRoom:
    """Writes files to a store, and where it is full, again after making room."""

    def __init__(self, store: Puts, make_room: Callable[[], bool]) -> None:
        self._store, self._make_room = store, make_room

    @property
    def pause(self) -> Callable[[], None] | None:
        """See ``Store.pause``."""
        return self._store.pause

    @pause.setter
    def pause(self, pause: Callable[[], None] | None) -> None:
        self._store.pause = pause

    def put(self, name: str, parts: Sequence[Any]) -> int:
        """Write a file; see ``Store.put``."""
        try:
            return self._store.put(name, parts)
        except StoreFull:
            if not self._make_room():
                raise
            return self._store.put(name, parts)


class Writer:
    """Saves versions of tables and of the state that belongs to them.

    Args:
        store: opened for writing; the caller holds its lock.
        policy: when to save, how, and what to keep.
        events: the log that gets every figure.
        publisher: publishes versions; by default one for a process that saves alone.
    """

    def __init__(
        self, store: Store, policy: Policy, events: EventLog, publisher: Publisher | None = None
    ) -> None:
        assert not isinstance(policy.strategy, str)  # Policy turns names into values
        self.store = store
        self.policy = policy
        self.strategy = policy.strategy
        self.events = events
        self._publisher = publisher or Publisher(Catalog(store, policy))
        self.catalog = self._publisher.catalog
        for complaint in self.catalog.complaints:
            log.warning("%s: using an older manifest: %s", store.url, complaint)
            self.events.emit("checkpoint_damaged", version=None, error=complaint)
        self.tracker = Tracker(())
        self.reports: list[SaveReport] = []
        self._groups: tuple[Group, ...] = ()
        self._tables = LiveTables((), lambda table: ())
        self._nothing_unseen = True
        self._shard = self._new_shard(())
        self._encoder = Encoder((), ())
        self.restores = 0
        self._restored = 0
        self._said: BitsChoice | None = None
        self._increment = IncrementRows(policy, ())
        self._copies = RowCopies(policy, ())
        self._next_version = self.catalog.next_version()
        self._thread = Background("holdfast-save")
        self._under_way: _Outcome | None = None
        self._tidy_error: BaseException | None = None
        self._era_is_damaged = False
        self._unseen = UnseenChanges(policy, events)
        self._frozen: _Outcome | None = None
        """The save whose rows are read from memory, until it is known that none changed unannounced."""
        self._has_restored = False

    def bind(self, tables: LiveTables) -> None:
        """Set the tables to save. New groups begin a new era: the next version holds all rows."""
        if tables is self._tables:
            return
        if tables.groups != self._groups or tables.shares.whole != self._tables.shares.whole:
            # A save in progress, and its outcome, belong to the old groups.
            self._thread.wait()
            self.collect()
            self._groups = tables.groups
            self._tables = tables
            self.tracker = Tracker(tables.groups, self._priorities(), tables.share_of)
            self._increment = IncrementRows(self.policy, [g.rows for g in tables.groups])
            self._copies = RowCopies(self.policy, tables.groups)
            self.begin_anew()
        self._tables = tables
        self._unseen.bind(tables, self.tracker)

    def _priorities(self) -> dict[str, Priority]:
        """One for each of the largest tables, if the policy prioritizes rows."""
        policy = self.policy
        if policy.prioritize is None:
            return {}
        tables = [(t, g.record_bytes) for g in self._groups for t in g.tables]
        largest = large_tables([table.rows * record for table, record in tables])
        return {
            name: make_priority(policy.prioritize, rows, policy.fraction, partial(self._weights, name))
            for name, rows in ((tables[i][0].name, tables[i][0].rows) for i in largest)
        }

    def _weights(self, table: str) -> NDArray[np.float32]:
        return self._tables.weights(table)

    def begin_anew(self) -> None:
        """Make the next version a baseline: the marks no longer tell which rows have changed."""
        self._shard = self._new_shard(self._tables.shares.whole)
        self._publisher.leave_era()
        self._unseen.digests_known = False

    def _new_shard(self, groups: Sequence[Group]) -> Shard:
        return Shard(self._publisher.shard, groups, self.strategy)

    def begin_restore(self, groups: Sequence[Group]) -> RowDigests | None:
        """All rows are about to be replaced by those of a version with these groups. Until ``resume``, the
        next version is a baseline. What is returned is to get the rows' digests, if they are wanted.
        """
        self.begin_anew()
        return self._unseen.begin_restore(groups)

    def number_next(self, version: int) -> None:
        """The next version is to have this number."""
        self._next_version = version

    @property
    def last_version(self) -> int:
        """The number of the last version that was begun."""
        return self._next_version - 1

    # Rows that changed without the tracker noticing

    def check(self, tables: Collection[str]) -> list[UnseenChange]:
        """Compare the unmarked rows of these tables with their digests, and mark those that differ.

        Call it in the trainer's thread, between two steps. Versions that lack such rows become unverified.
        """
        return self._check(tables, self.last_version)

    def _check(self, tables: Collection[str], version: int) -> list[UnseenChange]:
        if self._under_way is not None:
            self._under_way.noted.wait()
        return self._unseen.check(tables, version, self.last_version)

    def check_some(self, seconds: float, may_check: Callable[[str], bool]) -> list[UnseenChange]:
        """The same for some rows, for about ``seconds``; continues where the last call ended."""
        if self._under_way is not None and not self._under_way.noted.is_open():
            return []
        return self._unseen.check_some(seconds, may_check, self.last_version)

    def note_outside_change(self, table: str) -> None:
        """Rows of a table are changed outside of training: announced, if at all, only afterwards."""
        self._unseen.announced_late.add(table)

    def note_missed(self, table: str, why: str, complete: int) -> None:
        """Versions after ``complete`` may lack changes of a table."""
        if not self._unseen.note_missed(table, why, complete, self.last_version):
            self.check([table])

    def note_restored(self, bytes_: int, seconds: float) -> None:
        """A restore has read so many bytes in so long: how quickly the next one is expected to be read."""
        self._has_restored = True
        self._publisher.note_read(bytes_, seconds)

    def resume(self, version: Version, digests: RowDigests | None) -> bool:
        """Continue from the store's newest version, which was just restored, with these digests of its rows;
        False if the next one must be a baseline."""
        self._restored = version.version
        newest = self.catalog.newest
        if newest is None or newest != version or isinstance(self.strategy, Full) or self._era_is_damaged:
            return False
        if self.catalog.manifest.last_version > version.version:
            # Later versions were deleted. Rows that they replaced may have been moved to history files, and
            # would be missing from a version that continues without them.
            return False
        era = self.catalog.manifest.era(version.era)
        encoder = Encoder.of_era(self.policy, self.restores, era.decoded_groups(), self._tables.shares.whole)
        if encoder is None or era.strategy != self._shard.layout_name:
            return False
        self._encoder = encoder
        self._shard = self._new_shard(encoder.stored)
        try:
            self._take_up(era, version)
        except (CheckpointError, StoreError) as error:
            # A file of another version is damaged. This version was restored: continue without that file.
            log.warning("the next version of %s will be a baseline: %s", self.store.url, error)
            self.events.emit("checkpoint_damaged", version=version.version, error=str(error))
            self.begin_anew()
            return False
        self._unseen.note_restored(digests, self.last_version)
        return True

    def _take_up(self, era: Era, version: Version) -> None:
        self._publisher.resume(era, self._shard.groups)
        if not self._publisher.is_alone:
            era = msgspec.structs.replace(era, files=[f for f in era.files if f.shard == self._shard.number])
        self._shard.resume(self.store, era)
        self._increment = IncrementRows(self.policy, [g.rows for g in self._groups])
        shares = self._tables.shares
        saved = self._shard.rows_of(self.store, era, version.version)
        self._increment.resume(
            (group, shares.from_whole(group, ids)[1]) for group, ids in saved if group < len(self._groups)
        )

    def skips(self, step: int) -> bool:
        """Whether the policy skips a save of this step because another one is in progress."""
        if self.policy.when_busy != "skip" or not self.busy():
            return False
        self.events.emit("checkpoint_skipped", step=step)
        return True

    def save(self, step: int, source: Source, metadata: dict[str, Any], *, whole: bool = True) -> int:
        """Save a version and return its number as soon as its snapshot is taken.

        If not ``whole``, rows that the policy's ``prioritize`` ranks low wait for a later version. Cancels
        the save in progress, or waits for it, as the policy says; call ``skips`` first.
        """
        called = time.perf_counter()
        self._saved_wait()
        with contextlib.suppress(SaveVoid):  # this save takes its place
            self.collect()
        self.catalog.raise_if_fenced_off()
        started = time.perf_counter()
        job: Callable[[], None] | None = None
        try:
            snapshot = self._snapshot(source, whole)
            version = self._next_version
            may_be_cancelled = not self._publisher.last_was_cancelled
            wanted = Cancellation(snapshot=snapshot.frozen)
            outcome = _Outcome(version, step, snapshot.baseline, may_be_cancelled, wanted=wanted)
            now = time.perf_counter()
            stall = [now - called, now - started]

            def job() -> None:
                try:
                    self._write(outcome, snapshot, metadata, stall)
                except BaseException as error:
                    if not outcome.known.is_open():  # the next save waits for this
                        outcome.error = error
                        outcome.known.open()
                    raise
                finally:
                    if snapshot.frozen is not None:
                        snapshot.frozen.release()
                    if not outcome.noted.is_open():
                        outcome.noted.open()

            outcome.job = job
            self._under_way = outcome
            self._next_version += 1
            self.tracker.snapshot = snapshot.frozen
            self._frozen = outcome if snapshot.frozen is not None else None
            self._thread.submit(job)
            if snapshot.frozen is not None:
                self._copy_at_once(snapshot.frozen, source)
                stall[:] = [seconds + time.perf_counter() - now for seconds in stall]
        except BaseException as error:  # Ctrl-C, too, at any point
            # Nobody would ever report the outcome, and the next save would wait for it.
            if job is None or self._thread.withdraw(job):
                self._under_way = None
                self.tracker.give_back()
                self.tracker.snapshot = self._frozen = None
                self._publisher.failed(self.last_version + (job is None), error)
            raise
        return version

    def _copy_at_once(self, frozen: CopyOnWrite, source: Source) -> None:
        """Copy the tables whose rows may change unannounced before training goes on.

        As far as ``max_memory`` allows; this waits until the rest has been written.
        """
        known = {table.name for group in self._groups for table in group.tables}
        for table in known & {*source.unannounced(), *self._unseen.announced_late}:
            frozen.all_about_to_change(table)

    def collect(self) -> None:
        """Process the outcome of the last save, if it is known; raises SaveFailed if it failed.

        Raises StoreLocked if another writer has taken over the store; every later save would, too.
        """
        outcome = self._under_way
        if outcome is not None and outcome.wanted.cancelled:
            self._take_back(outcome)
        self._note_unannounced()
        if outcome is not None and outcome.known.is_open():
            cancelled = isinstance(outcome.error, SaveCancelled)
            if outcome.error is None:
                self.tracker.confirm()
                if outcome.baseline:
                    self._increment.note_baseline()
            else:
                self.tracker.give_back()
            if cancelled:
                self._publisher.last_was_cancelled = True
                log.info("version %d of %s was cancelled", outcome.version, self.store.url)
                self.events.emit("checkpoint_cancelled", version=outcome.version, step=outcome.step)
            self._under_way = None  # last: after an interrupt before this line, all of it is repeated
            if isinstance(outcome.error, SaveVoid):
                self._publisher.leave_era()  # digests may be those of the void version
            if isinstance(outcome.error, StoreLocked | SaveVoid):
                raise outcome.error  # of StoreLocked: no later save can succeed
            if outcome.error is not None and not cancelled:
                failure = SaveFailed(
                    f"a save to {self.store.url} failed: {message_of(outcome.error)}; its rows are still "
                    "marked as changed, and the next save will contain them"
                )
                failure.version = outcome.version
                raise failure from outcome.error
        error, self._tidy_error = self._tidy_error, None
        if error is not None:
            raise SaveFailed(
                f"the versions of {self.store.url} are intact, but their files could not be rearranged: "
                f"{message_of(error)}"
            ) from error

    def _note_unannounced(self) -> None:
        """See whether rows changed before they were read: their version is void, or flagged if it exists."""
        outcome, frozen = self._frozen, self.tracker.snapshot
        if outcome is None or frozen is None:
            return
        durable = outcome.known.is_open() and outcome.error is None
        self._unseen.note_unannounced(frozen, outcome.version, self.last_version, is_durable=durable)
        if outcome.known.is_open() and not (durable and frozen.unchecked):
            self.tracker.snapshot = self._frozen = None

    def finish_saves(self) -> None:
        """Return when no save is in progress, whatever became of it."""
        if self._under_way is not None:
            self._under_way.wanted.is_waited_for = True
        self._thread.wait()

    def wait(self) -> None:
        """Return when every save is durable and files are rearranged; raises SaveFailed if a save failed."""
        self.finish_saves()
        self._collect_and_flag()
        self._thread.raise_error()

    def _collect_and_flag(self) -> None:
        """``collect``, and publish which versions are unverified; no save is in progress."""
        try:
            self.collect()
        finally:
            if self._unseen.unverified:
                self.catalog.flag_versions(self._unseen.unverified)
                self._unseen.unverified.clear()

    def finish(self, most_seconds: float) -> bool:
        """Finish the save in progress and end the thread; False on timeout. Call ``close`` afterwards."""
        if self._under_way is not None:
            self._under_way.wanted.is_waited_for = True
        return self._thread.close(most_seconds)

    def close(self) -> None:
        """Finish the save in progress and end the thread."""
        self.finish_saves()
        self._thread.close()
        self._collect_and_flag()
        self._thread.raise_error()

    def busy(self) -> bool:
        """Whether a save is in progress."""
        return self._under_way is not None and not self._under_way.known.is_open()

    def _saved_wait(self) -> None:
        """Return when the outcome of the save in progress is known; cancel it if the policy allows."""
        outcome = self._under_way
        if outcome is None:
            return
        # If every save cancelled the one before, nothing would ever become durable.
        if self.policy.when_busy == "cancel" and outcome.may_be_cancelled:
            outcome.wanted.cancelled = True
            self._take_back(outcome)
        outcome.wanted.is_waited_for = True
        outcome.known.wait()

    def _take_back(self, outcome: _Outcome) -> None:
        """Withdraw a cancelled save that has not begun, because files are still being rearranged.

        May be repeated, after an interrupt.
        """
        assert outcome.job is not None
        if self._thread.withdraw(outcome.job) and not outcome.known.is_open():
            outcome.error = SaveCancelled()
            self._publisher.failed(outcome.version, outcome.error)
            outcome.noted.open()
            outcome.known.open()

    def _snapshot(self, source: Source, whole: bool) -> _Snapshot:
        """Copy the contents of the version, and do nothing else: training waits for this."""
        # Looking at every tensor takes as long as copying many rows. Usually nothing has changed: copying
        # starts at once, from where the rows were the last time, and is repeated if that was wrong.
        # Ranks first have to see that they have the same tables.
        at_once = self._nothing_unseen and self.policy.verify != "all" and self._publisher.is_alone
        copying = self._start_copying(whole) if at_once else None
        try:
            tables, unseen = source.look()
            self._nothing_unseen = not unseen
            if copying is not None and (unseen or tables is not self._tables):
                copying.copy.gather.finish()
                self.tracker.give_back()
                copying = None
            if copying is None:
                self.bind(tables)
                for table in unseen:
                    self.tracker.suspect(table, late="something had changed its rows unseen")
                if self.policy.verify == "all":
                    others = [t for t in self.tracker.tables if not self.tracker.is_suspect(t)]
                    self._check(others, self._next_version)
                copying = self._start_copying(whole)
            state = source.capture()
        finally:
            if copying is not None:
                copying.copy.gather.finish()
        return _Snapshot(copying.baseline, copying.copy.rows, state, copying.copy.frozen)

    def _start_copying(self, whole: bool) -> _Copying:
        groups, live_bytes = self._tables.shares.whole, self._shard.live_bytes()
        baseline = self._publisher.begin(self._next_version, groups, live_bytes)
        self._unseen.begin_version(self._next_version)
        wanted = self.tracker.take(whole=whole or baseline, find=self._unseen.find_changed(baseline))
        if not baseline:
            wanted = [self._increment.add(number, ids) for number, ids in enumerate(wanted)]
        on_read = self._unseen.on_read(baseline)
        return _Copying(baseline, self._copies.copy(self._tables, None if baseline else wanted, on_read))

    def _write(
        self, outcome: _Outcome, snapshot: _Snapshot, metadata: dict[str, Any], stall: Sequence[float]
    ) -> None:
        """In the background: write and commit the version; then tidy up."""
        number, step, baseline, frozen = outcome.version, outcome.step, outcome.baseline, snapshot.frozen
        started, cpu = time.perf_counter(), time.thread_time()
        try:
            change, version = self._write_version(outcome, snapshot, metadata)
        except BaseException as failure:  # of any kind: the trainer waits for the next lines
            outcome.error = error = self.catalog.with_advice(failure)
            outcome.known.open()
            if not isinstance(error, SaveCancelled):
                log.warning("saving version %d to %s failed: %s", number, self.store.url, message_of(error))
                self.events.emit("checkpoint_failed", version=number, step=step, error=message_of(error))
            self._publisher.failed(number, error)
            self._clear_away()
            if isinstance(error, StoreFull) and not self._publisher.is_alone:
                self._make_room_for_next()
            return
        seconds = time.perf_counter() - started
        self._publisher.note_written(version, seconds)
        self._apply(change)
        report = SaveReport(
            number, step, baseline, version.rows, version.bytes,
            stall_seconds=stall[0], snapshot_seconds=stall[1], write_seconds=seconds,
            waited_seconds=frozen.waited_seconds if frozen is not None else 0.0,
            copied_bytes=frozen.peak_bytes if frozen is not None else 0,
        )  # fmt: skip
        del snapshot, change, frozen
        self._copies.give_back()
        outcome.known.open()
        try:
            self._tidy(report, number, time.thread_time() - cpu)
        except BaseException as error:
            # The version exists; only its files are not rearranged.
            self._tidy_error = self.catalog.with_advice(error)
            log.warning("rearranging files of %s failed: %s", self.store.url, message_of(error))
            self.events.emit("checkpoint_tidy_failed", version=number, error=message_of(error))
            if isinstance(error, CorruptCheckpoint | ObjectMissing):
                # A version that needs a damaged file cannot be restored, and every round would read it again.
                log.warning("the next version of %s will be a baseline", self.store.url)
                self._era_is_damaged = True
                self._publisher.leave_era()
            self._publisher.tidying_failed(number, error)
            self._clear_away()

    def _write_version(
        self, outcome: _Outcome, snapshot: _Snapshot, metadata: dict[str, Any]
    ) -> tuple[ShardChange, Version]:
        """Choose files and codecs, write, and commit; again after making room if the store is full."""
        baseline, frozen = outcome.baseline, snapshot.frozen
        self._unseen.begin_writing(snapshot.rows if frozen is None else ())
        if frozen is None:
            self._noted(outcome)
        self._publisher.enter(outcome.version)
        shard, encoder = self._shard, self._encoder
        if baseline:
            encoder = self._plan_encoding(snapshot.rows)
            shard = self._new_shard(encoder.stored)
        new = NewVersion(outcome.version, outcome.step, baseline, metadata, self.restores)
        try:
            change, version = self._commit(new, shard, encoder, snapshot, outcome)
        except StoreFull:
            if not self._publisher.is_alone:  # others have written files of this version
                raise
            self._clear_away()
            # Rows that were read from the tables' memory cannot be read again.
            if not self._make_room() or frozen is not None:
                raise
            change, version = self._commit(new, shard, encoder, snapshot, outcome)
        if baseline:
            self._shard, self._encoder = shard, encoder
            self._era_is_damaged = False
            self._say_bits()
        return change, version

    def _plan_encoding(self, rows: Sequence[SampledRows]) -> Encoder:
        """The encoding of an era that begins with these rows, or with those and others'."""
        whole = self._tables.shares.whole
        if self._publisher.is_alone:
            return Encoder.plan(self.policy, self.restores, rows, whole)
        return Encoder.for_shards(self.policy, self.restores, whole)

    def _commit(
        self, new: NewVersion, shard: Shard, encoder: Encoder, snapshot: _Snapshot, outcome: _Outcome
    ) -> tuple[ShardChange, Version]:
        """Write the files of a version and publish the manifest that makes it exist."""
        wanted = outcome.wanted
        store: Puts = self.store
        limit = None
        if snapshot.frozen is not None:
            store, limit = _MakesRoom(store, self._make_room), file_bytes(self._copies.max_memory)
        rows = self._tables.shares.numbered(snapshot.rows)
        change = write_rows(
            shard, store, encoder, new.number, rows, baseline=new.baseline,
            policy=self.policy, wanted=wanted, file_bytes=limit,
        )  # fmt: skip
        if snapshot.frozen is not None:
            self._unseen.raise_if_found()
            self._noted(outcome)
        wanted.check()
        flags = dict(self._unseen.unverified)
        version = self._publisher.commit(
            new, encoder.stored, shard.layout_name, [change.for_manifest()], snapshot.state.parts(),
            check=wanted.check, unverified=flags,
        )  # fmt: skip
        for flagged in flags:
            self._unseen.unverified.pop(flagged, None)
        return change, version

    def _make_room(self) -> bool:
        return self.catalog.make_room(needed={self._restored})

    def _make_room_for_next(self) -> None:
        """After a version that ranks could not save: it is too late for that one."""
        with contextlib.suppress(CheckpointError, StoreError):
            self._make_room()

    def _noted(self, outcome: _Outcome) -> None:
        """Digests match the rows of this version."""
        if outcome.baseline:
            self._unseen.note_baseline(outcome.version)
        outcome.noted.open()

    def _clear_away(self) -> None:
        """Delete the files of a failed save or round: on a full disk the next one needs the space."""
        try:
            self.catalog.delete_leftovers()
        except Exception as error:  # the next writer deletes them
            log.warning("files of a failed save stay in %s: %s", self.store.url, message_of(error))

    def _apply(self, change: ShardChange) -> None:
        """Note that a manifest with the change is durable."""
        try:
            self._shard.apply(change)
        except BaseException as error:  # out of memory, for example
            log.warning("the next version of %s will be a baseline: %s", self.store.url, message_of(error))
            self.begin_anew()

    def _say_bits(self) -> None:
        """Log the bits chosen for tables with ``AutoBits``."""
        for group in self._groups:
            wish = self.policy.bits_of(group.tables[0].name)
            if isinstance(wish, AutoBits):
                choice = wish.choose(self.restores)
                if choice != self._said:
                    log.info("weights are stored in %d bits: %s", choice.bits, choice.reason)
                    self.events.emit(
                        "checkpoint_bits", bits=choice.bits, reason=choice.reason, restores=self.restores
                    )
                self._said = choice
                return

    def _tidy(self, report: SaveReport, number: int, cpu_seconds: float) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        tidied, tidied_bytes = None, 0
        if (
            report.baseline
            and self._publisher.shard == 0
            and self._publisher.wants_measured(report.bytes)
            and not self._has_restored
        ):
            self._measure_reading(number)
        if not self._era_is_damaged:
            tidied = self._shard.tidy(self.store, number, self.catalog.versions_from(self._shard.base))
        change = tidied.for_manifest() if tidied is not None else None
        self._publisher.replace_all(number, change, self._shard.live_bytes())
        if tidied is not None and change is not None:
            tidied_bytes = change.bytes
            self._apply(tidied)
            self.catalog.free_replaced()
        values = asdict(report) | {
            "tidied_bytes": tidied_bytes,
            "tidy_seconds": time.perf_counter() - started if tidied else 0.0,
            "cpu_seconds": cpu_seconds + time.thread_time() - cpu,
        }
        self.reports.append(SaveReport(**values))
        self.events.emit("checkpoint_saved", **values)
        problem, self.catalog.problem = self.catalog.problem, None
        if problem is not None:
            raise problem

    def _measure_reading(self, baseline: int) -> None:
        """Read some of a baseline back: nothing has been restored that would tell how long that takes."""
        era = self.catalog.manifest.era(baseline)
        try:
            speed = self._publisher.note_read(*measure_reading(self.store, era.files, self._shard.groups))
        except StoreError as error:
            log.warning("could not measure how quickly %s is read: %s", self.store.url, message_of(error))
            return
        self.events.emit("checkpoint_read_speed", version=baseline, bytes_per_second=speed)
