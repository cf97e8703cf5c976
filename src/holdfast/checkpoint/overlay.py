"""Rows that are newer than a full version's, laid over them between its file and the tables.

The pieces of a version go through the tables once each. Where they hold few rows of many, every row lies in
another page of memory than the one before, and finding the page takes longer than writing the row. So the
newer rows are read first and kept; then the full version is read, stretch by stretch, and each stretch
gets its newer rows while it is in the processor's cache. The tables are written to once, from front to back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.chunk import DecodedPiece, Piece
from holdfast.checkpoint.records import Group, RowIds
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
    """How many of them come before each edge."""

    def addresses(self) -> tuple[int, ...]:
        """As the kernel takes them."""
        positions = 0 if self.positions is None else self.positions.ctypes.data
        return (self.ids.ctypes.data, positions, *(field.ctypes.data for field in self.fields))


@dataclass(frozen=True, slots=True)
class _Stack:
    """The layers of a group, lowest first."""

    addresses: NDArray[np.int64]
    """[layer, which]"""
    cuts: NDArray[np.int64]
    """[edge, layer]"""


class Overlay:
    """The newer rows of a version. First ``add`` all of them, from any thread; then ``finish``.

    Args:
        groups: as they are stored.
        edges: by group, the first ids of the parts of the full version that rows will be laid over, and
            the one behind the last; ascending.
    """

    def __init__(self, groups: Sequence[Group], edges: Mapping[int, NDArray[np.int64]]) -> None:
        self._row_bytes = [np.array([field.bytes for field in g.fields], np.int64) for g in groups]
        self._edges = edges
        self._layers: dict[int, list[_Layer]] = {group: [] for group in edges}
        self._stacks: dict[int, _Stack] = {}

    def add(self, decoded: DecodedPiece, positions: RowIds | None) -> None:
        """Keep a piece, of whose rows those at the positions belong to the version; None: all of them."""
        group = decoded.piece.group
        ids = decoded.rows.ids if positions is None else decoded.rows.ids[positions]
        cuts = ids.searchsorted(self._edges[group])
        self._layers[group].append(_Layer(decoded.piece.rank, ids, positions, decoded.rows.fields, cuts))

    def finish(self) -> None:
        """All have been added."""
        for group, layers in self._layers.items():
            if layers:
                layers.sort(key=lambda layer: layer.rank)
                addresses = np.array([layer.addresses() for layer in layers], np.int64)
                cuts = np.array([layer.cuts for layer in layers], np.int64).T.copy()
                self._stacks[group] = _Stack(addresses, cuts)

    def lay_over(self, group: int, first: int, rows: int, targets: Sequence[int]) -> None:
        """Overwrite rows of the full version, in place, for which there are newer ones.

        They are these many from ``first`` on; it is an edge, and so is the id behind the last of them.
        ``targets`` are the addresses of their fields.
        """
        stack = self._stacks.get(group)
        if stack is not None:
            begin, end = self._edges[group].searchsorted((first, first + rows))
            lay_over_rows(
                stack.addresses,
                stack.cuts[begin],
                stack.cuts[end],
                first,
                np.array(targets, np.int64),
                self._row_bytes[group],
            )
