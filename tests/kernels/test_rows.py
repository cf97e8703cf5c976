"""Each hot loop against a slow, obvious twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.kernels.ids import (
    count_marked,
    decode_gaps,
    encode_gaps,
    gaps_bound,
    mark_rows,
    marked_rows,
    nonzero_rows,
)
from holdfast.kernels.rows import (
    ALL,
    HELP,
    UNTIL_HELPED,
    are_lines,
    copy_past_caches,
    gather_rows,
    scatter_rows,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
GAPS = st.lists(
    st.one_of(st.integers(1, 3), st.integers(1, 1000), st.integers(1, 2**36)), min_size=1, max_size=300
)
GUARD = 0xA5


def decoded(data: NDArray[np.uint8], first: int, last: int, least: int, count: int) -> NDArray[Any] | None:
    """With guards around the ids: a kernel that writes outside of them is found out."""
    padded = np.zeros(len(data) + 8, np.uint8)
    padded[: len(data)] = data
    room = np.full(count + 16, -7, np.int64)
    good = decode_gaps(padded, first, last, least, room[8 : 8 + count])
    assert (room[:8] == -7).all()
    assert (room[8 + count :] == -7).all()
    return room[8 : 8 + count].copy() if good else None


def encoded(ids: NDArray[np.int64], least: int) -> NDArray[np.uint8]:
    """Within the bound that is promised, with guards behind it."""
    bound = gaps_bound(len(ids), int(ids[-1] - ids[0]))  # type: ignore[no-untyped-call]
    out = np.full(bound + 64, GUARD, np.uint8)
    size = encode_gaps(ids, least, out)
    assert size <= bound, f"{len(ids)} ids over {ids[-1] - ids[0]}: {size} bytes, {bound} promised"
    assert (out[bound:] == GUARD).all()
    return out[:size]


@given(st.lists(INT64, max_size=200), st.integers(0, 300), st.integers(0, 300))
def test_marks_are_a_set_of_the_ids_inside(ids: list[int], first: int, rows: int) -> None:
    ids += [0, rows - 1, rows, -1]
    bits = np.zeros((first + rows + 63) // 64 + 1, np.uint64)
    mark_rows(bits, np.array(ids, np.int64), first, rows)
    expected = sorted({first + i for i in ids if 0 <= i < rows})
    assert count_marked(bits) == len(expected)
    assert marked(bits) == expected


def marked(bits: NDArray[np.uint64]) -> Any:
    """With a guard behind the room that is promised to be enough."""
    space = np.full(int(count_marked(bits)) + 65, -1, np.int64)
    found, words = marked_rows(bits, space[:-1], False)
    assert (words, space[-1]) == (len(bits), -1)
    return space[:found].tolist()


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 99))
def test_rows_with_a_bit_in_them(rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.random((rows, width)) < 0.5 / width).astype(np.uint8)
    found = np.empty(rows, np.int64)
    count = nonzero_rows(values.ctypes.data, width, found)
    assert found[:count].tolist() == np.flatnonzero(values.any(1)).tolist()


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(0, 700))
def test_every_bit_is_counted_and_found(words: list[int], room: int) -> None:
    bits = np.array(words, np.uint64)
    expected = [64 * w + b for w, word in enumerate(words) for b in range(64) if word >> b & 1]
    assert count_marked(bits) == len(expected)
    assert marked(bits) == expected
    # With little room it stops at a word, and clears only what it has written.
    space = np.full(room + 1, -1, np.int64)
    found, done = marked_rows(bits, space[:-1], True)
    assert space[-1] == -1
    assert space[:found].tolist() == [i for i in expected if i < 64 * done]
    assert marked(bits) == [i for i in expected if i >= 64 * done]
    assert done == len(words) or found > room - 64


@given(GAPS, st.integers(0, 2**40), st.sampled_from([0, 1]))
@example([2**47], 0, 1)
@example([2**48 - 2], 1, 1)
@example([1] * 128 + [2**40] * 128, 0, 1)
def test_gaps_come_back(gaps: list[int], first: int, least: int) -> None:
    gaps = gaps if least else [gap - 1 for gap in gaps]  # with 0, ids repeat
    ids = np.cumsum([first, *gaps]).astype(np.int64)
    found = decoded(encoded(ids, least), first, int(ids[-1]), least, len(ids))
    assert found is not None
    assert found.tolist() == ids.tolist()
    if ids[-1] > first:  # one that runs ahead of the last is stopped there
        assert decoded(encoded(ids, least), first, int(ids[-1]) - 1, least, len(ids)) is None


@pytest.mark.parametrize("count", [1, 2, 126, 127, 128, 129, 130, 255, 256, 257, 258, 384, 385, 386])
@pytest.mark.parametrize("spread", [1, 2, 3, 255, 2**20, 2**39])
def test_gaps_at_the_edges_of_blocks(count: int, spread: int) -> None:
    ids = np.cumsum(np.random.default_rng(count).integers(1, spread + 1, count))
    found = decoded(encoded(ids, 1), int(ids[0]), int(ids[-1]), 1, count)
    assert found is not None
    assert found.tolist() == ids.tolist()


@pytest.mark.parametrize("count", [2, 3, 100, 129, 130, 257, 1000, 12_801])
@pytest.mark.parametrize("span", [1, 2, 3, 127, 128, 1000, 2**31, 2**33, 2**48 - 1])
@pytest.mark.parametrize("shape", ["jump first", "jump last", "even", "just above a power", "each block"])
def test_the_bound_on_gaps_holds_for_the_worst(count: int, span: int, shape: str) -> None:
    """The most bytes go where a block's mean is just below a power of two and one gap holds most of it."""
    gaps = np.ones(count - 1, np.int64)
    rest = max(span - (count - 1), 0)
    if shape == "jump first":
        gaps[0] += rest
    elif shape == "jump last":
        gaps[-1] += rest
    elif shape == "even":
        gaps += rest // (count - 1)
    elif shape == "just above a power":
        gaps += max((1 << (rest // (count - 1)).bit_length() >> 1) - 1, 0)
    else:
        gaps[::128] += rest // len(gaps[::128])
    for least in (0, 1):
        ids = np.concatenate([[0], np.cumsum(gaps - (1 - least))])
        found = decoded(encoded(ids, least), 0, int(ids[-1]), least, count)
        assert found is not None
        assert np.array_equal(found, ids)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(1, 2000), st.integers(0, 2**48), st.sampled_from([0, 1]))
def test_any_bytes_give_ascending_ids_within_range_or_none(
    data: bytes, count: int, span: int, least: int
) -> None:
    found = decoded(np.frombuffer(data, np.uint8), 3, 3 + span, least, count)
    if found is not None:
        assert found[0] == 3
        assert (np.diff(found) >= least).all()
        assert found[-1] <= 3 + span


@pytest.mark.parametrize("k", [30, 40, 48])
def test_quotients_that_wrap_around_are_refused(k: int) -> None:
    """Ones enough for a gap of 2**63 and more: ids that come back from there would descend."""
    ones = 1 << (63 - k) if k >= 40 else 1 << 20
    data = np.concatenate([[k], np.full(ones // 8, 255), np.zeros(64)]).astype(np.uint8)
    for more in range(4):
        assert decoded(data, 2**47, 2**48, 0, 2 + more) is None


@pytest.mark.parametrize("k", [49, 63, 64, 200, 255])
def test_a_parameter_that_no_encoder_takes(k: int) -> None:
    data = np.zeros(100, np.uint8)
    data[0] = k
    assert decoded(data, 0, 2**40, 1, 5) is None


def at_line(table: NDArray[np.uint8], offset: int) -> NDArray[np.uint8]:
    """A copy whose second row begins ``offset`` bytes behind the beginning of a cache line."""
    room = np.empty(table.size + 128, np.uint8)
    skipped = -(room.ctypes.data + table.shape[1]) % 64 + offset
    copy = room[skipped : skipped + table.size].reshape(table.shape)
    copy[:] = table
    return copy


@pytest.mark.parametrize("offset", [0, 2])  # rows of whole cache lines take a way of their own
@pytest.mark.parametrize(
    "sizes", [[1], [8, 3], [16], [56, 64], [64, 72], [64, 64, 128], [128, 128], [264]], ids=str
)
@pytest.mark.parametrize("tables", [[5], [0, 5], [3, 0, 0, 4, 0], [1, 1, 1], [40, 2, 100]])
def test_rows_go_to_their_tables(sizes: list[int], tables: list[int], offset: int) -> None:
    random = np.random.default_rng(sizes[0])
    firsts = np.concatenate([[0], np.cumsum(tables)])

    def rows_of(count: int, size: int) -> NDArray[np.uint8]:
        return random.integers(0, 256, (count, size), np.uint8)

    # A row of guards before and behind each table.
    live = [[at_line(rows_of(rows + 2, size), offset) for rows in tables] for size in sizes]
    expected = [[table.copy() for table in field] for field in live]
    addresses = np.array([[table[1:].ctypes.data for table in field] for field in live], np.int64)
    for of_field, size in zip(addresses, sizes, strict=True):
        assert are_lines(of_field, size) == (offset == 0 and size % 64 == 0)
    for share in (0.0, 0.3, 1.0):
        ids = np.flatnonzero(random.random(firsts[-1]) <= share)
        some = np.flatnonzero(random.random(len(ids)) < 0.5)
        for positions in (some, some[:0]):  # a part, then all
            if positions is some and not len(some):
                continue
            values = [rows_of(len(ids), size) for size in sizes]
            for p in positions if len(positions) else range(len(ids)):
                table = int(np.searchsorted(firsts, ids[p], "right")) - 1
                for field, value in zip(expected, values, strict=True):
                    field[table][1 + ids[p] - firsts[table]] = value[p]
            scatter(addresses, firsts, ids, values, positions)
            for mine, theirs in zip(expected, live, strict=True):
                assert all(np.array_equal(*pair) for pair in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("size", [8, 64])
def test_of_a_row_that_repeats_the_last_counts(size: int) -> None:
    live = at_line(np.zeros((4, size), np.uint8), 0)
    values = np.repeat(np.array([[1], [2], [3]], np.uint8), size, axis=1)
    addresses = np.array([[live.ctypes.data]], np.int64)
    scatter(addresses, np.array([0, 4]), np.array([2, 2, 3]), [values], np.empty(0, np.int64))
    assert live.tolist() == [[n] * size for n in (0, 0, 2, 3)]


def scatter(addresses: Any, firsts: Any, ids: Any, values: list[NDArray[np.uint8]], positions: Any) -> None:
    """The kernel, which takes addresses."""
    where = np.array([value.ctypes.data for value in values], np.int64)
    sizes = np.array([value.shape[1] for value in values], np.int64)
    scatter_rows(addresses, firsts, ids, where, sizes, positions)


@pytest.mark.parametrize("tables", [[5], [0, 5], [3, 0, 0, 4, 0], [1, 1, 1], [40, 2, 9000]])
def test_rows_come_from_their_tables_whoever_copies_them(tables: list[int]) -> None:
    random = np.random.default_rng(len(tables))
    firsts = np.concatenate([[0], np.cumsum(tables)])
    widths = np.array([1, 8, 19, 64, 137])
    live = [[random.integers(0, 200, (rows, w), np.uint8) for rows in tables] for w in widths]
    addresses = np.array([[table.ctypes.data for table in field] for field in live], np.int64)
    for share in (0.1, 0.9, 1.0):
        ids = np.flatnonzero(random.random(firsts[-1]) <= share)
        if not len(ids):
            continue
        expected = [np.concatenate(field)[ids] for field in live]
        blocks = len(widths) * -(-len(ids) // 2048)
        for taken in {0, 1, blocks // 2, blocks}:
            out = [np.full((len(ids) + 1, w), 201, np.uint8) for w in widths]
            targets = np.array([o.ctypes.data for o in out], np.int64)
            rows = (addresses, firsts, ids, targets, widths)
            shared = np.array([taken, 0])  # as if somebody had taken those before it
            gather_rows(*rows, shared, HELP)
            assert shared.tolist() == [blocks + 1, 1]
            shared[0] = 0
            gather_rows(*rows, shared, UNTIL_HELPED)  # there is help: nothing to do until it is done
            assert shared.tolist() == [0, 1]
            shared[:] = 0
            gather_rows(*rows, shared, ALL if taken % 2 else UNTIL_HELPED)
            assert shared.tolist() == [blocks + 1, 0]
            for mine, theirs in zip(expected, out, strict=True):
                assert np.array_equal(mine, theirs[:-1])
                assert (theirs[-1] == 201).all()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("shift", [0, 1, 16, 63])
def test_bytes_are_copied_past_the_caches(size: int, shift: int) -> None:
    """Wherever they begin; what is around them stays."""
    source = np.random.default_rng(size).integers(0, 256, size + 7, np.uint8)[7:]
    target = np.full(size + 200, 9, np.uint8)
    begin = -target.ctypes.data % 64 + shift
    copy_past_caches(source.ctypes.data, target.ctypes.data + begin, size)
    assert np.array_equal(target[begin : begin + size], source)
    assert (target[:begin] == 9).all()
    assert (target[begin + size :] == 9).all()
