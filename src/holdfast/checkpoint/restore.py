"""Reading a version: which pieces it needs, in which order, as few and as long reads as possible.

The main path is ``VersionReader.read_rows``: a thread reads and checks the next stretch of a file while
this one decodes the last and hands its rows to whoever restores. Only where files take turns, as bundles of
several columns do, are they read as a whole before their rows are handed on.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint import chunk
from holdfast.checkpoint.chunk import (
    LARGEST_HEADER,
    DecodedPiece,
    Piece,
    check_piece,
    decode_header,
    decode_piece,
)
from holdfast.checkpoint.live import FieldsOf, LiveTables
from holdfast.checkpoint.manifest import Era, FileEntry, Manifest, Version, read_newest
from holdfast.checkpoint.records import Group, Rows
from holdfast.checkpoint.store import ObjectReader, Store
from holdfast.checkpoint.store.base import ReadRequest
from holdfast.errors import CorruptCheckpoint, NoSuchVersion, ObjectMissing

# A stretch this long stays in the processor's cache between being read, checked and handed on.
STRETCH_BYTES = 4 << 20
MOST_OPEN = 256
"""Files of a version that are held open; a process may have 1024 in all, as a rule."""
_AHEAD = 3
_THREADS = min(4, os.cpu_count() or 1)
_TRIES = 100  # a writer that is quicker than this a hundred times in a row has no time to train

Sink = Callable[[int, Rows], None]
"""Takes rows of a group; called from one thread, in the order in which rows override each other."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pieces of a file that are read together."""

    file: OpenFile
    pieces: tuple[Piece, ...]
    bytes: int

    @property
    def rank(self) -> int:
        """Of its pieces, if they are not read file by file."""
        return self.pieces[0].rank


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A chunk file whose header has been read and checked."""

    entry: FileEntry
    reader: ObjectReader
    pieces: tuple[Piece, ...]
    """Those that some version may need: the manifest says which are dead."""
    numbers: tuple[int, ...]
    """Which piece of the file each of them is."""
    where: str

    def read(self, pieces: Sequence[Piece], out: NDArray[np.uint8]) -> None:
        """Read these pieces, one behind the other."""
        ranges = [(self.entry.header_bytes + piece.offset, piece.length) for piece in pieces]
        self.reader.read_into(ranges, out.data)


def open_file(
    store: Store, entry: FileEntry, groups: Sequence[Group], version: int | None = None
) -> OpenFile:
    """Open a chunk file and check that it is the one that the manifest names."""
    where = f"{store.url}: {entry.name}" + ("" if version is None else f" (version {version})")
    reader = store.open(entry.name)
    try:
        if reader.size != entry.bytes:
            raise CorruptCheckpoint(f"{where} has {reader.size} bytes, expected {entry.bytes}")
        if not 8 < entry.header_bytes <= min(entry.bytes, LARGEST_HEADER):
            raise CorruptCheckpoint(f"{where} is said to have a header of {entry.header_bytes} bytes")
        header = reader.read(0, entry.header_bytes)
        if chunk.checksum(header) != entry.header_checksum:
            raise CorruptCheckpoint(f"{where}: its header does not have its checksum")
        pieces = decode_header(header, where)
        chunk.check_layout(pieces, groups, entry.bytes - entry.header_bytes, where)
    except BaseException:
        reader.close()
        raise
    numbers = tuple(sorted(set(range(len(pieces))) - set(entry.dead_pieces)))
    return OpenFile(entry, reader, tuple(pieces[number] for number in numbers), numbers, where)


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
    """One version of a store, opened: its files are held open, so that tidying cannot take them away.

    A context manager. Open it with ``open_version``.
    """

    def __init__(self, store: Store, manifest: Manifest, version: Version) -> None:
        self.store = store
        self.version = version
        self.era: Era = manifest.era(version.era)
        self.groups: tuple[Group, ...] = self.era.decoded_groups()
        self.bytes_read = 0
        self.pieces_read = 0
        self._stack = ExitStack()
        self.files: list[OpenFile] = []
        try:
            for entry in self.era.files_of(version.version):
                file = open_file(store, entry, self.groups, version.version)
                if len(self.files) >= MOST_OPEN:
                    file.reader.close()
                    file = replace(file, reader=_OpenedForEachRead(store, entry))
                self._stack.callback(file.reader.close)
                self.files.append(file)
            self._dense = self._stack.enter_context(store.open(version.dense.name))
        except BaseException:
            self._stack.close()
            raise

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
        """The bytes of the dense part, checked."""
        entry = self.version.dense
        where = f"{self.store.url}: {entry.name} (version {self.version.version})"
        if self._dense.size != entry.bytes:
            raise CorruptCheckpoint(f"{where} has {self._dense.size} bytes, expected {entry.bytes}")
        data = self._dense.read()
        if chunk.checksum(data) != entry.checksum:
            raise CorruptCheckpoint(f"{where} does not have its checksum")
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
        """Hand all rows of the version to the sink, later ones overriding earlier ones.

        ``baseline=False`` leaves out the rows of the era's full version: only what changed since.
        ``born_after`` leaves out what was written for that version of the era or an earlier one.
        ``on_progress`` is told how many bytes have been handed on.
        """
        pieces = self.pieces(baseline=baseline, born_after=born_after)
        if isinstance(sink, RowLoader):
            self._load(sink, pieces, born_after, on_progress)
            return
        done = 0
        for decoded in self._in_order(pieces):
            rows = decoded.at(self.version.version, born_after)
            if len(rows):
                sink(decoded.piece.group, rows)
            done += decoded.piece.length
            on_progress(done)

    def _load(
        self,
        loader: RowLoader,
        pieces: Sequence[tuple[OpenFile, Piece]],
        born_after: int,
        on_progress: Callable[[int], None],
    ) -> None:
        """Several threads read, decode and write pieces into live tables; of lower rank first."""
        version = self.version.version
        done = 0
        for interleaved, batch in _batches(pieces):
            if interleaved:
                for decoded in self._in_order(batch):
                    loader.load(decoded, version, born_after)
                    done += decoded.piece.length
                    on_progress(done)
                continue
            before = done
            turns = _Turns(_stretches(batch))

            def load(stretch: Stretch, turns: _Turns = turns, before: int = before) -> None:
                decoded = _read_stretch(stretch, self.groups, _thread_buffer(stretch.bytes))
                turns.wait(stretch.rank)
                for piece in decoded:
                    loader.load(piece, version, born_after)
                turns.finish(stretch, lambda loaded: on_progress(before + loaded))

            run_all(load, turns.stretches, _THREADS, on_error=turns.give_up)
            self.bytes_read += turns.loaded
            self.pieces_read += len(batch)
            done += turns.loaded

    def verify(self, on_progress: Callable[[int], None] = lambda done: None) -> int:
        """Read and check every byte that the version needs; how many there were."""
        self.read_rows(lambda group, rows: None, on_progress=on_progress)
        self.dense()
        return self.bytes_read

    def total_bytes(self) -> int:
        """How many bytes ``read_rows`` reads."""
        return sum(piece.length for _, piece in self.pieces())

    def _in_order(self, pieces: Sequence[tuple[OpenFile, Piece]]) -> Iterator[DecodedPiece]:
        """Pieces by ascending rank, read in long stretches."""
        for interleaved, batch in _batches(pieces):
            if not interleaved:
                yield from self._decode(_stretches(batch))
                continue
            # By rank, every read would be of another file. By file they are long, if all of it is in memory
            # before any is handed on.
            whole = list(self._decode(_stretches(batch, by_file=True), reuse=False))
            whole.sort(key=lambda decoded: decoded.piece.rank, reverse=True)
            while whole:
                yield whole.pop()

    def _decode(self, stretches: Iterator[Stretch], *, reuse: bool = True) -> Iterator[DecodedPiece]:
        """Decode in the order of reading. With ``reuse`` a piece is valid until the next one is asked for."""
        free: list[NDArray[np.uint8]] = []
        under_way: deque[tuple[Stretch, NDArray[np.uint8], Future[list[DecodedPiece]]]] = deque()

        def finish() -> Iterator[DecodedPiece]:
            stretch, buffer, future = under_way.popleft()
            yield from future.result()
            self.bytes_read += stretch.bytes
            self.pieces_read += len(stretch.pieces)
            if reuse and len(buffer) == STRETCH_BYTES:
                free.append(buffer)  # its rows have been handed on

        with ThreadPoolExecutor(1, "holdfast-read") as pool:
            try:
                for stretch in stretches:
                    size = stretch.bytes
                    least = STRETCH_BYTES if reuse else 0
                    buffer = free.pop() if free and size <= least else np.empty(max(size, least), np.uint8)
                    future = pool.submit(_read_stretch, stretch, self.groups, buffer[:size])
                    under_way.append((stretch, buffer, future))
                    if len(under_way) > _AHEAD:
                        yield from finish()
                while under_way:
                    yield from finish()
            finally:
                for _, _, future in under_way:
                    future.cancel()

    def close(self) -> None:
        """Let go of the files."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
        raise NoSuchVersion(f"{url} holds no version")
    if version is None:
        return manifest.versions[-1]
    for candidate in manifest.versions:
        if candidate.version == version:
            return candidate
    have = [v.version for v in manifest.versions]
    raise NoSuchVersion(f"{url} holds no version {version}: it has {_shown(have)}")


