"""Digests of rows against a slow, obvious twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.kernels.digests import digest_live, digest_rows, fill_rows, mark_changed

SEED, FIRST, SECOND = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3
THIRD, FOURTH = 0x589965CC75374CC3, 0x1D8E4E27C47D124F
NONE = np.empty(0, np.int64)
Bytes = NDArray[np.uint8]


def fold(one: int, other: int) -> int:
    product = one * other
    return (product >> 64) ^ (product & (1 << 64) - 1)


def word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def add_field(found: int, data: bytes) -> int:
    long = len(data) // 64 * 64
    if long:
        lanes = [found] * 4
        for at in range(0, long, 16):
            key = (FIRST, SECOND, THIRD, FOURTH)[at // 16 % 4]
            lanes[at // 16 % 4] = fold(word(data, at) ^ key, word(data, at + 8) ^ lanes[at // 16 % 4])
        found = lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3]
        data = data[long:]
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        found = fold(word(data, at) ^ FIRST, word(data, at + 8) ^ SECOND ^ found)
    if len(data) & 8:
        found = fold(word(data, whole) ^ FIRST, found ^ SECOND)
        whole += 8
    if len(data) & 7:
        found = fold(word(data, whole) ^ (len(data) & 7) << 56 ^ SECOND, found ^ FIRST)
    return found


def digest(*fields: bytes) -> int:
    """As the kernel does it, in whole numbers."""
    found = SEED
    for data in fields:
        found = add_field(found, data)
    return fold(found ^ FIRST, SEED) or 1


def digests_of(fields: list[Bytes], positions: NDArray[np.int64] = NONE) -> NDArray[np.uint64]:
    found = np.zeros(len(fields[0]), np.uint64)
    addresses = np.array([[field.ctypes.data] for field in fields], np.int64)
    row_bytes = np.array([field.shape[1] for field in fields], np.int64)
    digest_rows(addresses, row_bytes, np.arange(len(found)), positions, found)
    return found


def any_fields(seed: int, rows: int, widths: list[int]) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (rows, width), np.uint8) for width in widths]


@given(st.integers(0, 99), st.integers(1, 9), st.lists(st.integers(1, 210), min_size=1, max_size=3))
def test_against_the_twin(seed: int, rows: int, widths: list[int]) -> None:
    fields = any_fields(seed, rows, widths)
    right = [digest(*(field[i].tobytes() for field in fields)) for i in range(rows)]
    assert digests_of(fields).tolist() == right
    some = np.arange(rows - 1, dtype=np.int64)
    assert digests_of(fields, some).tolist() == ([*right[:-1], 0] if len(some) else right)


@given(
    st.integers(0, 99),
    st.integers(0, 600),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.booleans(),
)
def test_rows_are_filled_in(seed: int, rows: int, widths: list[int], noted: bool) -> None:
    sources = any_fields(seed, rows, widths)
    targets = [np.full((rows + 2, width), 9, np.uint8) for width in widths]
    digests = np.zeros(rows if noted else 0, np.uint64)
    fill_rows(
        np.array([target[1:].ctypes.data for target in targets], np.int64),
        np.array([[source.ctypes.data] for source in sources], np.int64),
        np.array(widths, np.int64),
        rows,
        digests,
    )
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target[1:-1], source)
        assert (target[[0, -1]] == 9).all()
    assert not noted or np.array_equal(digests, digests_of(sources))


@given(st.integers(0, 99), st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_rows_of_tables_that_are_numbered_through(seed: int, sizes: list[int]) -> None:
    tables = [any_fields(seed + t, size, [8, 68]) for t, size in enumerate(sizes)]
    right = np.concatenate([digests_of(fields) for fields in tables])
    ids = np.flatnonzero(np.random.default_rng(seed).random(len(right)) < 0.5)
    addresses = np.array([[fields[f].ctypes.data for fields in tables] for f in range(2)], np.int64)
    found = np.zeros(len(right), np.uint64)
    digest_live(addresses, np.cumsum([0, *sizes]), np.array([8, 68]), ids, found)
    assert (found[ids] == right[ids]).all()
    assert np.count_nonzero(found) == len(ids)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 12, 16, 20, 64, 68, 128, 250])
def test_every_bit_counts(width: int) -> None:
    """Also the last ones of a row, and of zeros."""
    rows = np.zeros((8 * width + 1, width), np.uint8)
    for bit in range(8 * width):
        rows[bit + 1, bit // 8] = 1 << bit % 8
    found = digests_of([rows])
    assert len(set(found.tolist())) == len(rows)
    differences = [int(d).bit_count() for d in found[1:] ^ found[0]]
    assert 28 < np.mean(differences) < 36  # half of 64 bits


@given(st.integers(0, 99), st.lists(st.integers(0, 9000), min_size=1, max_size=3), st.data())
def test_changed_rows_are_marked(seed: int, sizes: list[int], data: st.DataObject) -> None:
    """Of several tables that are numbered through; only those in the range that are not marked yet."""
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    tables = [any_fields(seed + t, size, [8, 4]) for t, size in enumerate(sizes)]
    firsts = np.cumsum([0, *sizes])
    digests = np.concatenate([digests_of(fields) for fields in tables])
    unknown = rng.random(rows) < 0.2  # as if they had changed
    digests[unknown] = 0
    changed = rng.random(rows) < 0.1
    for row in np.flatnonzero(changed):
        table = int(np.searchsorted(firsts, row, "right")) - 1
        tables[table][1][row - firsts[table], 3] ^= 1
    marked = rng.random(rows) < 0.2
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    bits = np.zeros((rows + 63) // 64 * 8, np.uint8)
    bits[: (rows + 7) // 8] = np.packbits(marked, bitorder="little")
    shared = np.zeros(2, np.int64)
    addresses = np.array([[fields[f].ctypes.data for fields in tables] for f in range(2)], np.int64)
    words, before = bits.view(np.uint64), digests.copy()
    mark_changed(addresses, firsts, np.array([8, 4]), begin, end, digests, words, shared)

    inside = np.zeros(rows, bool)
    inside[begin:end] = True
    new = inside & ~marked & (changed | unknown)
    found = np.unpackbits(bits, bitorder="little")[:rows].astype(bool)
    assert (found == marked | new).all()
    assert shared[1] == new.sum()
    assert (digests == before).all()
