"""Models and readers of the user's own, in the single-process trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.chaos.counting import Numbered
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.batches import Stream
from holdfast.cluster.worker.model import WorkerModel, plan_groups
from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError, DataError
from holdfast.models.recommender import table_dims
from holdfast.recipe import Recipe
from holdfast.tables.lookup import Placer
from holdfast.tables.plan import OptimizerPlan
from holdfast.training.config import OwnDataConfig, OwnModelConfig, load, to_yaml
from holdfast.training.networks import make_network
from holdfast.training.readers import make_reader
from holdfast.training.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def clicks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data for the example, in which a user clicks on the items of a hidden group."""
    monkeypatch.syspath_prepend(EXAMPLES)
    random = np.random.default_rng(0)
    samples = 20_000
    user, item = random.integers(0, 50, samples), random.integers(0, 80, samples)
    history = np.where(random.random((samples, 5)) < 0.5, random.integers(0, 80, (samples, 5)), -1)
    np.savez(
        tmp_path / "clicks.npz",
        user=user, item=item, history=history, context=random.random((samples, 3)),
        click=user % 2 == item % 2,
    )  # fmt: skip
    return tmp_path / "clicks.npz"


def test_the_example_trains(clicks: Path) -> None:
    config = load(
        None,
        ["model=own_model:build", "model.arguments.user_dim=4", "data.build=own_model:reader",
         f"data.arguments.path={clicks}", "batch_size=256", "epochs=3", "optimizer.lr=0.1", "threads=1"],
    )  # fmt: skip
    assert isinstance(config.model, OwnModelConfig)
    assert config.model.recipe == Recipe("own_model:build", {"user_dim": 4})
    assert isinstance(config.data, OwnDataConfig)
    result = Trainer(config).run()
    assert result.samples == 3 * 18_000
    assert result.test.samples == 2_000
    assert result.test.auc > 0.95


def test_the_example_runs_as_a_worker(clicks: Path) -> None:
    recipe = Recipe("own_model:reader", {"path": str(clicks)})
    reader = make_reader(recipe, "train", 100)
    network = make_network(Recipe("own_model:build"), reader)
    dims = table_dims(network, 3)
    sgd = OptimizerPlan(name="sgd", lr=0.1)
    plans = plan_groups(network, reader.table_rows, dims, sgd, sgd)
    assert [(plan.dim, plan.rows) for plan in plans[:-1]] == [(8, 50), (16, 160)]
    model = WorkerModel(network, reader.table_rows, dims)
    placers = [Placer(plan, Placement(2)) for plan in plans[:-1]]
    _, batch = next(iter(Stream(reader, 1, 2, 1)))
    placed = model.look_up(batch, placers)
    pulled = [np.ones((at.unique, plan.dim), np.float32) for at, plan in zip(placed, plans, strict=False)]
    step = model.train(batch, placed, pulled)
    assert all(gradient.any() for gradient in [*step.gradients, step.network])


def test_the_configuration_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: a.b:c\ndata: {build: 'a.d:e', arguments: {files: [x, y], n: 3}}\n")
    config = load(path)
    path.write_text(to_yaml(config))
    assert load(path) == config


HERE = "tests.training.test_own"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model=dlrm", "'dlrm' is not an import path: expected"),
        ("model=no_such:build", "there is no module no_such"),
        ("model.build=3", r"model\.build: expected `str`, got `int`"),
        ("model.build=a:b model.dim=3", r"there is no key model\.dim; model has build, arguments"),
        ("model.build=a:b model.argument=3", r"no key model\.argument; did you mean model\.arguments\?"),
        ("model.biuld=a:b", r"no key model\.biuld; did you mean model\.build\?"),
        ("model.kind=mine", r"model\.kind is 'mine': expected 'preset' or 'own'"),
        ("data.build=a:b data.arguments=3", r"data\.arguments: expected `object`, got `int`"),
        ("data.build=a:b data.arguments.day=2020-01-01", r"data\.arguments\.day is date: expected numbers"),
        ("data=holdfast.recipe:Recipe", r"cannot be called with these arguments \(part, batch_size\)"),
        (f"data={HERE}:not_a_reader", r"gave a dict without table_rows, .*: expected a reader"),
        (f"model={HERE}:not_a_network", r"gave a str without forward.*: expected an nn\.Module"),
        (f"model={HERE}:without_width", r"Linear has no attribute table_dim: set it to"),
        (f"model={HERE}:two_widths", r"table_dims has 2 lengths: expected one for each of 26"),
    ],
)
def test_mistakes_are_named(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(load(None, overrides.split()))


class WithoutTest(Numbered):
    """Batches to train on, and none to test on."""

    def __init__(self, part: str, batch_size: int) -> None:
        super().__init__(part, batch_size, batches=2)
        if part == "test":
            self.batches = 0


def test_a_test_part_without_samples_is_said_before_training() -> None:
    build = "data.build=tests.training.test_own:WithoutTest"
    config = load(None, ["model=holdfast.chaos.counting:Counting", build, "job.servers=1"])
    trainer = Trainer(config)
    with pytest.raises(DataError, match="the test part of the data has no samples"):
        trainer.run()
    assert trainer.step == 0
    with pytest.raises(DataError, match="the test part of the data has no samples"):
        plan_job(config)


def not_a_reader(part: str, batch_size: int) -> object:
    return {}


def not_a_network(reader: hf.Reader) -> object:
    return "network"


def without_width() -> object:
    from torch import nn

    return nn.Linear(2, 2)


def two_widths() -> object:
    from torch import nn

    network = nn.Linear(2, 2)
    network.table_dims = (3, 4)  # type: ignore[assignment]
    return network
