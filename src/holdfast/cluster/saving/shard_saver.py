"""A server's part of a checkpoint: copy rows at a cut, and write them in the background.

``ShardSaver`` is the interface to the server. Files count once the supervisor has them in a manifest;
until then the rows of a cut stay marked as changed, in a second generation, and are included in the next cut
if this one fails. A ``Shard`` knows which files hold what. If it is uncertain whether something was committed
(the supervisor died), the shard is read again from the manifest, which is authoritative.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.manifest import FileChange, Version, read_newest
from holdfast.checkpoint.format.records import Bytes2D, Field, Group, Rows, RowSource, Table
from holdfast.checkpoint.layout.baselines import Baselines
from holdfast.checkpoint.layout.bundles import ShardChange
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.memory import copy_on_write
from holdfast.checkpoint.memory.copy_on_write import CopyOnWrite, FrozenRows, default_max_memory
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.memory.priority import large_tables, make_priority
from holdfast.checkpoint.reading.speed import measure_reading
from holdfast.checkpoint.saving.row_copies import compile_loops, file_bytes
from holdfast.checkpoint.saving.shard_rows import (
    Cancellation,
    IncrementRows,
    SaveCancelled,
    write_rows,
)
from holdfast.checkpoint.store import Store
from holdfast.cluster.protocol.envelope import Frame
from holdfast.cluster.protocol.messages import DAMAGED, Saved
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.saving.failures import kind_of
from holdfast.cluster.saving.layout import encoder_of, saving_of, table_groups
from holdfast.errors import CorruptCheckpoint, ObjectMissing, StoreError, message_of
from holdfast.options import Differential, PriorityName
from holdfast.tables.shard import GroupShard

log = logging.getLogger("holdfast.checkpoint")

_LONGEST_WAIT_SECONDS = 2.0  # a server that waits sends no beats
_IDLE_SECONDS = 0.5  # without a push: workers hold, wait or have finished


class Runs(Protocol):
    """Runs jobs one at a time, in the background."""

    def submit(self, job: Callable[[], None], /) -> object:
        """Queue a job; returns at once. Jobs handle their errors themselves."""


@dataclass
class _Save:
    """One version being saved."""

    version: int
    baseline: bool
    whole: bool
    in_doubt: bool
    """Whether the shard must be read again from the manifest."""
    taken: list[NDArray[np.int64]]
    """The rows of each group that were marked."""
    rows: Sequence[RowSource] = ()
    """Of each group of tables."""
    network: NDArray[np.uint32] | None = None
    shard: Shard | None = None
    change: ShardChange | None = None
    file_bytes: int | None = None
    waited_seconds: float = 0.0
    error: str = ""
    kind: str = ""
    """The kind of the error."""
    seconds: float = 0.0
    written: bool = False
    committed: bool = False
    tidy: ShardChange | None = None
    tidy_error: str = ""
    tidy_kind: str = ""
    tidy_asked: bool = False
    tidied: bool = False
    wanted: Cancellation = field(default_factory=Cancellation)


class ShardSaver:
    """Saves the rows of one server; implements ``server.Saver``.

    Args:
        plan: the job's plan, which says where and how to save.
        slot: the server's slot.
        shards: its groups.
        store: the store to write to.
        runs: runs writes in the background; the server's own thread only copies.
    """

    def __init__(
        self, plan: JobPlan, slot: int, shards: Sequence[GroupShard], store: Store, runs: Runs
    ) -> None:
        policy = saving_of(plan).config.policy
        self._slot = slot
        self._shards = list(shards)
        self._tables = len(table_groups(plan))
        self._placements = plan.placements
        self._store = store
        self._runs = runs
        self._policy = policy
        self._strategy: Any = policy.strategy
        self._max_memory = policy.max_memory
        self._encoder = encoder_of(plan)
        self._shard: Shard | None = None
        self._save: _Save | None = None
        self._baselines = Baselines(policy)  # of which this server only knows how quickly it reads
        self._has_restored = False
        self._increment = IncrementRows(policy, [group.rows for group in table_groups(plan)])
        self._rankings = rankings(self._shards[: self._tables], policy.prioritize, policy.fraction)
        if self._all_bytes() > copy_on_write.COPIED_BYTES:
            compile_loops()  # before the job starts: at the first cut, pushes would wait for it

    def _all_bytes(self) -> int:
        """Size of all records of tables."""
        return sum(shard.records.nbytes for shard in self._shards[: self._tables])

    def touched(self, group: int, places: NDArray[np.uint32]) -> None:
        """Note that a push has updated these rows."""
        if group < len(self._rankings):
            self._rankings[group].touched(places)

    def resume(self, version: Version) -> None:
        """Note that all rows have just been restored from this version; the next one may be based on it."""
        for shard in self._shards:
            shard.take_marks()
        if isinstance(self._strategy, Differential):
            own, era = self._resumed()
            self._increment.resume(own.rows_of(self._store, era, version.version))

    def note_restored(self, bytes_: int, seconds: float) -> None:
        """Note that so many bytes of the store have been read, in so long."""
        self._has_restored = True
        self._baselines.note_read(bytes_, seconds)

    def cut(self, version: int, *, baseline: bool, whole: bool = True) -> None:
        """Copy the rows of a version, or begin to read them: they may change as soon as this returns.

        Without ``whole``, changed rows without priority are left out. This ends a cut that failed: its rows
        are included in this one.
        """
        save = _Save(version, baseline, whole, in_doubt=self._give_up(), taken=[])
        try:
            self._copy(save)
        except Exception as error:  # such as out of memory: the server must continue
            log.warning("version %d could not be copied: %r", version, error)
            save.rows, save.error, save.written = (), message_of(error), True
            save.kind = kind_of(error)
        self._save = save
        if not save.written:
            self._runs.submit(lambda: self._write(save))

    def confirm(self, committed: int, tidied: int) -> None:
        """Note the newest version that exists, and the newest whose files were rearranged."""
        save = self._save
        if save is None or save.version != committed or not save.written or save.error:
            return
        if not save.committed:
            save.committed = True
            save.taken = []
            if save.baseline:
                self._increment.note_baseline()
            self._runs.submit(lambda: self._apply(save))
        if save.version == tidied and save.tidied:
            self._save = None
            change = save.tidy
            if change is not None:
                self._runs.submit(lambda: self._apply_tidy(change))

    def saved(self) -> int:
        """The newest version whose files are durable, or could not be written; 0: no save in progress."""
        save = self._save
        if save is not None and save.written:
            self._thaw(save)
        return save.version if save is not None and save.written else 0

    def collect(
        self, version: int, *, tidy: bool, kept: Sequence[int] = ()
    ) -> tuple[Saved, Sequence[Frame]] | None:
        """The report on a version, or on its tidying, for the supervisor; None: not ready yet.

        With ``tidy``, ``kept`` are the versions since the last baseline that must stay restorable.
        """
        save = self._save
        if save is None or save.version != version:
            # Nobody waits for a report on an older version; a version that is done is tidy.
            done = Saved(version, tidy, msgspec.json.encode(FileChange()))
            return (done, ()) if tidy else None
        if not tidy:
            if not save.written:
                return None
            note = _encoded(save.change)
            answer = Saved(
                version,
                tidy,
                note,
                save.error,
                save.seconds,
                kind=save.kind,
                waited_seconds=save.waited_seconds,
            )
            return answer, () if save.network is None else (save.network,)
        self.confirm(version, 0)  # the supervisor asks this once a manifest has the version
        if not save.tidy_asked:
            save.tidy_asked = True
            self._runs.submit(lambda: self._tidy(save, kept))
        if not save.tidied:
            return None
        note = _encoded(save.tidy)
        live = self._shard.live_bytes() if self._shard is not None else 0
        speed = self._baselines.read_speed
        error, kind = save.tidy_error, save.tidy_kind
        return Saved(version, tidy, note, error, live_bytes=live, kind=kind, read_speed=speed), ()

    # At a cut, in the server's thread

    def _give_up(self) -> bool:
        """Abandon the save in progress, and mark its rows again. Returns whether it may have been committed
        anyway."""
        save, self._save = self._save, None
        if save is None:
            return False
        save.wanted.cancelled = True
        self._thaw(save)
        self._mark_again(save)
        tidying = save.tidy_asked and not (save.tidied and save.tidy is None)
        return not save.error and (not save.committed or tidying)

    def _mark_again(self, save: _Save) -> None:
        """Mark the rows of a failed save, so that the next one includes them."""
        for shard, rows in zip(self._shards, save.taken, strict=False):
            shard.mark(rows)
        for ranking, rows in zip(self._rankings, save.taken, strict=False):
            ranking.failed(rows)

    def _copy(self, save: _Save) -> None:
        save.taken = []
        for shard in self._shards:
            save.taken.append(shard.take_marks())
        try:
            for number, ranking in enumerate(self._rankings):
                if not save.whole:
                    chosen = ranking.chosen(save.taken[number])
                    self._shards[number].mark(save.taken[number][~chosen])
                    save.taken[number] = save.taken[number][chosen]
                ranking.saved(save.taken[number])
            self._copy_rows(save)
            if self._tables < len(self._shards):
                network = self._shards[-1]
                save.network = network.records[self._placements[-1].place(_own_rows(network))]
        except BaseException:
            self._mark_again(save)
            save.taken = []
            raise

    def _copy_rows(self, save: _Save) -> None:
        """Copy the rows of tables that a version contains; many are read while it is written."""
        shards = self._shards[: self._tables]
        all_bytes = self._all_bytes()
        limit = self._max_memory or default_max_memory(all_bytes)
        if save.baseline:
            if all_bytes > copy_on_write.COPIED_BYTES:
                self._freeze(save, limit, None)
                return
            wanted = [_own_rows(shard) for shard in shards]
        else:
            wanted = [
                self._increment.add(n, np.sort(rows)) for n, rows in enumerate(save.taken[: len(shards)])
            ]
        places = [self._placements[n].place(rows) for n, rows in enumerate(wanted)]
        if sum(len(at) * s.records[:1].nbytes for at, s in zip(places, shards, strict=True)) > limit:
            self._freeze(save, limit, [np.sort(at) for at in places])
            return
        save.rows = [
            _as_rows(shard, rows, np.take(shard.records, at, 0, mode="clip"))
            for shard, rows, at in zip(shards, wanted, places, strict=True)
        ]

    def _freeze(self, save: _Save, limit: int, wanted: Sequence[NDArray[np.int64]] | None) -> None:
        """Read rows, all or those at the wanted places, while the version is written."""
        shards = self._shards[: self._tables]
        frozen = freeze(shards, limit - 2 * file_bytes(limit), wanted)
        save.file_bytes, save.wanted.snapshot = file_bytes(limit), frozen
        save.rows = [FrozenShard(shard, rows) for shard, rows in zip(shards, frozen.groups, strict=True)]
        for number, shard in enumerate(shards):
            shard.before_change = partial(frozen.about_to_change, str(number))

    def _thaw(self, save: _Save) -> None:
        """Rows change freely again. Called in the server's thread only."""
        if save.wanted.snapshot is not None:
            for shard in self._shards[: self._tables]:
                shard.before_change = None

    # In the background, one at a time

    def _write(self, save: _Save) -> None:
        started = time.perf_counter()
        try:
            save.wanted.check()
            save.shard = self._shard_for(save)
            save.change = write_rows(
                save.shard, self._store, self._encoder, save.version, save.rows, baseline=save.baseline,
                policy=self._policy, wanted=save.wanted, file_bytes=save.file_bytes,
            )  # fmt: skip
            save.wanted.check()
            self._store.sync()  # the supervisor's publish does not sync files of others
        except SaveCancelled:
            pass  # it has been abandoned
        except Exception as error:
            log.warning("server %d could not save version %d: %r", self._slot, save.version, error)
            save.kind, save.error = kind_of(error), message_of(error)
        finally:
            save.rows = ()
            if save.wanted.snapshot is not None:
                save.wanted.snapshot.release()
                save.waited_seconds = save.wanted.snapshot.waited_seconds
            save.seconds = time.perf_counter() - started
            save.written = True  # last: readers check it before the other fields

    def _shard_for(self, save: _Save) -> Shard:
        if save.baseline:
            return Shard(self._slot, self._encoder.stored, self._strategy)
        if save.in_doubt or self._shard is None:
            return self._resumed()[0]
        return self._shard

    def _resumed(self) -> tuple[Shard, Any]:
        """Read a shard from the manifest. Returns it, and its era with only this server's files."""
        manifest = read_newest(self._store)
        if not manifest.versions:
            raise CorruptCheckpoint(f"{self._store.url} has no version that the next one could be based on")
        era = manifest.era(manifest.versions[-1].era)
        mine = msgspec.structs.replace(era, files=[f for f in era.files if f.shard == self._slot])
        shard = Shard(self._slot, self._encoder.stored, self._strategy)
        shard.resume(self._store, mine)
        return shard, mine

    def _apply(self, save: _Save) -> None:
        assert save.shard is not None
        assert save.change is not None
        try:
            save.shard.apply(save.change)
            self._shard = save.shard
        except Exception as error:
            log.warning("server %d reloads its list of files: %r", self._slot, error)
            self._shard = None

    def _tidy(self, save: _Save, kept: Sequence[int]) -> None:
        try:
            if save is self._save and self._shard is not None:
                if save.baseline and not self._has_restored:
                    self._measure_reading(save)
                save.tidy = self._shard.tidy(self._store, save.version, kept)
                self._store.sync()
        except Exception as error:
            log.warning("server %d could not rearrange its files: %r", self._slot, error)
            save.tidy, save.tidy_error = None, message_of(error)
            save.tidy_kind = DAMAGED if isinstance(error, CorruptCheckpoint | ObjectMissing) else ""
        finally:
            save.tidied = True

    def _measure_reading(self, save: _Save) -> None:
        """Read some of a baseline back: nothing has been restored that would tell how long that takes."""
        assert save.change is not None
        entries = [file.entry for file in save.change.files]
        if self._baselines.wants_measured(sum(entry.bytes for entry in entries)):
            try:
                self._baselines.note_read(*measure_reading(self._store, entries, self._encoder.stored))
            except StoreError as error:
                log.warning("server %d could not measure how quickly it reads: %r", self._slot, error)

    def _apply_tidy(self, change: ShardChange) -> None:
        try:
            if self._shard is not None:
                self._shard.apply(change)
        except Exception as error:
            log.warning("server %d reloads its list of files: %r", self._slot, error)
            self._shard = None


