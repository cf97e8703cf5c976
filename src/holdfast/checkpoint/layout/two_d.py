"""The "2d" layout of ``chunked``: IncrCP's two-dimensional list of chunks (section 4).

Each version since the baseline is a *column*. Row 0 of a column holds what is left of its increment. When
version *d* comes, its chunk is compared with every row-0 chunk of its group: of column *b*, the rows that *d*
replaces are taken out and become the chunk (b, d) of row 1, and all rows below move down by one. So a chunk
of row *r* was taken out *r* - 1 rounds ago. Version *i* of *L* is made of the first *i* columns and, of
these, L - i + 1 rows: exactly the chunks with b <= i < d, where *d* of row 0 lies in the future.

Comparing costs reads and leaves small chunks behind, so three filters, in this order, let most of it be
(section 4.3): the ranges of ids overlap; more than a share R of the new ids hit the older chunk's Bloom
filter; more than R of them are really in it. What they pass over stays where it is, replaced or not.

**Why any version comes out right, whatever was passed over.** Chunks are applied by column, later over
earlier. Take a row *x* and a version *v*, and let *b* be the last version <= *v* that wrote *x*.

1. The record (x, b) is read. It lies in row 0, which *v* reads because b <= v; or in a chunk (b, d), into
   which it came because *d* wrote *x*, too. As d > b and *b* is the last to write *x* up to *v*, d > v: the
   chunk is read.
2. No other record of *x* that is read overrides it: *v* reads columns <= *v* only, of those only *b* and
   earlier ones wrote *x*, and the earlier ones are applied before.

Records of earlier columns may well be read: where version *c* replaced (x, a) and a filter passed over it,
a later *d* takes it out, and its chunk says *d* though *c* < *d* is the truth. By 2. the column's order
mends that; applying such chunks after all of row 0 would not (hole 29). With R = 0 nothing that is replaced
is ever passed over, since a Bloom filter has no false negatives: then each chunk says the truth, and
a version reads each row once.

Dropping chunks that no kept version reads changes none of this, nor does moving a chunk to another file.
The order needs no more than that a column's number grows with time, so a round that was skipped or lost
is one that passed everything over.

Nothing here touches a store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.chunk import OPEN, Piece
from holdfast.checkpoint.format.manifest import is_needed
from holdfast.checkpoint.format.records import RowIds
from holdfast.checkpoint.layout.bloom import Bloom

LEAST_LIVE_FRACTION = 0.5
"""A file of whose bytes less than this is still needed is emptied into the next ones."""

Key = tuple[int, int, int]
"""A chunk: its group, its column, and the version that took it out (OPEN in row 0)."""


class Place(NamedTuple):
    """Where a part of a chunk is: the ``number``-th piece of a file."""

    file: str
    number: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one group and one column that were, or will be, taken out together."""

    group: int
    born: int
    died: int
    rows: int
    first_id: int
    last_id: int
    places: tuple[Place, ...] = ()
    """By ascending ids."""
    filter: Bloom | None = None
    """Of its ids; in row 0 only, others are never compared again."""

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.group, self.born, self.died

    @property
    def bytes(self) -> int:
        """Bytes of all its places."""
        return sum(place.piece.length for place in self.places)