def _shown(have: list[int]) -> str:
    return f"{have[0]} to {have[-1]} ({len(have)} in all)" if len(have) > 5 else ", ".join(map(str, have))


def _read_stretch(stretch: Stretch, groups: Sequence[Group], buffer: NDArray[np.uint8]) -> list[DecodedPiece]:
    """In the reading thread: read, check and decode. The pieces' fields are views of the buffer."""
    stretch.file.read(stretch.pieces, buffer)
    decoded: list[DecodedPiece] = []
    at = 0
    for piece in stretch.pieces:
        data = buffer[at : at + piece.length]
        check_piece(piece, data, stretch.file.where)
        decoded.append(decode_piece(piece, data, groups[piece.group].fields, stretch.file.where))
        at += piece.length
    return decoded


def _batches(
    pieces: Sequence[tuple[OpenFile, Piece]],
) -> Iterator[tuple[bool, list[tuple[OpenFile, Piece]]]]:
    """Pieces by ascending rank, in as few batches as can be; whether several files take turns in it.

    They do where one file has ranks between those of another.
    """
    by_file: dict[str, list[tuple[OpenFile, Piece]]] = {}
    for pair in pieces:
        by_file.setdefault(pair[0].entry.name, []).append(pair)
    spans = sorted(
        (min(piece.rank for _, piece in mine), max(piece.rank for _, piece in mine), name)
        for name, mine in by_file.items()
    )
    clusters: list[list[str]] = []
    highest = -1
    for low, high, name in spans:
        if low < highest:
            clusters[-1].append(name)
        else:
            clusters.append([name])
        highest = max(highest, high)
    for interleaved, together in itertools.groupby(clusters, key=lambda names: len(names) > 1):
        yield interleaved, [pair for names in together for name in names for pair in by_file[name]]


