"""``Checkpointer``: read this first.

    with hf.Checkpointer("run1", {"model": model, "optim": optimizer, "loader": loader},
                         hf.Policy(every_steps=500, keep=20)) as ckpt:
        start = ckpt.restore()                       # the newest version that verifies; 0 if there is none
        for step, batch in enumerate(loader, start):
            ...
            ckpt.step(step)                          # saves when the policy says so, and returns at once

A save copies the rows that changed since the last one with their optimizer state (``memory/tracker.py`` knows
which, ``saving/writer.py`` copies), and everything else in the objects (``torch/state.py``). A thread writes
them as chunk files (``format/chunk.py``) that the strategy arranges (``layout/``), and publishes a manifest
(``saving/catalog.py``), which makes the version exist. A restore reads each piece that its version needs once
(``reading/version.py``), into the live tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.dense import decode_tree
from holdfast.checkpoint.format.manifest import Manifest, Version, raise_if_unreachable
from holdfast.checkpoint.memory.digests import RowDigests
from holdfast.checkpoint.progress_bar import byte_progress
from holdfast.checkpoint.ranks.agreement import Agreement
from holdfast.checkpoint.ranks.publisher import Order
from holdfast.checkpoint.ranks.state import StateOfRank, for_rank
from holdfast.checkpoint.ranks.together import Together, join
from holdfast.checkpoint.reading.coverage import check_places
from holdfast.checkpoint.reading.loader import RowLoader, ShareLoader, compile_loops
from holdfast.checkpoint.reading.version import (
    VersionReader,
    by_preference,
    find_version,
    open_version,
    where_dense,
)
from holdfast.checkpoint.saving.schedule import SaveSchedule
from holdfast.checkpoint.saving.writer import SaveReport, Writer
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.torch.fit import say_grown, some, taken_for_damage
from holdfast.checkpoint.torch.read_ahead import ReadAhead
from holdfast.checkpoint.torch.source import TrainingSource
from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.checkpoint.torch.watch import WRITTEN, Watch
from holdfast.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    HoldfastError,
    NoSuchVersion,
    RankLost,
    SaveFailed,
    SaveVoid,
    StoreError,
    threads_explained,
)
from holdfast.events import EventLog
from holdfast.options import Policy

log = logging.getLogger("holdfast.checkpoint")


class Checkpointer:
    """Saves and restores the state of a training run.

    Args:
        path: a folder, or a URL: ``s3://bucket/prefix``, or any that fsspec knows. One writer at a time.
        objects: what makes up the state, by name: modules, optimizers, schedulers, loaders; anything with
            ``state_dict`` and ``load_state_dict``. Give optimizers together with the modules they update.
        policy: when to save, how, and what to keep.
        options: store options, such as S3's endpoint and keys.
        events: a log that gets every figure.
        show_progress: show a progress bar for long operations; by default on a terminal.
        process_group: the ranks that save together; by default all of ``torch.distributed``, if it is
            initialized. Make the Checkpointer on each of them, with the same arguments, and call its methods
            on each.
        rank_timeout_seconds: a rank that has not been heard of for so long is lost (RankLost).
        allow_without_optimizer: accept trainable tables that no optimizer among the objects owns. Their
            weights are saved; the state of an optimizer that you did not pass is lost.

    The modules' embedding tables (``nn.Embedding``, ``nn.EmbeddingBag``) are found automatically. Changed
    rows are tracked through forward passes and optimizer steps. Call ``mark`` if you change rows in a way
    that PyTorch does not count (``weight.data``, NumPy). Digests find rows that changed unseen, sooner or
    later (``Policy(verify=…)``): the next version contains them, and versions that lack them are flagged as
    unverified.

    If a save fails in the background, the next call raises SaveFailed. You can continue training: the next
    save contains the rows. If another writer has taken over the store, the next call and every later ``save``
    raise StoreLocked.

    Forked processes, such as a loader's workers, do not own the lock or the saves: ``save`` there raises
    StoreLocked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        objects: Mapping[str, Any],
        policy: Policy | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        events: EventLog | None = None,
        show_progress: bool | None = None,
        process_group: Any = None,
        rank_timeout_seconds: float = 30.0,
        allow_without_optimizer: bool = False,
    ) -> None:
        self.policy = policy or Policy()
        self._pid = os.getpid()
        self.events = events or EventLog(None)
        self._show_progress = show_progress
        self._schedule = SaveSchedule(self.policy, time.monotonic())
        self._ranks = join(process_group, rank_timeout_seconds, self.policy, self._schedule)
        self._decides = self._ranks is None or self._ranks.leads
        self._cleanup = contextlib.ExitStack()
        try:
            if self._ranks is None:
                self._look_at(objects, allow_without_optimizer)
                self._open(path, options)
            else:
                self._cleanup.callback(self._ranks.close)
                with self._ranks.roll_call(os.fspath(path), objects) as ready:
                    self._look_at(objects, allow_without_optimizer)
                    if self._ranks.leads:
                        self._open(path, options)
                        ready()
                    else:
                        ready()  # rank 0 has made the store
                        self._open(path, options)
            self._cleanup.callback(self._writer.finish, most_seconds=0)  # its thread, if what follows fails
            self._writer.bind(self._objects.live_tables())
            writer = self._writer  # its hooks know no more: a model must not keep a forgotten one of us alive
            self._watch = Watch(
                self._objects.tables,
                self._objects.optimizers,
                lambda: writer.tracker,
                lambda: writer.last_version,
                writer.note_missed,
                others_look_up=self._ranks is not None,
            )
            self._cleanup.callback(self._watch.close)
        except BaseException:
            self._cleanup.close()
            raise
        compile_loops()
        compared = "digests" if self.policy.verify else "whole"
        # What is sharded has parts on all ranks.
        only = None if self._decides or self._objects.is_sharded else self._objects.apart
        finish = None if self._ranks is None else self._ranks.part_of(self._objects)
        self._source = TrainingSource(self._objects, self._watch, compared, self.events, only, finish)
        if self._ranks is not None:  # not with a method of ours: whoever forgets us has us closed at once
            self._source.on_capture = partial(self._ranks.note_witness, self._objects, self._watch.sample)
        self._read_ahead = ReadAhead(self._objects.objects, self.events)
        # Who forgets to close it gets what is under way written all the same, and the lock freed.
        self._closing = weakref.finalize(self, _close_forgotten, self._writer, self._cleanup, self._pid)
        _note_the_end()
        self._last_step: int | None = None
        self._told: tuple[int, dict[str, Any] | None] | None = None
        self._told_version: int | None = None
        self._continues = False
        self._checked_at = time.perf_counter()

    def _look_at(self, objects: Mapping[str, Any], allow_without_optimizer: bool) -> None:
        ranks = self._ranks
        self._objects = TrainingObjects(objects, self.policy.bits_of, ranks.share_of if ranks else None)
        if not allow_without_optimizer:
            _refuse_unowned(self._objects.tables_without_optimizer())
        if ranks is not None:
            ranks.check_tables(self._objects)

    def _open(self, path: str | os.PathLike[str], options: Mapping[str, Any] | None) -> None:
        ranks, policy = self._ranks, self.policy
        with threads_explained():
            self.store = self._cleanup.enter_context(open_store(path, create=True, options=options or {}))
            if self._decides:
                self._lock = self._cleanup.enter_context(self.store.lock_writer(policy.lock_wait_seconds))
            publisher = ranks.open(self.store) if ranks is not None else None
            self._writer = Writer(self.store, policy, self.events, publisher)

    def step(self, step: int, metadata: dict[str, Any] | None = None) -> int | None:
        """Report that a step is done, and save if the policy says so; the version that was begun, or None."""
        self._check_open()
        # First: the step counts as told even if this call raises the error of an earlier save.
        self._last_step, self._told, self._told_version = step, (step, metadata), None
        if self._ranks is not None:
            return self._step_together(self._ranks.agreement, step, metadata)
        void = self._collect(step)
        if not void and not self._schedule.is_due(step, time.monotonic()):
            return None
        return self._save(step, metadata, whole=self.policy.prioritize is None)

    def _step_together(self, agreement: Agreement, step: int, metadata: dict[str, Any] | None) -> int | None:
        if not agreement.meets(step):
            self._collect(step)
            return None
        whole = self.policy.prioritize is None
        try:
            with agreement.meeting("step", step) as order:
                self._collect(step)
                if order is None and not self._schedule.is_due(step, time.monotonic()):
                    return None
                return self._save_ordered(order, step, metadata, whole=whole)
        except RankLost:
            self._collect(step)  # it may have ended because of the save that this raises the error of
            raise

    def _save_ordered(
        self, order: Order | None, step: int, metadata: dict[str, Any] | None, *, whole: bool
    ) -> int | None:
        """Save as rank 0, or as it has ordered."""
        if order is not None:
            if not order.version:
                return None
            self._writer.number_next(order.version)
        return self._save(step, metadata, whole=whole)

    def _collect(self, step: int) -> bool:
        """Find out what has become of earlier saves, and of rows; whether a save was void."""
        void = False
        self._check_snapshot()
        try:
            self._writer.collect()
        except SaveVoid as error:
            log.warning("saving again: %s", error)
            void = True
        self._check_some()
        self._read_ahead.told(step)
        return void

    def save(self, step: int | None = None, metadata: dict[str, Any] | None = None) -> int | None:
        """Save now. Returns the new version's number as soon as its snapshot is taken.

        ``step`` is the step that was just done; it defaults to the last one passed to ``step()``.
        ``metadata``, a JSON-serializable dict, is stored with the version. Returns None if a save is in
        progress and the policy says "skip". The version contains all changed rows, whatever the policy
        prioritizes. If the policy says "cancel", a save that follows too soon cancels this one.
        """
        if self._ranks is None:
            return self._save(step, metadata, whole=True)
        self._check_open()
        told = _step(self._step_now(step))
        with self._ranks.agreement.meeting("save", told) as order:
            return self._save_ordered(order, told, metadata, whole=True)

    def _step_now(self, step: int | None) -> int:
        if step is not None:
            return step
        return self._last_step if self._last_step is not None else 0

    def _save(self, step: int | None, metadata: dict[str, Any] | None, *, whole: bool) -> int | None:
        self._check_open()
        step, metadata = _step(self._step_now(step)), _plain(metadata)
        if self._decides:  # else rank 0 has done both
            self._lock.renew()
            if self._writer.skips(step):
                return None
        self._watch.search_last()
        self._check_snapshot()
        with threads_explained():
            version = self._writer.save(step, self._source, metadata, whole=whole)
        self._last_step = step
        self._schedule.note(step, time.monotonic())
        if whole:
            self._told_version = version
        return version

    def _save_last(self) -> None:
        """Save the last step passed to ``step()``, unless a version contains it."""
        if self._told is None or not self.policy.save_last or not self._closing.alive:
            return
        failures = []
        while True:
            try:
                self.wait()  # only then the outcome of the last save is known
                break
            except SaveFailed as error:  # of a save, and of the round before it
                failures.append(error)
        begun = self._told_version
        is_saved = begun is not None and any(v.version == begun for v in self.versions())
        if self._ranks is not None:
            with self._ranks.agreement.meeting("close", self._told[0]) as order:
                if order is not None or not is_saved:
                    self._save_ordered(order, *self._told, whole=True)
            self.wait()
        elif not is_saved:
            self._save(*self._told, whole=True)
            self.wait()
        for failure in failures:
            if failure.version is None or failure.version != begun:  # else the last save has replaced it
                raise failure

    def restore(self, version: int | None = None) -> int:
        """Load a saved state into the objects; returns the step to continue with.

        ``version`` defaults to the newest one that can be read completely; the log names every newer one that
        cannot. A store that does not answer raises an error instead of falling back to an older version.
        Returns 0 if the store holds no version. Restore before you iterate the loaders. If a queue or thread
        reads a loader ahead of training, wrap it in ``Prefetch``.
        """
        self._check_open()
        if self._ranks is not None:
            return self._restore_together(self._ranks, version)
        self.wait()
        candidates, manifest = self._candidates(version)
        if version is not None:
            return self._restore(candidates[0], manifest)
        problems: list[str] = []
        for candidate in candidates:
            try:
                step = self._restore(candidate, manifest)
            except (CorruptCheckpoint, NoSuchVersion, StoreError) as error:
                raise_if_unreachable(self.store, error)
                problems.append(self._note_damage(candidate, error))
                continue
            self._say_unverified(candidate, manifest)
            return step
        if not candidates:
            return 0
        raise self._nothing_restored(problems)

    def _restore_together(self, ranks: Together, version: int | None) -> int:
        agreement, problems = ranks.agreement, []
        try:
            with agreement.meeting("restore", version or 0):
                if ranks.leads:
                    with agreement.leading_restore():
                        self.wait()
                        candidates, manifest = self._candidates(version)

                        def note(damaged: Version, error: HoldfastError) -> None:
                            raise_if_unreachable(self.store, error)
                            problems.append(self._note_damage(damaged, error))
                            if version is not None:
                                raise error

                        restored, continues = agreement.lead_restore(
                            candidates, manifest, self._attempt, note
                        )
                        if restored is None and candidates:
                            raise self._nothing_restored(problems)
                    if restored is not None and version is None:
                        self._say_unverified(restored, manifest)
                else:
                    restored, continues = agreement.follow_restore(self.store, self.wait, self._attempt)
        finally:  # also if nothing could be restored
            agreement.begin_at_once()
        if restored is None:
            return 0
        if not continues:
            self._writer.begin_anew()
        return restored.step + 1

    def _attempt(self, version: Version, manifest: Manifest) -> bool:
        self._restore(version, manifest)
        return self._continues

    def _candidates(self, version: int | None) -> tuple[list[Version], Manifest]:
        """The versions to try, in this order."""
        complaints: list[str] = []
        manifest = self._writer.catalog.newest_manifest(complaints)
        for complaint in complaints:
            log.warning("%s: an older manifest is used: %s", self.store.url, complaint)
            self.events.emit("checkpoint_damaged", version=None, error=complaint)
        if version is not None:
            return [find_version(manifest, version, self.store.url)], manifest
        return by_preference(manifest.versions), manifest

    def _note_damage(self, version: Version, error: Exception) -> str:
        log.warning("version %d cannot be restored: %s", version.version, error)
        self.events.emit("checkpoint_damaged", version=version.version, error=str(error))
        return f"version {version.version}: {error}"

    def _nothing_restored(self, problems: Sequence[str]) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"no version of {self.store.url} can be restored: {'; '.join(problems)}")

    def _say_unverified(self, restored: Version, manifest: Manifest) -> None:
        if restored.unverified:
            log.warning(
                "version %d is unverified, and no other version could be restored: %s",
                restored.version,
                restored.unverified,
            )
        passed = [v.version for v in manifest.versions if v.version > restored.version and v.unverified]
        if passed:
            log.warning(
                "restored version %d, because versions %s are unverified; restore(%d) loads the last of them",
                restored.version, ", ".join(map(str, passed)), passed[-1],
            )  # fmt: skip

    def versions(self) -> list[Version]:
        """All versions that can be restored, oldest first."""
        return list(self.manifest.versions)  # this is the store's only writer, or follows it

    @property
    def manifest(self) -> Manifest:
        """The current manifest of the store."""
        return self._writer.catalog.manifest

    def mark(self, table: str, rows: Any = None) -> None:
        """Mark rows that you changed outside of training; without ``rows``, all rows of the table."""
        self._check_open()
        if table not in self._objects.tables:
            raise ConfigError(f"there is no table {table!r}: there are {', '.join(self._objects.tables)}")
        self._writer.note_outside_change(table)
        why = "rows were marked that had been changed outside of training"
        if rows is None:
            self._writer.tracker.suspect(table, late=why)
        else:
            count = len(self._objects.tables[table].weight)
            self._writer.tracker.mark(table, _row_ids(rows, table, count), late=why)

    def check(self) -> int:
        """Compare every unmarked row with its digest now; returns how many rows have changed unseen.

        Call it between two steps. The next version contains such rows; versions that lack them are flagged as
        unverified. Does nothing before the first save, or with ``Policy(verify=0)``. See ``Policy.verify``.
        """
        self._check_open()
        self._source.find_tables()
        for table in self._watch.written():
            self._writer.tracker.suspect(table, late=WRITTEN)
        unseen = self._objects.tables_with_unseen_changes()
        trusted = [n for n in self._objects.tables if n not in unseen and not self._is_suspect(n)]
        found = self._writer.check(trusted)
        for change in found:
            self._watch.distrust(change.table)
        return sum(change.rows for change in found)

    def _check_some(self) -> None:
        """Compare rows with their digests, for the policy's share of the time since the last call."""
        now = time.perf_counter()
        share = self.policy.verify
        if isinstance(share, str) or not share:
            return
        seconds, self._checked_at = share * (now - self._checked_at), now
        for change in self._writer.check_some(seconds, self._may_check):
            self._watch.distrust(change.table)

    def _may_check(self, table: str) -> bool:
        """Whether unmarked rows of a table are expected to be unchanged."""
        searched = self._is_suspect(table) or self._source.is_searched(table)
        return not searched and self._watch.is_known(table)

    def _is_suspect(self, table: str) -> bool:
        return self._writer.tracker.is_suspect(table)

    def _check_snapshot(self) -> None:
        """Find out whether something has written to tables that are read while a version is written."""
        snapshot = self._writer.tracker.snapshot
        if snapshot is not None:
            known = [table for table in snapshot.unchecked if self._watch.is_known(table)]
            for table in snapshot.unchecked.difference(known):
                snapshot.changed_unannounced(table, WRITTEN)
            snapshot.has_not_changed_unannounced(known)

    def wait(self) -> None:
        """Return when all saves are durable."""
        self._writer.finish_saves()
        self._check_snapshot()
        self._writer.wait()

    @property
    def reports(self) -> list[SaveReport]:
        """A report for each save of this process."""
        return list(self._writer.reports)

    def close(self) -> None:
        """Finish the save in progress and release the store; begins no new save.

        A ``with`` block calls it. If the block ends without an exception, it first saves the last step passed
        to ``step()``, unless a version contains it (``Policy.save_last``).

        You may call it twice. Forked processes need not close it.
        """
        self._close(cleanly=True)

    def _close(self, *, cleanly: bool) -> None:
        if self._closing.detach() is None:
            return
        try:
            self._writer.finish_saves()
            self._check_snapshot()
            self._writer.close()
            if self._ranks is not None and cleanly:  # else others may wait for this process to end
                self._ranks.finish()
        finally:
            self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                if os.getpid() == self._pid:  # not in a forked process
                    self._save_last()
            finally:
                self.close()
            return
        # The error that ends the block matters more than an error of closing.
        try:
            self._close(cleanly=False)
        except HoldfastError as second:
            log.warning("closing %s: %s", self.store.url, second)

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise CheckpointError(f"this Checkpointer of {self.store.url} is closed: make a new one")

    def _restore(self, version: Version, manifest: Manifest) -> int:
        with threads_explained():
            return self._read_back(version, manifest)

    def _read_back(self, version: Version, manifest: Manifest) -> int:
        started = time.perf_counter()
        objects = self._objects
        self._source.find_tables()
        with open_version(self.store, version.version, manifest) as reader:
            where = where_dense(self.store, version)
            mine = self._state_of(decode_tree(reader.dense(), where), where)
            tree = mine.tree
            # Validate before overwriting anything.
            reader.check_complete()
            with taken_for_damage(where):
                check_places(tree, reader.groups, where)
                objects.check_dense(tree)
            objects.prepare(reader.groups)
            text = f"restoring version {version.version}"
            # From here on the tables no longer match the newest version and the marks.
            digests, shares = self._writer.begin_restore(reader.groups), objects.held()
            # Otherwise digests, which are of the rows that it saves, are taken at the end.
            reads_all = self._ranks is None and not shares
            try:
                with byte_progress(text, reader.total_bytes(), self._show_progress) as on_progress:
                    loader = (
                        ShareLoader(reader.groups, objects.fields, shares)
                        if shares
                        else RowLoader(reader.groups, objects.fields, digests if reads_all else None)
                    )
                    reader.read_rows(loader, on_progress=on_progress)
                with taken_for_damage(where):
                    self._load_dense(mine)
            except BaseException:
                objects.cancel_restore()
                raise
            if digests is not None and not reads_all:
                digests = RowDigests.of(objects.live_tables())
            self._note_restored(version, reader, mine, digests, time.perf_counter() - started)
        return version.step + 1

    def _state_of(self, tree: Any, where: str) -> StateOfRank:
        link = self._ranks.link if self._ranks is not None else None
        return for_rank(tree, link.rank, link.world_size, where) if link else for_rank(tree, 0, 1, where)

    def _load_dense(self, mine: StateOfRank) -> None:
        """Load what is not rows. What each of other ranks had by itself is of no use here."""
        objects, link = self._objects, self._ranks.link if self._ranks is not None else None
        if mine.is_mine:
            objects.load_dense(mine.tree)
            return
        rank, size = (link.rank, link.world_size) if link is not None else (0, 1)
        seed = [] if mine.had_one_rng else [rank, size]
        objects.load_dense(mine.tree, leave=objects.loaders, seed=seed)
        if rank == 0:
            log.warning(
                "the version was saved by %d ranks and is restored by %d: random states are %s%s",
                mine.world_size, size,
                "seeded anew, from the saved ones and the rank" if seed else "as saved, on all ranks",
                f", and {some(objects.loaders)} stay where they are" if objects.loaders else "",
            )  # fmt: skip
            self.events.emit("checkpoint_ranks_changed", saved=mine.world_size, now=size)

    def _note_restored(
        self,
        version: Version,
        reader: VersionReader,
        mine: StateOfRank,
        digests: RowDigests | None,
        seconds: float,
    ) -> None:
        say_grown(self._objects.grown, version.version)
        self._writer.bind(self._objects.live_tables())
        self._objects.forget_replaced()
        self._watch.restored()
        lossy = any(group.is_coded for group in reader.stored_groups)
        self._writer.restores = version.restores + lossy
        self._writer.note_restored(reader.bytes_read, seconds)
        # Other ranks would rearrange files with the same rows, neither knowing of the other.
        same = mine.is_mine and mine.shares == self._objects.live_tables().share_of
        self._continues = resumed = same and self._writer.resume(version, digests)
        self._last_step = version.step
        self._schedule.begin_at(version.step)
        self._told = None
        self._read_ahead.begin(version.step + 1)
        figures = {"version": version.version, "step": version.step, "seconds_taken": seconds}
        self.events.emit("checkpoint_restored", **figures, bytes=reader.bytes_read, continues_era=resumed)
        log.info("restored version %d (step %d) in %.2f s", version.version, version.step, seconds)


