"""Damaged files: noticed, named, never loaded; older versions are not lost with them (hole 30)."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint.format.manifest import FileEntry, Manifest, encode, name_of, read_newest
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.tools.delta import export_delta
from holdfast.checkpoint.tools.export import export_dcp, export_model, restore_file
from holdfast.checkpoint.tools.verify import verify_versions
from holdfast.errors import CorruptCheckpoint, StoreError
from holdfast.events import EventLog, read_events
from tests.checkpoint.lineage import Lineage, QuickFiles, check_version

ROUNDS = hf.Chunked(round_versions=3, dead_fraction=0.0, reset="never")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with every kind of file."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
        with LocalStore(root, create=True, files=QuickFiles()) as store:
            line = Lineage(store, hf.Policy(strategy=ROUNDS))
            for _ in range(8):
                line.train()
                line.save()
            line.writer.close()
    return root


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Iterator[LocalStore]:
    shutil.copytree(whole, tmp_path / "store")
    with LocalStore(tmp_path / "store", create=False, files=QuickFiles()) as found:
        yield found


def chunks(manifest: Manifest) -> dict[str, str]:
    """One file of each kind."""
    found: dict[str, str] = {f.kind: f.name for era in manifest.eras for f in era.files}
    assert set(found) == {"baseline", "increment", "live", "history"}
    return found


def needing(manifest: Manifest, name: str) -> list[int]:
    (era,) = manifest.eras
    return [
        v.version
        for v in manifest.versions
        if v.dense.name == name or any(f.name == name for f in era.files_of(v.version))
    ]


def outcome(store: LocalStore, manifest: Manifest, number: int, name: str) -> bool:
    """Whether a version is refused, with an error that names file and version; else it must be right."""
    version = next(v for v in manifest.versions if v.version == number)
    try:
        check_version(store, version)
    except (CorruptCheckpoint, StoreError) as error:
        text = str(error)
        if name not in text or f"version {number}" not in text:
            raise AssertionError(f"neither file nor version is named: {text}") from error
        return True
    return False


def damaged(path: Path, content: bytes, check: Callable[[], None]) -> None:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        check()
    finally:
        path.write_bytes(before)


def cut_everywhere(store: LocalStore, name: str, step: int) -> None:
    manifest = read_newest(store)
    path = Path(store.url) / name
    content = path.read_bytes()
    number = needing(manifest, name)[0]

    def check() -> None:
        assert outcome(store, manifest, number, name)

    for length in (*range(0, len(content), step), len(content) - 1):
        damaged(path, content[:length], check)
    damaged(path, content + b"\0", check)


def flip_everywhere(store: LocalStore, name: str, step: int, bits: tuple[int, ...]) -> None:
    """A version that reads the flipped byte refuses it; one that does not is right."""
    manifest = read_newest(store)
    path = Path(store.url) / name
    content = path.read_bytes()
    numbers = needing(manifest, name)
    entry = next((f for era in manifest.eras for f in era.files if f.name == name), None)
    header = entry.header_bytes if entry else len(content)
    refused = 0
    for at in range(0, len(content), step):
        for bit in bits:
            flipped = bytearray(content)
            flipped[at] ^= 1 << (bit + at) % 8
            path.write_bytes(flipped)
            found = [outcome(store, manifest, number, name) for number in numbers]
            # Of a header every bit counts for everyone; of the rest, for those whose pieces it is in.
            assert any(found)
            assert at >= header or all(found)
            refused += sum(found)
    path.write_bytes(content)
    assert refused


@pytest.mark.parametrize("kind", ["baseline", "increment", "live", "history"])
def test_chunks_cut_and_flipped(store: LocalStore, kind: str) -> None:
    name = chunks(read_newest(store))[kind]
    cut_everywhere(store, name, 13)
    flip_everywhere(store, name, 17, (0,))


def test_dense_files_cut_and_flipped(store: LocalStore) -> None:
    name = read_newest(store).versions[3].dense.name
    cut_everywhere(store, name, 1)
    flip_everywhere(store, name, 1, (0, 5))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["baseline", "increment", "live", "history"])
def test_every_bit_of_every_kind_of_chunk(store: LocalStore, kind: str) -> None:
    name = chunks(read_newest(store))[kind]
    cut_everywhere(store, name, 1)
    flip_everywhere(store, name, 1, tuple(range(8)))


def test_files_in_each_others_place(store: LocalStore) -> None:
    root = Path(store.url)
    manifest = read_newest(store)
    names = sorted(f.name for era in manifest.eras for f in era.files) + [
        v.dense.name for v in manifest.versions[:3]
    ]
    tried = 0
    for one, other in itertools.permutations(names, 2):
        content = (root / one).read_bytes()
        (root / one).write_bytes((root / other).read_bytes())
        assert all(outcome(store, manifest, number, one) for number in needing(manifest, one)), one
        (root / one).write_bytes(content)
        tried += 1
    assert tried > 50


def replaced(path: Path, how: str) -> None:
    size = path.stat().st_size
    if how == "other bytes":
        path.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    elif how == "zeros":
        path.write_bytes(bytes(size))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        content = path.read_bytes()
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "link":
            # To the very bytes: who follows it reads what is right, and whatever else a link is set to.
            elsewhere = path.parents[2] / "elsewhere"
            elsewhere.write_bytes(content)
            path.symlink_to(elsewhere)


HOW = ["other bytes", "zeros", "empty", "deleted", "folder", "link"]


@pytest.mark.parametrize("how", HOW)
def test_files_that_are_something_else(store: LocalStore, how: str) -> None:
    manifest = read_newest(store)
    for name in (*chunks(manifest).values(), manifest.versions[-1].dense.name):
        replaced(Path(store.url) / name, how)
        for version in manifest.versions:
            if version.version in needing(manifest, name):
                with pytest.raises((CorruptCheckpoint, StoreError), match=r"chunks/|dense/"):
                    check_version(store, version)


class Run:
    """A model whose versions are known, saved by a Checkpointer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truth: dict[int, list[list[float]]] = {}
        table, objects = make()
        with hf.Checkpointer(path, objects, hf.Policy(strategy="incremental")) as ckpt:
            for step in range(5):
                train(table, objects, step)
                version = ckpt.save(step)
                assert version is not None
                self.truth[version] = table.weight.tolist()

    def file(self, pattern: str) -> Path:
        (found,) = self.path.glob(pattern)
        return found


