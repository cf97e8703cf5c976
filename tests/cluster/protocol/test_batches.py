from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.protocol.batches import Layout, Stream, merge_layouts
from holdfast.cluster.protocol.messages import Position
from holdfast.data.criteo import Criteo
from holdfast.data.reader import Batch, Reader
from holdfast.data.synthetic import Synthetic
from holdfast.errors import ConfigError, DataError, WrongReaderState


class Numbers:
    """A reader of empty batches that counts those it makes; some indices it uses up without a batch."""

    table_rows: tuple[int, ...] = ()
    dense_features = 0

    def __init__(self, batches: int, missing: frozenset[int] = frozenset()) -> None:
        self.batches, self.missing = batches, missing
        self.share = range(batches)
        self.next = 0
        self.made: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        while self.next < len(self.share):
            index = self.share[self.next]
            self.next += 1
            if index not in self.missing:
                self.made.append(index)
                yield Batch(index, np.zeros((0, 0), np.float32), [], None, np.zeros(0, np.float32))
        self.next = 0

    def split(self, worker: int, workers: int) -> Self:
        mine = copy.copy(self)
        mine.share, mine.next = range(worker, self.batches, workers), 0
        return mine

    def progress(self) -> float:
        return self.next / max(1, len(self.share))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Jumping(Numbers):
    def skip_to(self, index: int) -> None:
        self.next = sum(i < index for i in self.share)


positions = st.builds(Position, st.integers(0, 2), st.integers(-1, 9))
layouts = st.integers(1, 6).flatmap(
    lambda n: st.builds(Layout, st.just(n), st.tuples(*[positions] * n))
)  # fmt: skip


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_every_batch_is_handed_out_exactly_once(data: st.DataObject) -> None:
    """Workers die and come back behind their last batch; the job stops and resumes with other numbers."""
    batches, epochs = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3))
    missing = data.draw(st.frozensets(st.integers(0, batches - 1)))
    reader = data.draw(st.sampled_from([Numbers, Jumping]))(batches, missing)
    seen: Counter[Position] = Counter()
    done: tuple[Layout, ...] = ()
    runs = data.draw(st.lists(st.integers(1, 5), max_size=5))
    for run, workers in enumerate([*runs, 1]):
        at = [Position()] * workers
        for worker in range(workers):
            lives = [None] if run == len(runs) else data.draw(st.lists(st.integers(0, 8), max_size=3))
            for life in lives:
                stream = Stream(reader, worker, workers, epochs, at[worker], done)
                for position, batch in islice(stream, life):
                    assert batch.index == position.index
                    assert position > at[worker]
                    seen[position] += 1
                    at[worker] = position
        done = merge_layouts(*done, Layout(workers, tuple(at)))
        assert len(done) <= len(set(runs) | {1})
    expected = {Position(e, i) for e, i in product(range(epochs), range(batches)) if i not in missing}
    assert seen == dict.fromkeys(expected, 1)


@given(st.lists(layouts, max_size=5))
def test_merged_layouts_say_the_same(some: list[Layout]) -> None:
    merged = merge_layouts(*some)
    for position in map(Position, *zip(*product(range(4), range(70)), strict=True)):
        assert any(a.has(position) for a in some) == any(a.has(position) for a in merged)


def test_layouts_that_later_ones_cover_are_dropped() -> None:
    two = Layout(2, (Position(0, 8), Position(0, 5)))
    three = Layout(3, (Position(0, 9), Position(0, 10), Position(0, 8)))
    assert merge_layouts(two, three) == (three,)
    assert merge_layouts(three, two) == (three,)
    behind = Layout(3, (Position(0, 9), Position(0, 10), Position(0, 5)))
    assert merge_layouts(two, behind) == (two, behind)
    assert merge_layouts(Layout(4, (Position(),) * 4)) == ()
    assert merge_layouts(two, Layout(2, (Position(0, 2), Position(1, 1)))) == (
        Layout(2, (Position(0, 8), Position(1, 1))),
    )
    assert merge_layouts(three, three) == (three,)


def test_a_reader_that_can_jump_makes_nothing_that_is_done() -> None:
    made = []
    for kind in (Jumping, Numbers):
        reader = kind(100)
        done = [Layout(3, (Position(1, 90),) * 3)]
        got = [position.index for position, _ in Stream(reader, 1, 2, 2, Position(1, 51), done)]
        assert got == [91, 93, 95, 97, 99]
        made.append(reader.made)
    assert made == [[91, 93, 95, 97, 99], list(range(1, 100, 2))]


def test_progress_is_of_all_epochs() -> None:
    stream = Stream(Numbers(4), 0, 2, 2)
    assert stream.progress() == 0
    assert [stream.progress() for _ in stream] == [0.25, 0.5, 0.75, 1.0]
    assert stream.progress() == 1
    assert [p for p, _ in stream] == [Position(0, 0), Position(0, 2), Position(1, 0), Position(1, 2)]


def tsv(path: Path, lines: int) -> Path:
    row = "\t".join(["1", *["3"] * 13, *["a1b2c3d4"] * 26])
    path.write_text("".join(f"{i % 2}{row[1:]}\n" for i in range(lines)))
    return path


def readers(folder: Path) -> list[Reader]:
    path = tsv(folder / "day.tsv", 100)
    return [
        Synthetic(samples=100, batch_size=7, table_rows=[10]),
        Criteo(path, batch_size=7, table_rows=[10] * 26, part="all"),
    ]


def test_the_readers_jump_to_where_they_would_come_by_reading(tmp_path: Path) -> None:
    for reader in readers(tmp_path):
        whole = {batch.index: batch.labels.tobytes() for batch in reader.split(0, 1)}
        for workers, first in product((1, 2, 4), range(18)):
            mine = reader.split(workers - 1, workers)
            mine.skip_to(first)  # type: ignore[attr-defined]
            got = {batch.index: batch.labels.tobytes() for batch in mine}
            assert got == {i: b for i, b in whole.items() if i >= first and i % workers == workers - 1}
            again = [batch.index for batch in mine]
            assert again == [i for i in whole if i % workers == workers - 1], "the next pass is whole"


def test_a_jump_comes_before_iteration(tmp_path: Path) -> None:
    for reader in readers(tmp_path):
        batches = iter(reader)
        next(batches)
        with pytest.raises(WrongReaderState, match=r"skip.* before iter\(\)|skip, then iterate"):
            reader.skip_to(3)  # type: ignore[attr-defined]


def test_a_reader_that_numbers_wrongly_is_named() -> None:
    class Wrong(Numbers):
        def split(self, worker: int, workers: int) -> Self:
            return copy.copy(self)

    with pytest.raises(DataError, match=r"Wrong handed out batch 0 after -1 to worker 1 of 2: expected"):
        list(Stream(Wrong(4), 1, 2, 1))


def test_a_layout_needs_a_position_for_each_worker() -> None:
    with pytest.raises(ConfigError, match="2 workers with 1 positions"):
        Layout(2, (Position(),))
