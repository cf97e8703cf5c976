"""How quickly a store is read: measured once, or known from restores, and remembered."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import holdfast as hf
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.reading import speed
from holdfast.checkpoint.saving import writer
from holdfast.checkpoint.store.local import LocalReader, LocalStore
from holdfast.checkpoint.tools.inspect import describe_version
from holdfast.checkpoint.tools.printing import show_description
from holdfast.errors import CorruptCheckpoint, StoreError
from holdfast.events import EventLog, read_events
from tests.checkpoint.lineage import QuickFiles

ROWS = 20_000


def objects() -> dict[str, Any]:
    return {"model": torch.nn.EmbeddingBag(ROWS, 32, sparse=True)}


def checkpointer(folder: Path, **policy: Any) -> hf.Checkpointer:
    log = folder.parent / "log"
    log.mkdir(exist_ok=True)
    made = hf.Checkpointer(
        folder, objects(), hf.Policy(**policy), events=EventLog(log), allow_without_optimizer=True
    )
    return made


def saved(ckpt: hf.Checkpointer) -> Any:
    ckpt.mark("model.weight", np.arange(10))
    ckpt.save()
    ckpt.wait()
    return ckpt.versions()[-1]


def events(folder: Path) -> list[dict[str, Any]]:
    return [e for e in read_events(folder.parent / "log") if e["event"] == "checkpoint_read_speed"]


def test_it_is_measured_once_an_era_and_remembered(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with checkpointer(store) as ckpt:
        first, second, third = (saved(ckpt) for _ in range(3))
    assert first.read_speed == first.write_speed == 0, "nothing has been read when it is written"
    (event,) = events(store)
    assert event["version"] == 1
    assert second.read_speed == third.read_speed == round(event["bytes_per_second"]) > 0
    assert second.write_speed > 0
    with checkpointer(store) as ckpt:  # it does not restore: the next version is a baseline
        again = saved(ckpt)
    assert again.baseline
    assert again.read_speed == third.read_speed
    assert len(events(store)) == 2


def test_a_restore_tells_it_better(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with checkpointer(store) as ckpt:
        before = saved(ckpt)
    with checkpointer(store) as ckpt:
        ckpt.restore()
        after = saved(ckpt)
        restored = next(e for e in read_events(tmp_path / "log") if e["event"] == "checkpoint_restored")
        assert after.read_speed == round(restored["bytes"] / restored["seconds_taken"])
        ckpt._writer.begin_anew()
        assert saved(ckpt).baseline
    assert before.read_speed == 0
    assert len(events(store)) == 1, "by the process that had restored nothing"


def test_it_is_shown(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "store") as ckpt:
        for _ in range(2):
            saved(ckpt)
        text = io.StringIO()
        show_description(describe_version(ckpt.store), Console(file=text, width=200))
    assert "speed       written at " in text.getvalue()
    assert ", read at " in text.getvalue()


@pytest.mark.parametrize(
    "strategy", [hf.Incremental(), hf.Differential(), hf.Chunked(reset="never")], ids=str
)
def test_who_does_not_weigh_reading_does_not_read(tmp_path: Path, strategy: Any) -> None:
    with checkpointer(tmp_path / "store", strategy=strategy) as ckpt:
        saved(ckpt)
    assert not events(tmp_path / "store")


def test_a_store_that_cannot_be_read_costs_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise StoreError("not now")

    monkeypatch.setattr(writer, "measure_reading", fail)
    with checkpointer(tmp_path / "store") as ckpt:
        assert [saved(ckpt).read_speed for _ in range(2)] == [0, 0]


def test_no_more_is_read_than_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checkpointer(tmp_path / "store", strategy="full") as ckpt:
        saved(ckpt)
    store = LocalStore(tmp_path / "store", create=False, files=QuickFiles())
    era = read_newest(store).eras[0]
    groups = era.decoded_groups()
    dropped: list[str] = []
    monkeypatch.setattr(LocalReader, "forget_cached", lambda self: dropped.append(self.name))
    total = sum(f.bytes - f.header_bytes for f in era.files)
    done, seconds = speed.measure_reading(store, era.files, groups)
    assert done == total
    assert seconds > 0
    assert dropped == [f.name for f in era.files]
    monkeypatch.setattr(speed, "MOST_BYTES", 1)
    done, _ = speed.measure_reading(store, era.files, groups)
    assert 0 < done < total or len(era.files) == 1
    monkeypatch.setattr(speed, "LONGEST_SECONDS", 0.0)
    assert speed.measure_reading(store, era.files, groups)[0] == 0
    store.close()


def test_a_measurement_checks_what_it_reads(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "store", strategy="full") as ckpt:
        saved(ckpt)
        (entry,) = ckpt.manifest.eras[0].files
        path = tmp_path / "store" / entry.name
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint):
            speed.measure_reading(ckpt.store, [entry], ckpt.manifest.eras[0].decoded_groups())


def test_a_file_can_be_dropped_from_the_page_cache(tmp_path: Path) -> None:
    with LocalStore(tmp_path, create=True) as store:
        store.put("a", [b"content"])
        with store.open("a") as reader:
            reader.forget_cached()
            assert reader.read() == b"content"
        reader.forget_cached()  # it is closed: nothing to do
