"""The "2d" layout on files: bundles, restarts, retention, failures and crashes."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.chunk import OPEN
from holdfast.checkpoint.format.manifest import FileEntry, read_newest
from holdfast.checkpoint.format.records import Rows
from holdfast.checkpoint.layout import bundles, two_d
from holdfast.checkpoint.layout import rearrange_two_d as files_2d
from holdfast.checkpoint.layout.rearrange_two_d import TwoD
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.reading import pipelines, stretches
from holdfast.checkpoint.reading.stretches import open_file
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import StoreError
from holdfast.options import Chunked, Policy
from holdfast.testing.crash import Journal, RecordingFiles, crash_states, materialise
from tests.checkpoint.reading.test_versions import GROUPS, Trainer, check_all, restored, same


def trainer_in(place: Path, threshold: float, seed: int = 0, **policy: Any) -> Trainer:
    strategy = Chunked(layout="2d", threshold=threshold)
    return Trainer(open_store(place, create=True), Policy(strategy=strategy, **policy), seed)


def layout(trainer: Trainer) -> TwoD:
    found = trainer.shard._rearranger
    assert isinstance(found, TwoD)
    return found


def files(trainer: Trainer) -> list[FileEntry]:
    return [f for f in trainer.catalog.manifest.era(trainer.era).files if f.kind != "baseline"]


def shape(found: TwoD) -> dict[two_d.Key, tuple[Any, ...]]:
    """The list without what does not survive a restart: nothing."""
    return {
        key: (c.rows, c.first_id, c.last_id, c.places, None if c.filter is None else c.filter.words.tolist())
        for key, c in found.chunks.chunks.items()
    }


def shape_after_restart(trainer: Trainer) -> dict[two_d.Key, tuple[Any, ...]]:
    """What another process knows in the end. The trainer's own shard learns it as it goes on."""
    trainer.restart()
    kept = [v.version for v in trainer.catalog.manifest.versions]
    other = Shard(0, GROUPS, trainer.shard.strategy)
    other.resume(trainer.store, trainer.catalog.manifest.era(trainer.era))
    found = other._rearranger
    assert isinstance(found, TwoD)
    found._catch_up(trainer.store)
    while found._history:
        found._adopt_history(trainer.store, kept)
    return shape(found)


