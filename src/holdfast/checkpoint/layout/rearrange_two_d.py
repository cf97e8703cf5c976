"""The "2d" layout on files: a round after every version, its chunks put together in bundles.

What is taken out and what is left are decided in ``two_d.py``. A round writes two files
(section 4.4): all chunks that it leaves in row 0, and all that it takes out. The chunks' old places are
dead from then on; IncrCP keeps a bundle until its last chunk is dead. Here one that is mostly dead is
emptied into the files of the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.chunk import OPEN, NewPiece, Piece, check_piece, decode_index, decode_piece
from holdfast.checkpoint.format.manifest import Era, FileEntry, is_needed
from holdfast.checkpoint.format.records import Group, RowIds, Rows, join_rows
from holdfast.checkpoint.layout import rounds, two_d
from holdfast.checkpoint.layout.bloom import Bloom
from holdfast.checkpoint.layout.bundles import Backlog, FileWriter, ShardChange, Written
from holdfast.checkpoint.layout.two_d import Chunk, ChunkList, Key, Place
from holdfast.checkpoint.reading.stretches import by_size, open_file
from holdfast.checkpoint.store import Store
from holdfast.options import Chunked

# A round holds what it moves in memory. One that moves more than this does it in several steps, each of
# which writes two files of its own.
STEP_BYTES = 1 << 30
# After a resume, a round looks at the headers of this many history files of before.
ADOPTED_FILES = 16

Taken = dict[Key, NDArray[np.bool_]]
"""Which rows a round takes out of chunks."""


class TwoD:
    """Keeps the two-dimensional list of a shard, and its files in line with it."""

    def __init__(self, groups: Sequence[Group], strategy: Chunked, files: FileWriter) -> None:
        self.groups = tuple(groups)
        self.strategy = strategy
        self.chunks = ChunkList()
        self._writer = files
        self._files: dict[str, FileEntry] = {}
        # The version that was written last, and its rows by group, until they have been compared.
        self._new: tuple[int, dict[int, RowIds]] = 0, {}
        self._backlog: Backlog | None = None
        self._history: list[FileEntry] = []  # that has yet to be put into the list

    def begin(self, base: int) -> None:
        """A baseline has been written: an empty list."""
        self._backlog = None
        self._history = []
        self._forget()

    def resume(self, store: Store, era: Era) -> None:
        """Take up an era. Reads nothing: the next rounds read row 0's ids, of other rows the headers only."""
        self.begin(era.number)
        self._backlog = Backlog.of(era, self._writer.shard)

    def note_written(self, change: ShardChange) -> None:
        """Record a change that a durable manifest contains."""
        if self._backlog is not None:
            self._backlog.note(change)
        else:
            self._note(change)

    def _note(self, change: ShardChange) -> None:
        dead = {(entry.name, number) for entry in change.updated for number in entry.dead_pieces}
        gone = {
            chunk.key
            for chunk in self.chunks.chunks.values()
            if any(p.file in change.removed or (p.file, p.number) in dead for p in chunk.places)
        }
        for name in change.removed:
            del self._files[name]
        self._files.update(
            (entry.name, entry) for entry in (*change.updated, *(f.entry for f in change.files))
        )
        written = [(_chunk(places, ids), ids) for places, ids in _chunks_of(change.files)]
        if change.kind == "increment":
            self.chunks = self.chunks.with_column(change.version)
            self._new = change.version, {chunk.group: ids for chunk, ids in written}
        self.chunks = self.chunks.with_chunks((chunk for chunk, _ in written), without=gone)

    def tidy(self, store: Store, version: int, kept_versions: Sequence[int]) -> ShardChange | None:
        """Run the round of a version: compare its rows with row 0, and take out what it replaces."""
        self._catch_up(store)
        self._adopt_history(store, kept_versions)
        new_version, new = self._new
        # Compared once or not at all: a round that fails is one whose filters passed everything over.
        self._new = 0, {}
        taken = self._compare(store, version, new) if new_version == version else {}
        gone = self.chunks.unneeded(kept_versions) | set(taken)
        sizes = {name: entry.bytes - entry.header_bytes for name, entry in self._files.items()}
        rewritten = [self.chunks.chunks[key] for key in taken]
        rewritten += self.chunks.to_move(sizes, gone, self._crowded())
        if not rewritten:
            return None  # chunks that are not needed are found again, and marked, with the next change
        files = self._rewrite(store, version, rewritten, taken, kept_versions)
        removed, updated = self._what_stays(gone | {chunk.key for chunk in rewritten})
        replaced = tuple((version, key[0], int(np.count_nonzero(mask))) for key, mask in taken.items())
        return ShardChange(version, "round", files, removed, updated, replaced)

    def live_bytes(self) -> int:
        """Bytes of row 0."""
        backlog = self._backlog
        if backlog is not None:
            return backlog.live_bytes()
        return sum(chunk.bytes for chunk in self.chunks.row_0())

    def _crowded(self) -> list[str]:
        """Small files with chunks of row 0, of which there are too many: a restore opens each."""
        live = [entry for entry in self._files.values() if entry.kind != "history"]
        return [live[i].name for i in rounds.crowded([entry.bytes for entry in live])]

    def _forget(self) -> None:
        self.chunks = ChunkList()
        self._files = {}
        self._new = 0, {}

    def _catch_up(self, store: Store) -> None:
        """Put row 0 of an era that was resumed into the list; repeated if it fails."""
        backlog = self._backlog
        if backlog is None:
            return
        self._forget()
        self._add_files(store, backlog.files)
        for change in backlog.changes:
            self._note(change)
        self._history = list(backlog.history)
        self._backlog = None  # last: until now nothing but this has been used

    def _adopt_history(self, store: Store, kept_versions: Sequence[int]) -> None:
        """Put some of the history of before a resume into the list: it may be emptied, too.

        Until it is there, it stays as it is, as long as a version needs any of it.
        """
        some, rest = self._history[:ADOPTED_FILES], self._history[ADOPTED_FILES:]
        # Others have left the manifest, and may be deleted.
        self._add_files(store, [f for f in some if is_needed(f.first_born, f.last_died, kept_versions)])
        self._history = rest

    def _add_files(self, store: Store, entries: Sequence[FileEntry]) -> None:
        """Put the chunks of files into the list; parts of a chunk may be there already."""
        found: dict[Key, list[Place]] = {}
        for entry in entries:
            opened = open_file(store, entry, self.groups)
            opened.reader.close()
            for number, piece in zip(opened.numbers, opened.pieces, strict=True):
                key = piece.group, piece.first_born, piece.last_died
                if key not in found:
                    found[key] = list(self.chunks.chunks[key].places if key in self.chunks.chunks else ())
                found[key].append(Place(entry.name, number, piece))
        self._files.update((entry.name, entry) for entry in entries)
        versions = {v for _, born, died in found for v in (born, died) if v != OPEN}
        ordered = [sorted(places, key=lambda p: p.piece.first_id) for places in found.values()]
        chunks = [
            _chunk(places, self._read_ids(store, places) if places[0].piece.last_died == OPEN else None)
            for places in ordered
        ]
        columns = tuple(sorted(versions.union(self.chunks.columns)))
        self.chunks = ChunkList(columns, self.chunks.chunks).with_chunks(chunks)

    def _compare(self, store: Store, version: int, new: dict[int, RowIds]) -> Taken:
        """What is to be taken out. Reads row ids of chunks that pass the first two filters, no records."""
        threshold = self.strategy.threshold
        taken: Taken = {}
        for chunk in two_d.candidates(self.chunks, version, new, threshold):
            ids = self._read_ids(store, chunk.places)
            found = two_d.extract(ids, new[chunk.group], threshold)
            if found is not None:
                taken[chunk.key] = found
        return taken

    def _rewrite(
        self, store: Store, version: int, chunks: list[Chunk], taken: Taken, kept_versions: Sequence[int]
    ) -> tuple[Written, ...]:
        """Write chunks to new files, each as a whole or as what is left of it and what is taken out."""
        files: tuple[Written, ...] = ()
        ordered = sorted(chunks, key=lambda chunk: (chunk.born, chunk.group, chunk.died))
        for step in by_size(ordered, lambda chunk: chunk.bytes, STEP_BYTES):
            records = self._read_rows(store, step)
            left: list[NewPiece] = []
            out: list[NewPiece] = []
            for chunk in step:
                rows = records.pop(chunk.key)
                mask = taken.get(chunk.key)
                if mask is None:
                    target = left if chunk.died == OPEN else out
                    target += self._pieces(chunk, rows, chunk.died)
                    continue
                left += self._pieces(chunk, rows.take(np.flatnonzero(~mask)), OPEN)
                if is_needed(chunk.born, version, kept_versions):
                    out += self._pieces(chunk, rows.take(np.flatnonzero(mask)), version)
            del records
            files += self._writer.write(store, version, "live", left, file_bytes=2 * STEP_BYTES)
            files += self._writer.write(store, version, "history", out, file_bytes=2 * STEP_BYTES)
        return files

    def _pieces(self, chunk: Chunk, rows: Rows, died: int) -> list[NewPiece]:
        # The rank is the column: see the argument in two_d.py.
        return self._writer.split(NewPiece(chunk.group, chunk.born, rows, chunk.born, died))

    def _what_stays(self, gone: Collection[Key]) -> tuple[tuple[str, ...], tuple[FileEntry, ...]]:
        """Files of which nothing is needed without some chunks; and what to say of those that stay."""
        live: dict[str, list[Piece]] = {name: [] for name in self._files}
        dead: dict[str, list[int]] = {name: [] for name in self._files}
        for key, chunk in self.chunks.chunks.items():
            for place in chunk.places:
                if key in gone:
                    dead[place.file].append(place.number)
                else:
                    live[place.file].append(place.piece)
        removed = tuple(name for name, pieces in live.items() if not pieces)
        updated = tuple(
            msgspec.structs.replace(
                entry,
                dead_pieces=tuple(sorted({*entry.dead_pieces, *dead[name]})),
                first_born=min(piece.first_born for piece in live[name]),
                last_died=max(piece.last_died for piece in live[name]),
            )
            for name, entry in self._files.items()
            if dead[name] and live[name]
        )
        return removed, updated

    def _read_ids(self, store: Store, places: Sequence[Place]) -> RowIds:
        parts = [
            decode_index(place.piece, data, where).ids
            for place, data, where in self._read(store, places, lambda piece: piece.index_length)
        ]
        return np.concatenate(parts)

    def _read_rows(self, store: Store, chunks: Sequence[Chunk]) -> dict[Key, Rows]:
        """The records of chunks, with one request for each file."""
        places = [place for chunk in chunks for place in chunk.places]
        decoded: dict[tuple[str, int], Rows] = {}
        for place, data, where in self._read(store, places, lambda piece: piece.length):
            fields = self.groups[place.piece.group].fields
            decoded[place.file, place.number] = decode_piece(place.piece, data, fields, where).rows
        return {
            chunk.key: join_rows([decoded[place.file, place.number] for place in chunk.places])
            for chunk in chunks
        }

    def _read(
        self, store: Store, places: Sequence[Place], length_of: Callable[[Piece], int]
    ) -> Iterator[tuple[Place, NDArray[np.uint8], str]]:
        """The first bytes of each place, checked, and how to name its file; within a file in their order."""
        by_file: dict[str, list[Place]] = {}
        for place in places:
            by_file.setdefault(place.file, []).append(place)
        for name, mine in by_file.items():
            mine.sort(key=lambda place: place.number)
            where = f"{store.url}: {name}"
            ends = np.cumsum([0] + [length_of(place.piece) for place in mine]).tolist()
            data = np.empty(ends[-1], np.uint8)
            start = self._files[name].header_bytes
            with store.open(name) as reader:
                ranges = [(start + place.piece.offset, length_of(place.piece)) for place in mine]
                reader.read_into(ranges, data.data)
            for place, a, b in zip(mine, ends[:-1], ends[1:], strict=True):
                check_piece(place.piece, data[a:b], where)
                yield place, data[a:b], where


def _chunks_of(files: Sequence[Written]) -> list[tuple[list[Place], RowIds]]:
    """The chunks that were written to files: places and ids of each."""
    found: dict[Key, tuple[list[Place], list[RowIds]]] = {}
    for file in files:
        for number, (piece, own) in enumerate(zip(file.pieces, file.ids, strict=True)):
            key = piece.group, piece.first_born, piece.last_died
            places, ids = found.setdefault(key, ([], []))
            places.append(Place(file.entry.name, number, piece))
            ids.append(own)
    return [(places, np.concatenate(ids)) for places, ids in found.values()]


def _chunk(places: Sequence[Place], ids: RowIds | None) -> Chunk:
    pieces = [place.piece for place in places]
    died = pieces[0].last_died
    return Chunk(
        group=pieces[0].group,
        born=pieces[0].first_born,
        died=died,
        rows=sum(piece.rows for piece in pieces),
        first_id=pieces[0].first_id,
        last_id=pieces[-1].last_id,
        places=tuple(places),
        filter=Bloom.of(ids) if ids is not None and died == OPEN else None,
    )
