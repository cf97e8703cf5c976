"""A version that has a full one below it, read into live tables from front to back.

The main path is ``Sweep.run``. Newer rows are read and kept (``overlay.py``). Meanwhile and afterwards the
full version is read: each stretch of it gets its newer rows while it is in the processor's cache, and is
written to the tables past the caches. What was too early for that gets its newer rows there, in the end.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.chunk import DecodedPiece, Piece, decode_fields, decode_piece
from holdfast.checkpoint.loader import RowLoader
from holdfast.checkpoint.overlay import Overlay, Plan
from holdfast.checkpoint.records import Group
from holdfast.checkpoint.stretches import (
    THREADS,
    Stretch,
    read_checked,
    read_stretch,
    run_all,
    stretches,
    thread_buffer,
)
from holdfast.kernels.memory import aligned_empty

_Kept = tuple[Stretch, NDArray[np.uint8]]
"""A stretch of newer rows, and memory for it."""


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
        self._early: list[Piece] = []
        """Written to the tables before all newer rows were there."""
        self._batches_left = 0
        self._is_ready = self._given_up = False
        self._read = 0
        self._changed = threading.Condition()

    def run(self) -> int:
        """Fill the tables; how many bytes were read."""
        tasks: list[list[_Kept] | Stretch] = [*self._newer_rows(), *stretches(self._plan.base)]
        if not self._batches_left:
            self._finish_overlay()
        run_all(self._do, tasks, on_error=self._give_up)
        run_all(self._lay_over_tables, self._early)
        return self._read

    def _newer_rows(self) -> list[list[_Kept]]:
        """What has to be kept, in as many batches as threads should work on it."""
        newer = list(stretches(self._plan.above, by_file=True))
        ends = [0, *itertools.accumulate(stretch.bytes for stretch in newer)]
        # In one piece, which the system gives in large pages: small ones take several times as long.
        memory = aligned_empty(ends[-1])
        kept = [
            (stretch, memory[a:b]) for stretch, (a, b) in zip(newer, itertools.pairwise(ends), strict=True)
        ]
        # Decoding is many short steps, between which a thread needs the interpreter: two that decode wait for
        # each other most of the time. So others load the full version meanwhile, if that can go on alone.
        size = 1
        if kept and all(self._is_as_in_memory(piece) for _, piece in self._plan.base):
            size = -(-len(kept) // max(1, THREADS // 2))
        batches = [kept[i : i + size] for i in range(0, len(kept), size)]
        self._batches_left = len(batches)
        return batches

    def _do(self, task: list[_Kept] | Stretch) -> None:
        if isinstance(task, Stretch):
            self._load(task)
            return
        for stretch, buffer in task:
            for decoded in read_stretch(stretch, self._groups, buffer):
                self._overlay.add(decoded, self._positions_at(decoded))
            self._note_progress(stretch)
        with self._changed:
            self._batches_left -= 1
            is_last = not self._batches_left
        if is_last:
            self._finish_overlay()

    def _finish_overlay(self) -> None:
        self._overlay.finish()
        with self._changed:
            self._is_ready = True
            self._changed.notify_all()

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

    def _load(self, stretch: Stretch) -> None:
        for piece, data in read_checked(stretch, thread_buffer(stretch.bytes)):
            group = self._groups[piece.group]
            if self._is_as_in_memory(piece):
                self._load_as_it_is(piece, decode_fields(piece, data, group.fields))
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._is_ready or self._given_up)
                if self._given_up:
                    raise CancelledError
            decoded = decode_piece(piece, data, group.fields, stretch.file.where)
            self._lay_over(piece.group, piece.first_id, decoded.rows.fields)
            self._loader.load(group, piece.group, decoded.rows, self._positions_at(decoded))
        self._note_progress(stretch)

    def _load_as_it_is(self, piece: Piece, fields: Sequence[NDArray[np.uint8]]) -> None:
        if self._is_ready:
            self._lay_over(piece.group, piece.first_id, fields)
        else:
            self._early.append(piece)
        self._loader.tables.fill(piece.group, piece.first_id, fields)

    def _lay_over_tables(self, piece: Piece) -> None:
        for part in self._loader.tables.parts(piece.group, piece.first_id, piece.rows):
            self._lay_over(piece.group, part.first, part.fields)

    def _give_up(self) -> None:
        """Let nobody wait for what will not come."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _is_as_in_memory(self, piece: Piece) -> bool:
        """Whether the file has the very bytes that go to the tables, and nothing between them."""
        return piece.index_length == 0 and not self._groups[piece.group].is_coded

    def _lay_over(self, group: int, first: int, fields: Sequence[NDArray[np.uint8]]) -> None:
        self._overlay.lay_over(group, first, len(fields[0]), [field.ctypes.data for field in fields])

    def _note_progress(self, stretch: Stretch) -> None:
        with self._changed:
            self._read += stretch.bytes
            self._on_progress(self._read)
