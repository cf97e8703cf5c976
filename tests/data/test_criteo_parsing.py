"""The compiled parser against a slow, obvious twin."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.data.criteo_kernel import explain_bad_line, parse_lines, pass_lines

ROWS = [1, 2, 3, 10, 1000, 10_000_019, 2**31, 2**40, *range(100, 118)]
LONGEST = 1 << 20

Row = tuple[float, list[float], list[int]]


def twin_id(value: int, table: int, rows: int) -> int:
    mask = 2**64 - 1
    mixed = (value + (table + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    return 0 if rows == 1 else 1 + mixed % (rows - 1)


def twin_row(line: bytes, table_rows: Sequence[int] = ROWS) -> Row | None:
    """One line without its newline; None if it is no sample."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(line) > LONGEST or len(fields) != 40 or fields[0] not in (b"0", b"1"):
        return None
    dense = []
    for field in fields[1:14]:
        if field and not re.fullmatch(rb"-?[0-9]+", field):
            return None
        value = int(field or b"0")
        if not -(2**63) <= value < 2**63:
            return None
        dense.append(float(np.float32(math.log1p(max(value, 0)))))
    ids = []
    for table, (field, rows) in enumerate(zip(fields[14:], table_rows, strict=True)):
        if field and not re.fullmatch(rb"[0-9a-fA-F]{1,8}", field):
            return None
        ids.append(twin_id(int(field, 16), table, rows) if field else 0)
    return float(fields[0]), dense, ids


def rows_of(labels: Any, dense: Any, ids: Any) -> list[Row]:
    """Arrays as the twin's rows."""
    return [
        (float(label), row.tolist(), [int(table[n]) for table in ids])
        for n, (label, row) in enumerate(zip(labels, dense, strict=True))
    ]


def parse(text: bytes, *, most: int = 10**6, stop_at_bad: bool = False) -> tuple[Any, list[Row]]:
    # 7 bytes in front and behind: what is outside of the lines must not matter.
    buffer = np.frombuffer(bytearray(b"0\t1\t\n\t1" + text + b"0\t1\t2\t"), np.uint8)
    capacity = text.count(b"\n") + 1
    labels = np.full(capacity, -1, np.float32)
    dense = np.full((capacity, 13), -1, np.float32)
    ids = np.full((26, capacity), -1, np.int64)
    end = 7 + len(text)
    rows = np.array(ROWS, np.int64)
    at, lines, good, bad = parse_lines(
        buffer, 7, end, most, LONGEST, stop_at_bad, rows, labels, dense, ids, 0
    )
    return (at - 7, lines, good, bad), rows_of(labels[:good], dense[:good], ids[:, :good])


def line_of(label: str = "1", integers: Any = None, ids: Any = None) -> bytes:
    return "\t".join([label, *(integers or ["3"] * 13), *(ids or ["0a"] * 26)]).encode()


def random_line(rng: random.Random) -> bytes:
    integers = ["" if rng.random() < 0.2 else str(rng.choice([1, 50, -3, rng.getrandbits(40)]))] * 13
    ids = ["" if rng.random() < 0.2 else f"{rng.getrandbits(32):x}" for _ in range(26)]
    return line_of(rng.choice("01"), integers, ids)


integers = st.one_of(
    st.just(""),
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.integers(-3, 5000).map(str),
    st.sampled_from(["-0", "007", "-9223372036854775808", "9223372036854775807", "0" * 30 + "4"]),
)
hex_ids = st.one_of(st.just(""), st.text("0123456789abcdefABCDEF", min_size=1, max_size=8))
good_lines = st.builds(
    lambda label, numbers, words, end: line_of(label, numbers, words) + end,
    st.sampled_from("01"),
    st.lists(integers, min_size=13, max_size=13),
    st.lists(hex_ids, min_size=26, max_size=26),
    st.sampled_from([b"", b"\r"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(good_lines, min_size=1, max_size=3))
def test_good_lines_give_what_the_twin_gives(lines: list[bytes]) -> None:
    text = b"".join(line + b"\n" for line in lines)
    (at, count, good, bad), rows = parse(text)
    assert (at, count, good, bad) == (len(text), len(lines), len(lines), 0)
    assert rows == [twin_row(line) for line in lines]


@st.composite
def damaged_lines(draw: st.DrawFn) -> bytes:
    line = bytearray(draw(good_lines))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(line)))
        length = draw(st.integers(0, 3))
        line[place : place + length] = draw(
            st.binary(max_size=3)
            | st.sampled_from([b"\t", b"\r", b"-", b"+", b" ", b"g", b"\0", b"99999999"])
        )
    return bytes(line)


