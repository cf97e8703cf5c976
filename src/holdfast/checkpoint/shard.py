"""One writer's rows of a store: which files hold them, what a save adds, what tidying replaces.

A trainer has one shard with all rows; each parameter server has its own. A shard writes files and says
what changed; only the catalog, which sees all shards, makes it count. Nothing here knows torch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.chunk import (
    OPEN,
    Index,
    NewPiece,
    check_piece,
    decode_index,
    decode_piece,
    encode_file,
)
from holdfast.checkpoint.manifest import Era, FileEntry, FileKind
from holdfast.checkpoint.records import Field, Group, RowIds, Rows
from holdfast.checkpoint.restore import STRETCH_BYTES, open_file
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.strategies import rounds
from holdfast.options import Chunked, Differential, Full, Incremental

FILE_BYTES = 64 << 20
ROUND_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Change:
    """Files that a shard has written, and those that they replace; counts once it is in a manifest."""

    version: int
    kind: Literal["baseline", "increment", "round"]
    added: tuple[FileEntry, ...]
    removed: tuple[str, ...] = ()
    contents: tuple[list[NewPiece], ...] = ()
    """What is in each added file."""

    @property
    def bytes(self) -> int:
        """Bytes that were written."""
        return sum(f.bytes for f in self.added)

    @property
    def rows(self) -> int:
        """Rows that were written."""
        return sum(f.rows for f in self.added)


@dataclass
class _OpenFile:
    """A file with records that may still be current, and which of them have died since it was written."""

    entry: FileEntry
    number: int
    dead: int = 0
    deaths: list[tuple[int, int, RowIds]] = field(default_factory=list)
    """(group, version, ids)"""


class Shard:
    """Writes one shard's versions.

    The calls: ``write`` for a version; when a manifest that holds its change is durable, ``apply`` that
    change; then perhaps ``tidy``, whose change is committed and applied in turn. A change that could not
    be committed is dropped: nothing here remembers it. A "baseline" starts a new era.

    Args:
        number: which shard of the store it is.
        groups: its tables.
        strategy: what is written.
    """

    def __init__(
        self,
        number: int,
        groups: Sequence[Group],
        strategy: Full | Differential | Incremental | Chunked,
    ) -> None:
        self.number = number
        self.groups = tuple(groups)
        self.strategy = strategy
        self.base = 0
        """The version of the era's baseline; 0 if there is none yet."""
        self._files: dict[int, _OpenFile] = {}
        self._next_file = 1
        # For each row, the number of the file with its current record; 0 is the baseline.
        self._where: list[NDArray[np.int32]] = []

    def write(self, store: Store, version: int, snapshot: Sequence[Rows], *, baseline: bool) -> Change:
        """Write the snapshot (rows of each group) as the files of a version."""
        differential = isinstance(self.strategy, Differential) and not baseline
        pieces = [
            NewPiece(
                group=group,
                rank=0 if baseline else version,
                rows=part,
                born=version,
                died=version + 1 if differential else OPEN,  # the next one repeats all of its rows
            )
            for group, rows in enumerate(snapshot)
            for part in _cut(rows, self.groups[group].record_bytes)
        ]
        kind: Literal["baseline", "increment"] = "baseline" if baseline else "increment"
        added, contents = self._store_files(store, version, kind, pieces)
        return Change(version, kind, added, contents=contents)

    def apply(self, change: Change) -> None:
        """A manifest with this change is durable: it is now part of the store."""
        if change.kind == "baseline":
            self.base = change.version
            self._files.clear()
            self._where = [np.zeros(g.rows, np.int32) for g in self.groups] if self._follows_rows() else []
            return
        if not self._follows_rows():
            return
        removed = set(change.removed)
        self._files = {n: f for n, f in self._files.items() if f.entry.name not in removed}
        for entry, pieces in zip(change.added, change.contents, strict=True):
            if entry.kind != "history":
                self._note_open(entry, pieces, change.version if change.kind == "increment" else None)

    def tidy(self, store: Store, version: int, kept_versions: Sequence[int]) -> Change | None:
        """Write rearranged files after a version was committed; None if there is nothing to do.

        ``kept_versions`` are those that must stay restorable, ascending, this one included.
        """
        strategy = self.strategy
        if not isinstance(strategy, Chunked) or strategy.layout != "rounds":
            return None
        if (version - self.base) % strategy.round_versions:
            return None
        files = list(self._files.values())
        chosen = rounds.choose(
            [f.dead for f in files],
            [f.entry.rows for f in files],
            [f.entry.bytes for f in files],
            strategy.dead_fraction,
            ROUND_BYTES,
        )
        if not chosen:
            return None
        return self._run_round(store, version, strategy, [files[i] for i in chosen], kept_versions)

    def prune(self, store: Store, entries: Sequence[FileEntry], kept_versions: Sequence[int]) -> Change:
        """Write history files anew without the records that no kept version needs.

        For when versions were deleted: of a history file each record says when it died, so nothing else
        has to be read. ``is_prunable`` says for which files it is worth it.
        """
        kept = np.asarray(kept_versions, np.int32)
        added: list[FileEntry] = []
        for entry in entries:
            pieces: list[NewPiece] = []
            opened = open_file(store, entry)
            with opened.reader:
                for piece in opened.pieces:
                    data = np.empty(piece.length, np.uint8)
                    opened.read([piece], data)
                    check_piece(piece, data, opened.where)
                    found = decode_piece(piece, data, self.groups[piece.group].fields, opened.where)
                    born, died = (_each(v, piece.rows) for v in (found.born, found.died))
                    lives = rounds.Lives(found.rows, born, died)
                    lives = lives.take(rounds.belongs_to_any(lives, kept))
                    if len(lives.rows):
                        pieces.append(NewPiece(piece.group, piece.rank, lives.rows, lives.born, lives.died))
            added += self._store_files(store, int(kept[-1]), "history", pieces)[0]
        removed = tuple(entry.name for entry in entries)
        return Change(int(kept[-1]), "round", tuple(added), removed, tuple([] for _ in added))

    def resume(self, store: Store, era: Era) -> None:
        """Take up an era that another process wrote, as if this one had written it.

        Reads which rows are in each of its files, not the rows.
        """
        self.base = min(f.first_born for f in era.files if f.kind == "baseline")
        self._files.clear()
        self._where = []
        if not self._follows_rows():
            return
        self._where = [np.zeros(g.rows, np.int32) for g in self.groups]
        found: list[list[tuple[RowIds, NDArray[np.int32], int]]] = [[] for _ in self.groups]
        ordered = sorted((f for f in era.files if f.kind != "baseline"), key=lambda f: f.first_rank)
        for entry in ordered:
            number = 0
            if entry.kind != "history":
                number = self._next_file
                self._next_file += 1
                self._files[number] = _OpenFile(entry, number)
            for group, index in read_indexes(store, entry):
                born = np.broadcast_to(np.asarray(index.born, np.int32), len(index.ids))
                found[group].append((index.ids, born, number))
                if number:
                    self._where[group][index.ids] = number
        for group, parts in enumerate(found):
            self._find_deaths(group, parts)

    def _find_deaths(self, group: int, parts: list[tuple[RowIds, NDArray[np.int32], int]]) -> None:
        """A record dies in the version in which the next one of its row is born."""
        if not parts:
            return
        ids = np.concatenate([i for i, _, _ in parts])
        born = np.concatenate([b for _, b, _ in parts])
        files = np.concatenate([np.full(len(i), n, np.int32) for i, _, n in parts])
        order = np.lexsort((born, ids))
        ids, born, files = ids[order], born[order], files[order]
        dead = np.flatnonzero((ids[1:] == ids[:-1]) & (files[:-1] > 0))
        by_version = np.argsort(born[dead + 1], kind="stable")
        dead = dead[by_version]
        for version, a, b in _runs(born[dead + 1]):
            these = dead[a:b]
            self._note_deaths(group, version, ids[these], files[these])

    def rows_of(self, store: Store, era: Era, version: int) -> Iterator[tuple[int, RowIds]]:
        """(group, ids) of the rows that a version holds beyond the era's baseline."""
        for entry in era.files_of(version):
            if entry.kind != "baseline":
                for group, index in read_indexes(store, entry):
                    yield group, index.ids

    def live_bytes(self) -> int:
        """Bytes of the files that hold current records beyond the baseline."""
        return sum(f.entry.bytes for f in self._files.values())

    def _follows_rows(self) -> bool:
        return isinstance(self.strategy, Chunked)

    def _run_round(
        self,
        store: Store,
        version: int,
        strategy: Chunked,
        taken: Sequence[_OpenFile],
        kept_versions: Sequence[int],
    ) -> Change:
        kept = np.asarray(kept_versions, np.int32)
        live: list[NewPiece] = []
        history: list[NewPiece] = []
        for number, group in enumerate(self.groups):
            lives = self._take_records(store, number, taken)
            needed = rounds.belongs_to_any(lives, kept)
            if not needed.all():
                lives = lives.take(needed)
            arranged = rounds.arrange(number, lives, version, self.base, strategy.round_versions)
            for target, pieces in zip((live, history), arranged, strict=True):
                target += [part for piece in pieces for part in _cut_piece(piece, group.record_bytes)]
        live_files, live_pieces = self._store_files(store, version, "live", live)
        history_files, history_pieces = self._store_files(store, version, "history", history)
        return Change(
            version=version,
            kind="round",
            added=live_files + history_files,
            removed=tuple(file.entry.name for file in taken),
            contents=live_pieces + history_pieces,
        )

    def _take_records(self, store: Store, group: int, taken: Sequence[_OpenFile]) -> rounds.Lives:
        """All records of a group in these files, with when each was born and died."""
        parts: list[rounds.Lives] = []
        fields = self.groups[group].fields
        for file in taken:
            dead_ids, dead_versions = file_deaths(file.deaths, group)
            opened = open_file(store, file.entry)
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
                    born = np.broadcast_to(np.asarray(decoded.born, np.int32), len(ids))
                    parts.append(rounds.Lives(decoded.rows, born, died))
        return _join(parts, fields)

    def _note_open(self, entry: FileEntry, pieces: Sequence[NewPiece], version: int | None) -> None:
        """This file has the current records of its rows; with a version, the ones before died in it."""
        number = self._next_file
        self._next_file += 1
        self._files[number] = _OpenFile(entry, number)
        for piece in pieces:
            ids = piece.rows.ids
            where = self._where[piece.group]
            if version is not None:
                self._note_deaths(piece.group, version, ids, where[ids])
            where[ids] = number

    def _note_deaths(self, group: int, version: int, ids: RowIds, files: NDArray[np.int32]) -> None:
        order = np.argsort(files, kind="stable")
        for number, a, b in _runs(files[order]):
            if number:  # 0 is the baseline, whose records are never moved
                file = self._files[number]
                file.dead += b - a
                file.deaths.append((group, version, ids[order[a:b]]))

    def _store_files(
        self, store: Store, version: int, kind: FileKind, pieces: Sequence[NewPiece]
    ) -> tuple[tuple[FileEntry, ...], tuple[list[NewPiece], ...]]:
        bundles = _bundles(pieces, [g.record_bytes for g in self.groups])
        return tuple(self._store_file(store, version, kind, b) for b in bundles), tuple(bundles)

    def _store_file(
        self, store: Store, version: int, kind: FileKind, pieces: Sequence[NewPiece]
    ) -> FileEntry:
        encoded = encode_file(pieces, [g.fields for g in self.groups])
        name = f"chunks/{version:08}-{self.number:04}-{kind}-{secrets.token_hex(6)}.safetensors"
        store.put(name, encoded.parts)
        return FileEntry(
            name=name,
            bytes=encoded.bytes,
            header_bytes=encoded.header_bytes,
            header_checksum=encoded.header_checksum,
            kind=kind,
            shard=self.number,
            first_rank=min(p.rank for p in encoded.pieces),
            first_born=min(p.first_born for p in encoded.pieces),
            last_died=max(p.last_died for p in encoded.pieces),
            rows=sum(p.rows for p in encoded.pieces),
        )


