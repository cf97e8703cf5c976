"""How the rows of a version get to where they are wanted: two pipelines over the same pieces.

``load_rows`` is for live tables: several threads read, check, decode and write stretches of files at once.
``hand_on_rows`` is for anybody else: a thread reads and checks the next stretches while the caller's decodes
the last one and hands its rows on, in order.

Both apply pieces by ascending rank, and those with rows that no codec could hold at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format import chunk
from holdfast.checkpoint.format.chunk import DecodedPiece, Piece
from holdfast.checkpoint.format.records import Group, RowIds
from holdfast.checkpoint.reading.coverage import Coverage
from holdfast.checkpoint.reading.loader import Decoder, RowLoader
from holdfast.checkpoint.reading.stretches import (
    STRETCH_BYTES,
    OpenFile,
    Stretch,
    Turns,
    in_turns,
    read_checked,
    read_stretch,
    run_all,
    stretches,
    thread_buffer,
)

Pieces = Sequence[tuple[OpenFile, Piece]]
_AHEAD = 3


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of pieces are wanted.

    Args:
        groups: as they are stored.
        version: the one that is read.
        born_after: leaves out rows that were written for this version of its era or an earlier one.
        coverage: counts rows, so that missing ones are noticed; None: they are not counted.
    """

    groups: tuple[Group, ...]
    version: int
    born_after: int
    coverage: Coverage | None

    def positions(self, decoded: DecodedPiece) -> RowIds | None:
        """Where in a piece the wanted rows are; None: all of them are wanted. They count as read."""
        positions = decoded.positions_at(self.version, self.born_after)
        if self.coverage is not None and self.coverage.wants(decoded.piece):
            self.coverage.note(decoded.piece, decoded.rows.ids, positions)
        return positions

    def split(self, pieces: Pieces) -> tuple[Pieces, Pieces]:
        """The pieces, and apart from them those with rows that no codec could hold: these are for the end."""
        raw = [self.groups[piece.group].raw_rows_of is not None for _, piece in pieces]
        return (
            [pair for pair, is_raw in zip(pieces, raw, strict=True) if not is_raw],
            [pair for pair, is_raw in zip(pieces, raw, strict=True) if is_raw],
        )


def load_rows(
    loader: RowLoader, pieces: Pieces, chosen: Selection, on_progress: Callable[[int], None]
) -> int:
    """Write rows into live tables, from several threads, those of lower rank first; bytes that were read."""
    done = 0
    for part in chosen.split(pieces):
        turns = Turns(stretches(part), lambda loaded, before=done: on_progress(before + loaded))  # type: ignore[misc]

        def load(stretch: Stretch, turns: Turns = turns) -> None:
            writes = [
                _decoded_write(loader, piece, data, stretch.file.where, chosen)
                for piece, data in read_checked(stretch, thread_buffer(stretch.bytes))
            ]
            turns.wait(stretch.rank)
            for write in writes:
                write()
            turns.finish(stretch)

        run_all(load, turns.stretches, on_error=turns.give_up)
        done += turns.loaded
    return done


def _decoded_write(
    loader: RowLoader, piece: Piece, data: NDArray[np.uint8], where: str, chosen: Selection
) -> Callable[[], None]:
    """Decode a piece; what is returned writes its wanted rows."""
    group = chosen.groups[piece.group]
    if piece.is_run and not group.is_coded and group.raw_rows_of is None:
        fields = chunk.decode_fields(piece, data, group.fields)
        return partial(loader.fill, piece.group, piece.first_id, fields)
    decoded = chunk.decode_piece(piece, data, group.fields, where)
    return partial(loader.load, group, piece.group, decoded.rows, chosen.positions(decoded))


def hand_on_rows(
    decoder: Decoder, pieces: Pieces, chosen: Selection, on_progress: Callable[[int], None]
) -> int:
    """Hand rows on in the caller's thread, in the order in which they override each other; bytes read."""
    done = 0
    for decoded in (piece for part in chosen.split(pieces) for piece in in_order(part, chosen.groups)):
        positions = chosen.positions(decoded)
        if positions is None or len(positions):
            group = decoded.piece.group
            decoder.load(chosen.groups[group], group, decoded.rows, positions)
        done += decoded.piece.length
        on_progress(done)
    return done


def in_order(pieces: Pieces, groups: Sequence[Group]) -> Iterator[DecodedPiece]:
    """Pieces by ascending rank, read in long stretches."""
    for interleaved, together in in_turns(pieces):
        if not interleaved:
            yield from _decode(stretches(together), groups)
            continue
        # By rank, every read would be of another file. By file they are long, if all of it is in memory
        # before any is handed on.
        whole = list(_decode(stretches(together, by_file=True), groups, reuse=False))
        whole.sort(key=lambda decoded: decoded.piece.rank, reverse=True)
        while whole:
            yield whole.pop()


def _decode(
    wanted: Iterator[Stretch], groups: Sequence[Group], *, reuse: bool = True
) -> Iterator[DecodedPiece]:
    """Decode in the order of reading. With ``reuse`` a piece is valid until the next one is asked for."""
    free: list[NDArray[np.uint8]] = []
    under_way: deque[tuple[NDArray[np.uint8], Future[list[DecodedPiece]]]] = deque()

    def finish() -> Iterator[DecodedPiece]:
        buffer, future = under_way.popleft()
        yield from future.result()
        if reuse and len(buffer) == STRETCH_BYTES:
            free.append(buffer)  # its rows have been handed on

    with ThreadPoolExecutor(1, "holdfast-read") as pool:
        try:
            for stretch in wanted:
                size = stretch.bytes
                space = max(size, STRETCH_BYTES) if reuse else size
                buffer = free.pop() if free and space == STRETCH_BYTES else np.empty(space, np.uint8)
                future = pool.submit(read_stretch, stretch, groups, buffer[:size])
                under_way.append((buffer, future))
                if len(under_way) > _AHEAD:
                    yield from finish()
            while under_way:
                yield from finish()
        finally:
            for _, future in under_way:
                future.cancel()
