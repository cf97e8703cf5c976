"""Versions that are read into live tables, by several threads."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.chunk import Piece
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.reading import pipelines, stretches
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import CorruptCheckpoint
from holdfast.options import Incremental, Policy
from tests.checkpoint.lineage import QUANTIZED, STRATEGIES, Lineage, QuickFiles, check_store


@pytest.mark.parametrize("options", [{}, QUANTIZED], ids=["raw", "quantized"])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_whoever_is_first_every_version_is_the_same(
    tmp_path: Path, strategy: Any, threads: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 100)
    monkeypatch.setattr(stretches, "THREADS", threads)
    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store:
        line = Lineage(store, Policy(strategy=strategy, **options))
        for _ in range(9):
            line.train()
            line.save()
        line.writer.close()
        check_store(store, on_grids=line.on_grids)


@pytest.mark.parametrize("damaged_kind", ["baseline", "increment"])
def test_pieces_that_cannot_be_read_let_nobody_wait(
    tmp_path: Path, damaged_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 100)
    monkeypatch.setattr(stretches, "THREADS", 2)
    read = stretches.read_checked

    def damaged(stretch: stretches.Stretch, buffer: Any) -> Any:
        if stretch.file.entry.kind == damaged_kind:
            time.sleep(0.05)  # others have come to where they need what this does not bring
            raise CorruptCheckpoint(f"{damaged_kind} is damaged")
        return read(stretch, buffer)

    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store:
        line = Lineage(store, Policy(strategy=Incremental(), **QUANTIZED))
        for _ in range(3):
            line.train()
            line.save()
        line.writer.close()
        monkeypatch.setattr(pipelines, "read_checked", damaged)
        with pytest.raises(CorruptCheckpoint, match=f"{damaged_kind} is damaged"):
            check_store(store, on_grids=True)


def test_neighbours_of_one_birth_and_death_are_written_as_they_are() -> None:
    """And nothing else is, whatever a header says: the rows in it become memory addresses."""
    run = Piece(0, 1, 10, 1, 1, 5, 5, "range", 20, 29, 0, (0, 0, 0, 0, 640, 0), "", "")
    assert run.is_run
    for other in (
        {"rows": 11},
        {"last_id": 28},
        {"ids": "rice"},
        {"last_born": 2},
        {"last_died": 6},
        {"lengths": (8, 0, 0, 56, 640, 0)},
    ):
        assert not replace(run, **other).is_run
