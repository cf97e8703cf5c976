"""Rows are compared with their digests slice by slice, and versions that lack a change are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast.checkpoint.format.records import Bytes2D, Field, Rows, make_groups
from holdfast.checkpoint.memory import digests as module
from holdfast.checkpoint.memory.digests import RowDigests, UnseenChange
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.cli.app import app

SIZES = {"a": 10_000, "b": 3, "c": 0, "d": 5_000}


class Tables:
    """Some tables in one group, whose digests were noted for version 1."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.live: dict[str, Bytes2D] = {
            name: rng.integers(0, 256, (rows, 8), np.uint8) for name, rows in SIZES.items()
        }
        groups = make_groups([(name, rows, (Field("weight", "F32", 2),)) for name, rows in SIZES.items()])
        self.tables = LiveTables(groups, lambda name: (self.live[name],))
        self.tracker = Tracker(groups)
        self.digests = RowDigests(groups)
        everything = np.concatenate(list(self.live.values()))
        self.digests.note(0, Rows(np.arange(len(everything)), (everything,)))
        self.digests.verified(SIZES, 1)

    def check(
        self, version: int, seconds: float, may: Callable[[str], bool] = lambda name: True
    ) -> list[Any]:
        return self.digests.check_some(self.tables, self.tracker, version, seconds, may)


def test_all_rows_come_round_however_little_time_there_is() -> None:
    one = Tables()
    one.live["d"][-1, 0] ^= 1
    one.live["a"][0, 0] ^= 1
    found: list[UnseenChange] = []
    calls = 0
    while len(found) < 2 and calls < 1000:
        # Each call may compare about as many bytes as one slice of a table has.
        one.digests._bytes_per_second, one.digests._balance = 1e7, 0.0
        found += one.check(4, 4096 * 8 / 1e7)
        calls += 1
    assert calls > 2, "a call compares only what it has time for"
    assert [(change.table, change.rows, change.verified) for change in found] == [("a", 1, 1), ("d", 1, 1)]
    assert one.tracker.take()[0].tolist() == [0, sum(SIZES.values()) - 1]


def test_what_was_verified_since_is_not_flagged() -> None:
    one = Tables()
    assert one.check(3, 10.0) == []
    one.live["a"][5, 0] ^= 1
    (change,) = one.check(6, 10.0)
    assert (change.table, change.rows, change.verified) == ("a", 1, 3)
    assert one.check(7, 10.0) == [], "it is marked now"


def test_tables_that_may_not_be_checked_are_passed_over() -> None:
    one = Tables()
    one.live["a"][5, 0] ^= 1
    one.live["d"][5, 0] ^= 1
    (change,) = one.check(2, 10.0, lambda name: name != "a")
    assert change.table == "d"
    assert one.check(2, 10.0, lambda name: False) == []
    (change,) = one.check(2, 10.0)
    assert change.table == "a"


def test_time_is_not_saved_up() -> None:
    """After a pause, such as an evaluation, a step is not held up for a share of that."""
    one = Tables()
    one.check(1, 3600.0, lambda name: False)
    assert one.digests._balance <= module.LONGEST_CHECK_SECONDS


def adam_run(path: Path, **options: Any) -> tuple[list[int], dict[int, dict[str, Any]], dict[str, Any]]:
    """Rows of each version, what each must be, and the objects."""
    torch.manual_seed(0)
    model = nn.Embedding(1000, 4)
    optimizer = torch.optim.Adam(model.parameters())
    objects = {"model": model, "optim": optimizer}
    right: dict[int, dict[str, Any]] = {}
    with hf.Checkpointer(path, objects, hf.Policy(**options)) as ckpt:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.arange(10 * step, 10 * step + 10)).sum().backward()
            optimizer.step()
            right[ckpt.save(step) or 0] = {n: v.clone() for n, v in model.state_dict().items()}
        ckpt.wait()
        return [v.rows for v in ckpt.versions()], right, objects


