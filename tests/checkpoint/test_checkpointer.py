"""The Checkpointer as a user has it: real models, real optimizers, real stores."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store import open_store
from holdfast.training.metrics import digest
from holdfast.training.optimizers import RowMomentum, RowWiseAdagrad

ROWS = (50, 400, 3)
STRATEGIES: list[Any] = [
    hf.Full(),
    hf.Differential(),
    hf.Differential(baseline="one-shot"),
    hf.Incremental(),
    hf.Chunked(round_versions=2, reset="never"),
    hf.Chunked(round_versions=1, dead_fraction=0.0),
    hf.Chunked(layout="2d", threshold=0.0, reset="never"),
    hf.Chunked(layout="2d", threshold=0.3),
]


class Run:
    """A small training run that is the same whenever it is made with the same seed."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        torch.manual_seed(0)
        network = hf.DLRM(dense_features=13, tables=3, dim=4, bottom=(8, 4), top=(8, 1))
        self.model = hf.Recommender(network, ROWS)
        self.loader = hf.Synthetic(samples=3200, batch_size=16, table_rows=ROWS, seed=2)
        tables, dense = list(self.model.tables.parameters()), list(self.model.network.parameters())
        choices: dict[str, list[torch.optim.Optimizer]] = {
            "sgd": [torch.optim.SGD([*tables, *dense], lr=0.1)],
            "adagrad": [torch.optim.Adagrad([*tables, *dense], lr=0.1)],
            "momentum": [RowMomentum(tables, lr=0.1), torch.optim.SGD(dense, lr=0.1, momentum=0.9)],
            "rowwise": [RowWiseAdagrad(tables, lr=0.1), torch.optim.Adam(dense)],
            "adam": [torch.optim.SparseAdam(tables), torch.optim.Adam(dense)],
        }
        self.optimizers = {f"optim{i}": o for i, o in enumerate(choices[optimizer])}
        self.batches: Any = None

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "loader": self.loader, **self.optimizers}

    def train(self, steps: int = 1) -> None:
        self.batches = self.batches or iter(self.loader)
        for _ in range(steps):
            batch = next(self.batches)
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            logits = self.model(torch.from_numpy(batch.dense), [torch.from_numpy(i) for i in batch.ids], None)
            nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).backward()  # type: ignore[no-untyped-call]
            for optimizer in self.optimizers.values():
                optimizer.step()

    def digest(self) -> str:
        """All bits of the model and of the optimizers' states."""
        states = nn.ParameterDict()
        for name, optimizer in self.optimizers.items():
            for i, state in enumerate(optimizer.state.values()):
                for key, value in state.items():
                    tensor = torch.as_tensor(value, dtype=torch.float32)
                    states[f"{name}-{i}-{key}"] = nn.Parameter(tensor, requires_grad=False)
        return digest(self.model) + digest(states) + str(self.loader.state_dict()["next_index"])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "rowwise", "adam"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_version_in_a_fresh_run_and_on_from_there(tmp_path: Path, strategy: Any, optimizer: str) -> None:
    """Every version is exactly what was saved, and training on from it is what it would have been."""
    run = Run(optimizer)
    truth: dict[int, str] = {}
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=3, strategy=strategy)) as ckpt:
        assert ckpt.restore() == 0
        for step in range(30):
            run.train()
            version = ckpt.step(step)
            if version is not None:
                truth[version] = run.digest()
    run.train(4)
    assert len(truth) == 10
    for version, expected in truth.items():
        fresh = Run(optimizer)
        with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
            assert ckpt.restore(version) == version * 3
            assert fresh.digest() == expected
    fresh.train(4)
    assert fresh.digest() == run.digest()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_saving_goes_on_after_a_restart(tmp_path: Path, strategy: Any) -> None:
    """Processes come and go; every version that any of them saved stays right (hole 24)."""
    truth: dict[int, str] = {}
    policy = hf.Policy(strategy=strategy)
    for process in range(4):
        run = Run()
        with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
            assert ckpt.restore() == process * 6
            for step in range(process * 6, process * 6 + 6):
                run.train()
                if step % 2:
                    version = ckpt.save(step)
                    assert version is not None
                    truth[version] = run.digest()
    fulls = [v.version for v in ckpt.versions() if v.baseline]
    if isinstance(strategy, hf.Incremental) or getattr(strategy, "reset", None) == "never":
        assert fulls == [1], "a restart needs no new baseline"
    for version, expected in truth.items():
        fresh = Run()
        with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
            ckpt.restore(version)
        assert fresh.digest() == expected