def make() -> tuple[nn.Embedding, dict[str, Any]]:
    torch.manual_seed(0)
    table = nn.Embedding(40, 3, sparse=True)
    return table, {"m": table, "o": torch.optim.SGD(table.parameters(), lr=0.5)}


def train(table: nn.Embedding, objects: dict[str, Any], step: int) -> None:
    objects["o"].zero_grad()
    table(torch.tensor([step, 7, 20 + step])).square().sum().backward()
    objects["o"].step()


@pytest.mark.parametrize("how", [*HOW, "flipped", "cut"])
@pytest.mark.parametrize("pattern", ["chunks/00000005-*", "dense/00000005-*"])
def test_restore_falls_back(tmp_path: Path, how: str, pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = Run(tmp_path / "store")
    path = run.file(pattern)
    content = path.read_bytes()
    if how in ("flipped", "cut"):
        path.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if how == "flipped" else b""))
    else:
        replaced(path, how)
    table, objects = make()
    (tmp_path / "log").mkdir()
    with EventLog(tmp_path / "log") as events:
        if how == "link":  # nothing is written to a store with links in it
            with hf.Checkpointer(run.path, objects, events=events) as ckpt:
                assert ckpt.restore() == 4
                ckpt.save(9)
                with pytest.raises(hf.SaveFailed, match=r"is a link .*remove it"):
                    ckpt.wait()
            return
        with hf.Checkpointer(run.path, objects, hf.Policy(strategy="incremental"), events=events) as ckpt:
            assert ckpt.restore() == 4
            assert table.weight.tolist() == run.truth[4]
            with pytest.raises((hf.CorruptCheckpoint, hf.StoreError)):
                ckpt.restore(5)
            assert ckpt.restore(2) == 2
            assert table.weight.tolist() == run.truth[2]
            assert ckpt.restore() == 4
            train(table, objects, 9)
            assert ckpt.save(9) == 6
            run.truth[6] = table.weight.tolist()
    assert "version 5 cannot be restored" in caplog.text
    assert path.name in caplog.text
    told = [e for e in read_events(tmp_path / "log") if e["event"] == "checkpoint_damaged"]
    assert [e["version"] for e in told] == [5, 5]
    for version in (1, 2, 3, 4, 6):
        other, objects = make()
        with hf.Checkpointer(run.path, objects) as ckpt:
            ckpt.restore(version)
        assert other.weight.tolist() == run.truth[version]


