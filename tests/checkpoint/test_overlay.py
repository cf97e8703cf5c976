"""Newer rows that are laid over the full version on its way into the tables."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import overlay, stretches, sweep
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.strategies import rounds
from holdfast.checkpoint.sweep import Sweep
from holdfast.errors import CorruptCheckpoint
from holdfast.options import Differential, Incremental, Policy
from tests.checkpoint.lineage import QUANTIZED, STRATEGIES, Lineage, QuickFiles, check_store


@pytest.mark.parametrize("options", [{}, QUANTIZED], ids=["raw", "quantized"])
@pytest.mark.parametrize("limit", [0, 60, 200, 10**6])
@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=str)
def test_whatever_fits_into_memory_every_version_is_the_same(
    tmp_path: Path, strategy: Any, limit: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 100)
    monkeypatch.setattr(overlay, "LEAST_LIMIT_BYTES", limit)
    monkeypatch.setattr(overlay, "LIMIT_SHARE", 0.0)
    plans: list[overlay.Plan] = []
    run = Sweep.run

    def counted(self: Sweep) -> int:
        plans.append(self._plan)
        return run(self)

    monkeypatch.setattr(Sweep, "run", counted)
    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store:
        line = Lineage(store, Policy(strategy=strategy, **options))
        for _ in range(9):
            line.train()
            line.save()
        line.writer.close()
        check_store(store, on_grids=line.on_grids)
    if limit in (0, 10**6):
        assert any(plan.above for plan in plans) == (limit > 0)
        assert any(plan.rest for plan in plans) == (limit == 0)
    elif limit == 200 and strategy == Incremental():
        assert any(plan.above and plan.rest for plan in plans)


def test_the_full_version_is_there_before_newer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written too early gets its newer rows in the tables."""
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 100)
    monkeypatch.setattr(stretches, "THREADS", 2)
    monkeypatch.setattr(sweep, "THREADS", 2)
    read, read_base, whole_run = stretches.read_stretch, stretches.read_checked, Sweep.run
    early: list[bool] = []
    base_is_read = threading.Event()

    def late(*arguments: Any) -> Any:
        assert base_is_read.wait(60)
        return read(*arguments)

    def noted(stretch: Any, buffer: Any) -> Any:
        found = read_base(stretch, buffer)
        base_is_read.set()
        return found

    def run(self: Sweep) -> int:
        base_is_read.clear()
        done = whole_run(self)
        early.append(bool(self._early))
        return done

    monkeypatch.setattr(sweep, "read_stretch", late)
    monkeypatch.setattr(sweep, "read_checked", noted)
    monkeypatch.setattr(Sweep, "run", run)
    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store:
        line = Lineage(store, Policy(strategy=Differential(baseline="one-shot")))
        for _ in range(3):
            line.train()
            line.save()
        line.writer.close()
        check_store(store)
    assert any(early)


def test_newer_rows_that_cannot_be_read_let_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 100)

    def damaged(*_: Any) -> Any:
        time.sleep(0.05)  # others have come to where they need what this does not bring
        raise CorruptCheckpoint("newer rows")

    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store:
        line = Lineage(store, Policy(strategy=Incremental(), **QUANTIZED))
        for _ in range(3):
            line.train()
            line.save()
        line.writer.close()
        monkeypatch.setattr(sweep, "read_stretch", damaged)
        with pytest.raises(CorruptCheckpoint, match="newer rows"):
            check_store(store, on_grids=True)


def test_a_full_version_with_gaps_is_left_alone() -> None:
    """As of a shard that holds every second row."""

    class Range:
        def __init__(self, first: int, last: int, ids: str = "range") -> None:
            self.first_id, self.last_id, self.ids = first, last, ids

    whole: Any = [Range(4, 9), Range(0, 3)]
    assert overlay._covers(whole, 10)
    for pieces, rows in [
        (whole, 11),
        (whole[:1], 10),
        (whole[1:], 10),
        ([Range(0, 9, "rice")], 10),
        ([Range(0, 3), Range(0, 3), Range(4, 9)], 10),
        ([], 0),
        ([], 10),
    ]:
        assert not overlay._covers(pieces, rows)