@pytest.mark.parametrize(
    "layouts",
    [("rounds", "2d", "rounds"), ("2d", "rounds", "2d")],
    ids="-".join,
)
def test_a_change_of_layout_starts_a_new_era(tmp_path: Path, layouts: Any) -> None:
    truth: dict[int, str] = {}
    for process, layout in enumerate(layouts):
        run = Run()
        policy = hf.Policy(strategy=hf.Chunked(layout=layout, round_versions=2, reset="never"))
        with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
            ckpt.restore()
            for step in range(process * 6, process * 6 + 6):
                run.train()
                version = ckpt.save(step)
                assert version is not None
                truth[version] = run.digest()
    assert [v.version for v in ckpt.versions() if v.baseline] == [1, 7, 13]
    for version, expected in truth.items():
        fresh = Run()
        with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
            ckpt.restore(version)
        assert fresh.digest() == expected


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_going_on_after_the_newest_versions_were_deleted(tmp_path: Path, strategy: Any) -> None:
    """Rows may have been arranged by what a deleted version replaced: its era cannot go on."""
    run = Run()
    policy = hf.Policy(strategy=strategy)
    truth: dict[int, str] = {}
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        for step in range(8):
            run.train()
            version = ckpt.save(step)
            assert version is not None
            truth[version] = run.digest()
    with open_store(tmp_path, create=False) as store:
        Catalog(store, policy).delete_versions([6, 7, 8])
    other = Run()
    with hf.Checkpointer(tmp_path, other.objects, policy) as ckpt:
        assert ckpt.restore() == 5
        for step in range(5, 9):
            other.train()
            version = ckpt.save(step)
            assert version is not None
            assert version > 8, "numbers are not used again"
            truth[version] = other.digest()
    for version in (*range(1, 6), *range(9, 13)):
        fresh = Run()
        with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
            ckpt.restore(version)
        assert fresh.digest() == truth[version], version


def test_going_on_from_an_older_version_starts_a_new_era(tmp_path: Path) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        for step in range(6):
            run.train()
            ckpt.save(step)
    other = Run()
    with hf.Checkpointer(tmp_path, other.objects) as ckpt:
        assert ckpt.restore(3) == 3
        other.train(2)
        version = ckpt.save(4)
        truth = other.digest()
        ckpt.wait()
        assert ckpt.versions()[-1].baseline
    third = Run()
    with hf.Checkpointer(tmp_path, third.objects) as ckpt:
        ckpt.restore(version)
    assert third.digest() == truth


def test_only_changed_rows_are_written(tmp_path: Path) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="incremental")) as ckpt:
        run.train()
        ckpt.save(0)
        run.model.eval()
        with torch.no_grad():  # looking rows up without training on them changes nothing
            run.model(torch.zeros(1, 13), [torch.tensor([1])] * 3, None)
        ckpt.save(1)
        run.train()
        ckpt.save(2)
        ckpt.wait()
        written = [v.rows for v in ckpt.versions()]
    assert written[0] == sum(ROWS)
    assert written[1] == 0
    assert 0 < written[2] <= 16 * 3


def test_marked_rows_are_saved(tmp_path: Path) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="incremental")) as ckpt:
        ckpt.save(0)
        weight = next(run.model.tables.parameters())
        with torch.no_grad():
            weight[7] = 5.0
        ckpt.mark("model.tables.0.weight", [7])
        ckpt.save(1)
        ckpt.wait()
        assert ckpt.versions()[-1].rows == 1
        with pytest.raises(hf.ConfigError, match=r"no table 'x': there are model\.tables\.0\.weight"):
            ckpt.mark("x")
    fresh = Run()
    with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
        ckpt.restore()
    assert fresh.digest() == run.digest()


def test_dense_optimizers_save_rows_that_no_lookup_named(tmp_path: Path) -> None:
    """Hole 25: momentum moves rows long after their last lookup."""
    torch.manual_seed(0)

    def make() -> tuple[nn.Embedding, torch.optim.Optimizer]:
        table = nn.Embedding(30, 4)
        return table, torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)

    table, optimizer = make()
    with hf.Checkpointer(tmp_path, {"m": table, "o": optimizer}, hf.Policy(strategy="incremental")) as ckpt:
        for step in range(5):
            optimizer.zero_grad()
            table(torch.tensor([step])).sum().backward()
            optimizer.step()
            ckpt.save(step)
    other, optimizer2 = make()
    with hf.Checkpointer(tmp_path, {"m": other, "o": optimizer2}) as ckpt:
        ckpt.restore()
    assert torch.equal(other.weight, table.weight)


