"""Rows on their way to whoever asked for them, among them rows that no codec can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.checkpoint.codecs.quantize import FloatCodec, UniformCodec
from holdfast.checkpoint.format.records import Field, Group, Rows, Table
from holdfast.checkpoint.memory.digests import RowDigests
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.reading.loader import Decoder, RowLoader, compile_loops
from holdfast.kernels import digests, ids
from holdfast.kernels import rows as rows_kernels

TABLES = (Table("a", 8, 0),)
LIVE = Group((Field("weight", "F32", 2), Field("sum", "F32", 1)), TABLES)
CODED = Group((Field("weight", "F32", 2, FloatCodec(16)), Field("sum", "F32", 1)), TABLES)
RAW = Group(LIVE.fields, TABLES, raw_rows_of=0)
NAN = float("nan")


def rows(group: Group, ids: Sequence[int], weights: Sequence[float]) -> Rows:
    """Rows with these weights, twice each, and their negatives as sums."""
    values = np.repeat(np.array(weights, np.float32), 2).reshape(-1, 2)
    codec = group.fields[0].codec
    stored = values.view(np.uint8)
    if codec is not None:
        stored = np.empty((len(ids), codec.stored_bytes(2)), np.uint8)
        codec.encode(values, stored)
    sums = -np.array(weights, np.float32).reshape(-1, 1)
    return Rows(np.array(ids, np.int64), (stored, sums.view(np.uint8)))


class Live:
    """A table in memory, filled by either way of reading."""

    def __init__(self, kind: str) -> None:
        self.weight = np.full((8, 2), 99, np.float32)
        self.sum = np.full((8, 1), 99, np.float32)
        fields = self.weight.view(np.uint8), self.sum.view(np.uint8)
        self.calls: list[list[int]] = []

        def sink(number: int, found: Rows) -> None:
            assert number == 0
            self.calls.append(found.ids.tolist())
            for field, values in zip(fields, found.fields, strict=True):
                field[found.ids] = values

        self.tables = LiveTables([LIVE], lambda table: fields)
        self.digests = RowDigests([LIVE])
        self.target: Decoder | RowLoader = (
            Decoder(sink) if kind == "handed on" else RowLoader([LIVE], lambda table: fields, self.digests)
        )

    def load(self, group: Group, ids: list[int], weights: list[float], at: list[int] | None = None) -> None:
        positions = None if at is None else np.array(at, np.int64)
        self.target.load(group, int(group is RAW), rows(group, ids, weights), positions)

    def values(self) -> list[float]:
        return [float(value) for value in self.weight[:, 0]]

    def written_but_not_noted(self) -> list[int]:
        """Rows that have been written and do not match their digests."""
        found = np.zeros(1, np.uint64)
        self.digests.find_changed(self.tables, 0, 0, 8, found)
        return [row for row in range(8) if found[0] >> np.uint64(row) & np.uint64(1) and self.sum[row] != 99]

    def missing(self) -> dict[int, list[int]]:
        return {group: ids.tolist() for group, ids in self.target.missing_raw().items()}


@pytest.fixture(params=["handed on", "live"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    live = Live(request.param)
    yield live
    assert request.param == "handed on" or live.written_but_not_noted() == []


@pytest.mark.parametrize("group", [LIVE, CODED])
def test_rows_as_they_were_in_memory(live: Live, group: Group) -> None:
    live.load(group, [1, 4], [3.0, 5.0])
    live.load(group, [4, 6], [7.0, 8.0])
    assert live.values() == [99, 3, 99, 99, 7, 99, 8, 99]
    assert live.sum[:, 0].tolist() == [99, -3, 99, 99, -7, 99, -8, 99]
    assert live.missing() == {}


@pytest.mark.parametrize("group", [LIVE, CODED])
def test_rows_at_some_positions(live: Live, group: Group) -> None:
    live.load(group, [1, 4, 6], [3.0, 5.0, 7.0], at=[0, 2])
    assert live.values() == [99, 3, 99, 99, 99, 99, 7, 99]


def test_a_row_that_was_kept_raw_comes_at_the_end(live: Live) -> None:
    live.load(CODED, [1, 4], [3.0, NAN])
    assert live.missing() == {0: [4]}
    live.load(RAW, [2, 4], [6.0, 1e30])
    assert live.values()[1] == 3
    assert live.values()[2] == 99  # it is not marked: its raw record is an older one
    assert live.values()[4] == np.float32(1e30)
    assert live.sum[4, 0] == -np.float32(1e30)
    assert live.missing() == {}


def test_only_the_newest_mark_counts(live: Live) -> None:
    live.load(CODED, [1, 2], [NAN, NAN])
    live.load(CODED, [2], [5.0])
    live.load(RAW, [1, 2], [1e30, 1e30])
    assert live.values()[1:3] == [np.float32(1e30), 5]


def test_marks_at_other_positions_are_not_the_versions(live: Live) -> None:
    live.load(CODED, [1, 2, 3, 4], [NAN, 5.0, NAN, 6.0], at=[1, 2])
    assert live.missing() == {0: [3]}
    live.load(CODED, [3, 5], [NAN, 7.0], at=[1])
    assert live.missing() == {0: [3]}
    live.load(RAW, [1, 3, 3], [1e30, 1e30, 2e30], at=[0, 2])
    assert live.values()[1:6] == [99, 5, np.float32(2e30), 99, 7]
    assert live.missing() == {}


def test_raw_rows_of_pieces_of_their_own(live: Live) -> None:
    live.load(CODED, [1, 2, 3], [NAN, NAN, NAN])
    live.load(RAW, [1], [1e30])
    assert live.missing() == {0: [2, 3]}
    live.load(RAW, [3], [1e30], at=[])
    assert live.missing() == {0: [2, 3]}
    live.load(RAW, [3], [1e30])
    assert live.missing() == {0: [2]}


def test_raw_rows_that_nothing_asks_for(live: Live) -> None:
    live.load(CODED, [1], [3.0])
    live.load(RAW, [1, 2], [1e30, 1e30])
    assert live.values()[1:3] == [3, 99]
    assert live.missing() == {}


def test_nothing_is_handed_on_where_there_is_nothing() -> None:
    live = Live("handed on")
    live.load(CODED, [1], [NAN])
    live.load(LIVE, [1, 2], [3.0, 4.0], at=[])
    live.load(RAW, [2], [1e30])
    assert live.calls == []


def test_the_loops_that_a_restore_needs_are_compiled() -> None:
    compile_loops()
    for loop in (
        digests.fill_rows,
        rows_kernels.scatter_rows,
        ids.decode_gaps,
        digests.digest_rows,
    ):
        assert loop.signatures


def test_any_field_can_keep_a_row_raw() -> None:
    both = Group((Field("weight", "F32", 2, UniformCodec(8)), Field("sum", "F32", 1, FloatCodec(16))), TABLES)
    found: list[int] = []
    decoder = Decoder(lambda number, rows: found.extend(rows.ids.tolist()))
    weights: NDArray[np.float32] = np.array([[1, 2], [NAN, 2], [1, 2]], np.float32)
    sums: NDArray[np.float32] = np.array([[1], [1], [NAN]], np.float32)
    fields = []
    for field, values in zip(both.fields, (weights, sums), strict=True):
        assert field.codec is not None
        stored = np.empty((3, field.codec.stored_bytes(field.width)), np.uint8)
        field.codec.encode(values, stored)
        fields.append(stored)
    decoder.load(both, 0, Rows(np.arange(3), tuple(fields)), None)
    assert found == [0]
    assert decoder.missing_raw()[0].tolist() == [1, 2]