def read_indexes(store: Store, entry: FileEntry) -> Iterator[tuple[int, Index]]:
    """Which rows are in a file: (group, index) of each of its pieces."""
    opened = open_file(store, entry)
    with opened.reader:
        for piece in opened.pieces:
            data = np.empty(piece.index_length, np.uint8)
            opened.reader.read_into([(entry.header_bytes + piece.offset, len(data))], data.data)
            check_piece(piece, data, opened.where)
            yield piece.group, decode_index(piece, data, opened.where)


def is_prunable(store: Store, entry: FileEntry, kept_versions: Sequence[int], dead_fraction: float) -> bool:
    """Whether this is a history file of which more than a fraction of the records is of no kept version."""
    if entry.kind != "history":
        return False
    kept = np.asarray(kept_versions, np.int32)
    empty = Rows(np.empty(0, np.int64), ())
    needed = 0
    for _, index in read_indexes(store, entry):
        born, died = (_each(v, len(index.ids)) for v in (index.born, index.died))
        needed += int(rounds.belongs_to_any(rounds.Lives(empty, born, died), kept).sum())
    return entry.rows - needed > dead_fraction * entry.rows


def _each(versions: NDArray[np.int32] | int, rows: int) -> NDArray[np.int32]:
    return np.broadcast_to(np.asarray(versions, np.int32), rows)


