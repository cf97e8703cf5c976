"""Eras that one process after the other takes up: none of them reads history, and all versions stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.chunk import LAST
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.layout.rearrange_rounds import Rounds
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.reading.stretches import open_file
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import StoreError
from holdfast.options import Chunked, Policy
from tests.checkpoint.lineage import QuickFiles
from tests.checkpoint.reading.test_versions import GROUPS, Trainer, check_all

LAYOUTS: list[Any] = [Chunked(), Chunked(layout="2d", threshold=0.0), Chunked(layout="2d")]


def history_ranks(trainer: Trainer) -> set[int]:
    ranks: set[int] = set()
    for entry in trainer.catalog.manifest.era(trainer.era).files:
        if entry.kind == "history":
            opened = open_file(trainer.store, entry, GROUPS)
            opened.reader.close()
            ranks |= {piece.rank for piece in opened.pieces}
    return ranks


@pytest.mark.parametrize("seed", range(24))
def test_every_kept_version_after_restarts_between_rounds(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    chance = np.random.default_rng(seed)
    strategy = Chunked(
        round_versions=int(chance.choice([1, 2, 3])), dead_fraction=float(chance.choice([0.3, 0.5, 0.7]))
    )
    kept: dict[str, Any] = [{}, {}, {"keep": 6}, {"keep": 2, "keep_every": 3}][seed % 4]
    store = LocalStore(tmp_path, create=True, files=QuickFiles())
    trainer = Trainer(store, Policy(strategy=strategy, **kept), seed)
    for step in range(40):
        trainer.save(trainer.train())
        if chance.random() < 0.4:
            trainer.restart()
        if chance.random() < 0.1:
            versions = [v.version for v in trainer.catalog.manifest.versions]
            trainer.catalog.delete_versions(v for v in versions[:-1] if chance.random() < 0.2)
        if step % 8 == 7:
            check_all(trainer)
    check_all(trainer)


def test_what_died_between_two_processes_is_overridden_by_what_is_known(tmp_path: Path) -> None:
    """The smallest case: a record whose death is known only roughly, and the record that came between."""
    trainer = Trainer(open_store(tmp_path, create=True), Policy(strategy=Chunked(round_versions=100)), 1)
    shard = trainer.shard
    none = np.empty(0, np.int64)

    def save(rows: list[int], round_is_due: bool = False) -> None:
        ids = np.array(rows, np.int64)
        for field in trainer.state[0]:
            field[ids] = trainer.random.integers(0, 256, (len(ids), field.shape[1]), dtype=np.uint8)
        found = trainer.shard._rearranger
        assert isinstance(found, Rounds)
        found.strategy = Chunked(round_versions=1 if round_is_due else 100, dead_fraction=0.4)
        trainer.save([ids, none, none][: len(GROUPS)])

    save([])  # the full version
    save([7, *range(20, 40)])  # version 2: 1 of 21 records dies in version 3
    save([7, 8])  # version 3: both die in version 4
    save([7, 8], round_is_due=True)  # version 4: version 3's file becomes history
    assert history_ranks(trainer) == {LAST}
    trainer.restart()
    assert trainer.shard is not shard
    save(list(range(20, 40)))
    save([1], round_is_due=True)  # version 2's file becomes history, by a process that did not see version 3
    assert len(history_ranks(trainer)) == 2
    check_all(trainer)


@pytest.mark.parametrize("strategy", LAYOUTS, ids=str)
def test_a_resume_opens_no_file_and_a_round_opens_few(
    tmp_path: Path, strategy: Chunked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many versions there are."""
    store = LocalStore(tmp_path, create=True, files=QuickFiles())
    trainer = Trainer(store, Policy(strategy=strategy), 3)
    opened: list[str] = []
    real = LocalStore.open

    def count(self: LocalStore, name: str) -> Any:
        opened.append(name)
        return real(self, name)

    found: list[int] = []
    for versions in (60, 120):
        while len(trainer.remembered) < versions:
            trainer.save(trainer.train())
        history = sum(f.kind == "history" for f in trainer.catalog.manifest.era(trainer.era).files)
        assert history > versions / 8
        era = trainer.catalog.manifest.era(trainer.era)
        newest = trainer.catalog.manifest.versions[-1].version
        live = {f.name for f in era.files_of(newest) if f.kind != "baseline"}
        trainer.restart()
        monkeypatch.setattr(LocalStore, "open", count)
        opened.clear()
        shard = Shard(0, GROUPS, strategy)
        shard.resume(store, era)
        assert not opened
        assert shard.live_bytes() > 0
        shard.tidy(store, newest, [newest])
        monkeypatch.setattr(LocalStore, "open", real)
        found.append(len({name for name in opened if name not in live}))
    assert found[1] <= found[0] <= 16


@pytest.mark.parametrize("strategy", LAYOUTS, ids=str)
@pytest.mark.parametrize("at", range(2))
def test_a_file_that_cannot_be_read_at_once_is_read_the_next_time(
    tmp_path: Path, strategy: Chunked, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(open_store(tmp_path, create=True), Policy(strategy=strategy), 0)
    for _ in range(13):
        trainer.save(trainer.train())
    trainer.restart()
    real, left = LocalStore.open, [at]

    def fail(self: LocalStore, name: str) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise StoreError("not now")
        return real(self, name)

    touched = trainer.train()
    monkeypatch.setattr(LocalStore, "open", fail)
    with pytest.raises(StoreError, match="not now"):
        trainer.save(touched)
    monkeypatch.setattr(LocalStore, "open", real)
    for _ in range(8):
        trainer.save(trainer.train())
    check_all(trainer)


def test_too_many_small_files_are_those_of_the_most_frequent_size() -> None:
    most = rounds.MOST_SMALL_FILES
    assert rounds.crowded([1000] * most) == []
    assert rounds.crowded([100] * 9 + [1000] * (most - 8)) == list(range(9, most + 1))
    assert rounds.crowded([1 << 30] * 10 * most) == [], "large ones are worth a file each"


@pytest.mark.parametrize("strategy", LAYOUTS, ids=str)
def test_live_files_do_not_become_more_with_every_version(
    tmp_path: Path, strategy: Chunked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if hardly a row is saved twice."""
    monkeypatch.setattr(rounds, "MOST_SMALL_FILES", 8)
    store = LocalStore(tmp_path, create=True, files=QuickFiles())
    trainer = Trainer(store, Policy(strategy=strategy), 5)
    trainer.save(trainer.train())
    for step in range(40):
        none = [np.empty(0, np.int64) for _ in GROUPS[1:]]
        ids = np.array([step])
        for field in trainer.state[0]:
            field[ids] = trainer.random.integers(0, 256, (1, field.shape[1]), dtype=np.uint8)
        trainer.save([ids, *none])
        if step % 9 == 8:
            trainer.restart()
        files = trainer.catalog.manifest.era(trainer.era).files_of(step + 2)
        assert len(files) <= 1 + 8 + strategy.round_versions + 1
    check_all(trainer)
