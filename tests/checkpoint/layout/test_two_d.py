"""IncrCP's two-dimensional list, section by section, and against a dictionary that remembers everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.chunk import OPEN, Piece
from holdfast.checkpoint.format.manifest import is_needed
from holdfast.checkpoint.layout import two_d
from holdfast.checkpoint.layout.bloom import FALSE_POSITIVES, Bloom
from holdfast.checkpoint.layout.two_d import Chunk, ChunkList, Key, Place

Ids = np.ndarray[Any, np.dtype[np.int64]]


def ids_of(rows: Sequence[int] | set[int] | range) -> Ids:
    return np.array(sorted(rows), np.int64)


def chunk(rows: Sequence[int] | range, born: int = 1, died: int = OPEN) -> Chunk:
    ids = ids_of(rows)
    return Chunk(0, born, died, len(ids), int(ids[0]), int(ids[-1]), (), Bloom.of(ids))


@dataclass
class Records:
    """The list with its rows in memory. A record is (row, the version that wrote it)."""

    threshold: float = 0.0
    chunks: ChunkList = field(default_factory=ChunkList)
    rows: dict[Key, Ids] = field(default_factory=dict)
    written: dict[int, set[int]] = field(default_factory=dict)

    def add(self, version: int, rows: Sequence[int] | set[int], *, round_is_lost: bool = False) -> list[Key]:
        """A version and its round; which chunks were divided."""
        new = ids_of(rows)
        self.written[version] = set(new.tolist())
        self.chunks = self.chunks.with_column(version)
        divided: list[Key] = []
        if not round_is_lost:
            for old in two_d.candidates(self.chunks, version, {0: new}, self.threshold):
                taken = two_d.extract(self.rows[old.key], new, self.threshold)
                if taken is not None:
                    divided.append(old.key)
                    self._divide(old, taken, version)
        if len(new):
            self._put((0, version, OPEN), new)
        return divided

    def _divide(self, old: Chunk, taken: np.ndarray[Any, np.dtype[np.bool_]], version: int) -> None:
        rows = self.rows.pop(old.key)
        self.chunks = self.chunks.with_chunks((), without={old.key})
        for key, part in ((old.key, rows[~taken]), ((0, old.born, version), rows[taken])):
            if len(part):
                self._put(key, part)

    def _put(self, key: Key, rows: Ids) -> None:
        self.rows[key] = rows
        new = Chunk(*key, len(rows), int(rows[0]), int(rows[-1]), (), Bloom.of(rows))
        self.chunks = self.chunks.with_chunks([new])

    def drop(self, kept: Sequence[int]) -> None:
        gone = self.chunks.unneeded(kept)
        self.chunks = self.chunks.with_chunks((), without=gone)
        for key in gone:
            del self.rows[key]

    def grid(self) -> dict[tuple[int, int], list[int]]:
        """Rows by (row, column), both counted from 0 as in the figures."""
        return {
            (self.chunks.row_of(c), self.chunks.columns.index(c.born)): self.rows[key].tolist()
            for key, c in self.chunks.chunks.items()
        }

    def restored(self, version: int) -> dict[int, int]:
        state: dict[int, int] = {}
        for c in self.chunks.of_version(version):
            state.update(dict.fromkeys(self.rows[c.key].tolist(), c.born))
        return state

    def truth(self, version: int) -> dict[int, int]:
        return {row: v for v, rows in sorted(self.written.items()) if v <= version for row in rows}


class TestSection42:
    """The 2-D chunk approach."""

    def test_figure_5_step_by_step(self) -> None:
        records = Records()
        records.add(1, [1, 3, 5])  # Interval0: straight into Row0
        assert records.grid() == {(0, 0): [1, 3, 5]}
        records.add(2, [2, 3, 6])  # Interval1: 3 of Interval0 is extracted to Row1
        assert records.grid() == {(0, 0): [1, 5], (0, 1): [2, 3, 6], (1, 0): [3]}
        records.add(3, [1, 6, 7])  # Interval2: two chunks into Row1, what was there is pushed to Row2
        assert records.grid() == {
            (0, 0): [5], (0, 1): [2, 3], (0, 2): [1, 6, 7],
            (1, 0): [1], (1, 1): [6],
            (2, 0): [3],
        }  # fmt: skip
        records.add(4, [2, 7, 9])  # Interval3: nothing of Col0, an empty node in its Row1
        assert records.grid() == {
            (0, 0): [5], (0, 1): [3], (0, 2): [1, 6], (0, 3): [2, 7, 9],
            (1, 1): [2], (1, 2): [7],
            (2, 0): [1], (2, 1): [6],
            (3, 0): [3],
        }  # fmt: skip

    def test_figure_6_the_newest_state_is_row_0(self) -> None:
        records = Records()
        for version, rows in enumerate(([1, 3, 5], [2, 3, 6], [1, 6, 7], [2, 7, 9]), 1):
            records.add(version, rows)
            assert records.chunks.of_version(version) == records.chunks.row_0()

    @given(st.lists(st.sets(st.integers(0, 30), max_size=20), min_size=1, max_size=12))
    def test_a_version_is_a_rectangle_without_duplicates_when_nothing_is_passed_over(
        self, increments: list[set[int]]
    ) -> None:
        records = Records()
        for version, rows in enumerate(increments, 1):
            records.add(version, rows)
        last = len(increments)
        for i in range(1, last + 1):
            inside = {
                key: rows for key, rows in records.grid().items() if key[0] < last - i + 1 and key[1] < i
            }
            read = [records.rows[c.key].tolist() for c in records.chunks.of_version(i)]
            assert sorted(map(tuple, read)) == sorted(map(tuple, inside.values()))
            together = [row for rows in read for row in rows]
            assert len(together) == len(set(together)), "a row is read once"
            assert records.restored(i) == records.truth(i)

    def test_a_version_without_rows_pushes_rows_down_too(self) -> None:
        records = Records()
        for version, rows in enumerate(([1, 2], [2], []), 1):
            records.add(version, rows)
        assert records.grid() == {(0, 0): [1], (0, 1): [2], (2, 0): [2]}


class TestSection43:
    """Selective extraction: each filter alone decides."""

    def test_ranges_that_do_not_overlap_end_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(two_d, "hit_ratio", lambda *_: pytest.fail("the second filter was asked"))
        low, high = chunk(range(10)), chunk(range(20, 30), 2)
        chunks = ChunkList((1, 2)).with_chunks([low, high])
        for rows in ([10, 19], [-5, -1], [30, 99], []):
            assert two_d.candidates(chunks, 3, {0: ids_of(rows)}, 0.0) == []

    @pytest.mark.parametrize("rows", [[9, 15], [0, 100], [5, 6], [-3, 0]])
    def test_ranges_that_overlap_pass(self, rows: list[int]) -> None:
        assert two_d.ranges_overlap(chunk(range(10)), ids_of(rows))

    def test_few_hits_of_the_bloom_filter_end_it(self) -> None:
        chunks = ChunkList((1,)).with_chunks([chunk(range(0, 2000, 2))])
        new = ids_of({*range(1, 1801, 2), *range(0, 200, 2)})  # 900 of others, 100 of its own
        hits = two_d.hit_ratio(chunks.row_0()[0], new)
        assert 0.1 <= hits < 0.1 + 5 * FALSE_POSITIVES
        assert two_d.candidates(chunks, 2, {0: new}, hits) == [], "R itself is not enough"
        assert two_d.candidates(chunks, 2, {0: new}, hits - 0.001) == chunks.row_0()

    def test_a_bloom_filter_that_is_wrong_is_found_out_by_the_third(self) -> None:
        everything = Bloom(np.full(8, ~np.uint64(0), np.uint64))
        chunks = ChunkList((1,)).with_chunks([Chunk(0, 1, OPEN, 10, 0, 18, (), everything)])
        new = ids_of([1, 3, 5, 8])
        assert two_d.candidates(chunks, 2, {0: new}, 0.25) == chunks.row_0()
        assert two_d.extract(ids_of(range(0, 20, 2)), new, 0.25) is None, "one of four is not more than R"
        taken = two_d.extract(ids_of(range(0, 20, 2)), new, 0.24)
        assert taken is not None
        assert np.flatnonzero(taken).tolist() == [4]

    def test_only_its_own_group_is_compared(self) -> None:
        other = Chunk(1, 1, OPEN, 2, 0, 5, (), Bloom.of(ids_of([0, 5])))
        chunks = ChunkList((1,)).with_chunks([chunk([0, 5]), other])
        assert [c.group for c in two_d.candidates(chunks, 2, {1: ids_of([0])}, 0.0)] == [1]


class TestOrder:
    """Hole 29: what the filters pass over are duplicates, and columns in order mend them."""

    def test_a_chunk_that_was_taken_out_late_says_the_wrong_version(self) -> None:
        records = Records(threshold=0.5)
        records.add(1, [0, 1, 2, 3])
        assert records.add(2, [0, 10, 11, 12]) == [], "row 0 is replaced, and passed over"
        assert records.add(3, [0, 1, 2, 20]) == [(0, 1, OPEN)]
        late = records.rows[0, 1, 3]
        assert 0 in late, "it says that version 3 replaced row 0, which version 2 did"
        assert records.restored(2)[0] == 2, "version 2 reads both, and the column decides"
        assert [c.born for c in records.chunks.of_version(2)] == sorted([1, 1, 2])

    @settings(max_examples=250, deadline=None)
    @given(data=st.data(), threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.6, 0.99]))
    def test_any_version_against_a_dictionary(self, data: st.DataObject, threshold: float) -> None:
        """Random rows, thresholds, gaps between versions, rounds that got lost, versions deleted."""
        records = Records(threshold)
        versions: list[int] = []
        for _ in range(data.draw(st.integers(1, 12))):
            version = (versions[-1] if versions else 0) + data.draw(st.integers(1, 2))
            rows = data.draw(st.sets(st.integers(0, 15), max_size=12))
            records.add(version, rows, round_is_lost=data.draw(st.integers(0, 5)) == 0)
            versions.append(version)
            if data.draw(st.integers(0, 3)) == 0:
                kept = data.draw(st.sets(st.sampled_from(versions)))
                versions = sorted({*kept, version})
                records.drop(versions)
        for version in versions:
            assert records.restored(version) == records.truth(version)
        for c in records.chunks.chunks.values():
            assert len(records.rows[c.key]) == len(set(records.rows[c.key].tolist()))


class TestFiles:
    """What a file's loss of chunks leads to (section 4.4, and what goes beyond it)."""

    def placed(self, born: int, file: str, length: int, died: int = OPEN) -> Chunk:
        piece = Piece(0, born, 1, born, born, died, died, "range", 0, 0, 0, (0, 0, 0, 0, length, 0), "", "")
        return Chunk(0, born, died, 1, 0, 0, (Place(file, 0, piece),), None)

    def test_chunks_of_files_that_are_less_than_half_alive_are_moved(self) -> None:
        one, two, three = self.placed(1, "a", 50), self.placed(2, "a", 40), self.placed(3, "b", 100)
        chunks = ChunkList((1, 2, 3)).with_chunks([one, two, three])
        assert chunks.to_move({"a": 100, "b": 100}, ()) == []
        assert chunks.to_move({"a": 100, "b": 100}, {two.key}) == [], "half is enough"
        assert chunks.to_move({"a": 100, "b": 100}, {one.key}) == [two]
        assert chunks.to_move({"a": 100, "b": 100}, {one.key, two.key, three.key}) == []
        assert chunks.to_move({"a": 100, "b": 100}, (), crowded=["b"]) == [three]

    @given(
        st.integers(0, 12),
        st.one_of(st.integers(1, 13), st.just(OPEN)),
        st.lists(st.integers(0, 12), unique=True).map(sorted),
    )
    def test_what_no_kept_version_reads_is_not_needed(self, born: int, died: int, kept: list[int]) -> None:
        assert is_needed(born, died, kept) == any(born <= v < died for v in kept)


