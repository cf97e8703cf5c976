from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.errors import TrainingDiverged
from holdfast.events import EventLog, read_events
from holdfast.training.config import Config, load
from holdfast.training.trainer import Progress, Trainer

SMALL = [
    "model.dim=8", "model.bottom=[32, 8]", "model.top=[32, 1]", "data.samples=30000",
    "data.test_samples=5000", "data.max_rows=1000", "batch_size=256", "threads=1", "report_every=10",
]  # fmt: skip


def small(*overrides: str) -> Config:
    return load(None, [*SMALL, *overrides])


def test_it_learns() -> None:
    trainer = Trainer(small("optimizer.lr=0.03"))
    untrained = trainer.test().auc
    result = trainer.run()
    assert abs(untrained - 0.5) < 0.05
    assert result.test.auc > 0.72
    assert (result.steps, result.samples, result.interrupted) == (118, 30_000, False)


@pytest.mark.parametrize("architecture", ["dlrm", "deepfm", "pnn"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "rowwise-adagrad", "adam"])
def test_every_model_with_every_optimizer_lowers_the_loss(architecture: str, optimizer: str) -> None:
    trainer = Trainer(
        small(f"model.architecture={architecture}", f"optimizer.name={optimizer}", "max_steps=100")
    )
    before = trainer.test().log_loss
    assert trainer.run().test.log_loss < before


def test_the_same_seed_gives_the_same_bits() -> None:
    weights = [Trainer(small("max_steps=20", f"seed={seed}")).run().weights for seed in (3, 3, 4)]
    assert weights[0] == weights[1] != weights[2]


def test_events_hold_every_figure(tmp_path: Path) -> None:
    seen: list[Progress] = []
    with EventLog(tmp_path) as log:
        result = Trainer(small("max_steps=40", "test_every=20"), log).run(seen.append)
    events = read_events(tmp_path)
    assert [e["event"] for e in events] == [
        "run_started", "progress", "test", "progress", "progress", "test", "progress", "run_finished",
    ]  # fmt: skip
    reports = [e for e in events if e["event"] == "progress"]
    assert [(r["step"], r["loss"]) for r in reports] == [(p.step, p.loss) for p in seen]
    assert seen[-1].fraction == 1.0
    assert events[-1]["test"]["auc"] == result.test.auc
    assert events[-1]["weights"] == result.weights


def test_epochs_go_over_the_data_again() -> None:
    result = Trainer(small("data.samples=1000", "epochs=3")).run()
    assert (result.samples, result.steps) == (3000, 12)


def test_multi_hot_trains() -> None:
    assert math.isfinite(Trainer(small("data.ids_per_sample=3", "max_steps=5")).run().test.log_loss)


def test_a_stop_request_ends_after_the_step_under_way() -> None:
    steps: list[int] = []
    trainer = Trainer(small())

    def stop() -> bool:
        steps.append(trainer.step)
        return trainer.step >= 7

    result = trainer.run(stop_requested=stop)
    assert result.interrupted
    assert result.steps == 7
    assert result.test.samples == 5000


def test_divergence_is_an_error_that_names_the_cure() -> None:
    with pytest.raises(TrainingDiverged, match=r"lower optimizer\.lr"):
        Trainer(small("optimizer.name=sgd", "optimizer.lr=1e30")).run()
