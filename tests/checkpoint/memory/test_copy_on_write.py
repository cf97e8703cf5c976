"""Snapshots that are read while rows change: what is read is what there was at the instant."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

from holdfast.checkpoint.format.records import Field, Rows, make_groups
from holdfast.checkpoint.memory import copy_on_write
from holdfast.checkpoint.memory.copy_on_write import CopyOnWrite, _shares, default_max_memory
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.saving.shard_rows import Cancellation

SIZES = {"a": 50, "b": 1, "c": 120, "other": 30}
NOTHING = 1 << 40


class Tables:
    """Tables in two groups: three with two fields, one with one."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        two = (Field("weight", "F32", 2), Field("state", "U8", 3))
        one = (Field("weight", "F32", 1),)
        self.groups = make_groups([(n, r, one if n == "other" else two) for n, r in SIZES.items()])
        self.fields: dict[str, list[NDArray[np.uint8]]] = {
            t.name: [rng.integers(0, 256, (t.rows, f.live_bytes), np.uint8) for f in g.fields]
            for g in self.groups
            for t in g.tables
        }
        self.live = LiveTables(self.groups, lambda name: self.fields[name])

    def all_rows(self) -> list[list[bytes]]:
        """The records of each group."""
        return [
            [
                b"".join(field[row].tobytes() for field in self.fields[table.name])
                for table in group.tables
                for row in range(table.rows)
            ]
            for group in self.groups
        ]

    def change(self, table: str, rows: list[int]) -> None:
        for field in self.fields[table]:
            field[rows] += 1


def records(rows: Rows) -> dict[int, bytes]:
    return {int(i): b"".join(f[n].tobytes() for f in rows.fields) for n, i in enumerate(rows.ids)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_on_write, "BLOCK_BYTES", 77)  # 7 rows of the first group