def file_deaths(deaths: Sequence[tuple[int, int, RowIds]], group: int) -> tuple[RowIds, NDArray[np.int32]]:
    """The ids of a group that died in a file, ascending, and when."""
    mine = [(version, ids) for g, version, ids in deaths if g == group]
    if not mine:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    ids = np.concatenate([i for _, i in mine])
    versions = np.concatenate([np.full(len(i), v, np.int32) for v, i in mine])
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
    rows = Rows(
        np.concatenate([p.rows.ids for p in parts]),
        tuple(np.concatenate([p.rows.fields[i] for p in parts]) for i in range(len(parts[0].rows.fields))),
    )
    return rounds.Lives(
        rows, np.concatenate([p.born for p in parts]), np.concatenate([p.died for p in parts])
    )


def _cut(rows: Rows, record_bytes: int) -> list[Rows]:
    """Slices that are read in one stretch each."""
    step = max(1, STRETCH_BYTES // max(record_bytes + 8, 1))
    return [
        Rows(rows.ids[a : a + step], tuple(f[a : a + step] for f in rows.fields))
        for a in range(0, len(rows), step)
    ]


def _cut_piece(piece: NewPiece, record_bytes: int) -> list[NewPiece]:
    cut: list[NewPiece] = []
    at = 0
    for part in _cut(piece.rows, record_bytes):
        born, died = (
            v[at : at + len(part)] if isinstance(v, np.ndarray) else v for v in (piece.born, piece.died)
        )
        cut.append(NewPiece(piece.group, piece.rank, part, born, died))
        at += len(part)
    return cut


def _bundles(pieces: Sequence[NewPiece], record_bytes: Sequence[int]) -> list[list[NewPiece]]:
    """Pieces in files of a size that a later round can take one by one."""
    bundles: list[list[NewPiece]] = []
    size = 0
    for piece in pieces:
        bytes_ = len(piece.rows) * record_bytes[piece.group]
        if not bundles or size + bytes_ > FILE_BYTES:
            bundles.append([])
            size = 0
        bundles[-1].append(piece)
        size += bytes_
    return bundles
