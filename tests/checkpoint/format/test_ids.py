"""Sets of row ids: they come back, and bytes that are none are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.ids import decode_ids, encode_ids
from holdfast.errors import CorruptCheckpoint

NOTHING = np.empty(0, np.uint8)


@given(st.lists(st.integers(0, 2**48 - 1), max_size=400), st.booleans())
def test_any_set_comes_back(chosen: list[int], repeats: bool) -> None:
    ids = np.array(sorted(chosen) if repeats else sorted(set(chosen)), np.int64)
    encoding, data = encode_ids(ids)
    first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
    assert decode_ids(encoding, data, len(data), len(ids), first, last, "here").tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "encoding"),
    [([], "range"), ([7], "range"), ([3, 4, 5], "range"), ([3, 5], "rice"), ([3, 3, 4], "rice0")],
)
def test_the_encoding_that_is_chosen(ids: list[int], encoding: str) -> None:
    assert encode_ids(np.array(ids, np.int64))[0] == encoding


def test_random_ids_take_little_more_than_their_entropy() -> None:
    ids = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < 0.1)
    assert len(encode_ids(ids)[1]) / len(ids) < 0.62


def test_everything_but_the_right_numbers_is_refused() -> None:
    ids = np.cumsum(np.random.default_rng(1).integers(1, 50, 300))
    encoding, data = encode_ids(ids)
    first, last, rows = int(ids[0]), int(ids[-1]), len(ids)
    assert decode_ids(encoding, data, len(data), rows, first, last, "here").tolist() == ids.tolist()
    for wrong in [
        (encoding, data, rows, first, last + 1),
        (encoding, data, rows, first, last - 1),
        (encoding, data, rows, first + 1, last),
        (encoding, data, rows - 1, first, last),
        (encoding, data, rows + 1, first, last),
        (encoding, data, 2**60, first, last),
        (encoding, data, rows, -1, last),
        (encoding, data, rows, -(2**63), last),
        (encoding, data, rows, -(2**70), last),
        (encoding, data, rows, first, 2**63 - 1),
        (encoding, data, rows, first, 2**70),
        (encoding, data, rows, last, first),
        (encoding, data[:-1], rows, first, last),
        (encoding, NOTHING, rows, first, last),
        ("rice0", data, rows, first, last),
        ("bitmap", data, rows, first, last),
        ("range", NOTHING, rows, first, last),
        ("range", NOTHING, 2**60, 0, 2**60 - 1),
        ("range", NOTHING, 5, -5, -1),
    ]:
        name, bytes_, count, low, high = wrong
        with pytest.raises(CorruptCheckpoint, match="here: "):
            decode_ids(name, bytes_, len(bytes_), count, low, high, "here")


@given(st.data())
def test_flipped_bits_never_leave_the_range(chance: st.DataObject) -> None:
    ids = np.cumsum(np.random.default_rng(1).integers(1, 50, 300))
    encoding, data = encode_ids(ids)
    for _ in range(chance.draw(st.integers(1, 4))):
        data[chance.draw(st.integers(0, len(data) - 1))] ^= np.uint8(1 << chance.draw(st.integers(0, 7)))
    try:
        found = decode_ids(encoding, data, len(data), len(ids), int(ids[0]), int(ids[-1]), "here")
    except CorruptCheckpoint:
        return
    assert (np.diff(found) > 0).all()
    assert (found[0], found[-1]) == (ids[0], ids[-1])