def test_two_writers_on_one_path(tmp_path: Path) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(0)
        code = (
            "import sys, torch, holdfast as hf\n"
            "try: hf.Checkpointer(sys.argv[1], {'m': torch.nn.Embedding(3, 4).requires_grad_(False)})\n"
            "except hf.StoreLocked as error: print(error); sys.exit(7)\n"
        )
        second = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert second.returncode == 7, second.stderr
    with hf.Checkpointer(tmp_path, Run().objects):
        pass


def test_another_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    with hf.Checkpointer(tmp_path, {"m": nn.Embedding(5, 4)}, allow_without_optimizer=True) as ckpt:
        ckpt.save(0)
    other = nn.Embedding(3, 4)
    before = digest(other)
    with hf.Checkpointer(tmp_path, {"m": other}, allow_without_optimizer=True) as ckpt:
        with pytest.raises(
            hf.ModelMismatch, match=r"m\.weight is .*5, 4.* in the checkpoint and .*3, 4.* here"
        ):
            ckpt.restore()
        with pytest.raises(hf.NoSuchVersion, match="has no version 9: it has 1"):
            ckpt.restore(9)
    assert digest(other) == before


def test_restore_after_iter_is_refused(tmp_path: Path) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        run.train()
        ckpt.save(0)
        with pytest.raises(hf.HoldfastError, match="iter"):
            ckpt.restore()


def test_failures_surface_at_the_next_call_and_lose_nothing(tmp_path: Path) -> None:
    """Hole 23: a save that failed leaves its rows marked."""
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="incremental")) as ckpt:
        run.train()
        ckpt.save(0)
        ckpt.wait()
        real, failed = ckpt.store.publish, []

        def no_space(name: str, data: bytes) -> None:
            failed.append(name)
            raise hf.StoreError("no space left")

        ckpt.store.publish = no_space  # type: ignore[method-assign]
        run.train()
        ckpt.save(1)
        with pytest.raises(hf.SaveFailed, match=r"no space left; its rows are still marked"):
            ckpt.wait()
        assert len(failed) == 1
        ckpt.store.publish = real  # type: ignore[method-assign]
        run.train()
        ckpt.save(2)
        truth = run.digest()
    assert [v.step for v in ckpt.versions()] == [0, 2]
    fresh = Run()
    with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
        assert ckpt.restore() == 3
    assert fresh.digest() == truth


@pytest.mark.parametrize("when_busy", ["wait", "skip", "cancel"])
def test_saves_do_not_overlap(tmp_path: Path, when_busy: Any) -> None:
    run = Run()
    gate, entered = threading.Event(), threading.Event()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(when_busy=when_busy)) as ckpt:
        real = ckpt.store.put

        def slow(name: str, parts: Any) -> int:
            entered.set()
            assert gate.wait(30)
            return real(name, parts)

        ckpt.store.put = slow  # type: ignore[method-assign]
        run.train()
        assert ckpt.save(0) == 1
        assert entered.wait(30)
        run.train()
        if when_busy == "skip":
            assert ckpt.save(1) is None
            gate.set()
        else:
            threading.Timer(0.2, gate.set).start()
            assert ckpt.save(1) == 2
        ckpt.wait()
        run.train()
        ckpt.save(2)
        truth = run.digest()
    assert [v.step for v in ckpt.versions()] == {"wait": [0, 1, 2], "skip": [0, 2], "cancel": [1, 2]}[
        when_busy
    ]
    fresh = Run()
    with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
        ckpt.restore()
    assert fresh.digest() == truth


def test_seconds_between_saves(tmp_path: Path) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_seconds=0)) as ckpt:
        assert [ckpt.step(0), ckpt.step(1)] == [1, 2]
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_seconds=3600)) as ckpt:
        assert [ckpt.step(0), ckpt.step(1)] == [None, None]


def test_metadata_and_reports(tmp_path: Path) -> None:
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(4, metadata={"auc": 0.75})
        ckpt.wait()
        (version,) = ckpt.versions()
        (report,) = ckpt.reports
    assert (version.step, version.metadata) == (4, {"auc": 0.75})
    assert (report.version, report.rows, report.baseline) == (1, sum(ROWS), True)
    assert report.stall_seconds > 0
    assert report.bytes == version.bytes


@pytest.mark.parametrize(
    "options",
    [{"strategy": "best"}, {"keep": 0}, {"every_steps": 0}, {"when_busy": "panic"}, {"keep_seconds": -1.0}],
)
def test_policies_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(hf.ConfigError):
        hf.Policy(**options)