@settings(max_examples=80, deadline=None)
@given(st.lists(damaged_lines() | st.binary(max_size=60) | good_lines, max_size=3))
@example([b"", b"\r", b"\r\r", line_of() + b"\r\r", line_of() + b"\t", b"\t" * 39, b"0" + b"\t" * 39])
@example([line_of(integers=["9223372036854775808"] + [""] * 12), line_of(integers=["-"] * 13)])
@example([line_of(integers=["-9223372036854775809"] * 13), line_of(integers=["1" * 4000] * 13)])
@example([line_of(ids=["123456789"] * 26), line_of(label=""), line_of(label="2"), line_of(label="01")])
def test_any_bytes_are_accepted_or_refused_as_the_twin_does(parts: list[bytes]) -> None:
    check_against_twin(b"".join(part + b"\n" for part in parts))


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 400))]
)
def test_lines_with_a_few_other_bytes_are_accepted_or_refused_as_the_twin_does(seed: int) -> None:
    rng = random.Random(seed)
    text = bytearray(b"".join(random_line(rng) + b"\n" for _ in range(1000)))
    for _ in range(1000):
        place = rng.randrange(len(text) - 2)
        text[place : place + rng.randrange(3)] = rng.choice([b"", b"\t", b"\r\n", b"7", b"-", b"F", b"\xff"])
    accepted = check_against_twin(bytes(text) + b"\n")
    assert 100 < accepted < 900


def check_against_twin(text: bytes) -> int:
    lines = text.split(b"\n")[:-1]
    expected = [twin_row(line) for line in lines]
    refused = expected.count(None)
    (at, count, good, bad), rows = parse(text)
    assert (at, count, good, bad) == (len(text), len(lines), len(lines) - refused, refused)
    assert rows == [row for row in expected if row is not None]
    for line, row in zip(lines, expected, strict=True):
        if row is None:
            assert explain_bad_line(line, LONGEST)
    return int(good)


def test_stops_in_front_of_a_bad_line_and_after_the_wanted_ones() -> None:
    good, bad = line_of() + b"\n", b"what\n"
    assert parse(good * 2 + bad + good, stop_at_bad=True)[0] == (2 * len(good), 2, 2, 0)
    assert parse(good * 5, most=3)[0] == (3 * len(good), 3, 3, 0)
    assert parse(b"")[0] == (0, 0, 0, 0)


def test_ids_differ_by_table_and_fill_the_rows_but_the_first() -> None:
    rows = [11] * 26
    seen = [{twin_id(value, table, rows[table]) for value in range(500)} for table in range(26)]
    assert seen == [set(range(1, 11))] * 26
    assert len({tuple(twin_id(value, table, 11) for value in range(20)) for table in range(26)}) == 26


def test_published_rows_of_ids_stay_what_they_are() -> None:
    # Checkpoints depend on them: a trained table is worthless under another mapping.
    _, rows = parse(line_of(ids=["68fd1e64"] * 26) + b"\n")
    assert rows[0][2][:8] == [0, 1, 2, 7, 610, 8702618, 134950751, 153347891061]


@pytest.mark.parametrize("seed", range(5))
def test_pass_lines_finds_the_line_that_a_slow_count_finds(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 50, 300, 4095, 4096, 9000]) for _ in range(40)]
    text = b"".join(b"x" * size + b"\n" for size in sizes)
    buffer = np.frombuffer(bytearray(b"\nx" + text + b"yy\n"), np.uint8)
    ends = np.cumsum([size + 1 for size in sizes])
    for wanted in range(1, 42):
        expected = (2 + int(ends[min(wanted, 40) - 1]), min(wanted, 40))
        assert pass_lines(buffer, 2, 2 + len(text), wanted) == expected
    assert pass_lines(buffer, 2, 2 + len(text), 0) == (2, 0)