class TestBloom:
    @given(st.sets(st.integers(0, 2**48), max_size=300))
    def test_it_never_denies_a_member(self, rows: set[int]) -> None:
        ids = ids_of(rows)
        assert Bloom.of(ids).hits(ids) == len(ids)

    @pytest.mark.parametrize("step", [1, 2, 64, 1000])
    def test_its_false_positives_are_as_many_as_documented(self, step: int) -> None:
        members = np.arange(0, 50_000 * step, step, dtype=np.int64)
        others = np.arange(50_000 * step, 250_000 * step, step, dtype=np.int64)
        bloom = Bloom.of(members)
        assert len(bloom.words) * 64 <= 10 * len(members) + 512
        assert bloom.hits(others) / len(others) == pytest.approx(FALSE_POSITIVES, rel=0.2)

    def test_an_empty_one_holds_nothing(self) -> None:
        assert Bloom.of(ids_of([])).hits(ids_of(range(1000))) == 0

    @given(st.sets(st.integers(0, 2**62), max_size=40), st.sets(st.integers(0, 2**62), max_size=40))
    def test_it_is_what_its_slow_twin_says(self, members: set[int], asked: set[int]) -> None:
        mask = 2**64 - 1

        def mixed(value: int) -> int:
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
            return value ^ (value >> 31)

        bloom = Bloom.of(ids_of(members))
        blocks = len(bloom.words) // 8

        def bits(row: int) -> set[int]:
            place = mixed((row + 0x9E3779B97F4A7C15) & mask)
            rest = mixed((place + 0x9E3779B97F4A7C15) & mask)
            block = ((place >> 32) * blocks) >> 32
            return {block * 512 + ((rest >> 9 * i) & 511) for i in range(7)}

        twin = {bit for row in members for bit in bits(row)}
        fast = np.flatnonzero(np.unpackbits(bloom.words.view(np.uint8), bitorder="little"))
        assert set(fast.tolist()) == twin
        assert bloom.hits(ids_of(asked)) == sum(bits(row) <= twin for row in asked)