def _encoded(change: ShardChange | None) -> bytes:
    """Encode the changes to files for the supervisor's manifest."""
    return msgspec.json.encode(change.for_manifest() if change is not None else FileChange())


def _own_rows(shard: GroupShard) -> NDArray[np.int64]:
    """All rows of this server, ascending."""
    rows = shard.rows_of(np.arange(len(shard.records)))
    return np.sort(rows[rows < shard.plan.rows])


def _as_rows(shard: GroupShard, ids: NDArray[np.int64], records: NDArray[np.uint32]) -> Rows:
    """Records as rows with the fields of their group."""
    return Rows(
        ids, tuple(_bytes(records[:, field.first : field.first + field.width]) for field in shard.plan.fields)
    )


def _bytes(words: NDArray[np.uint32]) -> Bytes2D:
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), 4 * words.shape[1])


def freeze(
    shards: Sequence[GroupShard], max_bytes: int, wanted: Sequence[NDArray[np.int64]] | None
) -> CopyOnWrite:
    """A snapshot of the records at the wanted places (ascending), or of all; group ``n`` has table "n"."""
    groups = [
        Group((Field("record", "U32", shard.plan.words),), (Table(str(n), len(shard.records), 0),))
        for n, shard in enumerate(shards)
    ]
    return CopyOnWrite(
        LiveTables(groups, lambda name: [shards[int(name)].records.view(np.uint8)]),
        max_bytes,
        wanted=wanted,
        row_multiple=math.lcm(*(shard.placement.k for shard in shards)),
        max_wait_seconds=_LONGEST_WAIT_SECONDS,
        idle_seconds=_IDLE_SECONDS,
    )


