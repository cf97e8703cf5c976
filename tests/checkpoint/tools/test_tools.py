"""Looking at stores, checking them and freeing space, as functions."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.base import RESERVE_PREFIX
from holdfast.checkpoint.tools.inspect import (
    collect_garbage,
    describe_version,
    leftover_files,
    list_versions,
    stored_files,
)
from holdfast.checkpoint.tools.printing import age
from holdfast.checkpoint.tools.verify import bytes_to_verify, verify_versions
from tests.checkpoint.test_checkpointer import ROWS, STRATEGIES, Run

CHUNKED = hf.Chunked(round_versions=2, dead_fraction=0.25, reset="never")


def train(path: Path, strategy: Any = CHUNKED, versions: int = 9) -> dict[int, str]:
    run = Run()
    digests: dict[int, str] = {}
    with hf.Checkpointer(path, run.objects, hf.Policy(strategy=strategy)) as ckpt:
        for step in range(versions):
            run.train(2)
            version = ckpt.save(step, {"auc": step / 10})
            assert version is not None
            digests[version] = run.digest()
    return digests


def restored(path: Path, version: int) -> str:
    fresh = Run()
    with hf.Checkpointer(path, fresh.objects) as ckpt:
        ckpt.restore(version)
    return fresh.digest()


def flip(path: Path, offset: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path, create=True)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_bytes_to_restore_are_those_that_a_restore_reads(tmp_path: Path, store: Store, strategy: Any) -> None:
    train(tmp_path, strategy)
    listing = list_versions(store)
    assert [v.version for v in listing.versions] == list(range(1, 10))
    files = [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith(RESERVE_PREFIX)]
    assert listing.stored_bytes == sum(p.stat().st_size for p in files)
    assert not listing.complaints
    for line in listing.versions:
        with open_version(store, line.version) as reader:
            headers = sum(f.entry.header_bytes for f in reader.files)
            reader.verify()
            assert line.bytes_to_restore == reader.bytes_read + headers
        assert line.metadata == {"auc": line.step / 10}
        assert line.strategy.startswith(type(strategy).__name__)
    assert listing.versions[0].kind == "full"
    assert listing.versions[0].rows == sum(ROWS)
    json.dumps(asdict(listing))


def test_what_a_version_is_made_of(tmp_path: Path, store: Store) -> None:
    train(tmp_path)
    found = describe_version(store, 4)
    assert (found.version, found.step, found.era, found.kind) == (4, 3, 1, "increment")
    assert [t.rows for t in found.tables] == list(ROWS)
    assert found.tables[0].fields == (("weight", "F32", 4, None), ("optim0.sum", "F32", 4, None))
    assert {f.kind for f in found.files} >= {"baseline", "history", "dense"}
    assert any(0 < f.needed_pieces < f.pieces for f in found.files)
    assert found.bytes_to_restore == list_versions(store).versions[3].bytes_to_restore
    assert set(found.objects) == {"model", "loader", "optim0"}
    model = {line.key: line for line in found.objects["model"]}
    assert model["tables.1.weight"].shape == (400, 4)
    assert model["network.bottom.0.weight"].dtype == "F32"
    loader = {line.key: line.value for line in found.objects["loader"]}
    assert loader["next_index"] == "8"
    json.dumps(asdict(found))
    assert describe_version(store).version == 9
    with pytest.raises(hf.NoSuchVersion, match="has no version 99: it has 1 to 9"):
        describe_version(store, 99)


def test_a_store_without_versions(store: Store) -> None:
    assert list_versions(store).versions == ()
    for look in (describe_version, verify_versions):
        with pytest.raises(hf.NoSuchVersion, match="has no version"):
            look(store)


def test_all_is_whole(tmp_path: Path, store: Store) -> None:
    train(tmp_path)
    done: list[int] = []
    report = verify_versions(store, (), done.append)
    assert report.good
    assert report.whole == tuple(range(1, 10))
    assert not report.leftovers
    names = manifests.read_newest(store).file_names()
    assert report.files == len(names), "each file once, not once for each version"
    assert done == sorted(done)
    assert done[-1] == report.bytes == bytes_to_verify(store) == sum(stored_files(store)[n] for n in names)


@pytest.mark.parametrize("strategy", [hf.Incremental(), CHUNKED], ids=str)
def test_every_damage_is_found_and_the_versions_are_the_right_ones(
    tmp_path: Path, store: Store, strategy: Any
) -> None:
    """For each file, and a byte anywhere in it: exactly the versions that cannot be restored are named."""
    train(tmp_path, strategy, versions=7)
    for name in sorted(manifests.read_newest(store).file_names()):
        size = (tmp_path / name).stat().st_size
        for offset in (3, size // 2, size - 1):
            flip(tmp_path / name, offset)
            report = verify_versions(store)
            broken = [v for v in range(1, 8) if not readable(store, v)]
            assert [f.name for f in report.damaged_files] == [name]
            assert list(report.damaged) == broken == list(report.damaged_files[0].versions)
            assert report.whole == tuple(v for v in range(1, 8) if v not in broken)
            assert not report.good
            flip(tmp_path / name, offset)
    assert verify_versions(store).good


def readable(store: Store, version: int) -> bool:
    try:
        with open_version(store, version) as reader:
            reader.verify()
    except hf.CorruptCheckpoint:
        return False
    return True


def test_missing_and_short_files(tmp_path: Path, store: Store) -> None:
    train(tmp_path, hf.Incremental(), versions=4)
    (third,) = tmp_path.glob("chunks/00000003-*")
    (fourth,) = tmp_path.glob("dense/00000004-*")
    fourth.write_bytes(fourth.read_bytes()[:-1])
    third.unlink()
    report = verify_versions(store)
    assert {Path(f.name).name: f.versions for f in report.damaged_files} == {
        third.name: (3, 4),
        fourth.name: (4,),
    }
    assert report.whole == (1, 2)
    assert verify_versions(store, [2]).good
    assert [v.version for v in list_versions(store).versions] == [1, 2, 3, 4]


def test_damaged_manifests_are_complained_about(tmp_path: Path, store: Store) -> None:
    train(tmp_path, hf.Incremental(), versions=4)
    newest = tmp_path / manifests.name_of(manifests.numbers(store)[0])
    flip(newest, 100)
    assert "is damaged" in list_versions(store).complaints[0]
    report = verify_versions(store)
    assert not report.good
    assert report.whole == (1, 2, 3)
    assert not report.leftovers, "what a damaged manifest may have named is not called a leftover"
    before = stored_files(store)
    with pytest.raises(hf.CheckpointError, match="nothing was deleted"):
        collect_garbage(store, hf.Policy(keep=1))
    assert stored_files(store) == before


@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=str)
def test_garbage(tmp_path: Path, store: Store, strategy: Any) -> None:
    digests = train(tmp_path, strategy)
    store.put("chunks/00000099-0000-live-000000000000.safetensors", [b"x" * 1000])
    assert leftover_files(store) == {"chunks/00000099-0000-live-000000000000.safetensors": 1000}
    before = stored_files(store)
    policy = hf.Policy(keep=2, keep_every=4)
    plan = collect_garbage(store, policy, dry_run=True)
    assert stored_files(store) == before
    report = collect_garbage(store, policy)
    after = stored_files(store)
    assert report.deleted_versions == plan.deleted_versions == (1, 2, 3, 5, 6, 7)
    assert report.kept_versions == plan.kept_versions == (4, 8, 9)
    assert report.rewritten_files == plan.rewritten_files
    assert set(report.deleted_files) == set(plan.deleted_files)
    gone = {n for n in before if n not in after and not n.startswith("manifests/")}
    assert gone == {*report.deleted_files, *report.rewritten_files}
    assert report.freed_bytes == sum(before.values()) - sum(after.values())
    assert set(manifests.read_newest(store).file_names()) == {n for n in after if not n.startswith("manif")}
    assert verify_versions(store).good
    for version in (4, 8, 9):
        assert restored(tmp_path, version) == digests[version]


def test_histories_of_deleted_versions_are_freed(tmp_path: Path, store: Store) -> None:
    digests = train(tmp_path, versions=13)
    old = {f.name: f for f in manifests.read_newest(store).eras[0].files if f.kind == "history"}
    report = collect_garbage(store, hf.Policy(keep=4))
    new = [f for f in manifests.read_newest(store).eras[0].files if f.kind == "history"]
    assert report.rewritten_files
    assert set(report.rewritten_files) <= old.keys()
    assert sum(f.bytes for f in new) < 0.5 * sum(f.bytes for f in old.values())
    for name in report.rewritten_files:
        assert not (tmp_path / name).exists()
    for version in (10, 11, 12, 13):
        assert restored(tmp_path, version) == digests[version]
    # And a writer goes on with what it finds.
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy=CHUNKED)) as ckpt:
        ckpt.restore()
        for step in range(13, 18):
            run.train()
            saved = ckpt.save(step)
            assert saved is not None
            digests[saved] = run.digest()
    for version in (10, 13, 14, 16, 18):
        assert restored(tmp_path, version) == digests[version]


def test_garbage_goes_though_a_history_is_damaged(tmp_path: Path, store: Store) -> None:
    train(tmp_path, versions=13)
    plan = collect_garbage(store, hf.Policy(keep=4), dry_run=True)
    flip(tmp_path / plan.rewritten_files[0], 20)
    report = collect_garbage(store, hf.Policy(keep=4))
    assert len(report.complaints) == 1
    assert plan.rewritten_files[0] in report.complaints[0]
    assert report.rewritten_files == plan.rewritten_files[1:]
    assert report.deleted_versions == tuple(range(1, 10))


def test_without_options_only_what_nobody_needs(tmp_path: Path, store: Store) -> None:
    train(tmp_path)
    store.put("dense/00000099-000000000000.safetensors", [b"x"])
    assert collect_garbage(store, hf.Policy()).deleted_versions == ()
    assert set(stored_files(store)) >= manifests.read_newest(store).file_names()
    assert not (tmp_path / "dense/00000099-000000000000.safetensors").exists()
    again = collect_garbage(store, hf.Policy())
    assert (again.deleted_files, again.freed_bytes) == ((), 0)


def test_a_delay_keeps_files_for_restores_under_way(tmp_path: Path, store: Store) -> None:
    train(tmp_path, hf.Full(), versions=4)
    policy = hf.Policy(keep=1, deletion_delay_seconds=3600)
    assert collect_garbage(store, policy, dry_run=True).deleted_files == ()
    report = collect_garbage(store, policy)
    assert report.deleted_versions == (1, 2, 3)
    assert report.deleted_files == ()
    assert not leftover_files(store)
    assert len(collect_garbage(store, hf.Policy()).deleted_files) == 6


def test_garbage_is_left_alone_where_it_is_not_ours(tmp_path: Path, store: Store) -> None:
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "thesis.txt").write_text("five years")
    with pytest.raises(hf.NoSuchVersion, match="nothing to clean up"):
        collect_garbage(store, hf.Policy(keep=1))
    assert (tmp_path / "chunks" / "thesis.txt").exists()


def test_garbage_waits_for_the_writer(tmp_path: Path, store: Store) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(0)
        ckpt.wait()
        with pytest.raises(hf.StoreLocked):
            collect_garbage(open_store(tmp_path, create=False), hf.Policy(keep=1))
        assert collect_garbage(store, hf.Policy(keep=1), dry_run=True).kept_versions == (1,)


def test_looking_while_a_writer_rearranges_files(tmp_path: Path, store: Store) -> None:
    """Whatever a writer replaces and deletes meanwhile, nothing is called damaged."""
    digests = train(tmp_path, hf.Chunked(round_versions=1, dead_fraction=0.0, reset="never"))
    stop = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        run = Run()
        policy = hf.Policy(strategy=hf.Chunked(round_versions=1, dead_fraction=0.0, reset="never"), keep=6)
        try:
            with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
                step = ckpt.restore()
                while not stop.is_set():
                    run.train()
                    ckpt.save(step)
                    step += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = 0
        for _ in range(25):
            listing = list_versions(store)
            assert not listing.complaints
            seen = max(seen, listing.versions[-1].version)
            report = verify_versions(store)
            assert report.good, report
            assert report.whole or report.gone
            describe_version(store)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert seen > len(digests)


@pytest.mark.parametrize("look", [list_versions, verify_versions, describe_version])
def test_files_replaced_between_the_manifest_and_their_opening(
    tmp_path: Path, store: Store, look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = hf.Policy(strategy=hf.Chunked(round_versions=1, dead_fraction=0.0, reset="never"), keep=5)
    train(tmp_path, policy.strategy)
    real, guard = store.open, threading.Lock()
    written: list[str] = []

    def open_late(name: str) -> Any:
        with guard:
            if not name.startswith("manifests/") and not written:
                written.append(name)
                run = Run()
                with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
                    step = ckpt.restore()
                    for more in range(3):
                        run.train()
                        ckpt.save(step + more)
        return real(name)

    before = manifests.read_newest(store).file_names()
    monkeypatch.setattr(store, "open", open_late)
    found = look(store)
    assert before - stored_files(store).keys(), "the writer has deleted some"
    if look is verify_versions:
        assert found.good
        assert (found.whole, found.gone) == ((8, 9), (1, 2, 3, 4, 5, 6, 7))
    elif look is list_versions:
        assert not found.complaints
        assert [v.version for v in found.versions] == [8, 9, 10, 11, 12]


def test_the_files_of_a_version_are_opened_once(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path)
    opened: list[str] = []
    real = type(store).open
    monkeypatch.setattr(type(store), "open", lambda self, name: opened.append(name) or real(self, name))  # type: ignore[func-returns-value]
    verify_versions(store)
    data = [name for name in opened if not name.startswith("manifests/")]
    assert len(data) == len(set(data))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (5, "5 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (86400 * 3, "3 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text