class Machine(RuleBasedStateMachine):
    """Rows change in any order between blocks, and while one is copied."""

    @initialize(wanted=st.none() | st.lists(st.integers(0, 170), unique=True), slots=st.integers(1, 60))
    def begin(self, wanted: list[int] | None, slots: int) -> None:
        self.tables = Tables()
        self.right = self.tables.all_rows()
        ids = None if wanted is None else [np.array(sorted(wanted), np.int64), np.arange(0, 30, 4)]
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(copy_on_write, "BLOCK_BYTES", 77)
        self.snapshot = CopyOnWrite(
            self.tables.live, 2 * slots * 27, wanted=ids, max_wait_seconds=0, on_read=self.read
        )
        self.wanted = [range(171), range(30)] if ids is None else [i.tolist() for i in ids]
        self.left: list[tuple[int, Iterator[Rows]]] = [
            (n, rows.parts(5)) for n, rows in enumerate(self.snapshot.groups)
        ]
        self.found: list[dict[int, bytes]] = [{}, {}]
        self.during: list[tuple[str, list[int]]] = []
        self.logged = 0

    def read(self, group: int, rows: Rows, logged: NDArray[np.bool_]) -> None:
        self.logged += int(logged.sum())

    def announce(self, table: str, rows: list[int]) -> bool:
        self.snapshot.about_to_change(table, np.array(rows, np.int64))
        return not self.snapshot.unannounced

    @rule(table=st.sampled_from(sorted(SIZES)), rows=st.lists(st.integers(0, 119), max_size=9))
    def change(self, table: str, rows: list[int]) -> None:
        rows = [row for row in rows if row < SIZES[table]]
        if not self.snapshot.unannounced and self.announce(
            table, rows
        ):  # else the side log is full, and nobody reads in another thread
            self.tables.change(table, rows)

    @precondition(lambda self: not self.snapshot.unannounced)
    @rule(table=st.sampled_from(sorted(SIZES)))
    def change_all(self, table: str) -> None:
        self.snapshot.all_about_to_change(table)
        if not self.snapshot.unannounced:
            self.tables.change(table, list(range(SIZES[table])))

    @precondition(lambda self: self.left)
    @rule(n=st.integers(0, 1), table=st.sampled_from(sorted(SIZES)), rows=st.lists(st.integers(0, 119)))
    def read_on(self, n: int, table: str, rows: list[int]) -> None:
        """Read a block; rows change while it is copied, which may tear it."""
        number, parts = self.left[n % len(self.left)]
        copied = LiveTables.copy_range
        rows = [row for row in rows if row < SIZES[table]]

        def torn(*arguments: Any) -> None:
            copied(*arguments)
            if self.announce(table, rows):
                self.tables.change(table, rows)
                copied(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            if not self.snapshot.unannounced:
                patch.setattr(LiveTables, "copy_range", torn)
            block = next(parts, None)
        if block is None:
            self.left.remove((number, parts))
        else:
            assert len(block) <= 5
            self.found[number] |= records(block)

    def teardown(self) -> None:
        if hasattr(self, "snapshot"):
            for number, parts in self.left:
                for block in parts:
                    self.found[number] |= records(block)
            self.patch.undo()
            for found, right, wanted in zip(self.found, self.right, self.wanted, strict=True):
                assert found == {row: right[row] for row in wanted}
            assert self.snapshot.is_over()
            assert not self.snapshot._buffers


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase


def test_a_full_side_log_makes_training_wait_for_blocks() -> None:
    tables = Tables()
    right = tables.all_rows()
    snapshot = CopyOnWrite(tables.live, 3 * 27)
    changed = threading.Event()

    def train() -> None:
        for row in range(50):
            snapshot.about_to_change("a", np.array([row]))
            tables.change("a", [row])
        changed.set()

    thread = threading.Thread(target=train)
    thread.start()
    deadline = time.monotonic() + 30
    while not snapshot.is_waited_for:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not changed.is_set()
    found: dict[int, bytes] = {}
    for block in snapshot.groups[0].parts():
        found |= records(block)
    thread.join()
    assert changed.is_set()
    assert found == dict(enumerate(right[0]))
    assert snapshot.waited_seconds > 0
    assert not snapshot._waiting
    assert 0 < snapshot.peak_bytes <= 3 * 27
    assert not snapshot.is_over()  # the other group is not read yet
    snapshot.release()
    assert snapshot.is_over()


def test_how_full_the_side_log_is() -> None:
    tables = Tables()
    snapshot = CopyOnWrite(tables.live, 10 * 43)
    wanted = Cancellation(snapshot=snapshot)
    room = snapshot._logs[0]._limit
    assert 2 < room < 50
    assert (snapshot.fullness, wanted.pause_length()) == (0.0, 1.0)
    snapshot.about_to_change("a", np.arange(room - 1))
    assert snapshot.fullness == (room - 1) / room
    assert wanted.pause_length() == pytest.approx(1 - (1 - 1 / room) ** 2)
    blocks = snapshot.groups[0].parts()
    next(blocks)
    assert snapshot.fullness < (room - 1) / room, "a block that was read frees its slots"
    snapshot.release()
    assert snapshot.fullness == 0.0
    everything = CopyOnWrite(tables.live, 1 << 20)
    everything.all_about_to_change("a")
    assert everything.fullness == 0.0, "there is room for every row"
    assert Cancellation().pause_length() == 1.0


def test_nobody_waits_for_a_snapshot_that_was_released() -> None:
    tables = Tables()
    snapshot = CopyOnWrite(tables.live, 1)
    thread = threading.Thread(target=lambda: snapshot.all_about_to_change("c"))
    thread.start()
    snapshot.release()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="released"):
        list(snapshot.groups[0].parts())


def test_who_may_wait_only_so_long_makes_it_void() -> None:
    tables = Tables()
    snapshot = CopyOnWrite(tables.live, 1, max_wait_seconds=0)
    snapshot.about_to_change("a", np.arange(5))
    assert snapshot.unannounced == {"a": "copies of changed rows exceeded max_memory for too long"}
    snapshot.about_to_change("c", np.arange(5))  # returns at once: it is void anyway


def test_without_changes_for_a_while_nobody_needs_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    snapshot = CopyOnWrite(Tables().live, NOTHING, idle_seconds=2)
    busy = CopyOnWrite(Tables().live, NOTHING)
    found = []
    for now[0] in (102.0, 102.1):
        found.append((snapshot.is_idle, busy.is_idle))
    snapshot.about_to_change("a", np.array([1]))
    found.append((snapshot.is_idle, busy.is_idle))
    assert found == [(False, False), (True, False), (False, False)]


def test_a_sample_is_of_the_instant() -> None:
    tables = Tables()
    right = tables.all_rows()[0]
    snapshot = CopyOnWrite(tables.live, NOTHING)
    snapshot.about_to_change("a", np.array([3, 9]))
    snapshot.about_to_change("c", np.array([0]))
    tables.change("a", [3, 9])
    tables.change("c", [0])
    assert records(snapshot.groups[0].take(np.array([0, 3, 51]))) == {row: right[row] for row in (0, 3, 51)}
    assert len(snapshot.groups[0].take(np.empty(0, np.int64))) == 0


