"""Write chunk files: how pieces become files, and what a change to a store consists of."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

import numpy as np

from holdfast.checkpoint.format.chunk import Index, NewPiece, Piece, encode_file
from holdfast.checkpoint.format.manifest import Era, FileChange, FileEntry, FileKind
from holdfast.checkpoint.format.records import Group, RowIds, Rows
from holdfast.checkpoint.reading.stretches import STRETCH_BYTES, open_file
from holdfast.checkpoint.store import Store

FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """A written file."""

    entry: FileEntry
    pieces: tuple[Piece, ...]
    ids: tuple[RowIds, ...]
    """The rows of each piece; of a baseline's none, which has all of them and would take much memory."""


@dataclass(frozen=True, slots=True)
class ShardChange:
    """Files that a shard has written, and those that they replace; takes effect with a manifest."""

    version: int
    kind: Literal["baseline", "increment", "round"]
    files: tuple[Written, ...]
    removed: tuple[str, ...] = ()
    """Files that are no longer needed."""
    updated: tuple[FileEntry, ...] = ()
    """New manifest entries of files that stay, but with fewer needed pieces."""
    replaced: tuple[tuple[int, int, int], ...] = ()
    """(version, group, how many) of records of which the files now say that they died in that version."""

    def for_manifest(self) -> FileChange:
        """The change as the manifest records it."""
        written = tuple((piece.group, piece.rows) for file in self.files for piece in file.pieces)
        added = tuple(file.entry for file in self.files)
        return FileChange(added, self.removed, self.updated, written, self.replaced)


class Puts(Protocol):
    """Where files are written to: a ``Store``, or something in front of one."""

    pause: Callable[[], None] | None

    def put(self, name: str, parts: Sequence[Any], /) -> int:
        """See ``Store.put``."""


@dataclass(slots=True)
class Backlog:
    """What a rearranger has yet to learn of an era that another process wrote.

    To read which rows are in files takes as long as they are large, so nobody waits for it: it is read in the
    background, before files are rearranged for the first time.
    """

    files: tuple[FileEntry, ...]
    """With records that may be current, the oldest first."""
    history: tuple[FileEntry, ...]
    changes: list[ShardChange] = field(default_factory=list)
    """What has been written since."""

    @classmethod
    def of(cls, era: Era, shard: int) -> Self:
        """The files of one shard."""
        mine = [f for f in era.files if f.kind != "baseline" and f.shard == shard]
        files = sorted((f for f in mine if f.kind != "history"), key=lambda f: f.first_rank)
        return cls(tuple(files), tuple(f for f in mine if f.kind == "history"))

    def note(self, change: ShardChange) -> None:
        """Keep a change until the files are read."""
        # The next snapshot reuses the memory of ids.
        files = tuple(replace(file, ids=tuple(ids.copy() for ids in file.ids)) for file in change.files)
        self.changes.append(replace(change, files=files))

    def live_bytes(self) -> int:
        """About as many bytes as a restore of the newest version reads beyond the baseline."""
        written = [file.entry for change in self.changes for file in change.files]
        return sum(entry.bytes for entry in (*self.files, *written))


class FileWriter:
    """Writes the chunk files of one shard."""

    def __init__(self, shard: int, groups: Sequence[Group]) -> None:
        self.shard = shard
        self.groups = tuple(groups)

    def write(
        self,
        store: Puts,
        version: int,
        kind: FileKind,
        pieces: Iterable[NewPiece],
        file_bytes: int | None = None,
    ) -> tuple[Written, ...]:
        """Write pieces, in their order, to files of at most about ``file_bytes`` each.

        Pieces are asked for as they are written, and let go of then.
        """
        limit = FILE_BYTES if file_bytes is None else file_bytes
        return tuple(
            self._write_file(store, version, kind, bundle) for bundle in self._bundles(pieces, limit)
        )

    def split(self, piece: NewPiece) -> list[NewPiece]:
        """The same records in pieces that are read in one stretch each; none for no records."""
        step = max(1, STRETCH_BYTES // max(self.groups[piece.group].record_bytes + 8, 1))
        if 0 < len(piece.rows) <= step:
            return [piece]
        parts: list[NewPiece] = []
        for a in range(0, len(piece.rows), step):
            rows = Rows(piece.rows.ids[a : a + step], tuple(f[a : a + step] for f in piece.rows.fields))
            born, died = (
                v[a : a + step] if isinstance(v, np.ndarray) else v for v in (piece.born, piece.died)
            )
            parts.append(NewPiece(piece.group, piece.rank, rows, born, died))
        return parts

    def _bundles(self, pieces: Iterable[NewPiece], limit: int) -> Iterator[list[NewPiece]]:
        bundle: list[NewPiece] = []
        size = 0
        for piece in pieces:
            bytes_ = len(piece.rows) * self.groups[piece.group].record_bytes
            if bundle and size + bytes_ > limit:
                yield bundle
                bundle, size = [], 0
            bundle.append(piece)
            size += bytes_
        if bundle:
            yield bundle

    def _write_file(self, store: Puts, version: int, kind: FileKind, pieces: Sequence[NewPiece]) -> Written:
        encoded = encode_file(pieces, [g.fields for g in self.groups])
        name = f"chunks/{version:08}-{self.shard:04}-{kind}-{secrets.token_hex(6)}.safetensors"
        store.put(name, encoded.parts)
        entry = FileEntry(
            name=name,
            bytes=encoded.bytes,
            header_bytes=encoded.header_bytes,
            header_checksum=encoded.header_checksum,
            kind=kind,
            shard=self.shard,
            first_rank=min(p.rank for p in encoded.pieces),
            first_born=min(p.first_born for p in encoded.pieces),
            last_died=max(p.last_died for p in encoded.pieces),
            rows=sum(p.rows for p in encoded.pieces),
        )
        ids = () if kind == "baseline" else tuple(piece.rows.ids for piece in pieces)
        return Written(entry, encoded.pieces, ids)


def read_indexes(store: Store, entry: FileEntry, groups: Sequence[Group]) -> Iterator[tuple[int, Index]]:
    """Which rows are in a file: (group, index) of each of its pieces that is still needed."""
    opened = open_file(store, entry, groups)
    with opened.reader:
        for piece in opened.pieces:
            yield piece.group, opened.read_index(piece)
