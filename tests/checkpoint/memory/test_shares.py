"""Rows of a share by their numbers here and in the whole tables, against a list of all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.records import Field, Rows, make_groups
from holdfast.checkpoint.memory.shares import Share, Shares, even_share
from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.checkpoint.reading.loader import ShareLoader

FIELDS = (Field("weight", "F32", 1),)
tables = st.lists(
    st.integers(1, 12).flatmap(
        lambda of: st.tuples(st.integers(0, of), st.integers(0, of), st.just(of), st.booleans())
    ),
    min_size=1,
    max_size=5,
)


def build(drawn: list[tuple[int, int, int, bool]]) -> tuple[Shares, list[tuple[int, int]], list[int]]:
    """Shares, (number here, number in the whole) of each row, and the numbers in the whole of all others."""
    shares: dict[str, Share] = {}
    here: list[tuple[int, int]] = []
    others: list[int] = []
    layout, first_here, first_whole = [], 0, 0
    for number, (one, two, of, is_shared) in enumerate(drawn):
        begin, end = (min(one, two), max(one, two)) if is_shared else (0, of)
        if is_shared:
            shares[str(number)] = Share(begin, end - begin, of)
        layout.append((str(number), end - begin, FIELDS))
        here += [(first_here + i, first_whole + begin + i) for i in range(end - begin)]
        others += [first_whole + i for i in range(of) if not begin <= i < end]
        first_here, first_whole = first_here + end - begin, first_whole + of
    return Shares(make_groups(layout), shares), here, others


@given(tables)
def test_numbers_here_and_in_the_whole(drawn: list[tuple[int, int, int, bool]]) -> None:
    shares, here, others = build(drawn)
    assert shares.whole[0].rows == sum(of for _, _, of, _ in drawn)
    mine = np.array([number for number, _ in here], np.int64)
    theirs = np.array([number for _, number in here], np.int64)
    assert shares.to_whole(0, mine).tolist() == theirs.tolist()
    everything = np.array(sorted([*theirs.tolist(), *others]), np.int64)
    positions, numbers = shares.from_whole(0, everything)
    assert everything[positions].tolist() == theirs.tolist()
    assert numbers.tolist() == mine.tolist()
    for first in range(shares.whole[0].rows):
        for last in range(first, shares.whole[0].rows):
            assert shares.has_some_of(0, first, last) == any(first <= n <= last for n in theirs.tolist())
    rows = Rows(mine, (np.zeros((len(mine), 4), np.uint8),))
    parts = shares.numbered([rows])[0].parts(None)
    assert [number for part in parts for number in part.ids.tolist()] == theirs.tolist()


@given(tables)
def test_a_loader_writes_the_rows_that_are_here(drawn: list[tuple[int, int, int, bool]]) -> None:
    shares, here, _ = build(drawn)
    whole = shares.whole
    wanted = {t.name: s for t, s in zip(whole[0].tables, drawn, strict=True)}
    given_shares = {n: Share(min(a, b), abs(a - b), of) for n, (a, b, of, shared) in wanted.items() if shared}
    memory = {
        t.name: np.zeros((given_shares[t.name].rows if t.name in given_shares else t.rows, 4), np.uint8)
        for t in whole[0].tables
    }
    loader = ShareLoader(whole, lambda name: [memory[name]], given_shares)
    values = np.arange(1, whole[0].rows + 1, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    half = whole[0].rows // 2
    loader.fill(0, 0, [values[:half]])
    loader.load(whole[0], 0, Rows(np.arange(whole[0].rows), (values,)), np.arange(half, whole[0].rows))
    found = np.concatenate([memory[t.name].view(np.uint32)[:, 0] for t in whole[0].tables])
    assert found.tolist() == [number + 1 for _, number in here]


@given(st.integers(0, 1000), st.integers(1, 40))
def test_even_shares_are_all_rows_and_alike(rows: int, world_size: int) -> None:
    shares = [even_share(rows, rank, world_size) for rank in range(world_size)]
    assert [row for s in shares for row in range(s.first, s.first + s.rows)] == list(range(rows))
    assert max(s.rows for s in shares) - min(s.rows for s in shares) <= 1


def test_a_tracker_marks_the_rows_of_its_share() -> None:
    groups = make_groups([("t", 3, FIELDS), ("all", 2, FIELDS)])
    tracker = Tracker(groups, shares={"t": Share(5, 3, 20)})
    tracker.mark("t", np.array([0, 4, 5, 7, 8, 19]))
    tracker.mark("all", np.array([1]))
    assert tracker.explains("t", np.array([5, 7, 9])), "9 is another's"
    assert not tracker.explains("t", np.array([6]))
    assert [ids.tolist() for ids in tracker.take()] == [[0, 2, 4]]
