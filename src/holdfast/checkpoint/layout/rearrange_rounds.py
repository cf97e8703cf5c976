"""The "rounds" layout on files: count dead records per file, and rewrite the files with the most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.chunk import OPEN, NewPiece, check_piece, decode_piece
from holdfast.checkpoint.format.manifest import Era, FileEntry
from holdfast.checkpoint.format.records import Field, Group, RowIds, Rows, join_rows
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.layout.bundles import Backlog, FileWriter, ShardChange, Written, read_indexes
from holdfast.checkpoint.reading.stretches import open_file
from holdfast.checkpoint.store import Store
from holdfast.options import Chunked

ROUND_BYTES = 1 << 30
# Between rounds, files are rewritten if that frees this share of the store, and more than it writes.
_WORTH_FREEING = 0.05
_MOSTLY = 0.5

Deaths = tuple[int, NDArray[np.int32], RowIds]
"""Of a group: versions and ids of records."""


@dataclass
class _OpenFile:
    """A file with records that may still be current, and which of them have died since it was written."""

    entry: FileEntry
    number: int
    dead: int = 0
    deaths: list[Deaths] = field(default_factory=list)
    deaths_are_exact: bool = True
    """Or some are when the records were dead at the latest."""

    def freed_by(self, oldest_kept: int) -> int:
        """Records of which it is known that no version from this one on needs them."""
        return sum(int(np.count_nonzero(versions <= oldest_kept)) for _, versions, _ in self.deaths)


class Rounds:
    """Every few versions, rewrites the files of which most has died; see ``rounds.py``."""

    def __init__(self, groups: Sequence[Group], strategy: Chunked, files: FileWriter) -> None:
        self.groups = tuple(groups)
        self.strategy = strategy
        self._writer = files
        self._base = 0
        self._files: dict[int, _OpenFile] = {}
        self._next_file = 1
        # For each row, the number of the file with its current record; 0 is the baseline.
        self._where: list[NDArray[np.int32]] = []
        self._backlog: Backlog | None = None

    def begin(self, base: int) -> None:
        """A baseline has been written."""
        self._base = base
        self._backlog = None
        self._forget()

    def resume(self, store: Store, era: Era) -> None:
        """Take up an era. Reads nothing; the first ``tidy`` reads which rows are in the live files."""
        self.begin(era.number)
        self._backlog = Backlog.of(era, self._writer.shard)

    def note_written(self, change: ShardChange) -> None:
        """Record a change that a durable manifest contains."""
        if self._backlog is not None:
            self._backlog.note(change)
        else:
            self._note(change)

    def _note(self, change: ShardChange) -> None:
        removed = set(change.removed)
        self._files = {n: f for n, f in self._files.items() if f.entry.name not in removed}
        for file in change.files:
            if file.entry.kind != "history":
                version = change.version if change.kind == "increment" else None
                self._note_open(file, version)

    def tidy(self, store: Store, version: int, kept_versions: Sequence[int]) -> ShardChange | None:
        """Run a round if one is due and some file is worth it; or give back what nobody needs."""
        self._catch_up(store)
        files = list(self._files.values())
        round_is_due = (version - self._base) % self.strategy.round_versions == 0
        chosen = rounds.choose(
            [f.dead if round_is_due else f.freed_by(kept_versions[0]) for f in files],
            [f.entry.rows for f in files],
            [f.entry.bytes for f in files],
            self.strategy.dead_fraction if round_is_due else _MOSTLY,
            ROUND_BYTES,
        )
        if round_is_due:
            others = [i for i in range(len(files)) if i not in chosen]
            chosen += [others[i] for i in rounds.crowded([files[i].entry.bytes for i in others])]
        taken = [files[i] for i in chosen]
        if not taken or not (round_is_due or self._is_worth_freeing(taken, kept_versions[0])):
            return None
        return self._run_round(store, version, taken, kept_versions)

    def _is_worth_freeing(self, taken: Sequence[_OpenFile], oldest_kept: int) -> bool:
        freed = sum(f.entry.bytes * f.freed_by(oldest_kept) / max(f.entry.rows, 1) for f in taken)
        baseline = sum(g.rows * g.record_bytes for g in self.groups if g.raw_rows_of is None)
        return freed > _WORTH_FREEING * (baseline + self.live_bytes())

    def live_bytes(self) -> int:
        """Bytes of the files that hold current records beyond the baseline."""
        # The background may be tidying while the trainer asks.
        backlog = self._backlog
        if backlog is not None:
            return backlog.live_bytes()
        return sum(f.entry.bytes for f in list(self._files.values()))

    def _forget(self) -> None:
        self._files = {}
        self._where = [np.zeros(g.rows, np.int32) for g in self.groups]

    def _catch_up(self, store: Store) -> None:
        """Read which rows are in the live files of an era that was resumed; repeated if it fails."""
        backlog = self._backlog
        if backlog is None:
            return
        self._forget()
        for entry in backlog.files:
            file = self._add_file(entry)
            file.deaths_are_exact = not backlog.history
            for group, index in read_indexes(store, entry, self.groups):
                where = self._where[group]
                self._note_deaths(group, index.born.each(len(index.ids)), index.ids, where[index.ids])
                where[index.ids] = file.number
        for change in backlog.changes:
            self._note(change)
        self._backlog = None  # last: until now nothing but this has been used

    def _run_round(
        self, store: Store, version: int, taken: Sequence[_OpenFile], kept_versions: Sequence[int]
    ) -> ShardChange:
        kept = np.asarray(kept_versions, np.int32)
        exact = all(file.deaths_are_exact for file in taken)
        live: list[NewPiece] = []
        history: list[NewPiece] = []
        replaced: list[tuple[int, int, int]] = []
        for number in range(len(self.groups)):
            lives = self._take_records(store, number, taken)
            dead = np.sort(lives.died[lives.died != OPEN])
            replaced += [(died, number, b - a) for died, a, b in _runs(dead)]
            needed = rounds.belongs_to_any(lives, kept)
            if not needed.all():
                lives = lives.take(needed)
            arranged = rounds.arrange(
                number, lives, version, self._base, self.strategy.round_versions, deaths_are_exact=exact
            )
            for target, pieces in zip((live, history), arranged, strict=True):
                target += [part for piece in pieces for part in self._writer.split(piece)]
        live_files = self._writer.write(store, version, "live", live)
        history_files = self._writer.write(store, version, "history", history)
        removed = tuple(file.entry.name for file in taken)
        return ShardChange(version, "round", live_files + history_files, removed, replaced=tuple(replaced))

    def _take_records(self, store: Store, group: int, taken: Sequence[_OpenFile]) -> rounds.Lives:
        """All records of a group in these files, with when each was born and died."""
        parts: list[rounds.Lives] = []
        fields = self.groups[group].fields
        for file in taken:
            dead_ids, dead_versions = file_deaths(file.deaths, group)
            opened = open_file(store, file.entry, self.groups)
            with opened.reader:
                for piece in opened.pieces:
                    if piece.group != group or not piece.rows:
                        continue
                    data = np.empty(piece.length, np.uint8)
                    opened.read([piece], data)
                    check_piece(piece, data, opened.where)
                    decoded = decode_piece(piece, data, fields, opened.where)
                    ids = decoded.rows.ids
                    died = np.full(len(ids), OPEN, np.int32)
                    at = np.searchsorted(dead_ids, ids)
                    hit = np.flatnonzero(np.append(dead_ids, -1)[at] == ids)
                    died[hit] = dead_versions[at[hit]]
                    born = decoded.born.each(len(ids))
                    parts.append(rounds.Lives(decoded.rows, born, died))
        return _join(parts, fields)

    def _note_open(self, file: Written, version: int | None) -> None:
        """This file has the current records of its rows; with a version, the ones before died in it."""
        number = self._add_file(file.entry).number
        for piece, ids in zip(file.pieces, file.ids, strict=True):
            where = self._where[piece.group]
            if version is not None:
                self._note_deaths(piece.group, np.full(len(ids), version, np.int32), ids, where[ids])
            where[ids] = number

    def _add_file(self, entry: FileEntry) -> _OpenFile:
        file = self._files[self._next_file] = _OpenFile(entry, self._next_file)
        self._next_file += 1
        return file

    def _note_deaths(
        self, group: int, versions: NDArray[np.int32], ids: RowIds, files: NDArray[np.int32]
    ) -> None:
        """Records of these rows died: in which versions, and in which files they are."""
        movable = np.flatnonzero(files)  # 0 is the baseline, whose records are never moved
        order = movable[np.argsort(files[movable], kind="stable")]
        for number, a, b in _runs(files[order]):
            file = self._files[number]
            file.dead += b - a
            file.deaths.append((group, versions[order[a:b]], ids[order[a:b]]))


def file_deaths(deaths: Sequence[Deaths], group: int) -> tuple[RowIds, NDArray[np.int32]]:
    """The ids of a group that died in a file, ascending, and when."""
    mine = [(versions, ids) for g, versions, ids in deaths if g == group]
    if not mine:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    ids = np.concatenate([i for _, i in mine])
    versions = np.concatenate([v for v, _ in mine])
    order = np.argsort(ids)
    return ids[order], versions[order]


def _runs(ordered: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """Each value of an ascending array, with where its run begins and ends."""
    values, starts = np.unique(ordered, return_index=True)
    ends = np.append(starts, len(ordered))[1:]
    yield from zip(values.tolist(), starts.tolist(), ends.tolist(), strict=True)


def _join(parts: Sequence[rounds.Lives], fields: Sequence[Field]) -> rounds.Lives:
    if not parts:
        empty = Rows(np.empty(0, np.int64), tuple(np.empty((0, f.bytes), np.uint8) for f in fields))
        return rounds.Lives(empty, np.empty(0, np.int32), np.empty(0, np.int32))
    return rounds.Lives(
        join_rows([p.rows for p in parts]),
        np.concatenate([p.born for p in parts]),
        np.concatenate([p.died for p in parts]),
    )
