"""The "rounds" layout of ``chunked``: where each record is to lie so that every version is quick to read.

A record is born in one version and dies in the version that replaces it. A version needs the records
born at or before it that die after it. New records enter an *increment* file. Every few versions a round
looks at the files that hold current records; from those of which enough has died, records that are still
current go to a *live* file, and the dead ones to a *history* file, grouped by when they were born and
died, so that a version reads of it only what it needs, in few stretches.

So nothing is ever stored twice; a record is moved about as often as its neighbours die; and dead records
that no kept version needs are dropped on the way.

Why any version comes out right (``rank`` is the order in which pieces are applied):

- A live piece of rank T holds records that were current at version T. A row in two open pieces is
  therefore newer in the one of higher rank.
- A history piece says when each of its records died, so only the right one is taken from it; it is applied
  after all open pieces, which may still hold an older record of the row.
- A process that takes up an era looks at open files only: history grows with every version. So of a record
  *r* that had died by then it knows the next record of the row in an open file, which came no sooner than
  the death. If there were others between the two, they have been moved to history before. A version that
  needs one of those may read *r*, too. So the round that moves *r* gives its history a rank below that of
  all history from before (``history_rank``), and the right record overrides *r*.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.chunk import LAST, OPEN, NewPiece
from holdfast.checkpoint.format.records import Rows

# A piece should be worth a read of its own: smaller ones are put together with their neighbours.
SMALLEST_PIECE_BYTES = 512 << 10
_WIDER = 4
# How much more than it needs of the live files a version may have to read.
_LIVE_SHARE = 0.1
# A restore opens every live file. More small ones than this are put together.
MOST_SMALL_FILES = 64
_SMALL_FILE_BYTES = 32 << 20
_ALIKE_BITS = 3


@dataclass(frozen=True, slots=True)
class Lives:
    """Records of a group with the versions in which each was born and died."""

    rows: Rows
    born: NDArray[np.int32]
    died: NDArray[np.int32]

    def take(self, mask: NDArray[np.bool_]) -> Lives:
        """Those where the mask is set."""
        where = np.flatnonzero(mask)
        return Lives(self.rows.take(where), self.born[where], self.died[where])


def choose(
    dead: Sequence[int], rows: Sequence[int], sizes: Sequence[int], dead_fraction: float, most_bytes: int
) -> list[int]:
    """Which files a round takes: those with the largest dead share above a fraction, within a budget."""
    shares = [(d / n if n else 1.0, i) for i, (d, n) in enumerate(zip(dead, rows, strict=True))]
    chosen: list[int] = []
    total = 0
    for share, i in sorted(shares, reverse=True):
        if share <= dead_fraction:
            break
        if not chosen or total + sizes[i] <= most_bytes:
            chosen.append(i)
            total += sizes[i]
    return sorted(chosen)


def crowded(sizes: Sequence[int]) -> list[int]:
    """Which files to put together because there are too many small ones, though little in them may be dead.

    Those of about the same size, within a factor of eight, of which there are most. So what they hold is
    moved again only when it has become a multiple of that: as often as its size has digits, not with every
    version.
    """
    alike: dict[int, list[int]] = {}
    for i, size in enumerate(sizes):
        if size < _SMALL_FILE_BYTES:
            alike.setdefault(size.bit_length() // _ALIKE_BITS, []).append(i)
    if sum(map(len, alike.values())) <= MOST_SMALL_FILES:
        return []
    return max(alike.values(), key=len)


def belongs_to_any(lives: Lives, versions: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which records at least one of the versions (ascending) needs."""
    first_not_before = np.append(versions, OPEN)[np.searchsorted(versions, lives.born)]
    return first_not_before < lives.died


def history_rank(version: int, *, deaths_are_exact: bool) -> int:
    """The rank of the history that the round of a version writes; see above."""
    return LAST if deaths_are_exact else LAST - version


