"""A version that has a full one below it, read into live tables from front to back.

The main path is ``Sweep.run``. First newer rows are read and kept (``overlay.py``). Then threads go through
the full version: each stretch of it is read straight into the tables, and gets its newer rows while it is in
the processor's cache.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.checkpoint import chunk
from holdfast.checkpoint.chunk import DecodedPiece, Piece
from holdfast.checkpoint.live import Part
from holdfast.checkpoint.loader import RowLoader
from holdfast.checkpoint.overlay import Overlay, Plan
from holdfast.checkpoint.records import Group
from holdfast.checkpoint.stretches import (
    OpenFile,
    Stretch,
    read_stretch,
    run_all,
    stretches,
    thread_buffer,
)
from holdfast.errors import CorruptCheckpoint
from holdfast.kernels.memory import aligned_empty


class Sweep:
    """One restore; call ``run`` once.

    Args:
        plan: its ``base`` and ``above`` are read.
        groups: as they are stored.
        loader: has the tables.
        positions_at: which rows of a piece belong to the version.
        on_progress: told how many bytes have been read.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        loader: RowLoader,
        positions_at: Callable[[DecodedPiece], NDArray[np.int64] | None],
        on_progress: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._loader = loader
        self._positions_at = positions_at
        self._on_progress = on_progress
        self._overlay = Overlay(groups, self._edges())
        self._read = 0
        self._lock = threading.Lock()

    def run(self) -> int:
        """Fill the tables; how many bytes were read."""
        newer = list(stretches(self._plan.above, by_file=True))
        ends = [0, *itertools.accumulate(stretch.bytes for stretch in newer)]
        # In one piece, which the system gives in large pages: small ones take several times as long.
        memory = aligned_empty(ends[-1])
        buffers = [memory[a:b] for a, b in itertools.pairwise(ends)]
        run_all(self._keep, zip(newer, buffers, strict=True))
        self._overlay.finish()
        run_all(self._load, stretches(self._plan.base))
        return self._read

    def _edges(self) -> dict[int, NDArray[np.int64]]:
        """Rows are laid over pieces, and in the tables over one table's rows at a time."""
        firsts: dict[int, list[int]] = {}
        for _, piece in self._plan.base:
            firsts.setdefault(piece.group, []).append(piece.first_id)
        tables = self._loader.tables
        return {
            group: np.unique(np.concatenate((np.array(ids, np.int64), tables.firsts(group))))
            for group, ids in firsts.items()
        }

    def _keep(self, job: tuple[Stretch, NDArray[np.uint8]]) -> None:
        stretch, buffer = job
        for decoded in read_stretch(stretch, self._groups, buffer):
            self._overlay.add(decoded, self._positions_at(decoded))
        self._note_progress(stretch)

    def _load(self, stretch: Stretch) -> None:
        if stretch.file.reader.splits_reads and all(map(self._is_as_in_memory, stretch.pieces)):
            for piece in stretch.pieces:
                parts = list(self._loader.tables.parts(piece.group, piece.first_id, piece.rows))
                _read_in_place(stretch.file, piece, parts)
                for part in parts:
                    self._lay_over(piece.group, part.first, part.fields)
        else:
            for decoded in read_stretch(stretch, self._groups, thread_buffer(stretch.bytes)):
                number, rows = decoded.piece.group, decoded.rows
                self._lay_over(number, decoded.piece.first_id, rows.fields)
                self._loader.load(self._groups[number], number, rows, self._positions_at(decoded))
        self._note_progress(stretch)

    def _is_as_in_memory(self, piece: Piece) -> bool:
        """Whether the file has the very bytes that go to the tables, and nothing between them."""
        return piece.index_length == 0 and not self._groups[piece.group].is_coded

    def _lay_over(self, group: int, first: int, fields: Sequence[NDArray[np.uint8]]) -> None:
        self._overlay.lay_over(group, first, len(fields[0]), [field.ctypes.data for field in fields])

    def _note_progress(self, stretch: Stretch) -> None:
        with self._lock:
            self._read += stretch.bytes
            self._on_progress(self._read)


def _read_in_place(file: OpenFile, piece: Piece, parts: Sequence[Part]) -> None:
    """Read a piece to where its rows belong.

    What is wrong with it is found when it is there. Tables that a restore has failed on are of no version
    anyway, and whatever is restored instead writes every row.
    """
    fields = range(len(parts[0].fields))
    views = [part.fields[field].reshape(-1).data for field in fields for part in parts]
    views.append(memoryview(bytearray(piece.lengths[-1])))
    file.reader.read_split(file.entry.header_bytes + piece.offset, views)
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    if state.hexdigest() != piece.fields_checksum or piece.index_checksum != chunk.checksum():
        raise CorruptCheckpoint(f"{file.where}: the piece at byte {piece.offset} does not have its checksum")
