"""Files that no writer has written: whatever is in the folder, only a store's own files are deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.checkpoint.saving.publisher import Publisher
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.base import RESERVE_PREFIX
from holdfast.checkpoint.tools.inspect import collect_garbage, leftover_files
from tests.checkpoint.by_hand import Rows, restored

FOREIGN = [
    "chunks/part-0001.bin",
    "chunks/2024/readings.csv",
    "chunks/00000001-0000-live-00000000000g.safetensors",
    "dense/matrix.npy",
    "dense/readme",
]
LEFT = "chunks/00000099-0000-increment-0123456789ab.safetensors"


def put_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")


def files_in(root: Path) -> set[str]:
    files = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(RESERVE_PREFIX)]
    return {str(path.relative_to(root)) for path in files}


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    put_files(tmp_path, *FOREIGN)
    run = Rows()
    for step in range(3):
        with hf.Checkpointer(tmp_path, run.objects, hf.Policy(keep=1)) as ckpt:
            assert ckpt.restore() == step
            run.change(ckpt, step)
            ckpt.save(step)
    assert restored(tmp_path) == run.value()
    assert files_in(tmp_path) >= {*FOREIGN}
    with open_store(tmp_path, create=False) as store:
        assert not leftover_files(store)
        assert not {*collect_garbage(store, hf.Policy()).leftovers} & {*FOREIGN}
    assert files_in(tmp_path) >= {*FOREIGN}


def test_a_copy_that_is_not_complete_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path / "store", run.objects) as ckpt:
        ckpt.save(0)
    for folder in ("chunks", "dense"):
        shutil.copytree(tmp_path / "store" / folder, tmp_path / "copy" / folder)
    with hf.Checkpointer(tmp_path / "copy", Rows().objects) as ckpt:
        assert ckpt.restore() == 0
    assert "has no manifest, but 2 files" in caplog.text
    shutil.copytree(tmp_path / "store" / "manifests", tmp_path / "copy" / "manifests")
    assert restored(tmp_path / "copy") == run.value()


def test_what_a_first_save_left_is_cleared_when_there_is_a_manifest(tmp_path: Path) -> None:
    put_files(tmp_path, LEFT)
    for step in range(2):
        assert LEFT in files_in(tmp_path)
        with hf.Checkpointer(tmp_path, Rows().objects) as ckpt:
            ckpt.save(step)
    assert LEFT not in files_in(tmp_path)


def test_a_first_save_that_fails_clears_away_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_files(tmp_path, LEFT)
    with hf.Checkpointer(tmp_path, Rows().objects) as ckpt:
        with monkeypatch.context() as broken:
            broken.setattr(Publisher, "_store_dense", lambda *_: os.fstat(-1))
            ckpt.save(0)
            with pytest.raises(hf.SaveFailed):
                ckpt.wait()
        assert files_in(tmp_path) == {LEFT, "manifests/0000000001.json", "writer.lock"}


@pytest.mark.parametrize("path", ["", "file://"])
def test_an_empty_path(path: str) -> None:
    with pytest.raises(hf.ConfigError, match="is empty"):
        hf.Checkpointer(path, Rows().objects)