@pytest.mark.parametrize("strategy", ["incremental", "differential", "chunked", hf.Chunked("2d")])
def test_any_optimizer_is_incremental(tmp_path: Path, strategy: Any) -> None:
    """Adam with dense gradients moves rows that it has touched, and no others."""
    rows, right, objects = adam_run(tmp_path / "s", strategy=strategy)
    assert rows == [1000, 20, 30, 40, 50, 60]
    with hf.Checkpointer(tmp_path / "s", objects, hf.Policy(strategy=strategy)) as ckpt:
        for version, state in right.items():
            ckpt.restore(version)
            assert torch.equal(objects["model"].weight, state["weight"]), version


def test_any_optimizer_is_incremental_after_a_restart(tmp_path: Path) -> None:
    _, _, objects = adam_run(tmp_path / "s", strategy="incremental")
    with hf.Checkpointer(tmp_path / "s", objects, hf.Policy(strategy="incremental")) as ckpt:
        ckpt.restore()
        objects["optim"].step()
        ckpt.save(6)
        ckpt.wait()
        assert ckpt.versions()[-1].rows == 60


def test_without_digests_such_tables_are_saved_whole(tmp_path: Path) -> None:
    rows, _, _ = adam_run(tmp_path / "s", strategy="incremental", verify=0)
    assert rows == [1000] * 6


def flagged_store(path: Path) -> dict[str, Any]:
    """A store whose versions 2 and 3 lack a change."""
    torch.manual_seed(0)
    model = nn.Embedding(100, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"model": model, "optim": optimizer}
    with hf.Checkpointer(path, objects, hf.Policy(strategy="incremental", verify=1e-9)) as ckpt:
        ckpt.save(0)
        model.weight.data[7] = 1.0
        ckpt.save(1)
        ckpt.save(2)
        assert ckpt.check() == 1
    return objects


def test_what_the_commands_show(tmp_path: Path) -> None:
    """Closing says it, too, where no save comes after the check."""
    flagged_store(tmp_path / "s")
    run = CliRunner()
    listed = run.invoke(app, ["ckpt", "ls", str(tmp_path / "s")])
    assert listed.exit_code == 0
    assert "increment (unverified)" in listed.output
    assert "versions 2 to 3 may lack changes: model.weight: 1 rows had changed unseen" in listed.output
    found = json.loads(run.invoke(app, ["ckpt", "ls", str(tmp_path / "s"), "--json"]).output)
    assert [bool(version["unverified"]) for version in found["versions"]] == [False, True, True]
    shown = run.invoke(app, ["ckpt", "show", str(tmp_path / "s")]).output
    assert "gradients: they are sparse" in shown
    assert "it may lack changes: model.weight: 1 rows had changed unseen" in shown


def test_restores_prefer_versions_that_lack_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    objects = flagged_store(tmp_path / "s")
    with hf.Checkpointer(tmp_path / "s", objects) as ckpt:
        assert ckpt.restore() == 1
        assert "restored version 1, because versions 2, 3 are unverified" in caplog.text
        assert ckpt.restore(3) == 3
    for file in (tmp_path / "s" / "chunks").glob("00000001-*"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with hf.Checkpointer(tmp_path / "s", objects) as ckpt, pytest.raises(hf.CorruptCheckpoint):
        ckpt.restore()  # all of them need the first


def test_how_tables_are_tracked_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = nn.ModuleDict(
        {"a": nn.Embedding(9, 4), "b": nn.Embedding(9, 4, sparse=True), "c": nn.Embedding(9, 4)}
    )
    optimizers = {
        "sgd": torch.optim.SGD([*model["a"].parameters(), *model["b"].parameters()], lr=0.1),
        "adam": torch.optim.Adam(model["c"].parameters()),
    }
    with hf.Checkpointer(tmp_path / "s", {"model": model} | optimizers) as ckpt:
        for step in range(3):
            ckpt.save(step)
    said = [r.getMessage() for r in caplog.records if "are found by" in r.getMessage()]
    assert said == [
        "changed rows of model.a.weight are found by lookups: only rows that are looked up change",
        "changed rows of model.b.weight are found by gradients: they are sparse",
        "changed rows of model.c.weight are found by digests: Adam may change rows that have no gradient",
    ]
