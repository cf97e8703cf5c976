"""Saving behind the trainer's back: whatever goes wrong there, nothing hangs and nothing is forgotten."""

from __future__ import annotations

import errno
import io
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.store.local import LocalStore
from holdfast.events import EventLog, read_events
from tests.checkpoint.by_hand import SECONDS, Rows, in_time, restored

STRATEGIES: list[Any] = [
    hf.Full(),
    hf.Differential(),
    hf.Differential(baseline="one-shot"),
    hf.Incremental(),
    hf.Chunked(round_versions=2, dead_fraction=0.0, reset="never"),
]


class Strange(BaseException):
    """No error that anybody expects."""


ERRORS = [ValueError("odd"), MemoryError(), KeyboardInterrupt(), Strange(), OSError(5, "io")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("place", ["put", "publish", "apply", "tidy", "delete"])
def test_any_error_in_the_background(
    tmp_path: Path, error: BaseException, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Rows()
    policy = hf.Policy(strategy=hf.Chunked(round_versions=1, dead_fraction=0.0), keep=2)
    ckpt = hf.Checkpointer(tmp_path, run.objects, policy)
    for step in range(3):
        run.change(ckpt, step)
        ckpt.save(step)
    ckpt.wait()
    owner = Shard if place in ("apply", "tidy") else LocalStore
    real = getattr(owner, place)
    raised: list[str] = []

    def fail(*arguments: Any, **options: Any) -> Any:
        if not raised:
            raised.append(place)
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(owner, place, fail)
    run.change(ckpt, 5)
    ckpt.save(3)
    found = in_time(ckpt.wait)
    assert raised == [place]
    if place in ("put", "publish"):
        assert isinstance(found, hf.SaveFailed)
        assert found.__cause__ is error
        assert "its rows are still marked" in str(found)
    elif place == "apply":
        assert found is None  # the version stands; the next one holds everything
    else:
        assert isinstance(found, hf.SaveFailed)
        assert "are intact" in str(found)
    assert in_time(ckpt.wait) is None, "an error is told once"
    run.change(ckpt, 6)
    assert in_time(lambda: ckpt.save(4)) is None
    assert in_time(ckpt.close) is None
    assert [v.step for v in ckpt.versions()][-1] == 4
    assert restored(tmp_path) == run.value()


def test_a_version_stands_although_old_files_could_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that was told to have failed would let later rounds take its rows for older ones."""
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 8)
    run, truth = Rows(), {}
    policy = hf.Policy(strategy=hf.Chunked(round_versions=3, dead_fraction=0.0, reset="never"))
    failures = []
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        real = ckpt.store.delete
        for step in range(12):
            run.change(ckpt, 1, 2 + step % 3)

            def refuse(names: Any) -> None:
                failures.append(names)
                raise hf.StoreError("no permission")

            ckpt.store.delete = refuse if step in (4, 5) else real  # type: ignore[method-assign]
            version = ckpt.save(step)
            assert version is not None
            truth[version] = run.value()
            if step in (4, 5):
                with pytest.raises(hf.SaveFailed, match=r"are intact, but .* no permission"):
                    ckpt.wait()
            ckpt.wait()
        assert [v.version for v in ckpt.versions()] == list(truth)
    assert failures
    assert len(list((tmp_path / "manifests").iterdir())) == 2, "what could not be deleted was tried again"
    for version, expected in truth.items():
        assert restored(tmp_path, version) == expected


def test_a_manifest_that_came_to_exist_after_all(tmp_path: Path) -> None:
    """An answer was lost: the writer believes that it failed, and must be able to go on."""
    run, lost = Rows(), []
    with hf.Checkpointer(tmp_path / "store", run.objects, hf.Policy(strategy="incremental")) as ckpt:
        run.change(ckpt, 1)
        ckpt.save(0)
        ckpt.wait()
        real = ckpt.store.publish

        def lose(name: str, data: bytes) -> None:
            real(name, data)
            lost.append(name)
            raise hf.StoreError("lost the connection")

        ckpt.store.publish = lose  # type: ignore[method-assign]
        for step in (1, 2):
            run.change(ckpt, 2)
            ckpt.save(step)
            with pytest.raises(hf.SaveFailed, match="lost the connection"):
                ckpt.wait()
            # Should the process die now, then this is the newest version.
            shutil.copytree(tmp_path / "store", tmp_path / str(step))
            assert restored(tmp_path / str(step)) == run.value()
        ckpt.store.publish = real  # type: ignore[method-assign]
        run.change(ckpt, 3)
        ckpt.save(3)
        ckpt.wait()
        assert [v.step for v in ckpt.versions()] == [0, 3]
        run.change(ckpt, 4)
        ckpt.save(4)
    assert len(lost) == 2
    assert restored(tmp_path / "store") == run.value()
    assert len(list((tmp_path / "store/manifests").iterdir())) == 2


def test_another_writers_manifest_is_never_passed_over(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(0)
        ckpt.wait()
        newest = max((tmp_path / "manifests").iterdir())
        newest.with_name(f"{int(newest.stem) + 1:010}.json").write_bytes(b"of another writer")
        ckpt.save(1)
        with pytest.raises(hf.StoreLocked, match="another writer has taken"):
            ckpt.wait()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(hf.StoreLocked, match="another writer has taken"):
            ckpt.save(2)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_an_older_version_in_the_same_process(tmp_path: Path, strategy: Any) -> None:
    """What is saved after going back is whole, although rows that were undone are marked nowhere."""
    run, truth = Rows(), {}
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy=strategy)) as ckpt:
        for step in range(5):
            run.change(ckpt, step, step + 10)
            truth[ckpt.save(step)] = run.value()
        ckpt.restore(2)
        assert run.value() == truth[2]
        run.change(ckpt, 30)
        truth[ckpt.save(5)] = run.value()
        run.change(ckpt, 31)
        truth[ckpt.save(6)] = run.value()
    for version, expected in truth.items():
        assert restored(tmp_path, version) == expected


def test_a_restore_that_fails_half_way(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="incremental")) as ckpt:
        run.change(ckpt, *range(40))
        ckpt.save(0)
        run.change(ckpt, 1)
        ckpt.save(1)
        ckpt.wait()
        run.change(ckpt, 2)
        ckpt.save(2)
        ckpt.wait()
        (second,) = (p for p in (tmp_path / "chunks").iterdir() if p.name.startswith("00000002"))
        damaged = bytearray(second.read_bytes())
        damaged[-1] ^= 1
        second.write_bytes(damaged)
        with pytest.raises(hf.CorruptCheckpoint, match=r"00000002-.*version 3.*checksum"):
            ckpt.restore(3)
        run.change(ckpt, 3)
        ckpt.save(3)
        ckpt.wait()
        assert ckpt.versions()[-1].baseline, "what the tables hold now is nobody's increment"
    assert restored(tmp_path) == run.value()


def test_new_optimizer_state_while_a_save_is_under_way(tmp_path: Path) -> None:
    """The first steps make optimizer state: other records, while the save before is still being written."""
    table = nn.Embedding(30, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    gate, entered = threading.Event(), threading.Event()
    truth = {}
    with hf.Checkpointer(tmp_path, {"m": table, "o": optimizer}, hf.Policy(strategy="incremental")) as ckpt:
        real = ckpt.store.put

        def slow(name: str, parts: Any) -> int:
            entered.set()
            assert gate.wait(SECONDS)
            return real(name, parts)

        ckpt.store.put = slow  # type: ignore[method-assign]
        truth[ckpt.save(0)] = table.weight.tolist()
        assert entered.wait(SECONDS)
        table(torch.tensor([3, 4])).sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]
        threading.Timer(0.2, gate.set).start()
        truth[ckpt.save(1)] = table.weight.tolist()
        optimizer.zero_grad()
        table(torch.tensor([5])).sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]
        truth[ckpt.save(2)] = table.weight.tolist()
        ckpt.wait()
        assert [v.baseline for v in ckpt.versions()] == [True, True, False]
    for version, expected in truth.items():
        other = nn.Embedding(30, 4, sparse=True)
        objects = {"m": other, "o": torch.optim.SparseAdam(other.parameters())}
        with hf.Checkpointer(tmp_path, objects) as ckpt:
            ckpt.restore(version)
        assert other.weight.tolist() == expected


def test_lookups_by_keyword_are_seen(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {"one": nn.Embedding(9, 2, sparse=True), "bag": nn.EmbeddingBag(9, 2, sparse=True, mode="sum")}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path, {"m": model, "o": optimizer}, hf.Policy(strategy="incremental")) as ckpt:
        ckpt.save(0)
        model["one"](input=torch.tensor([4])).sum().backward()
        model["bag"](input=torch.tensor([[2, 3]])).sum().backward()
        optimizer.step()
        ckpt.save(1)
        ckpt.wait()
        assert ckpt.versions()[-1].rows == 3


@pytest.mark.parametrize(
    "rows", [[-1], [40], [2**40], -3, [1.0], [True] * 40, ["1"], np.array([2**63], np.uint64)], ids=repr
)
def test_rows_that_the_table_does_not_have(tmp_path: Path, rows: Any) -> None:
    """Hole 33: what is marked is saved, or refused; never left out."""
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(0)
        with pytest.raises(hf.ConfigError, match=r"rows .*m\.weight"):
            ckpt.mark("m.weight", rows)
        ckpt.mark("m.weight", [])
        ckpt.mark("m.weight", torch.tensor([0, 39]))
        ckpt.save(1)
        ckpt.wait()
        assert ckpt.versions()[-1].rows == 2


def test_models_without_tables(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"m": nn.Linear(3, 2)}

    for step in range(3):
        objects = make()
        with hf.Checkpointer(tmp_path, objects) as ckpt:
            assert ckpt.restore() == step
            with torch.no_grad():
                objects["m"].weight.fill_(step)
            ckpt.save(step)
    objects = make()
    with hf.Checkpointer(tmp_path, objects) as ckpt:
        ckpt.restore()
    assert objects["m"].weight.unique().tolist() == [2.0]


def test_a_damaged_file_of_another_version(tmp_path: Path) -> None:
    """It keeps nobody from going on from a version that is whole, and from its era: nobody reads it."""
    run = Rows()
    policy = hf.Policy(strategy=hf.Chunked(round_versions=2, dead_fraction=0.0, reset="never"))
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        for step in range(6):
            run.change(ckpt, 1, 2)
            ckpt.save(step)
    for history in (tmp_path / "chunks").glob("*-history-*"):
        history.write_bytes(b"damaged")
    assert list((tmp_path / "chunks").glob("*-history-*"))
    other = Rows()
    with hf.Checkpointer(tmp_path, other.objects, policy) as ckpt:
        assert ckpt.restore() == 6
        assert other.value() == run.value()
        for step in range(6, 10):
            other.change(ckpt, step)
            ckpt.save(step)
            ckpt.wait()
        assert not any(version.baseline for version in ckpt.versions()[1:])
        assert any(report.tidied_bytes for report in ckpt.reports)
    assert restored(tmp_path) == other.value()


@pytest.mark.parametrize("layout", ["rounds", "2d"])
@pytest.mark.parametrize("how", ["flipped", "deleted"])
def test_a_damaged_file_is_reported_once(tmp_path: Path, layout: Any, how: str) -> None:
    """Every round would read it, and every version that needs it would be lost: a new era begins."""
    policy = hf.Policy(strategy=hf.Chunked(layout=layout, round_versions=2, dead_fraction=0.0, reset="never"))
    run = Rows()
    refused: list[str] = []
    (tmp_path / "log").mkdir()
    with (
        EventLog(tmp_path / "log") as events,
        hf.Checkpointer(tmp_path / "store", run.objects, policy, events=events) as ckpt,
    ):
        for step in range(12):
            # Of the fourth version's rows some die with each later one, so that a round takes its file.
            run.change(ckpt, 1, 2, *range(20, 30 if step == 3 else 25))
            ckpt.save(step)
            try:
                ckpt.wait()
            except hf.SaveFailed as error:
                refused.append(str(error))
            if step == 4:
                damaged = max((tmp_path / "store" / "chunks").glob("*-increment-*"))
                content = damaged.read_bytes()
                damaged.unlink()
                if how == "flipped":
                    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert [v.baseline for v in ckpt.versions()].count(True) == 2
    assert len(refused) == 1
    assert damaged.name in refused[0]
    failed = [e for e in read_events(tmp_path / "log") if e["event"] == "checkpoint_tidy_failed"]
    assert len(failed) == 1
    assert restored(tmp_path / "store") == run.value()


def test_numbers_of_deleted_versions_are_not_used_again(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="full")) as ckpt:
        for step in range(3):
            ckpt.save(step)
        ckpt.wait()
        ckpt._writer.catalog.delete_versions([2, 3])
        assert [v.version for v in ckpt.versions()] == [1]
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        assert ckpt.save(3) == 4


def test_a_log_on_a_full_disk(tmp_path: Path) -> None:
    class FullDisk(io.BytesIO):
        lines = 0

        def write(self, line: Any) -> int:
            self.lines += 1
            raise OSError(errno.ENOSPC, "no space left on device")

    run, events, disk = Rows(), EventLog(None), FullDisk()
    events._file = disk
    ckpt = hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="incremental"), events=events)
    ckpt.save(0)
    assert in_time(ckpt.wait) is None
    lines = disk.lines
    assert lines
    ckpt.store.put = lambda *a: 1 / 0  # type: ignore[assignment]
    ckpt.save(1)
    assert isinstance(in_time(ckpt.wait), hf.SaveFailed)
    assert disk.lines == lines + 1
    del ckpt.store.put
    ckpt.save(2)
    assert in_time(ckpt.close) is None
    assert [v.step for v in ckpt.versions()] == [0, 2]


def test_no_thread_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Rows()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(hf.CheckpointError, match="cannot start another thread"):
            hf.Checkpointer(tmp_path, run.objects)
    ckpt = hf.Checkpointer(tmp_path, run.objects)  # the lock was released
    run.change(ckpt, 1)
    assert in_time(lambda: ckpt.save(1)) is None
    assert in_time(ckpt.close) is None
    assert restored(tmp_path) == run.value()


def test_what_a_failed_save_wrote_is_cleared_away(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(0)
        ckpt.wait()
        before = sorted((tmp_path / "chunks").iterdir())
        real = ckpt.store.publish
        ckpt.store._sync_folders = lambda: 1 / 0  # type: ignore[attr-defined]
        ckpt.store.put = lambda name, parts: (  # type: ignore[method-assign]
            LocalStore.put(ckpt.store, name, parts) if "chunks" in name else 1 // 0  # type: ignore[arg-type]
        )
        run.change(ckpt, 1)
        ckpt.save(1)
        with pytest.raises(hf.SaveFailed, match="ZeroDivisionError"):
            ckpt.wait()
        assert sorted((tmp_path / "chunks").iterdir()) == before
        del ckpt.store._sync_folders, ckpt.store.put  # type: ignore[attr-defined]
        assert ckpt.store.publish == real
        ckpt.save(2)
    assert restored(tmp_path) == run.value()