@pytest.mark.parametrize("how", ["other bytes", "zeros", "empty", "deleted", "folder", "cut"])
def test_a_damaged_manifest_costs_one_version_at_most(tmp_path: Path, how: str) -> None:
    run = Run(tmp_path / "store")
    newest = max((run.path / "manifests").iterdir())
    if how == "cut":
        newest.write_bytes(newest.read_bytes()[:-1])
    else:
        replaced(newest, how)
    table, objects = make()
    (tmp_path / "log").mkdir()
    with (
        EventLog(tmp_path / "log") as events,
        hf.Checkpointer(run.path, objects, hf.Policy(strategy="incremental"), events=events) as ckpt,
    ):
        assert ckpt.restore() == 4
        assert table.weight.tolist() == run.truth[4]
        for step in (4, 5, 6):
            train(table, objects, step)
            ckpt.save(step)
        ckpt.wait()
        # Nothing is cleared away while a manifest is damaged: it may be all that tells what a file is.
        assert len(list((run.path / "chunks").iterdir())) == (7 if how == "deleted" else 8)
    told = [e for e in read_events(tmp_path / "log") if e["event"] == "checkpoint_damaged"]
    assert len(told) == (0 if how == "deleted" else 2)
    assert all(newest.name in event["error"] for event in told)
    other, objects = make()
    with hf.Checkpointer(run.path, objects) as ckpt:
        assert not ckpt._writer.catalog.complaints
        assert ckpt.restore() == 7
        assert other.weight.tolist() == table.weight.tolist()
        assert ckpt.restore(3) == 3


def test_no_manifest_can_be_read(tmp_path: Path) -> None:
    """Better no start than one that writes over what may be rescued."""
    run = Run(tmp_path / "store")
    for path in (run.path / "manifests").iterdir():
        path.write_bytes(b"{}")
    before = sorted(run.path.rglob("*"))
    with pytest.raises(hf.CorruptCheckpoint, match="has no manifest that can be read"):
        hf.Checkpointer(run.path, make()[1])
    assert sorted(run.path.rglob("*")) == before


def test_all_versions_damaged(tmp_path: Path) -> None:
    run = Run(tmp_path / "store")
    run.file("chunks/00000001-*").write_bytes(b"")
    table, objects = make()
    with hf.Checkpointer(run.path, objects) as ckpt:
        with pytest.raises(hf.CorruptCheckpoint, match=r"no version .* version 5: .* version 1: "):
            ckpt.restore()
        train(table, objects, 1)
        assert ckpt.save(1) == 6
    other, objects = make()
    with hf.Checkpointer(run.path, objects) as ckpt:
        assert ckpt.restore() == 2
    assert other.weight.tolist() == table.weight.tolist()


