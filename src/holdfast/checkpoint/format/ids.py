"""Sets of row ids in few bytes.

Neighbouring ids that are drawn at random differ by geometrically distributed gaps, for which Rice codes
are as good as optimal: a gap costs about log2(mean gap) + 1.5 bits, 0.6 bytes where a tenth of all rows
is in the set. The codes' parameter is chosen anew for every block of ids, because a set may be dense in one
table and sparse in the next.

    range   first to last, nothing stored
    rice    gaps less one
    rice0   gaps, where an id may repeat
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.records import MOST_ROWS, RowIds
from holdfast.errors import CorruptCheckpoint
from holdfast.kernels.ids import decode_gaps, encode_gaps, gaps_bound


def encode_ids(ids: RowIds) -> tuple[str, NDArray[np.uint8]]:
    """Encode ascending ids, which may repeat. Returns the encoding's name and the bytes."""
    if not len(ids):
        return "range", np.empty(0, np.uint8)
    span = int(ids[-1] - ids[0])
    repeats = len(ids) > 1 and int(np.diff(ids).min()) == 0
    if not repeats and span == len(ids) - 1:
        return "range", np.empty(0, np.uint8)
    least = 0 if repeats else 1
    packed = np.empty(gaps_bound(len(ids), span), np.uint8)
    size = encode_gaps(ids, least, packed)
    return "rice0" if repeats else "rice", packed[:size].copy()


def decode_ids(
    encoding: str, data: NDArray[np.uint8], size: int, rows: int, first: int, last: int, where: str
) -> RowIds:
    """The ids again, checked to be ``rows`` ascending ones from ``first`` to ``last``.

    They are the first ``size`` bytes of the data. What is behind them has no meaning here, but saves a copy.
    """
    if rows == 0:
        return np.empty(0, np.int64)
    if not 0 <= first <= last < MOST_ROWS:
        raise CorruptCheckpoint(f"{where}: {rows} row ids from {first} to {last} are invalid")
    if encoding == "range":
        if last - first != rows - 1:
            raise CorruptCheckpoint(f"{where}: {rows} row ids from {first} to {last} are not a range")
        return np.arange(first, last + 1, dtype=np.int64)
    if encoding not in ("rice", "rice0"):
        raise CorruptCheckpoint(
            f"{where}: row ids are encoded as {encoding!r}, which this version of Holdfast does not know"
        )
    if rows > 8 * size:  # every id takes a bit at least: checked before memory is taken
        raise CorruptCheckpoint(f"{where}: {rows} row ids in {size} bytes")
    ids = np.empty(rows, np.int64)
    padded = data[: size + 8]
    if len(padded) < size + 8:
        padded = np.zeros(size + 8, np.uint8)
        padded[:size] = data[:size]
    if not decode_gaps(padded, first, last, 1 if encoding == "rice" else 0, ids) or ids[-1] != last:
        raise CorruptCheckpoint(f"{where}: row ids do not match the header")
    return ids