def _stretches(pieces: Sequence[tuple[OpenFile, Piece]], *, by_file: bool = False) -> Iterator[Stretch]:
    """Neighbouring pieces of a file and of equal rank together, up to a limit, in ascending order of rank.

    ``by_file`` gives up rank and order for fewer stretches.
    """
    gathered: list[Piece] = []
    size = 0
    file: OpenFile | None = None
    # Among pieces of equal rank the order is free: by place, so that neighbours meet.
    for next_file, piece in sorted(
        pieces, key=lambda p: (0 if by_file else p[1].rank, p[0].entry.name, p[1].offset)
    ):
        if file is not None and (
            next_file is not file
            or size + piece.length > STRETCH_BYTES
            or (piece.rank != gathered[0].rank and not by_file)
        ):
            yield Stretch(file, tuple(gathered), size)
            gathered, size = [], 0
        file = next_file
        gathered.append(piece)
        size += piece.length
    if file is not None:
        yield Stretch(file, tuple(gathered), size)


class _Turns:
    """Lets threads write stretches of one rank at the same time, and of a higher rank only after them."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self.stretches = sorted(stretches, key=lambda stretch: stretch.rank)
        self.loaded = 0
        self._left = Counter(stretch.rank for stretch in self.stretches)
        self._ranks = sorted(self._left, reverse=True)
        self._changed = threading.Condition()
        self._given_up = False

    def wait(self, rank: int) -> None:
        """Return when everything of lower rank is written. Stretches are begun in ascending order of rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._ranks[-1] == rank)
            if self._given_up:
                raise CancelledError

    def finish(self, stretch: Stretch, on_progress: Callable[[int], None]) -> None:
        """This stretch is written."""
        with self._changed:
            self.loaded += stretch.bytes
            self._left[stretch.rank] -= 1
            if not self._left[stretch.rank]:
                self._ranks.pop()
                self._changed.notify_all()
            on_progress(self.loaded)

    def give_up(self) -> None:
        """Let nobody wait for what will not come."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()


_thread_local = threading.local()


def _thread_buffer(size: int) -> NDArray[np.uint8]:
    """Memory for a stretch: this thread's last one, which is done with."""
    buffer: NDArray[np.uint8] | None = getattr(_thread_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _thread_local.buffer = np.empty(max(size, STRETCH_BYTES), np.uint8)
    return buffer[:size]


def run_all(
    work: Callable[[Stretch], None],
    stretches: Sequence[Stretch],
    threads: int,
    on_error: Callable[[], None],
) -> None:
    """Do the work for each, begun in their order; raises the first error after all threads have stopped."""
    with ThreadPoolExecutor(min(threads, max(len(stretches), 1)), "holdfast-read") as pool:
        futures = [pool.submit(work, stretch) for stretch in stretches]
        try:
            for future in futures:
                future.result()
        except BaseException:
            on_error()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in futures:
                if future.done() and not future.cancelled():
                    error = future.exception()
                    if error is not None and not isinstance(error, CancelledError):
                        raise error from None
            raise


class RowLoader:
    """A sink that writes rows into live tables.

    Args:
        groups: as the version has them.
        fields_of: the live fields of a table, as bytes [rows, bytes], in the order of its group's fields.
    """

    def __init__(self, groups: Sequence[Group], fields_of: FieldsOf) -> None:
        self._tables = LiveTables(groups, fields_of)

    def __call__(self, group: int, rows: Rows) -> None:
        """Write rows of a group to where they belong."""
        self._tables.scatter(group, rows)

    def load(self, decoded: DecodedPiece, version: int, born_after: int = 0) -> None:
        """Write those records of a piece that belong to a version, of those born after another."""
        positions = decoded.positions_at(version, born_after)
        self._tables.scatter(decoded.piece.group, decoded.rows, positions)