def arrange(
    group: int, lives: Lives, version: int, base: int, round_versions: int, *, deaths_are_exact: bool = True
) -> tuple[list[NewPiece], list[NewPiece]]:
    """The live and the history pieces that these records become, each list in file order.

    ``base`` is the version of the era's baseline; buckets of ``round_versions`` are counted from it. If not
    ``deaths_are_exact``, records may have died earlier than ``lives`` says.
    """
    record_bytes = sum(f.shape[1] for f in lives.rows.fields)
    least_rows = max(1, SMALLEST_PIECE_BYTES // max(record_bytes, 1))
    current = lives.died == OPEN
    live, history = lives.take(current), lives.take(~current)
    rank = history_rank(version, deaths_are_exact=deaths_are_exact)
    return (
        _pieces(group, live, version, _live_keys(live.born, least_rows)),
        _pieces(group, history, rank, _history_keys(history, base, round_versions, least_rows)),
    )


def _pieces(group: int, lives: Lives, rank: int, keys: NDArray[np.int64]) -> list[NewPiece]:
    if not len(lives.rows):
        return []
    # By piece, then by id: ids must ascend within a piece, and rows that lie together are written together.
    order = np.lexsort((lives.rows.ids, keys))
    rows, born, died = lives.rows.take(order), lives.born[order], lives.died[order]
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    cuts = [0, *edges.tolist(), len(order)]
    return [
        NewPiece(
            group=group,
            rank=rank,
            rows=Rows(rows.ids[a:b], tuple(f[a:b] for f in rows.fields)),
            born=born[a:b],
            died=died[a:b],
        )
        for a, b in itertools.pairwise(cuts)
    ]


def _live_keys(born: NDArray[np.int32], least_rows: int) -> NDArray[np.int64]:
    """A number for the piece of each current record, ascending by birth.

    An older version reads on to the end of the piece with its own births: that is to be a small share of what
    it needs anyway. Beyond that the fewer pieces the better, each goes through the tables once.
    """
    versions, which, counts = np.unique(born, return_inverse=True, return_counts=True)
    number = np.zeros(len(versions), np.int64)
    before = inside = 0
    for i, count in enumerate(counts.tolist()):
        if inside and inside + count > max(least_rows, int(_LIVE_SHARE * before)):
            before, inside = before + inside, 0
            number[i:] += 1
        inside += count
    return number[which]


def _history_keys(lives: Lives, base: int, round_versions: int, least_rows: int) -> NDArray[np.int64]:
    """A number for the piece of each dead record, ascending by birth.

    A piece for each (born, died); where that would be small, for (born, bucket of died); where that too would
    be small, for (bucket of born, bucket of died), with buckets of ever more versions.
    """
    if not len(lives.rows):
        return np.empty(0, np.int64)
    born = (lives.born - base).astype(np.int64)
    died = (lives.died - base).astype(np.int64)
    levels = [(born, died), (born, _bucket(died, round_versions))]
    size = round_versions
    while size < 2 * round_versions or size <= int(born.max()):
        levels.append((_bucket(born, size), _bucket(died, max(size // _WIDER, round_versions))))
        size *= _WIDER
    span = int(died.max()) + 2
    level_span = (int(born.max()) + 2) * span
    keys = np.zeros(len(born), np.int64)
    rest = np.arange(len(born))
    for number, (births, deaths) in enumerate(levels):
        mine = births[rest] * span + deaths[rest]
        enough = _how_often(mine) >= least_rows
        if number == len(levels) - 1:
            enough[:] = True
        # The first version of birth first: what a version needs of a file is then at its start.
        first = births[rest] if number < 2 else (births[rest] - 1) * _width(number, round_versions) + 1
        keys[rest[enough]] = (
            np.maximum(first, 0)[enough] * (len(levels) * level_span) + number * level_span + mine[enough]
        )
        rest = rest[~enough]
        if not len(rest):
            break
    return keys


def _bucket(versions: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Versions 1 to ``size`` are in bucket 1, and so on."""
    return (versions - 1) // size + 1


def _width(level: int, round_versions: int) -> int:
    return int(round_versions * _WIDER ** (level - 2))


def _how_often(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each key, how often it is among them."""
    if len(keys) and int(keys.max()) > 4 * len(keys) + 1024:
        # Keys grow with the square of the era's versions: counting them all would take more memory than rows.
        _, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
        return counts[which]
    return np.bincount(keys, minlength=1)[keys]
