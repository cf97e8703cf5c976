"""Manifests: one's own is known again, and none is published that nobody could read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store import ObjectReader
from holdfast.checkpoint.store.local import LocalStore
from tests.checkpoint.by_hand import Rows, restored
from tests.checkpoint.lineage import Lineage, QuickFiles, check_no_leftovers, check_store
from tests.checkpoint.plain_source import PlainSource


class Nfs(QuickFiles):
    """A disk behind a network: a link is made, the answer is lost, the repeated request finds it there."""

    answers_to_lose = 0

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        if self.answers_to_lose and target.startswith("manifests/"):
            self.answers_to_lose -= 1
            raise FileExistsError(17, "File exists", target)


@pytest.fixture
def files() -> Nfs:
    return Nfs()


@pytest.fixture
def line(tmp_path: Path, files: Nfs) -> Iterator[Lineage]:
    with LocalStore(tmp_path, create=True, files=files) as store, store.lock_writer():
        line = Lineage(store, hf.Policy())
        line.train()
        line.save()
        line.writer.wait()
        yield line
        line.writer.close()


def test_ones_own_manifest_is_not_taken_for_anothers(line: Lineage, files: Nfs) -> None:
    for _ in range(3):
        files.answers_to_lose = 1
        line.train()
        line.save()
        line.writer.wait()
        assert not files.answers_to_lose
    assert [v.version for v in check_store(line.store).versions] == [1, 2, 3, 4]
    check_no_leftovers(line)


def test_ones_own_manifest_is_made_durable_though_its_answer_was_lost(
    line: Lineage, files: Nfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, newest = line.store.sync, []

    def sync() -> None:
        newest.append(read_newest(line.store).versions[-1].version)
        real()

    monkeypatch.setattr(line.store, "sync", sync)
    files.answers_to_lose = 1
    line.train()
    line.save()
    line.writer.wait()
    assert newest[:2] == [1, 2], "once before it is published, and once when it is found there"


def test_a_manifest_that_cannot_be_looked_at_stops_one_save_only(
    line: Lineage, files: Nfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: LocalStore, name: str) -> ObjectReader:
        raise hf.StoreUnreachable("gone")

    files.answers_to_lose = 1
    line.train()
    with monkeypatch.context() as broken:
        broken.setattr(LocalStore, "open", fail)
        line.save()
        with pytest.raises(hf.SaveFailed, match="gone"):
            line.writer.wait()
    # It stands, though it was said to have failed. What comes next is built upon the one before it.
    assert [v.version for v in read_newest(line.store).versions] == [1, 2]
    line.train()
    line.save()
    line.writer.wait()
    assert [v.version for v in check_store(line.store).versions] == [1, 3]


def test_another_writers_manifest_is_not_taken_for_ones_own(line: Lineage, tmp_path: Path) -> None:
    number = read_newest(line.store).number
    line.store.publish(f"manifests/{number + 1:010}.json", b"another's")
    line.train()
    line.save()
    with pytest.raises(hf.StoreLocked, match="another writer has taken"):
        line.writer.wait()
    assert (tmp_path / f"manifests/{number + 1:010}.json").read_bytes() == b"another's"


STEP: Any = "seven"


def test_what_nobody_could_read_is_not_published(tmp_path: Path) -> None:
    """It would take every version with it."""
    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store, store.lock_writer():
        line = Lineage(store, hf.Policy())
        line.train()
        line.save()
        line.train()
        line.writer.save(STEP, PlainSource(line.tables), {})
        with pytest.raises(hf.SaveFailed, match="could not be read back, so nothing was published"):
            line.writer.wait()
        check_no_leftovers(line)
        line.save()
        line.writer.close()
        assert [v.step for v in check_store(store).versions] == [1, 2]


def test_metadata_are_those_of_their_save(tmp_path: Path) -> None:
    """A trainer may use one dict for all of them."""
    run = Rows()
    metadata: dict[str, Any] = {}
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        for step in range(3):
            metadata["auc"] = step
            run.change(ckpt, step)
            ckpt.save(step, metadata)
            ckpt.wait()
        assert [v.metadata for v in ckpt.versions()] == [{"auc": 0}, {"auc": 1}, {"auc": 2}]
    assert restored(tmp_path) == run.value()


def test_no_number_is_used_twice_after_damage(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        for step in range(3):
            run.change(ckpt, step)
            ckpt.save(step)
    newest = max((tmp_path / "manifests").iterdir())
    newest.write_bytes(b"x" + newest.read_bytes()[1:])
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        assert ckpt.restore() == 2
        assert ckpt.save(9) == 4
        ckpt.wait()
        assert [v.version for v in ckpt.versions()] == [1, 2, 4]


def test_files_that_were_retired_by_a_clock_that_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = hf.Policy(strategy=hf.Full(), keep=1)
    now = time.time()
    for ahead in (10 * 365 * 86400.0, 0.0):
        monkeypatch.setattr(time, "time", partial(float, now + ahead))
        with LocalStore(tmp_path, create=True, files=QuickFiles()) as store, store.lock_writer():
            line = Lineage(store, policy)
            for _ in range(3):
                line.train()
                line.save()
                line.writer.wait()
            line.writer.close()
    assert len(list((tmp_path / "chunks").iterdir())) == 2, "of this manifest and the one before it"