def test_a_sample_of_wanted_rows_goes_by_position() -> None:
    tables = Tables()
    right = tables.all_rows()[0]
    snapshot = CopyOnWrite(tables.live, NOTHING, wanted=[np.array([5, 8, 60]), np.empty(0, np.int64)])
    snapshot.about_to_change("a", np.array([8]))
    tables.change("a", [8])
    assert len(snapshot.groups[0]) == 3
    assert records(snapshot.groups[0].take(np.array([1, 2]))) == {8: right[8], 60: right[60]}


def test_what_changes_unannounced_counts_until_it_is_known_that_nothing_did() -> None:
    snapshot = CopyOnWrite(Tables().live, NOTHING)
    snapshot.has_not_changed_unannounced(["a"])  # it still may: rows are pending
    snapshot.all_about_to_change("b")
    snapshot.changed_unannounced("b", "late")  # all its rows are copied
    assert not snapshot.unannounced
    for rows in snapshot.groups:
        list(rows.parts())
    snapshot.has_not_changed_unannounced(["a"])
    snapshot.changed_unannounced("a", "late")
    assert not snapshot.unannounced
    snapshot.changed_unannounced("c", "first")
    snapshot.changed_unannounced("c", "second")
    assert snapshot.unannounced == {"c": "first"}


def test_buffers_are_used_again() -> None:
    snapshot = CopyOnWrite(Tables().live, NOTHING)
    count = 0
    for block in snapshot.groups[0].parts():
        kept = block.fields[0][:1] if count % 2 else None
        count += 1
        del block
        assert len(snapshot._buffers) <= 3
        del kept
    assert count > 20


def test_memory_is_free_when_all_is_read_or_nobody_reads() -> None:
    def held(snapshot: CopyOnWrite) -> list[bool]:
        arrays = [(log._slab, log._pending, log._heads, log._nexts, log._free) for log in snapshot._logs]
        return [any(array.nbytes for array in each) for each in arrays]

    snapshot = CopyOnWrite(Tables().live, NOTHING)
    snapshot.about_to_change("a", np.array([1, 2]))
    assert held(snapshot) == [True, True]
    list(snapshot.groups[0].parts())
    assert held(snapshot) == [False, True]
    assert snapshot._buffers == []
    assert snapshot.peak_bytes == 2 * (11 + 16), "of two records, each with its row and its links"
    snapshot.about_to_change("a", np.array([1, 2]))  # takes none again
    assert snapshot.peak_bytes == 2 * (11 + 16)
    snapshot.release()
    assert held(snapshot) == [False, False]


def test_a_whole_table_range_by_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_on_write, "_RANGE_ROWS", 8)
    tables = Tables()
    right = tables.all_rows()[0]
    snapshot = CopyOnWrite(tables.live, NOTHING)
    asked: list[int] = []
    about_to_change = snapshot.about_to_change

    def note(table: str, ids: NDArray[np.int64]) -> None:
        asked.append(len(ids))
        about_to_change(table, ids)

    monkeypatch.setattr(snapshot, "about_to_change", note)
    snapshot.all_about_to_change("a")
    assert asked == [8] * 6 + [2]
    assert snapshot.unchecked == {"b", "c", "other"}
    tables.change("a", list(range(50)))
    found: dict[int, bytes] = {}
    for block in snapshot.groups[0].parts():
        found |= records(block)
    assert found == dict(enumerate(right))


def test_who_stops_before_all_rows_are_copied_may_have_changed_some() -> None:
    snapshot = CopyOnWrite(Tables().live, NOTHING)
    snapshot.release()
    snapshot.all_about_to_change("a")
    assert "a" in snapshot.unchecked


def test_blocks_of_few_wanted_rows_are_longer() -> None:
    """So that about as many rows are read at a time."""
    wanted = [np.arange(0, 171, 3), np.arange(30)]
    snapshot = CopyOnWrite(Tables().live, NOTHING, wanted=wanted)
    assert [len(block) for block in snapshot.groups[0].parts()] == [7] * 8 + [1]


def test_blocks_begin_at_multiples() -> None:
    snapshot = CopyOnWrite(Tables().live, NOTHING, row_multiple=4)
    assert [int(block.ids[0]) % 4 for block in snapshot.groups[0].parts()] == [0] * 43


def test_limits_are_divided() -> None:
    assert _shares([10, 1000, 2000], 500) == [10, 245, 245]
    assert _shares([], 500) == []
    assert default_max_memory(100) == 5 + (256 << 20)
