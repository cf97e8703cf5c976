"""Rows that are newer than a full version's, laid over them between its file and the tables.

The pieces of a version go through the tables once each. Where they hold few rows of many, every row lies in
another page of memory than the one before, and finding the page takes longer than writing the row. So the
newer rows are read first and kept; then the full version is read, stretch by stretch, and each stretch
gets its newer rows while it is in the processor's cache. The tables are written to once, from front to back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.chunk import DecodedPiece, Piece
from holdfast.checkpoint.records import MOST_ROWS, Group, RowIds, Rows, in_words
from holdfast.checkpoint.stretches import OpenFile
from holdfast.kernels.rows import lay_over_rows

Pieces = list[tuple[OpenFile, Piece]]

# Newer rows that are kept in memory while a version is restored: so many bytes, or this share of the tables.
LEAST_LIMIT_BYTES = 256 << 20
LIMIT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Plan:
    """Which pieces of a version are laid over which; each list in the order of its ranks."""

    base: Pieces
    above: Pieces
    rest: Pieces
    """To be loaded after these."""


def plan_overlay(pieces: Pieces, groups: Sequence[Group]) -> Plan:
    """Choose from all pieces of a version, by ascending rank, within a limit of memory.

    What a shard of a table has saved is not laid over: its full version has every n-th row, not a range.
    """
    covered = {g for g in range(len(groups)) if _covers(_base_of(pieces, g), groups[g].rows)}
    limit = max(LEAST_LIMIT_BYTES, LIMIT_SHARE * sum(g.rows * g.record_bytes for g in groups))
    plan = Plan([], [], [])
    taken = 0
    for file, piece in pieces:
        if piece.group not in covered:
            plan.rest.append((file, piece))
        elif file.entry.kind == "baseline":
            plan.base.append((file, piece))
        else:
            taken += piece.length  # counted even if left out: whatever comes after must be left out, too
            (plan.above if taken <= limit else plan.rest).append((file, piece))
    return plan


def _base_of(pieces: Pieces, group: int) -> list[Piece]:
    return [piece for file, piece in pieces if piece.group == group and file.entry.kind == "baseline"]


def _covers(base: Iterable[Piece], rows: int) -> bool:
    """Whether these hold every row once, in runs of ids."""
    at = 0
    for piece in sorted(base, key=lambda piece: piece.first_id):
        if piece.ids != "range" or piece.first_id != at:
            return False
        at = piece.last_id + 1
    return at == rows > 0


@dataclass(frozen=True, slots=True)
class _Layer:
    """The rows of a piece that belong to the version."""

    rank: int
    ids: RowIds
    positions: RowIds | None
    """Where they are in the fields, if these hold others as well."""
    fields: tuple[NDArray[np.uint8], ...]
    cuts: NDArray[np.int64]
    """How many of them come before each piece of the full version."""


@dataclass(frozen=True, slots=True)
class _Addresses:
    """The layers of a group as the kernel takes them, lowest first."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    fields: NDArray[np.int64]
    cuts: NDArray[np.int64]


class Overlay:
    """The newer rows of a version. First ``add`` all of them, from any thread; then ``lay_over``.

    Args:
        base: pieces of the full version, as ``plan_overlay`` gives them.
    """

    def __init__(self, base: Pieces) -> None:
        firsts: dict[int, list[int]] = {}
        for _, piece in base:
            firsts.setdefault(piece.group, []).append(piece.first_id)
        # Behind the last piece there is no id.
        self._edges = {group: np.array([*sorted(ids), MOST_ROWS], np.int64) for group, ids in firsts.items()}
        self._layers: dict[int, list[_Layer]] = {group: [] for group in firsts}
        self._addresses: dict[int, _Addresses] = {}

    def add(self, decoded: DecodedPiece, positions: RowIds | None) -> None:
        """Keep a piece, of whose rows those at the positions belong to the version; None: all of them."""
        group = decoded.piece.group
        ids = decoded.rows.ids if positions is None else decoded.rows.ids[positions]
        cuts = ids.searchsorted(self._edges[group])
        self._layers[group].append(_Layer(decoded.piece.rank, ids, positions, decoded.rows.fields, cuts))

    def finish(self) -> None:
        """All have been added."""
        for group, layers in self._layers.items():
            layers.sort(key=lambda layer: layer.rank)
            self._addresses[group] = _Addresses(
                np.array([layer.ids.ctypes.data for layer in layers], np.int64),
                np.array(
                    [0 if layer.positions is None else layer.positions.ctypes.data for layer in layers],
                    np.int64,
                ),
                np.array([[f.ctypes.data for f in layer.fields] for layer in layers], np.int64).T.copy(),
                np.array([layer.cuts for layer in layers], np.int64).T.copy(),
            )

    def lay_over(self, piece: Piece, rows: Rows) -> None:
        """Overwrite the rows of a piece of the full version, in place, for which there are newer ones."""
        if not self._layers[piece.group]:
            return
        layers = self._addresses[piece.group]
        number = int(self._edges[piece.group].searchsorted(piece.first_id))
        for fields, values in zip(layers.fields, rows.fields, strict=True):
            lay_over_rows(
                layers.ids,
                layers.positions,
                fields,
                layers.cuts[number],
                layers.cuts[number + 1],
                piece.first_id,
                in_words(values),
            )