def _refuse_unowned(tables: Sequence[str]) -> None:
    if tables:
        raise ConfigError(
            f"no optimizer among the objects owns {some(tables)}, which can be trained: the state of its "
            "optimizer would be lost; give that too, call requires_grad_(False) on what is not trained, or "
            "pass allow_without_optimizer=True if there is none"
        )


def _step(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise ConfigError(f"the step is {step!r}: expected a whole number") from None


def _plain(metadata: Any) -> dict[str, Any]:
    """A copy, since the caller may change the original; raises ConfigError if it is not JSON."""
    if metadata is None:
        return {}
    try:
        text = json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata is not JSON-serializable: {error}") from None
    plain = json.loads(text)
    if not isinstance(plain, dict):
        raise ConfigError(f"metadata is {metadata!r}: expected a dict")
    return plain


def _row_ids(rows: Any, table: str, count: int) -> NDArray[np.int64]:
    ids = np.asarray(rows).reshape(-1)
    if len(ids) and ids.dtype.kind not in "iu":
        raise ConfigError(f"rows of {table} are {ids.dtype}: expected their numbers; mask.nonzero() has them")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ConfigError(f"rows {ids.min()} to {ids.max()} of {table}: expected 0 to {count - 1}")
    return np.ascontiguousarray(ids, np.int64)


_ending = False
_PATIENCE_SECONDS = 10.0


@cache
def _note_the_end() -> None:
    """Note the end of the program, before forgotten Checkpointers are closed: handlers run in reverse."""

    def note() -> None:
        global _ending  # noqa: PLW0603
        _ending = True

    atexit.register(note)


def _close_forgotten(writer: Writer, cleanup: contextlib.ExitStack, pid: int) -> None:
    """Close a Checkpointer that was garbage-collected, or is still open when the program ends."""
    if os.getpid() != pid:
        return  # a forked process: thread and lock belong to its parent
    log.warning("the Checkpointer of %s was not closed: use it in a with statement", writer.store.url)
    if not _ending and not writer.finish(_PATIENCE_SECONDS):
        # The garbage collector interrupts a thread anywhere, also while it holds a lock that saving needs.
        # The program does not end before this thread.
        threading.Thread(target=_close, args=(writer, cleanup), name="holdfast-close").start()
        return
    _close(writer, cleanup)


def _close(writer: Writer, cleanup: contextlib.ExitStack) -> None:
    try:
        writer.close()
    except HoldfastError as error:
        log.warning("closing %s: %s", writer.store.url, error)
    finally:
        cleanup.close()
