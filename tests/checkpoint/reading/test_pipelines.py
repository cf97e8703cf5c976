"""Memory that pieces are read into, and for how long they are valid."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.checkpoint.reading import pipelines
from holdfast.checkpoint.reading.stretches import STRETCH_BYTES, Stretch
from tests.checkpoint.reading.test_stretches import A, piece_of


class Decoding:
    """Stretches of some sizes, and the memory that each was read into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}
        """By rank."""
        self.asked = 0
        """Stretches so far."""
        monkeypatch.setattr(pipelines, "read_stretch", self._read)

    def _read(self, stretch: Stretch, groups: Any, buffer: NDArray[np.uint8]) -> list[Any]:
        assert len(buffer) == stretch.bytes
        self.memory[stretch.rank] = buffer if buffer.base is None else buffer.base
        return [stretch.rank]

    def run(self, sizes: list[int], **how: Any) -> list[int]:
        """How many stretches were under way when each was handed on."""

        def wanted() -> Any:
            for rank, size in enumerate(sizes):
                self.asked += 1
                yield Stretch(A, (piece_of(rank),), size)

        ahead = []
        decoded: Any = pipelines._decode(wanted(), (), **how)
        for number, rank in enumerate(decoded):
            assert rank == number
            ahead.append(self.asked - number)
        return ahead

    def shared(self) -> list[tuple[int, int]]:
        """Stretches that were read into the same memory."""
        return [
            (one, other)
            for one in self.memory
            for other in self.memory
            if one < other and self.memory[one] is self.memory[other]
        ]


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    return Decoding(monkeypatch)


def test_a_few_stretches_are_read_ahead(decoding: Decoding) -> None:
    assert decoding.run([10] * 8) == [4, 4, 4, 4, 4, 3, 2, 1]


def test_memory_is_used_again_once_its_rows_are_handed_on(decoding: Decoding) -> None:
    decoding.run([10, STRETCH_BYTES] * 6)
    assert {len(memory) for memory in decoding.memory.values()} == {STRETCH_BYTES}
    assert len({id(memory) for memory in decoding.memory.values()}) == 4
    assert min(other - one for one, other in decoding.shared()) == 4


def test_a_piece_that_is_too_long_gets_memory_of_its_own(decoding: Decoding) -> None:
    long = STRETCH_BYTES + 1
    decoding.run([long, *[10] * 6, long, *[10] * 6])
    assert [len(decoding.memory[rank]) for rank in (0, 7)] == [long, long]
    assert not {0, 7} & {rank for pair in decoding.shared() for rank in pair}
    assert {len(decoding.memory[rank]) for rank in range(14) if rank not in (0, 7)} == {STRETCH_BYTES}


def test_what_is_kept_shares_no_memory_and_takes_no_more_than_it_needs(decoding: Decoding) -> None:
    sizes = [10, STRETCH_BYTES, STRETCH_BYTES + 1] * 4
    decoding.run(sizes, reuse=False)
    assert decoding.shared() == []
    assert [len(decoding.memory[rank]) for rank in range(len(sizes))] == sizes


def test_nothing_more_is_read_for_whoever_stops(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()

    def slow(stretch: Stretch, *rest: Any) -> list[Any]:
        assert stretch.rank == 0 or stopped.wait(60)
        return decoding._read(stretch, *rest)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *args: Any, **options: Any) -> None:
            stopped.set()
            super().shutdown(*args, **options)

    monkeypatch.setattr(pipelines, "read_stretch", slow)
    monkeypatch.setattr(pipelines, "ThreadPoolExecutor", Pool)
    pieces: Any = pipelines._decode((Stretch(A, (piece_of(rank),), 10) for rank in range(100)), ())
    next(pieces)
    pieces.close()
    assert set(decoding.memory) <= {0, 1}, "only what was being read"
