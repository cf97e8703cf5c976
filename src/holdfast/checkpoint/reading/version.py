"""Read a version: select its pieces, order them, and read them in few long reads.

The main path is ``VersionReader.read_rows``: into live tables by ``pipelines.load_rows``, to anybody else by
``pipelines.hand_on_rows``.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.checkpoint.format import chunk
from holdfast.checkpoint.format.chunk import Piece
from holdfast.checkpoint.format.dense import decode_shapes, header_bytes
from holdfast.checkpoint.format.manifest import Era, FileEntry, Manifest, Version, read_newest
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.memory.parts import GroupPart
from holdfast.checkpoint.reading.coverage import Coverage
from holdfast.checkpoint.reading.loader import Decoder, RowLoader, ShareLoader, Sink
from holdfast.checkpoint.reading.pipelines import Selection, hand_on_rows, load_rows
from holdfast.checkpoint.reading.stretches import OpenFile, open_file
from holdfast.checkpoint.store import ObjectReader, Store
from holdfast.checkpoint.store.base import ReadRequest
from holdfast.errors import CorruptCheckpoint, NoSuchVersion, ObjectMissing

Opened = TypeVar("Opened")

MOST_OPEN = 256
"""Files of a version that are held open: a quarter of what a process may have in all, as a rule."""
_MOST_COUNTED = 1 << 28  # rows
_FIRST_READ = 1 << 16  # most headers of dense files are no longer
_TRIES = 100  # a writer that is quicker than this a hundred times in a row has no time to train


class _OpenedForEachRead(ObjectReader):
    """A file of a version with so many that a process may not have all of them open at once."""

    def __init__(self, store: Store, entry: FileEntry) -> None:
        self._store = store
        self.name = entry.name
        self.size = entry.bytes

    def _fill(self, requests: list[ReadRequest]) -> None:
        with self._store.open(self.name) as reader:
            for request in requests:
                reader.read_into([(request.offset, request.into.nbytes)], request.into)

    def close(self) -> None:
        """Nothing is open between reads."""


class VersionReader:
    """An open version. Its files stay open, so that they remain readable if a writer deletes them.

    A context manager. Open it with ``open_version``.
    """

    def __init__(self, store: Store, manifest: Manifest, version: Version) -> None:
        self.store = store
        self.version = version
        self.era: Era = manifest.era(version.era)
        self.stored_groups: tuple[Group, ...] = self.era.decoded_groups()
        """As they are stored: with codecs, and with groups of rows that no codec could hold."""
        self.groups = tuple(g.live() for g in self.stored_groups if g.raw_rows_of is None)
        """As ``read_rows`` hands them on."""
        self.bytes_read = 0
        self._is_whole = True
        self._parts: tuple[GroupPart, ...] | None = None
        self._stack = ExitStack()
        self.files: list[OpenFile] = []
        most_open = min(MOST_OPEN, _open_files_limit() // 4)
        try:
            for entry in self.era.files_of(version.version):
                file = open_file(store, entry, self.stored_groups, version.version)
                if len(self.files) >= most_open:
                    file.reader.close()
                    file = replace(file, reader=_OpenedForEachRead(store, entry))
                self._stack.callback(file.reader.close)
                self.files.append(file)
            self._dense = self._stack.enter_context(store.open(version.dense.name))
        except BaseException:
            self._stack.close()
            raise

    def keep_shard(self, number: int) -> None:
        """Read one shard's files alone. Whether rows are missing is up to the caller then."""
        self.files = [file for file in self.files if file.entry.shard == number]
        self._is_whole = False

    def keep_parts(self, parts: Sequence[GroupPart]) -> None:
        """Read only what these parts of ``groups`` need.

        Files hold each group for itself, and runs of neighbouring rows; within them, all tables and fields of
        a group lie together under one checksum, so that rows and fields that no part has may be read, too.
        """
        self._parts = tuple(parts)

    def pieces(self, *, baseline: bool = True, born_after: int = 0) -> list[tuple[OpenFile, Piece]]:
        """All pieces that the version needs, in the order in which they are to be applied.

        ``born_after`` leaves out those that an earlier version of its era holds too.
        """
        needed = self._needed(baseline, born_after)
        return sorted((pair for pair in needed if self._is_kept(pair[1])), key=lambda pair: pair[1].rank)

    def _needed(self, baseline: bool = True, born_after: int = 0) -> Iterator[tuple[OpenFile, Piece]]:
        """The same in no order, with those that ``keep_parts`` leaves out."""
        v = self.version.version
        for file in self.files:
            if baseline or file.entry.kind != "baseline":
                for piece in file.pieces:
                    if (
                        piece.rows
                        and piece.first_born <= v < piece.last_died
                        and piece.last_born > born_after
                    ):
                        yield file, piece

    def _is_kept(self, piece: Piece) -> bool:
        """Whether a piece is read, though perhaps not all of it is wanted."""
        if self._parts is None:
            return True
        of = self.stored_groups[piece.group].raw_rows_of
        part = self._parts[piece.group if of is None else of]
        # The rows of others are counted as they are read; and a raw row belongs to a mark that is read.
        return bool(part.ranges) and (
            of is not None or not piece.is_run or part.overlaps(piece.first_id, piece.last_id)
        )

    def dense(self) -> bytes:
        """The verified bytes of the dense part."""
        entry = self.version.dense
        where = where_dense(self.store, self.version)
        _check_size(self._dense, self.version, where)
        data = self._dense.read()
        chunk.check_checksum(data, entry.checksum, where)
        self.bytes_read += len(data)
        return data

    def read_rows(
        self,
        sink: Sink,
        *,
        baseline: bool = True,
        born_after: int = 0,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Pass all rows of the version to the sink; later rows override earlier ones.

        ``baseline=False`` leaves out the rows of the era's full version: only what changed since.
        ``born_after`` leaves out what was written for that version of the era or an earlier one.
        ``on_progress`` is told how many bytes have been handed on.

        Raises CorruptCheckpoint if rows are missing: before the first is handed on where headers tell, else
        after the last. What is left out by the arguments is not counted.
        """
        pieces = self.pieces(baseline=baseline, born_after=born_after)
        all_of_it = baseline and not born_after and self._is_whole
        coverage = self._coverage() if all_of_it else None
        if coverage is not None:
            coverage.check()
        if isinstance(sink, ShareLoader):
            # What is of other ranks, and need not be read to be counted.
            pieces = [
                (file, p)
                for file, p in pieces
                if sink.wants(self.stored_groups[p.group], p.group, p.first_id, p.last_id)
                or (coverage is not None and coverage.wants(p))
            ]
        chosen = Selection(self.stored_groups, self.version.version, born_after, coverage)
        if isinstance(sink, RowLoader):
            target: RowLoader | Decoder = sink
            self.bytes_read += load_rows(sink, pieces, chosen, on_progress)
        else:
            target = Decoder(sink)
            self.bytes_read += hand_on_rows(target, pieces, chosen, on_progress)
        if coverage is not None:
            coverage.finish()
        for number, ids in target.missing_raw().items():
            tables = self.groups[number].tables
            raise CorruptCheckpoint(
                f"{self._where} is incomplete: {len(ids):,} raw rows are missing, of which the first is row "
                f"{ids[0]} of the group of table {tables[0].name}"
            )

    def check_complete(self) -> None:
        """Raise CorruptCheckpoint if the headers show that rows are missing. Reads nothing."""
        self._coverage().check()

    def count_rows(self) -> None:
        """Raise CorruptCheckpoint if rows are missing. Reads no records, only row ids where it has to."""
        # One bit for each row. With more rows than its files could hold, the headers have to do.
        most_rows = max(_MOST_COUNTED, sum(file.entry.bytes for file in self.files))
        coverage = self._coverage()
        coverage.check(at_most=most_rows)
        for file, piece in self.pieces():
            if coverage.wants(piece):
                index = file.read_index(piece)
                coverage.note(piece, index.ids, index.positions_at(self.version.version))
        coverage.finish()

    @property
    def _where(self) -> str:
        return f"version {self.version.version} of {self.store.url}"

    def _coverage(self) -> Coverage:
        parts, counted = self._parts, None
        if parts is not None:
            of = [n if g.raw_rows_of is None else g.raw_rows_of for n, g in enumerate(self.stored_groups)]
            counted = {number for number, whole in enumerate(of) if parts[whole].ranges}
        pieces = (piece for _, piece in self._needed())
        return Coverage(self.version, self.stored_groups, pieces, self._where, counted)

    def verify(self, on_progress: Callable[[int], None] = lambda done: None) -> int:
        """Read and check every byte that the version needs, and count its rows; how many bytes there were."""
        self.read_rows(lambda group, rows: None, on_progress=on_progress)
        self.dense()
        return self.bytes_read

    def total_bytes(self) -> int:
        """How many bytes ``read_rows`` reads."""
        return sum(piece.length for _, piece in self.pieces())

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_files_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4 * MOST_OPEN if soft == resource.RLIM_INFINITY else soft


def open_version(store: Store, version: int | None = None, manifest: Manifest | None = None) -> VersionReader:
    """Open a version, the newest by default, for reading.

    A writer may be tidying up meanwhile: a file that is gone has been replaced by others that a newer
    manifest names, so that one is read and the version opened again.
    """
    current = manifest if manifest is not None else read_newest(store)
    return _from_newest(store, version, current, lambda current, found: VersionReader(store, current, found))


def _from_newest(
    store: Store, version: int | None, current: Manifest, opened: Callable[[Manifest, Version], Opened]
) -> Opened:
    """What ``opened`` makes of a version; once more with the newest manifest where a file is gone."""
    for _ in range(_TRIES):
        found = find_version(current, version, store.url)
        try:
            return opened(current, found)
        except ObjectMissing as error:
            missing, tried = error, current.number
        current = read_newest(store)
        if current.number == tried:
            break  # no writer has replaced it: it is lost
    raise CorruptCheckpoint(f"version {found.version} of {store.url} cannot be read: {missing}")


def read_shapes(store: Store, version: int | None = None) -> tuple[Version, tuple[Group, ...], Any]:
    """A version, the newest by default, its groups as they are in memory, and its dense part without content.

    Reads the header of one file, which a writer may delete meanwhile: then from the newest manifest again.
    """

    def opened(manifest: Manifest, found: Version) -> tuple[Version, tuple[Group, ...], Any]:
        groups = tuple(g.live() for g in manifest.era(found.era).decoded_groups() if g.raw_rows_of is None)
        where = where_dense(store, found)
        with store.open(found.dense.name) as file:
            _check_size(file, found, where)
            header = file.read(0, min(file.size, _FIRST_READ))
            size = min(file.size, header_bytes(header))
            header += file.read(len(header), max(size - len(header), 0))
        return found, groups, decode_shapes(header, found.dense.bytes, where)

    return _from_newest(store, version, read_newest(store), opened)


def where_dense(store: Store, version: Version) -> str:
    """How to name a version's dense file in messages."""
    return f"{store.url}: {version.dense.name} (version {version.version})"


def _check_size(file: ObjectReader, version: Version, where: str) -> None:
    if file.size != version.dense.bytes:
        raise CorruptCheckpoint(f"{where} has {file.size} bytes, expected {version.dense.bytes}")


def by_preference(versions: Sequence[Version]) -> list[Version]:
    """The newest first; those that may lack changes come last."""
    return sorted(versions, key=lambda version: (bool(version.unverified), -version.version))


def find_version(manifest: Manifest, version: int | None, url: str) -> Version:
    """A version of a manifest by number; the newest for None."""
    if not manifest.versions:
        raise NoSuchVersion(f"{url} has no versions")
    if version is None:
        return manifest.versions[-1]
    for candidate in manifest.versions:
        if candidate.version == version:
            return candidate
    have = [v.version for v in manifest.versions]
    raise NoSuchVersion(f"{url} has no version {version}: it has {_shown(have)}")


def _shown(have: list[int]) -> str:
    return f"{have[0]} to {have[-1]} ({len(have)} in all)" if len(have) > 5 else ", ".join(map(str, have))
