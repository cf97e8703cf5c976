"""Which rows and records a version lacks, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from holdfast.checkpoint.format.chunk import OPEN, Index, Piece, Versions
from holdfast.checkpoint.format.dense import TablePlace
from holdfast.checkpoint.format.manifest import DenseEntry, FileEntry, Version
from holdfast.checkpoint.format.records import Field, Group, Table
from holdfast.checkpoint.reading.coverage import (
    Coverage,
    EraCount,
    check_places,
    lacking_records,
    lacking_rows,
    uncovered,
)
from holdfast.errors import CorruptCheckpoint

WEIGHT = (Field("weight", "F32", 4),)


def group(*tables: int, raw_rows_of: int | None = None) -> Group:
    """Tables a, b, c … with so many rows."""
    firsts = np.cumsum([0, *tables]).tolist()
    named = zip("abcdefghijk", tables, firsts, strict=False)
    return Group(WEIGHT, tuple(Table(name, rows, first) for name, rows, first in named), raw_rows_of)


def run(first: int, last: int, *, number: int = 0, born: int = 1, died: int = OPEN) -> Piece:
    """Neighbouring rows of one birth and death: the header says all."""
    rows = last - first + 1
    lengths = (0, 0, 0, 0, 16 * rows, 0)
    return Piece(number, born, rows, born, born, died, died, "range", first, last, 0, lengths, "", "")


def scattered(
    first: int,
    last: int,
    rows: int,
    *,
    number: int = 0,
    born: tuple[int, int] = (1, 1),
    died: tuple[int, int] = (OPEN, OPEN),
) -> Piece:
    """Some rows between two: only the ids in it say which."""
    lengths = (8, 0, 0, 56, 16 * rows, 0)
    return Piece(number, born[0], rows, *born, *died, "rice", first, last, 0, lengths, "", "")


def version(number: int = 3, records: tuple[int, ...] = ()) -> Version:
    return Version(number, 0, 0, 0.0, False, 0, 0, DenseEntry("d", 0, ""), records=records)


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    ("ranges", "gaps"),
    [
        ([], [(0, 9)]),
        ([(0, 9)], []),
        ([(0, 8)], [(9, 9)]),
        ([(1, 9)], [(0, 0)]),
        ([(5, 6), (1, 2)], [(0, 0), (3, 4), (7, 9)]),
        ([(0, 4), (5, 9)], []),
        ([(0, 4), (6, 9)], [(5, 5)]),
        ([(0, 8), (2, 3), (9, 9)], []),
    ],
)
def test_rows_that_no_range_has(ranges: list[tuple[int, int]], gaps: list[tuple[int, int]]) -> None:
    assert uncovered(ranges, 10) == gaps


class TestMessages:
    def test_missing_rows_are_named_by_table(self) -> None:
        said = lacking_rows(group(10, 2000, 5), [(3, 4, 2), (10, 30, 20), (2009, 2009, 1), (2010, 2014, 5)])
        assert said == (
            "is incomplete: 28 rows are missing: 2 of the 10 rows of table a (between rows 3 and 4), "
            "21 of the 2,000 rows of table b (between rows 0 and 1999), "
            "5 of the 5 rows of table c (between rows 0 and 4)"
        )

    def test_where_headers_do_not_tell_which_they_are(self) -> None:
        said = lacking_rows(group(2000), [(3, 1999, 1997)], at_least=1500)
        assert said == (
            "is incomplete: at least 1,500 rows are missing: "
            "some of the 2,000 rows of table a (between rows 3 and 1999)"
        )

    @pytest.mark.parametrize(("tables", "more"), [(5, ""), (6, " and 1 more"), (8, " and 3 more")])
    def test_of_many_tables_five_are_named(self, tables: int, more: str) -> None:
        said = lacking_records(group(*[1] * tables), 7, 9)
        assert (
            said
            == f"is incomplete: 2 records are missing: its files hold 7 of 9 of table a, b, c, d, e{more}"
        )

    def test_records_that_nobody_wrote(self) -> None:
        assert lacking_records(group(9), 2000, 1000) == (
            "is not what was saved: its files hold 2,000 records of table a, expected 1,000"
        )
        assert "1 raw rows are missing" in lacking_records(group(9, raw_rows_of=0), 1, 2)


class TestHeaders:
    """What can be told before anything is read."""

    def check(
        self, pieces: Sequence[Piece], *, records: tuple[int, ...] = (), at_most: int = 0, number: int = 3
    ) -> Coverage:
        coverage = Coverage(version(number, records), [group(10, 10)], pieces, "version 3 of s")
        coverage.check(at_most=at_most)
        return coverage

    def test_runs_say_all(self) -> None:
        coverage = self.check([run(0, 14), run(15, 19)], records=(20,))
        assert not coverage.wants(run(0, 14))
        coverage.finish()

    def test_a_row_that_no_piece_can_have(self) -> None:
        with pytest.raises(
            CorruptCheckpoint, match=r"version 3 of s .* at least 2 rows .* 9 and 9.* 0 and 0"
        ):
            self.check([run(0, 8), run(11, 19)])

    def test_rows_that_are_too_many_for_the_pieces(self) -> None:
        with pytest.raises(
            CorruptCheckpoint, match=r"at least 2 rows are missing: some .* 5 and 9.* 0 and 9"
        ):
            self.check([run(0, 4), scattered(5, 19, 13)])
        self.check([run(0, 4), scattered(5, 19, 15)])

    def test_the_larger_number_is_named(self) -> None:
        with pytest.raises(CorruptCheckpoint, match="at least 9 rows are missing"):
            self.check([scattered(0, 15, 11)])
        with pytest.raises(CorruptCheckpoint, match="at least 4 rows are missing"):
            self.check([scattered(0, 15, 16), scattered(0, 15, 16)])

    def test_pieces_without_rows_are_nothing(self) -> None:
        self.check([run(0, 19), run(5, 4)], records=(20,)).finish()

    def test_small_groups_are_left_to_the_end(self) -> None:
        """Which rows they are can be told exactly then."""
        self.check([run(0, 8)], records=(4,), at_most=20)
        for at_most in (0, 19):
            with pytest.raises(CorruptCheckpoint):
                self.check([run(0, 8)], at_most=at_most)
            with pytest.raises(CorruptCheckpoint, match="hold 20 records of table a, b, expected 4"):
                self.check([run(0, 19)], records=(4,), at_most=at_most)

    def test_records_that_must_be_and_that_can_be(self) -> None:
        pieces = [run(0, 19), scattered(0, 9, 5, born=(2, 4)), scattered(0, 9, 3, died=(3, 9))]
        for expected in (20, 28):
            self.check(pieces, records=(expected,))
        with pytest.raises(CorruptCheckpoint, match="hold 20 records of table a, b, expected 19"):
            self.check(pieces, records=(19,))
        with pytest.raises(CorruptCheckpoint, match="1 records are missing: its files hold 28 of 29"):
            self.check(pieces, records=(29,))

    @pytest.mark.parametrize(
        ("piece", "sure"),
        [
            (scattered(0, 19, 3, born=(1, 3)), True),
            (scattered(0, 19, 3, born=(1, 4)), False),
            (scattered(0, 19, 3, died=(4, 9)), True),
            (scattered(0, 19, 3, died=(3, 9)), False),
        ],
    )
    def test_a_piece_is_wanted_if_its_header_does_not_say_all(self, piece: Piece, sure: bool) -> None:
        coverage = self.check([run(0, 19), piece], records=(23,))
        assert coverage.wants(piece) is not sure
        assert not coverage.wants(run(0, 19, born=9))

    def test_raw_rows_need_not_be_there(self) -> None:
        groups = [group(4), group(4, raw_rows_of=0)]
        coverage = Coverage(version(records=(4, 1)), groups, [run(0, 3), scattered(2, 2, 1, number=1)], "v")
        coverage.check()
        coverage.finish()


class TestCounting:
    """What can be told after all has been read."""

    def coverage(self, *pieces: Piece, records: tuple[int, ...] = ()) -> Coverage:
        coverage = Coverage(version(3, records), [group(6, 6)], pieces, "version 3 of s")
        coverage.check(at_most=100)
        return coverage

    def test_rows_are_put_together(self) -> None:
        piece = scattered(4, 11, 5)
        coverage = self.coverage(run(0, 4), run(7, 8), piece, records=(12,))
        assert coverage.wants(piece)
        coverage.note(piece, ids(5, 6, 9, 10, 11), None)
        coverage.finish()

    def test_rows_that_are_missing_are_named(self) -> None:
        piece = scattered(0, 11, 4)
        coverage = self.coverage(run(0, 4), piece)
        coverage.note(piece, ids(5, 7, 9, 11), None)
        with pytest.raises(
            CorruptCheckpoint,
            match=r"3 rows are missing: 3 of the 6 rows of table b \(between rows 0 and 4\)",
        ):
            coverage.finish()

    def test_only_rows_of_the_version_count(self) -> None:
        piece = scattered(0, 11, 3, born=(1, 9))
        coverage = self.coverage(run(0, 10), piece, records=(12,))
        coverage.note(piece, ids(9, 10, 11), ids(0))
        with pytest.raises(CorruptCheckpoint, match="1 rows are missing"):
            coverage.finish()
        coverage = self.coverage(run(0, 10), piece, records=(12,))
        coverage.note(piece, ids(9, 10, 11), ids(2))
        coverage.finish()

    @pytest.mark.parametrize("found", [1, 2, 3])
    def test_records_are_counted(self, found: int) -> None:
        piece = scattered(0, 11, 4, born=(1, 9))
        coverage = self.coverage(run(0, 11), piece, records=(14,))
        assert coverage.wants(piece)
        coverage.note(piece, ids(0, 1, 2, 3), np.arange(found))
        if found == 2:
            coverage.finish()
        else:
            with pytest.raises(CorruptCheckpoint, match=f"hold {12 + found:,}"):
                coverage.finish()

    def test_records_of_a_whole_piece(self) -> None:
        """It was not sure that all belong to the version, and they do."""
        piece = scattered(0, 11, 4, born=(1, 9))
        coverage = self.coverage(run(0, 11), piece, records=(16,))
        coverage.note(piece, ids(0, 1, 2, 3), None)
        coverage.finish()


class TestPlaces:
    GROUPS = (group(10),)

    def test_a_field_of_a_table(self) -> None:
        check_places({"a": [TablePlace("a", "weight", (10, 4))], "b": 3}, self.GROUPS, "dense")

    @pytest.mark.parametrize(
        ("place", "found"),
        [
            (TablePlace("b", "weight", (10, 4)), "weight of table b, 40 numbers, which is missing"),
            (TablePlace("a", "moment", (10, 4)), "moment of table a, 40 numbers, which is missing"),
            (TablePlace("a", "weight", (10, 3)), "weight of table a, 30 numbers, which has 40"),
            (TablePlace("a", "weight", (2**40, 2**40)), "which has 40"),
        ],
    )
    def test_one_that_is_not_there(self, place: TablePlace, found: str) -> None:
        with pytest.raises(CorruptCheckpoint, match=f"dense: .* is .*{found} in the manifest"):
            check_places({"x": place}, self.GROUPS, "dense")


def entry(name: str, kind: str = "baseline") -> FileEntry:
    return FileEntry(name, 0, 0, "", kind, 0, 0, 0, 0, 0)  # type: ignore[arg-type]


def versions(*numbers: int) -> Versions:
    least = min(numbers)
    if len(set(numbers)) == 1:
        return Versions(least, np.empty(0, np.uint8))
    return Versions(least, np.array(numbers, np.uint8) - np.uint8(least))


class TestEra:
    """All versions of an era at once."""

    def count(self, *tables: int, full_files: int = 1, largest: int = 1000, raw: bool = False) -> EraCount:
        groups = [group(*tables), *([group(*tables, raw_rows_of=0)] if raw else [])]
        return EraCount(groups, [2, 3, 5], full_files, largest)

    def test_records_live_from_birth_to_death(self) -> None:
        count = self.count(10)
        piece = scattered(0, 9, 4)
        index = Index(ids(0, 1, 2, 3), versions(1, 2, 4, 6), versions(3, 5, OPEN % 256, 255))
        count.note(entry("f", "increment"), 0, piece, index)
        # Born in 1, 2, 4 (so first read by 5) and 6 (by none); died in 3 and 5, the others later.
        assert count.records({"f": ()}).tolist() == [[2, 1, 1]]

    def test_records_of_one_birth_and_death(self) -> None:
        count = self.count(10)
        index = Index(ids(0, 1, 2), versions(3), versions(OPEN % 256))
        count.note(entry("f", "increment"), 0, scattered(0, 9, 3), index)
        count.note(entry("g", "increment"), 0, scattered(0, 9, 2), Index(ids(0, 1), versions(2), versions(5)))
        assert count.records({"f": (), "g": ()}).tolist() == [[2, 5, 3]]
        assert count.records({"f": ()}).tolist() == [[0, 3, 3]]

    def test_dead_pieces_do_not_count(self) -> None:
        count = self.count(10)
        for number in (0, 1):
            index = Index(ids(0, 1)[: number + 1], versions(2), versions(255))
            count.note(entry("f", "increment"), number, scattered(0, 9, number + 1), index)
        assert count.records({"f": ()}).tolist() == [[3, 3, 3]]
        assert count.records({"f": (0,)}).tolist() == [[2, 2, 2]]
        assert count.records({"f": (0, 1), "unknown": ()}).tolist() == [[0, 0, 0]]

    def note(self, count: EraCount, piece: Piece, *numbers: int, kind: str = "baseline") -> None:
        born, died = versions(piece.first_born), versions(255)
        count.note(entry("f", kind), len(count._changes), piece, Index(ids(*numbers), born, died))

    def test_the_full_version_has_all_rows(self) -> None:
        count = self.count(6, 4, full_files=2)
        self.note(count, run(0, 5))
        count.full_file_done()
        assert not count.has_all_rows
        self.note(count, run(6, 9))
        count.full_file_done()
        assert count.has_all_rows

    def test_in_runs_and_others(self) -> None:
        for numbers in ((6, 8, 9, 7), (6, 8, 9, 9), (7, 8, 9, 9)):
            count = self.count(6, 4)
            self.note(count, run(0, 2))
            self.note(count, run(3, 5))
            self.note(count, scattered(6, 9, 2), *numbers[:2])
            self.note(count, scattered(6, 9, 2), *numbers[2:])
            count.full_file_done()
            assert count.has_all_rows is (len(set(numbers)) == 4)

    @pytest.mark.parametrize(
        ("piece", "kind"),
        [
            (run(0, 9), "increment"),
            (run(0, 9, born=3), "baseline"),
            (run(0, 9, died=5), "baseline"),
            (run(0, 8), "baseline"),
            (run(0, 9, number=1), "baseline"),
        ],
    )
    def test_rows_that_not_every_version_reads_from_it(self, piece: Piece, kind: str) -> None:
        count = self.count(10, raw=True)
        self.note(count, piece, kind=kind)
        count.full_file_done()
        assert not count.has_all_rows

    def test_the_first_version_is_read_by_all(self) -> None:
        count = self.count(10, raw=True)
        self.note(count, run(0, 9, born=2))
        count.full_file_done()
        assert count.has_all_rows

    @pytest.mark.parametrize(("largest", "counted"), [(10, True), (9, False)])
    def test_a_forged_number_of_rows_takes_no_memory(self, largest: int, counted: bool) -> None:
        count = self.count(10, largest=largest)
        self.note(count, scattered(0, 9, 10), *range(10))
        count.full_file_done()
        assert count.has_all_rows is counted

    def test_without_rows_there_is_nothing_to_miss(self) -> None:
        assert EraCount([group(0)], [1], 0, 100).has_all_rows
        assert not EraCount([group(0), group(1)], [1], 1, 100).has_all_rows