@dataclass(frozen=True, slots=True)
class ChunkList:
    """The two-dimensional list of a shard, with the chunks of all groups. A value: changes make new ones."""

    columns: tuple[int, ...] = ()
    """Versions since the baseline, ascending."""
    chunks: Mapping[Key, Chunk] = field(default_factory=dict)

    def row_0(self, group: int | None = None) -> list[Chunk]:
        """What is left of each increment (of a group), by column."""
        found = [c for c in self.chunks.values() if c.died == OPEN and group in (None, c.group)]
        return sorted(found, key=lambda chunk: chunk.key)

    def row_of(self, chunk: Chunk) -> int:
        """How far down a chunk is by now."""
        return sum(column >= chunk.died for column in self.columns)

    def of_version(self, version: int) -> list[Chunk]:
        """What a version is made of beyond the baseline, in the order in which it is to be applied."""
        found = [c for c in self.chunks.values() if c.born <= version < c.died]
        return sorted(found, key=lambda chunk: (chunk.born, chunk.group, chunk.died))

    def unneeded(self, kept_versions: Sequence[int]) -> set[Key]:
        """Chunks that none of these versions (ascending) reads."""
        return {c.key for c in self.chunks.values() if not is_needed(c.born, c.died, kept_versions)}

    def to_move(
        self, file_bytes: Mapping[str, int], gone: Collection[Key], crowded: Collection[str] = ()
    ) -> list[Chunk]:
        """The chunks in files of which, without the ones that are gone, too little is needed any more.

        And those in crowded files: there are too many of these.
        """
        live = dict.fromkeys(file_bytes, 0)
        stay = [chunk for key, chunk in self.chunks.items() if key not in gone]
        for chunk in stay:
            for place in chunk.places:
                live[place.file] += place.piece.length
        emptied = {f for f, size in file_bytes.items() if live[f] < LEAST_LIVE_FRACTION * size}
        emptied.update(crowded)
        return [chunk for chunk in stay if any(place.file in emptied for place in chunk.places)]

    def with_column(self, version: int) -> ChunkList:
        """The list with a version behind the others: its round pushes all rows down by one."""
        return ChunkList(tuple(sorted({*self.columns, version})), self.chunks)

    def with_chunks(self, added: Iterable[Chunk], without: Collection[Key] = ()) -> ChunkList:
        """The list with some chunks replaced by others."""
        chunks = {key: chunk for key, chunk in self.chunks.items() if key not in without}
        chunks.update((chunk.key, chunk) for chunk in added)
        return ChunkList(self.columns, chunks)


def ranges_overlap(chunk: Chunk, new_ids: RowIds) -> bool:
    """The first filter: could they have a row in common?"""
    if not len(new_ids) or not chunk.rows:
        return False
    return chunk.first_id <= int(new_ids[-1]) and int(new_ids[0]) <= chunk.last_id


def hit_ratio(chunk: Chunk, new_ids: RowIds) -> float:
    """For the second filter: the share of the new ids that hit the chunk's Bloom filter."""
    assert chunk.filter is not None  # it is in row 0
    # Ids outside of the chunk's range are no members: they need not be asked about.
    within = new_ids[
        np.searchsorted(new_ids, chunk.first_id) : np.searchsorted(new_ids, chunk.last_id, "right")
    ]
    return chunk.filter.hits(within) / max(len(new_ids), 1)


def duplicates(ids: RowIds, new_ids: RowIds) -> NDArray[np.bool_]:
    """For the third filter, and for the extraction: which of the ids (ascending) the new ones hold, too."""
    if not len(new_ids):
        return np.zeros(len(ids), bool)
    at = np.minimum(np.searchsorted(new_ids, ids), len(new_ids) - 1)
    return np.equal(new_ids[at], ids)


def candidates(chunks: ChunkList, version: int, new: Mapping[int, RowIds], threshold: float) -> list[Chunk]:
    """The row-0 chunks that pass the first two filters, for which no row id need be read.

    ``new`` holds the ids of version ``version``, ascending, by group.
    """
    return [
        chunk
        for group, ids in new.items()
        for chunk in chunks.row_0(group)
        if chunk.born < version and ranges_overlap(chunk, ids) and hit_ratio(chunk, ids) > threshold
    ]


def extract(ids: RowIds, new_ids: RowIds, threshold: float) -> NDArray[np.bool_] | None:
    """Which rows of a candidate with these ids the new version takes out; None if that is not worth it.

    That is the third filter.
    """
    taken = duplicates(ids, new_ids)
    return taken if np.count_nonzero(taken) > threshold * len(new_ids) else None
