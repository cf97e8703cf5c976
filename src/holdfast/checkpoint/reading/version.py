"""Read a version: select its pieces, order them, and read them in few long reads.

The main path is ``VersionReader.read_rows``: into live tables by ``pipelines.load_rows``, to anybody else by
``pipelines.hand_on_rows``.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from holdfast.checkpoint.format import chunk
from holdfast.checkpoint.format.chunk import Piece
from holdfast.checkpoint.format.manifest import Era, FileEntry, Manifest, Version, read_newest
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.reading.coverage import Coverage
from holdfast.checkpoint.reading.loader import Decoder, RowLoader, ShareLoader, Sink
from holdfast.checkpoint.reading.pipelines import Selection, hand_on_rows, load_rows
from holdfast.checkpoint.reading.stretches import OpenFile, open_file
from holdfast.checkpoint.store import ObjectReader, Store
from holdfast.checkpoint.store.base import ReadRequest
from holdfast.errors import CorruptCheckpoint, NoSuchVersion, ObjectMissing

MOST_OPEN = 256
"""Files of a version that are held open: a quarter of what a process may have in all, as a rule."""
_MOST_COUNTED = 1 << 28  # rows
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

    def pieces(self, *, baseline: bool = True, born_after: int = 0) -> list[tuple[OpenFile, Piece]]:
        """All pieces that the version needs, in the order in which they are to be applied.

        ``born_after`` leaves out those that an earlier version of its era holds too.
        """
        v = self.version.version
        needed = [
            (file, piece)
            for file in self.files
            if baseline or file.entry.kind != "baseline"
            for piece in file.pieces
            if piece.rows and piece.first_born <= v < piece.last_died and piece.last_born > born_after
        ]
        return sorted(needed, key=lambda pair: pair[1].rank)

    def dense(self) -> bytes:
        """The verified bytes of the dense part."""
        entry = self.version.dense
        where = f"{self.store.url}: {entry.name} (version {self.version.version})"
        if self._dense.size != entry.bytes:
            raise CorruptCheckpoint(f"{where} has {self._dense.size} bytes, expected {entry.bytes}")
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
        coverage = self._coverage(pieces) if all_of_it else None
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
        self._coverage(self.pieces()).check()

    def count_rows(self) -> None:
        """Raise CorruptCheckpoint if rows are missing. Reads no records, only row ids where it has to."""
        pieces = self.pieces()
        # One bit for each row. With more rows than its files could hold, the headers have to do.
        most_rows = max(_MOST_COUNTED, sum(file.entry.bytes for file in self.files))
        coverage = self._coverage(pieces)
        coverage.check(at_most=most_rows)
        for file, piece in pieces:
            if coverage.wants(piece):
                index = file.read_index(piece)
                coverage.note(piece, index.ids, index.positions_at(self.version.version))
        coverage.finish()

    @property
    def _where(self) -> str:
        return f"version {self.version.version} of {self.store.url}"

    def _coverage(self, pieces: Sequence[tuple[OpenFile, Piece]]) -> Coverage:
        return Coverage(self.version, self.stored_groups, (piece for _, piece in pieces), self._where)

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
    for _ in range(_TRIES):
        found = find_version(current, version, store.url)
        try:
            return VersionReader(store, current, found)
        except ObjectMissing as error:
            missing, tried = error, current.number
        current = read_newest(store)
        if current.number == tried:
            break  # no writer has replaced it: it is lost
    raise CorruptCheckpoint(f"version {found.version} of {store.url} cannot be read: {missing}")


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
