"""Anything that a run can do, in any order, against a dictionary of what every version must hold."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.saving import history
from holdfast.checkpoint.saving.writer import Writer
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import NoSuchVersion, SaveFailed, StoreError
from holdfast.events import EventLog
from holdfast.options import Chunked, Policy
from tests.checkpoint.lineage import (
    GROUPS,
    QUANTIZED,
    STRATEGIES,
    TABLES,
    WITH_QUANTIZED,
    QuickFiles,
    any_rows,
    blank,
    rows_on_grids,
    same,
)
from tests.checkpoint.plain_source import PlainSource

ROWS = st.lists(st.integers(0, 13), max_size=6)
BIG = 1 << 20
BETWEEN_ROUNDS = [
    Chunked(round_versions=2, dead_fraction=0.4, reset="never"),
    Chunked(round_versions=3, dead_fraction=0.6, reset="never"),
    Chunked(layout="2d", threshold=0.1, reset="never"),
]


class Machine(RuleBasedStateMachine):
    """The model: the live tables, what each version held, and which versions ought to be there."""

    strategy: Any = Chunked()
    keep: int | None = None
    quantized = False

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.tables = blank()
        self.truth: dict[int, dict[str, tuple[NDArray[np.uint8], ...]]] = {}
        self.listed: list[int] = []
        self.values = 0
        self.steps = 0
        self.open()

    def open(self) -> None:
        self.store = LocalStore(self.root, create=True, files=QuickFiles())
        self.lock = self.store.lock_writer()
        policy = Policy(strategy=self.strategy, keep=self.keep, **QUANTIZED if self.quantized else {})
        self.writer = Writer(self.store, policy, EventLog(None))
        self.source = PlainSource(LiveTables(GROUPS, lambda table: self.tables[table]))
        self.writer.bind(self.source.tables)

    @rule(table=st.sampled_from(sorted(TABLES)), rows=ROWS)
    def touch(self, table: str, rows: list[int]) -> None:
        ids = np.unique([r for r in rows if r < TABLES[table][0]]).astype(np.int64)
        self.values += 1
        make = rows_on_grids if self.quantized else any_rows
        values = make(np.random.default_rng(self.values), table, len(ids))
        for field, new in zip(self.tables[table], values, strict=True):
            field[ids] = new
        self.writer.tracker.mark(table, ids)

    @rule()
    def touch_everything(self) -> None:
        for table in TABLES:
            self.touch(table, list(range(14)))

    @rule(wait=st.booleans())
    def save(self, wait: bool) -> None:
        self.steps += 1
        number = self.writer.save(self.steps, self.source, {})
        assert number not in self.truth
        self.truth[number] = {name: tuple(f.copy() for f in own) for name, own in self.tables.items()}
        self.listed.append(number)
        if self.keep is not None:
            self.listed = self.listed[-self.keep :]
        if wait:
            self.writer.wait()

    @rule(place=st.sampled_from(["put", "publish", "publish, and the answer is lost"]))
    def fail_to_save(self, place: str) -> None:
        self.writer.wait()
        name = place.split(",", maxsplit=1)[0]
        real = getattr(self.store, name)
        failed: list[str] = []

        def fail(*arguments: Any) -> None:
            if not failed and "lost" in place:
                real(*arguments)
            failed.append(place)
            raise StoreError("no")

        setattr(self.store, name, fail)
        self.writer.save(-1, self.source, {})
        with pytest.raises(SaveFailed):
            self.writer.wait()
        delattr(self.store, name)
        assert failed
        if "lost" in place:
            self.save(wait=True)  # until then, nobody can say whether the one before exists

    @rule()
    def begin_a_new_era(self) -> None:
        self.writer.wait()
        self.writer.begin_anew()

    @precondition(lambda self: len(self.listed) > 1)
    @rule(choice=st.integers(0, BIG))
    def delete_a_version(self, choice: int) -> None:
        self.writer.wait()
        number = self.listed.pop(choice % (len(self.listed) - 1))  # not the newest, which is gone on from
        self.writer.catalog.delete_versions([number])

    @rule(restore=st.booleans(), finish=st.booleans())
    def restart(self, restore: bool, finish: bool) -> None:
        """Another process goes on: from the newest version, or with what it has, which nobody knows of."""
        if finish:
            self.writer.close()
        else:
            with contextlib.suppress(SaveFailed):
                self.writer.wait()
            self.writer._thread.close()
        self.lock.release()
        self.store.close()
        self.open()
        if restore and self.listed:
            self.go_to(self.listed[-1])

    @precondition(lambda self: self.listed)
    @rule(choice=st.integers(0, BIG))
    def go_back(self, choice: int) -> None:
        """In the same process, to any version."""
        self.writer.wait()
        self.go_to(self.listed[choice % len(self.listed)])

    def go_to(self, number: int) -> None:
        with open_version(self.store, number) as reader:
            digests = self.writer.begin_restore(reader.groups)
            reader.read_rows(RowLoader(GROUPS, lambda table: self.tables[table], digests))
            self.writer.resume(reader.version, digests)
        assert same(self.tables, self.truth[number])

    @precondition(lambda self: self.truth)
    @rule(choice=st.integers(0, BIG))
    def restore_any(self, choice: int) -> None:
        """While saving may be going on: a version that was ever there is right, or gone, or yet to come."""
        number = sorted(self.truth)[choice % len(self.truth)]
        try:
            self.check(number)
        except NoSuchVersion:
            self.writer.wait()
            if number in self.listed:
                self.check(number)

    def check(self, number: int) -> None:
        found = blank()
        with open_version(self.store, number) as reader:
            reader.read_rows(RowLoader(GROUPS, lambda table: found[table]))
        assert same(found, self.truth[number]), number

    @invariant()
    def what_is_listed_is_what_ought_to_be(self) -> None:
        if not self.writer.busy():
            found = [v.version for v in read_newest(self.store).versions]
            assert found == self.listed

    def teardown(self) -> None:
        self.writer.wait()
        for number in self.listed:
            self.check(number)
        self.writer.close()
        self.lock.release()
        self.store.close()
        shutil.rmtree(self.root)


class Restarting(Machine):
    """Trains, saves and restarts: what has died is in several files when the next process takes over."""

    touch_everything = begin_a_new_era = go_back = fail_to_save = None  # type: ignore[assignment]

    @rule(seed=st.integers(0, BIG), saves=st.integers(1, 4))
    def train_for_a_while(self, seed: int, saves: int) -> None:
        random = np.random.default_rng(seed)
        self.restart(restore=True, finish=True)
        for _ in range(saves):
            for table, (rows, _) in TABLES.items():
                self.touch(table, (rows * random.random(random.integers(0, 8)) ** 2).astype(int).tolist())
            self.save(wait=True)


def run(
    strategy: Any, keep: int | None, examples: int, steps: int, *, quantized: bool = False,
    machine: type[Machine] = Machine,
) -> None:  # fmt: skip
    machine = type("Machine", (machine,), {"strategy": strategy, "keep": keep, "quantized": quantized})
    checks = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=checks,
        ),
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_order(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    monkeypatch.setattr(history, "RECENT_BYTES", 1500)
    chunked = isinstance(strategy, Chunked)
    run(strategy, None, 12 if chunked else 4, 50)
    run(strategy, 3, 8 if chunked else 3, 30)


@pytest.mark.parametrize("keep", [None, 4])
@pytest.mark.parametrize("strategy", BETWEEN_ROUNDS, ids=str)
def test_restarts_between_rounds(strategy: Any, keep: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    run(strategy, keep, 10, 25, machine=Restarting)


@pytest.mark.parametrize("strategy", WITH_QUANTIZED, ids=str)
def test_any_order_with_quantized_rows(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    run(strategy, None, 6, 50, quantized=True)
    run(strategy, 1, 6, 50, quantized=True)


@pytest.mark.soak
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("keep", [None, 1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_order_for_long(
    strategy: Any, keep: int | None, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    monkeypatch.setattr(history, "RECENT_BYTES", 1500)
    run(strategy, keep, 200, 80, quantized=quantized)
