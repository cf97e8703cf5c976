"""What is read together, and threads that share work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.chunk import OPEN, Piece
from holdfast.checkpoint.format.manifest import FileEntry
from holdfast.checkpoint.reading import stretches
from holdfast.checkpoint.reading.stretches import (
    STRETCH_BYTES,
    OpenFile,
    Stretch,
    Turns,
    by_size,
    in_turns,
    run_all,
    thread_buffer,
)


def file_of(name: str) -> OpenFile:
    entry = FileEntry(name, 0, 0, "", "increment", 0, 0, 0, 0, 0)
    return OpenFile(entry, None, (), (), name)  # type: ignore[arg-type]


def piece_of(rank: int, offset: int = 0, length: int = 10) -> Piece:
    return Piece(0, rank, 1, 1, 1, OPEN, OPEN, "range", 0, 0, offset, (0, 0, 0, 0, length, 0), "", "")


A, B, C = file_of("a"), file_of("b"), file_of("c")


def read(pieces: list[tuple[OpenFile, Piece]], **how: Any) -> list[tuple[str, list[tuple[int, int]], int]]:
    """The stretches: file, rank and offset of each piece, and bytes."""
    return [
        (s.file.entry.name, [(p.rank, p.offset) for p in s.pieces], s.bytes)
        for s in stretches.stretches(pieces, **how)
    ]


class TestStretches:
    def test_none(self) -> None:
        assert read([]) == []

    def test_neighbours_of_a_file_and_of_equal_rank_are_read_together(self) -> None:
        pieces = [(B, piece_of(1, 0)), (A, piece_of(2, 20)), (A, piece_of(1, 10)), (A, piece_of(1, 0))]
        assert read(pieces) == [
            ("a", [(1, 0), (1, 10)], 20),
            ("b", [(1, 0)], 10),
            ("a", [(2, 20)], 10),
        ]

    def test_by_file_ranks_do_not_matter(self) -> None:
        pieces = [(B, piece_of(1, 0)), (A, piece_of(2, 20)), (A, piece_of(3, 10)), (A, piece_of(1, 0))]
        assert read(pieces, by_file=True) == [
            ("a", [(1, 0), (3, 10), (2, 20)], 30),
            ("b", [(1, 0)], 10),
        ]

    def test_up_to_a_limit(self) -> None:
        half = STRETCH_BYTES // 2
        pieces = [(A, piece_of(1, number * half, half)) for number in range(3)]
        assert [size for _, _, size in read(pieces)] == [STRETCH_BYTES, half]
        more = [(A, piece_of(1, 0, half)), (A, piece_of(1, half, half + 1))]
        assert [size for _, _, size in read(more)] == [half, half + 1]
        assert [size for _, _, size in read([(A, piece_of(1, 0, 3 * STRETCH_BYTES))])] == [3 * STRETCH_BYTES]

    def test_the_limit_fits_into_a_cache(self) -> None:
        assert STRETCH_BYTES == 4 << 20


class TestInTurns:
    def in_turns(self, *pieces: tuple[OpenFile, int]) -> list[tuple[bool, str]]:
        found = in_turns([(file, piece_of(rank)) for file, rank in pieces])
        return [
            (interleaved, " ".join(f"{f.entry.name}{p.rank}" for f, p in pairs))
            for interleaved, pairs in found
        ]

    def test_files_one_behind_the_other(self) -> None:
        assert self.in_turns((A, 1), (A, 2), (B, 3), (B, 4)) == [(False, "a1 a2 b3 b4")]

    def test_files_that_take_turns(self) -> None:
        assert self.in_turns((A, 1), (B, 2), (A, 3)) == [(True, "a1 a3 b2")]
        assert self.in_turns((A, 1), (B, 2), (A, 3), (B, 4)) == [(True, "a1 a3 b2 b4")]

    def test_a_file_that_ends_where_another_begins(self) -> None:
        assert self.in_turns((A, 1), (A, 2), (B, 2), (B, 3)) == [(False, "a1 a2 b2 b3")]

    def test_both_in_turn(self) -> None:
        assert self.in_turns((A, 1), (B, 2), (A, 5), (B, 4), (C, 6)) == [(True, "a1 a5 b2 b4"), (False, "c6")]

    def test_a_long_file_over_several(self) -> None:
        """The second of them is within the first, though behind the end of the one before."""
        assert self.in_turns((A, 1), (B, 2), (C, 4), (A, 9)) == [(True, "a1 a9 b2 c4")]

    def test_files_that_take_turns_behind_one_that_does_not(self) -> None:
        assert self.in_turns((C, 0), (A, 1), (B, 2), (A, 3)) == [(False, "c0"), (True, "a1 a3 b2")]

    def test_none(self) -> None:
        assert self.in_turns() == []


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ([], []),
        ([4], [[4]]),
        ([20], [[20]]),
        ([4, 6], [[4, 6]]),
        ([4, 7], [[4], [7]]),
        ([20, 1, 20], [[20], [1], [20]]),
        ([10, 6, 5], [[10], [6], [5]]),
        ([5, 5, 5, 5, 5], [[5, 5], [5, 5], [5]]),
    ],
)
def test_as_many_together_as_are_within_a_limit(sizes: list[int], together: list[list[int]]) -> None:
    assert list(by_size(sizes, lambda size: size, 10)) == together


class TestTurns:
    def turns(self, *ranks: int) -> tuple[Turns, list[int]]:
        told: list[int] = []
        pieces = [Stretch(A, (piece_of(rank),), 10 * rank) for rank in ranks]
        return Turns(pieces, told.append), told

    def test_ranks_in_turn(self) -> None:
        turns, told = self.turns(2, 1, 1)
        low, other, high = turns.stretches
        assert [stretch.rank for stretch in turns.stretches] == [1, 1, 2]
        turns.wait(1)
        turns.wait(1)
        turns.finish(low)
        turns.wait(1)  # the other one may be written still
        turns.finish(other)
        turns.wait(2)
        turns.finish(high)
        assert told == [10, 20, 40]
        assert turns.loaded == 40

    @pytest.mark.parametrize("end", [lambda turns: turns.finish(turns.stretches[0]), Turns.give_up])
    def test_whoever_waits_is_woken(self, end: Callable[[Turns], None]) -> None:
        turns, _ = self.turns(1, 2)
        waits = threading.Event()
        outcome: list[str] = []

        class Condition(threading.Condition):
            def wait(self, timeout: float | None = None) -> bool:
                waits.set()
                return super().wait(timeout)

        turns._changed = Condition()

        def work() -> None:
            try:
                turns.wait(2)
                outcome.append("written")
            except CancelledError:
                outcome.append("given up")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert waits.wait(60)
        end(turns)
        thread.join(60)
        assert outcome == ["given up" if end is Turns.give_up else "written"]

    def test_after_one_has_given_up_nobody_writes(self) -> None:
        turns, _ = self.turns(1)
        turns.give_up()
        with pytest.raises(CancelledError):
            turns.wait(1)


def test_a_thread_reads_into_the_same_memory_again() -> None:
    first = thread_buffer(100)
    assert len(first) == first.nbytes == 100
    assert np.shares_memory(thread_buffer(STRETCH_BYTES), first)
    larger = thread_buffer(STRETCH_BYTES + 1)
    assert len(larger) == STRETCH_BYTES + 1
    assert not np.shares_memory(larger, first)
    assert np.shares_memory(thread_buffer(STRETCH_BYTES + 1), larger)
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(thread_buffer(100)))
    thread.start()
    thread.join()
    assert not np.shares_memory(others[0], larger)


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_everything_is_done_once(count: int) -> None:
    done: list[int] = []
    run_all(done.append, range(count))
    assert sorted(done) == list(range(count))


def test_one_thread_keeps_to_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "THREADS", 1)
    done: list[int] = []
    run_all(done.append, range(50))
    assert done == list(range(50))


def test_an_error_stops_the_others_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for the one that failed are told, and what they raise then is not the reason."""
    monkeypatch.setattr(stretches, "THREADS", 3)
    failed = threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 2:
            raise ValueError("two")
        assert failed.wait(60)
        raise CancelledError

    with pytest.raises(ValueError, match="two"):
        run_all(work, range(100), on_error=failed.set)
    assert sorted(begun) == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast-read")]


def test_whoever_waits_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    free = threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        assert free.wait(60)

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stretches, "THREADS", 2)
    monkeypatch.setattr(stretches, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(work, range(100), on_error=free.set)
    assert len(begun) <= 2


@pytest.mark.parametrize(("count", "threads"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_there_are_no_more_threads_than_items(
    monkeypatch: pytest.MonkeyPatch, count: int, threads: int
) -> None:
    made: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, most: int, name: str) -> None:
            made.append(most)
            super().__init__(most, name)

    monkeypatch.setattr(stretches, "THREADS", 4)
    monkeypatch.setattr(stretches, "ThreadPoolExecutor", Pool)
    run_all(lambda item: None, range(count))
    assert made == [threads]
