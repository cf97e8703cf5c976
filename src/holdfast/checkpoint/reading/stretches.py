"""Read chunk files: open, verify, and read long stretches with several threads."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format import chunk
from holdfast.checkpoint.format.chunk import (
    LARGEST_HEADER,
    DecodedPiece,
    Piece,
    check_piece,
    decode_header,
    decode_piece,
)
from holdfast.checkpoint.format.manifest import FileEntry
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.store import ObjectReader, Store
from holdfast.errors import CorruptCheckpoint
from holdfast.kernels.memory import aligned_empty

Item = TypeVar("Item")

# A stretch this long stays in the processor's cache between being read, checked and handed on.
STRETCH_BYTES = 4 << 20
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive pieces of a file that are read together."""

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
        """Read these pieces, one after the other."""
        ranges = [(self.entry.header_bytes + piece.offset, piece.length) for piece in pieces]
        self.reader.read_into(ranges, out.data)

    def read_index(self, piece: Piece) -> chunk.Index:
        """Which rows a piece holds, without its records."""
        data = np.empty(piece.index_length, np.uint8)
        self.reader.read_into([(self.entry.header_bytes + piece.offset, len(data))], data.data)
        check_piece(piece, data, self.where)
        return chunk.decode_index(piece, data, self.where)


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
            raise CorruptCheckpoint(f"{where} has an invalid header size, {entry.header_bytes} bytes")
        header = reader.read(0, entry.header_bytes)
        chunk.check_checksum(header, entry.header_checksum, f"{where}: header")
        pieces = decode_header(header, where)
        chunk.check_layout(pieces, groups, entry.bytes - entry.header_bytes, where)
    except BaseException:
        reader.close()
        raise
    numbers = tuple(sorted(set(range(len(pieces))) - set(entry.dead_pieces)))
    return OpenFile(entry, reader, tuple(pieces[number] for number in numbers), numbers, where)


def read_stretch(stretch: Stretch, groups: Sequence[Group], buffer: NDArray[np.uint8]) -> list[DecodedPiece]:
    """In the reading thread: read, check and decode. The pieces' fields are views of the buffer."""
    return [
        decode_piece(piece, data, groups[piece.group].fields, stretch.file.where)
        for piece, data in read_checked(stretch, buffer)
    ]


def read_checked(stretch: Stretch, buffer: NDArray[np.uint8]) -> list[tuple[Piece, NDArray[np.uint8]]]:
    """Read and check: each piece with its bytes, which are views of the buffer."""
    stretch.file.read(stretch.pieces, buffer)
    pieces = []
    at = 0
    for piece in stretch.pieces:
        data = buffer[at : at + piece.length]
        check_piece(piece, data, stretch.file.where)
        pieces.append((piece, data))
        at += piece.length
    return pieces


def by_size(items: Iterable[Item], bytes_of: Callable[[Item], int], most_bytes: int) -> Iterator[list[Item]]:
    """Group consecutive items up to a size limit."""
    together: list[Item] = []
    size = 0
    for item in items:
        if together and size + bytes_of(item) > most_bytes:
            yield together
            together, size = [], 0
        together.append(item)
        size += bytes_of(item)
    if together:
        yield together


def in_turns(
    pieces: Sequence[tuple[OpenFile, Piece]],
) -> Iterator[tuple[bool, list[tuple[OpenFile, Piece]]]]:
    """Pieces by ascending rank, in as few runs as possible; of each, whether several files take turns in it.

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


def stretches(pieces: Sequence[tuple[OpenFile, Piece]], *, by_file: bool = False) -> Iterator[Stretch]:
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


class Turns:
    """Lets threads write stretches of one rank at the same time, and of a higher rank only after them."""

    def __init__(self, stretches: Iterable[Stretch], on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress
        self.stretches = sorted(stretches, key=lambda stretch: stretch.rank)
        self.loaded = 0
        self._left = Counter(stretch.rank for stretch in self.stretches)
        self._ranks = sorted(self._left, reverse=True)
        self._changed = threading.Condition()
        self._given_up = False

    def wait(self, rank: int) -> None:
        """Wait until everything of lower rank is written. Stretches start in ascending order of rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._ranks[-1] == rank)
            if self._given_up:
                raise CancelledError

    def finish(self, stretch: Stretch) -> None:
        """Record that this stretch is written."""
        with self._changed:
            self.loaded += stretch.bytes
            self._left[stretch.rank] -= 1
            if not self._left[stretch.rank]:
                self._ranks.pop()
                self._changed.notify_all()
            self._on_progress(self.loaded)

    def give_up(self) -> None:
        """Wake up all waiting threads after an error."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()


_thread_local = threading.local()


def thread_buffer(size: int) -> NDArray[np.uint8]:
    """A buffer for a stretch; each thread reuses its own."""
    buffer: NDArray[np.uint8] | None = getattr(_thread_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _thread_local.buffer = aligned_empty(max(size, STRETCH_BYTES))
    return buffer[:size]


def run_all(
    work: Callable[[Item], None], items: Iterable[Item], on_error: Callable[[], None] = lambda: None
) -> None:
    """Do the work for each, begun in their order; an error is raised after all threads have stopped."""
    # Threads take items themselves: one that waits for each would wake up as often, and need the interpreter.
    left = deque(items)
    threads = min(THREADS, max(len(left), 1))

    def stop() -> None:
        left.clear()
        on_error()

    def run() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException:
                stop()
                raise

    with ThreadPoolExecutor(threads, "holdfast-read") as pool:
        futures = [pool.submit(run) for _ in range(threads)]
        try:
            wait(futures)
        except BaseException:  # whoever waits has been interrupted
            stop()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    # Those that only stopped because another one failed say so.
    for error in sorted(errors, key=lambda error: isinstance(error, CancelledError)):
        raise error