def forge(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Publish another manifest in the place of the newest, its checksum in order."""
    with LocalStore(path, create=False) as store:
        forged = change(read_newest(store))
    (path / name_of(forged.number)).write_bytes(encode(forged))


def with_files(manifest: Manifest, keep: Callable[[FileEntry], bool]) -> Manifest:
    eras = [msgspec.structs.replace(era, files=[f for f in era.files if keep(f)]) for era in manifest.eras]
    return msgspec.structs.replace(manifest, eras=eras)


def with_tables(manifest: Manifest, change: Callable[[list[Any]], list[Any]]) -> Manifest:
    eras = [
        msgspec.structs.replace(
            era, groups=[group | {"tables": change(group["tables"])} for group in era.groups]
        )
        for era in manifest.eras
    ]
    return msgspec.structs.replace(manifest, eras=eras)


def test_a_manifest_that_leaves_rows_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest increments are not named: the version is passed over, before a row is overwritten."""
    caplog.set_level(logging.WARNING)
    run = Run(tmp_path / "store")
    forge(run.path, lambda manifest: with_files(manifest, lambda f: f.first_born < 5))
    table, objects = make()
    before = table.weight.tolist()
    with hf.Checkpointer(run.path, objects, hf.Policy(strategy="incremental")) as ckpt:
        with pytest.raises(
            hf.CorruptCheckpoint, match=r"version 5 .*incomplete: 3 records are missing: .*m\.weight"
        ):
            ckpt.restore(5)
        assert table.weight.tolist() == before
        assert ckpt.restore() == 4
        assert table.weight.tolist() == run.truth[4]
        train(table, objects, 7)
        assert ckpt.save(7) == 6
    assert "version 5 cannot be restored" in caplog.text
    other, objects = make()
    with hf.Checkpointer(run.path, objects) as ckpt:
        assert ckpt.restore() == 8
    assert other.weight.tolist() == table.weight.tolist()


def test_rows_of_the_full_version_are_left_out(tmp_path: Path) -> None:
    """No version has all rows: each that is asked for says how many of which table."""
    run = Run(tmp_path / "store")
    forge(run.path, lambda manifest: with_files(manifest, lambda f: f.kind != "baseline"))
    table, objects = make()
    before = table.weight.tolist()
    with hf.Checkpointer(run.path, objects) as ckpt:
        with pytest.raises(
            hf.CorruptCheckpoint,
            match=r"no version .*version 5 .*incomplete: at least \d+ rows are missing: some of the 40 rows "
            r"of table m\.weight .*version 1 .*incomplete: at least 40 rows are missing",
        ):
            ckpt.restore()
        assert table.weight.tolist() == before
    with LocalStore(run.path, create=False) as store:
        found = {number: one.problem for one in verify_versions(store).incomplete for number in one.versions}
    assert list(found) == [1, 2, 3, 4, 5]
    assert (
        found[1]
        == "is incomplete: 40 rows are missing: 40 of the 40 rows of table m.weight (between rows 0 and 39)"
    )
    assert found[2].startswith("is incomplete: 37 rows are missing: 37 of the 40 rows of table m.weight")
    assert found[5].startswith("is incomplete: 31 rows are missing: ")


@pytest.mark.parametrize(
    "change",
    [
        lambda tables: [],
        lambda tables: [[name, rows - 1] for name, rows in tables],
        lambda tables: [[f"other.{name}", rows] for name, rows in tables],
    ],
    ids=["missing", "shorter", "renamed"],
)
def test_tables_that_the_manifest_lacks(tmp_path: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """The dense part says what tables there are: the manifest is damaged, not the model another."""
    run = Run(tmp_path / "store")
    forge(run.path, lambda manifest: with_tables(manifest, change))
    table, objects = make()
    before = table.weight.tolist()
    with hf.Checkpointer(run.path, objects) as ckpt:
        with pytest.raises(hf.CorruptCheckpoint):
            ckpt.restore()
        with pytest.raises(hf.CorruptCheckpoint):
            ckpt.restore(1)
        assert table.weight.tolist() == before
    with LocalStore(run.path, create=False) as store:
        report = verify_versions(store)
        assert not report.good
        assert report.damaged == (1, 2, 3, 4, 5)


def test_exports_of_what_lacks_rows(tmp_path: Path) -> None:
    run = Run(tmp_path / "store")
    forge(run.path, lambda manifest: with_files(manifest, lambda f: f.first_born != 3))
    with LocalStore(run.path, create=False) as store:
        out = tmp_path / "out"
        writes: list[Callable[[], object]] = [
            lambda: restore_file(store, 5, out),
            lambda: export_model(store, 4, out),
            lambda: export_dcp(store, 3, out),
            lambda: export_delta(store, 1, 5, out),
            lambda: export_delta(store, 4, 2, out),
        ]
        for write in writes:
            with pytest.raises(CorruptCheckpoint, match="missing"):
                write()
            assert not out.exists()
        export_delta(store, 1, 2, out)
