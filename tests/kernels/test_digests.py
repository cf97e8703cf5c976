"""Digests of rows against a slow, obvious twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.kernels.digests import KEEP_UNKNOWN, MARK_UNKNOWN, digest_rows, mark_changed

SEED, FIRST, SECOND = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3
Bytes = NDArray[np.uint8]


def fold(one: int, other: int) -> int:
    product = one * other
    return (product >> 64) ^ (product & (1 << 64) - 1)


def digest(*fields: bytes) -> int:
    """As the kernel does it, in whole numbers."""
    found = SEED
    for data in fields:
        whole = len(data) // 16 * 16
        for at in range(0, whole, 16):
            first, second = (int.from_bytes(data[i : i + 8], "little") for i in (at, at + 8))
            found = fold(first ^ FIRST, second ^ SECOND ^ found)
        if len(data) & 8:
            found = fold(int.from_bytes(data[whole : whole + 8], "little") ^ FIRST, found ^ SECOND)
            whole += 8
        if len(data) & 7:
            rest = int.from_bytes(data[whole:], "little") | (len(data) & 7) << 56
            found = fold(rest ^ SECOND, found ^ FIRST)
    return fold(found ^ FIRST, SEED) or 1


def digests_of(fields: list[Bytes]) -> NDArray[np.uint64]:
    found = np.zeros(len(fields[0]), np.uint64)
    addresses = np.array([[field.ctypes.data] for field in fields], np.int64)
    row_bytes = np.array([field.shape[1] for field in fields], np.int64)
    digest_rows(addresses, row_bytes, np.arange(len(found)), found)
    return found


def any_fields(seed: int, rows: int, widths: list[int]) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (rows, width), np.uint8) for width in widths]


@given(st.integers(0, 99), st.integers(1, 9), st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_against_the_twin(seed: int, rows: int, widths: list[int]) -> None:
    fields = any_fields(seed, rows, widths)
    right = [digest(*(field[i].tobytes() for field in fields)) for i in range(rows)]
    assert digests_of(fields).tolist() == right


@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 12, 16, 20, 64, 68])
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
    unknown = rng.random(rows) < 0.2
    digests[unknown] = 0
    changed = rng.random(rows) < 0.1
    for row in np.flatnonzero(changed):
        table = int(np.searchsorted(firsts, row, "right")) - 1
        tables[table][1][row - firsts[table], 3] ^= 1
    marked = rng.random(rows) < 0.2
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    how = data.draw(st.sampled_from([KEEP_UNKNOWN, MARK_UNKNOWN]))
    bits = np.zeros((rows + 63) // 64 * 8, np.uint8)
    bits[: (rows + 7) // 8] = np.packbits(marked, bitorder="little")
    shared = np.zeros(2, np.int64)
    addresses = np.array([[fields[f].ctypes.data for fields in tables] for f in range(2)], np.int64)
    words, before = bits.view(np.uint64), digests.copy()
    mark_changed(addresses, firsts, np.array([8, 4]), begin, end, digests, words, how, shared)

    inside = np.zeros(rows, bool)
    inside[begin:end] = True
    differs = changed & ~unknown if how == KEEP_UNKNOWN else changed | unknown
    new = inside & ~marked & differs
    found = np.unpackbits(bits, bitorder="little")[:rows].astype(bool)
    assert (found == marked | new).all()
    assert shared[1] == new.sum()
    noted = inside & ~marked & unknown if how == KEEP_UNKNOWN else np.zeros(rows, bool)
    assert (digests[~noted] == before[~noted]).all()
    assert (digests[noted] != 0).all()