class FrozenShard:
    """The rows of one group at a server; implements ``RowSource``.

    Blocks are of whole placement blocks, so that all rows of one come before those of the next.
    """

    def __init__(self, shard: GroupShard, frozen: FrozenRows) -> None:
        self._shard, self._frozen = shard, frozen

    def parts(self, most_rows: int | None = None) -> Iterator[Rows]:
        """All rows, ascending, in parts of at most so many. Only once."""
        for block in self._frozen.parts():
            rows = self._shard.rows_of(block.ids)
            order = np.argsort(rows)[: int((rows < self._shard.plan.rows).sum())]
            records = block.fields[0].view(np.uint32)[order]
            yield from _as_rows(self._shard, rows[order], records).parts(most_rows)


def rankings(shards: Sequence[GroupShard], name: PriorityName | None, fraction: float) -> list[Ranking]:
    """One ranking for each group of tables; empty without priorities."""
    if name is None:
        return []
    sizes = [table.rows * shard.plan.words for shard in shards for table in shard.plan.tables]
    large, first, found = set(large_tables(sizes)), 0, []
    for shard in shards:
        count = len(shard.plan.tables)
        found.append(Ranking(shard, name, fraction, [first + t in large for t in range(count)]))
        first += count
    return found


class Ranking:
    """Chooses which rows of one group at a server to save first (see ``checkpoint.memory.priority``).

    Rows of all large tables of a group, which make up most of the job's bytes, are ranked together. Rows of
    other tables are saved whenever they have changed. A row counts once per batch, however often the
    batch looks it up.

    Args:
        shard: the group.
        name: the kind of ranking.
        fraction: the fraction of ranked rows to save at a time.
        large: which tables' rows are ranked; those of others are always chosen.
    """

    def __init__(self, shard: GroupShard, name: PriorityName, fraction: float, large: Sequence[bool]) -> None:
        self._shard = shard
        self._large = np.array(large, np.bool_)
        self._ends = np.cumsum([table.rows for table in shard.plan.tables])
        weights = shard.records[:, : shard.plan.dim].view(np.float32)
        self._priority = make_priority(name, len(shard.records), fraction, lambda: weights, seed=shard.server)

    @property
    def nbytes(self) -> int:
        """Memory it uses."""
        return self._priority.nbytes

    def touched(self, places: NDArray[np.uint32]) -> None:
        """Note that a push updates these records."""
        self._priority.touched(places.astype(np.int64))

    def chosen(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows, all of which have changed, to save now."""
        first = np.zeros(len(self._shard.records), np.bool_)
        first[self._priority.choose()] = True
        chosen: NDArray[np.bool_] = first[self._places(rows)] | ~self._ranked(rows)
        return chosen

    def saved(self, rows: NDArray[np.int64]) -> None:
        """Note that these rows are copied in their current state."""
        self._priority.saved(self._places(rows))

    def failed(self, rows: NDArray[np.int64]) -> None:
        """Note that these rows did not reach the store."""
        self._priority.failed(self._places(rows[self._ranked(rows)]))

    def _ranked(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        ranked: NDArray[np.bool_] = self._large[np.searchsorted(self._ends, rows, "right")]
        return ranked

    def _places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._shard.placement.place(rows)