class TestSection44:
    """The concatenation approach."""

    def test_a_round_writes_two_files(self, tmp_path: Path) -> None:
        trainer = trainer_in(tmp_path, 0.0)
        trainer.save(trainer.train())
        for _ in range(15):
            before = {f.name for f in files(trainer)}
            trainer.save(trainer.train())
            kinds = Counter(f.kind for f in files(trainer) if f.name not in before)
            assert max(kinds.values(), default=0) <= 1
            assert set(kinds) <= {"increment", "live", "history"}

    def test_a_version_reads_one_file_for_each_deeper_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """N+ <= L - i, as printed, if bundles are kept until their last chunk is dead."""
        monkeypatch.setattr(two_d, "LEAST_LIVE_FRACTION", 0.0)
        trainer = trainer_in(tmp_path, 0.0)
        for _ in range(13):
            trainer.save(trainer.train())
        era = trainer.catalog.manifest.era(trainer.era)
        last = 12
        for i in range(1, last + 1):
            found = Counter(f.kind for f in era.files_of(1 + i))
            assert found["history"] <= last - i
            assert found["live"] + found["increment"] <= i

    def test_a_bundle_goes_when_its_last_chunk_is_dead(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(two_d, "LEAST_LIVE_FRACTION", 0.0)
        trainer = trainer_in(tmp_path, 0.0)
        for _ in range(16):
            trainer.save(trainer.train())
        assert any(f.dead_pieces for f in files(trainer))
        for entry in files(trainer):
            with open_file(trainer.store, entry, GROUPS).reader:
                assert open_file(trainer.store, entry, GROUPS).pieces, "not one that is needed"


def test_files_are_half_alive_at_least(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 0.0, seed=3)
    for step in range(30):
        trainer.save(trainer.train())
        if step:
            for entry in files(trainer):
                opened = open_file(trainer.store, entry, GROUPS)
                opened.reader.close()
                live = sum(piece.length for piece in opened.pieces)
                assert live >= two_d.LEAST_LIVE_FRACTION * (entry.bytes - entry.header_bytes)
    stored = sum(f.bytes - f.header_bytes for f in files(trainer))
    needed = sum(c.bytes for c in layout(trainer).chunks.chunks.values())
    assert needed <= stored < 2 * needed


def test_each_row_is_read_once_without_a_threshold(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 0.0, seed=4)
    for step in range(20):
        trainer.save(trainer.train())
        if step % 5 == 4:
            trainer.restart()
    for version in trainer.catalog.manifest.versions:
        seen: Counter[tuple[int, int]] = Counter()

        def count(group: int, rows: Rows, seen: Counter[tuple[int, int]] = seen) -> None:
            seen.update((group, row) for row in rows.ids.tolist())

        with open_version(trainer.store, version.version) as reader:
            reader.read_rows(count, baseline=False)
        assert set(seen.values()) <= {1}


@pytest.mark.parametrize("seed", range(10))
def test_random_runs(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds, retention, restarts and sizes of everything at random: what is kept stays right."""
    chance = np.random.default_rng(seed)
    monkeypatch.setattr(two_d, "LEAST_LIVE_FRACTION", float(chance.choice([0.0, 0.3, 0.5, 0.9, 1.0])))
    monkeypatch.setattr(files_2d, "STEP_BYTES", int(chance.choice([60, 400, 1 << 30])))
    monkeypatch.setattr(files_2d, "ADOPTED_FILES", int(chance.choice([1, 3, 100])))
    monkeypatch.setattr(bundles, "FILE_BYTES", int(chance.choice([80, 1 << 20])))
    monkeypatch.setattr(bundles, "STRETCH_BYTES", int(chance.choice([70, 1 << 20])))
    monkeypatch.setattr(pipelines, "STRETCH_BYTES", int(chance.choice([100, 1 << 20])))
    policy: dict[str, Any] = [{}, {"keep": 4}, {"keep": 2, "keep_every": 5}][seed % 3]
    trainer = trainer_in(tmp_path, float(chance.choice([0.0, 0.05, 0.2, 0.5])), seed, **policy)
    checked = 0
    for step in range(20):
        trainer.save(trainer.train(), baseline=step == 15)
        if chance.random() < 0.2:
            before = shape(layout(trainer))
            kept = [v.version for v in trainer.catalog.manifest.versions]
            gone = layout(trainer).chunks.unneeded(kept)
            knew_all = not layout(trainer)._history
            after = shape_after_restart(trainer)
            assert all(after[key] == before[key] for key in after if knew_all or key[2] == OPEN)
            assert before.keys() - after.keys() <= gone, "lost by a restart: only what retention took"
            checked += knew_all
        if chance.random() < 0.15:
            versions = [v.version for v in trainer.catalog.manifest.versions]
            trainer.catalog.delete_versions(v for v in versions[:-1] if chance.random() < 0.3)
        if step % 4 == 3:
            check_all(trainer)
    check_all(trainer)
    assert checked


def test_retention_leaves_no_history_that_nobody_needs(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 0.0, seed=1, keep=1)
    for _ in range(20):
        trainer.save(trainer.train())
    assert {f.kind for f in files(trainer)} <= {"live", "increment"}
    assert all(key[2] == OPEN for key in layout(trainer).chunks.chunks)


def test_interleaved_bundles_are_read_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path, 0.0, seed=6)
    for _ in range(24):
        trainer.save(trainer.train())
    seen: list[str] = []
    read = stretches.OpenFile.read

    def note(self: stretches.OpenFile, pieces: Sequence[Any], out: Any) -> None:
        seen.append(self.entry.name)
        read(self, pieces, out)

    monkeypatch.setattr(stretches.OpenFile, "read", note)
    for version in (8, 16, 24):
        seen.clear()
        assert same(restored(trainer.store, version), trainer.remembered[version])
        with open_version(trainer.store, version) as reader:
            pieces = reader.pieces()
            assert len(seen) == len({file.entry.name for file, _ in pieces}) < len(pieces) / 2


def test_a_change_of_layout_begins_a_new_era(tmp_path: Path) -> None:
    names = {
        trainer_in(tmp_path / "a", 0.1).shard.layout_name,
        Trainer(open_store(tmp_path / "b", create=True), Policy(strategy="chunked"), 0).shard.layout_name,
    }
    assert names == {"Chunked-2d", "Chunked"}


@dataclass
class FailingStore:
    """A store of which one call fails, after ``left`` others."""

    store: Store
    left: int
    fired: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def _arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.fired += 1
            raise StoreError("no space left on device")

    def put(self, name: str, parts: Sequence[Any]) -> int:
        self._arrive()
        return self.store.put(name, parts)

    def publish(self, name: str, data: bytes) -> None:
        self._arrive()
        self.store.publish(name, data)

    def open(self, name: str) -> Any:
        self._arrive()
        return self.store.open(name)


def test_a_round_that_fails_anywhere_costs_nothing_but_the_round(tmp_path: Path) -> None:
    fired = 0
    for at in range(1, 14):
        trainer = trainer_in(tmp_path / str(at), 0.2 * (at % 2), seed=at)
        for _ in range(5):
            trainer.save(trainer.train())
        failing = FailingStore(trainer.store, at)
        trainer.store = trainer.catalog.store = failing  # type: ignore[assignment]
        newest = trainer.catalog.newest
        touched = trainer.train()
        with contextlib.suppress(StoreError):
            trainer.save(touched)
        fired += failing.fired
        trainer.store = trainer.catalog.store = failing.store
        if trainer.catalog.newest == newest:
            trainer.restart()  # the version itself failed: its rows are in the next one
            trainer.save(touched)
        for _ in range(3):
            trainer.save(trainer.train())
        check_all(trainer)
        trainer.restart()
        trainer.save(trainer.train())
        check_all(trainer)
    assert fired >= 8


def test_every_version_survives_a_crash_anywhere(tmp_path: Path) -> None:
    """Hole 27: at every crash point every version that was promised, and every one listed, is whole."""
    journal = Journal()
    store = LocalStore(tmp_path / "store", create=True, files=RecordingFiles(journal))
    policy = Policy(strategy=Chunked(layout="2d", threshold=0.0), keep=3)
    trainer = Trainer(store, policy, 8)
    for step in range(7):
        trainer.save(trainer.train())
        journal.mark(f"saved {step + 1}")
    states = 0
    whole: dict[str, bool] = {}
    for number, state in enumerate(crash_states(journal, mixed=1)):
        if number % 3:
            continue
        states += 1
        place = tmp_path / "crash"
        materialise(state, place, cache=tmp_path / "cache")
        with LocalStore(place, create=False) as crashed:
            manifest = read_newest(crashed)
            last = int(state.marks[-1].split()[1]) if state.marks else 0
            assert [v.version for v in manifest.versions][-1:] >= [last][: last > 0]
            for version in manifest.versions:
                # The same files named by the same manifest need not be read twice.
                key = f"{manifest.number}-{version.version}-{sorted(manifest.file_names())}"
                if key not in whole:
                    whole[key] = same(restored(crashed, version.version), trainer.remembered[version.version])
                assert whole[key]
                for name in manifest.file_names():
                    crashed.open(name).close()
        shutil.rmtree(place)
    assert states > 50
