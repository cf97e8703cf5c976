"""``load`` and ``saved_shapes``: a version's part that some objects need, as ``restore()`` gives it."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, Optimizer, Rprop
from torch.optim.swa_utils import AveragedModel

import holdfast as hf
from holdfast.checkpoint import loading
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.layout import bundles
from holdfast.checkpoint.reading.version import VersionReader, open_version
from holdfast.checkpoint.store import open_store
from holdfast.testing.s3 import S3Server
from tests.checkpoint import steady_trainer
from tests.checkpoint.lineage import STRATEGIES
from tests.checkpoint.test_quantized_checkpoints import OPTIONS, Tables

ROUNDS = hf.Chunked(round_versions=2, dead_fraction=0.0, reset="never")
SHAPES = [
    *((strategy, options) for strategy in STRATEGIES for options in ({}, OPTIONS[0])),
    *((ROUNDS, options) for options in OPTIONS[1:]),
]
ROWS, DIM = 40, 4


def bits(state: Any) -> Any:
    """A state of tensors that can be compared, NaN included."""
    if isinstance(state, Tensor):
        flat = state.detach().reshape(-1)
        return tuple(state.shape), str(state.dtype), bytes(flat.view(torch.uint8).numpy())
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, list):
        return [bits(value) for value in state]
    return state


def bits_of(thing: Any) -> Any:
    return bits(dict(thing.state_dict()))


@pytest.mark.parametrize(("strategy", "options"), SHAPES, ids=str)
def test_what_is_loaded_is_what_is_restored(tmp_path: Path, strategy: Any, options: dict[str, Any]) -> None:
    run = Tables()
    policy = hf.Policy(strategy=strategy, **options)
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        for step in range(7):
            run.change(ckpt)
            ckpt.save(step, {"loss": step})
        ckpt.wait()
        found = ckpt.versions()
        assert len(found) == 7
        for version in found:
            ckpt.restore(version.version)
            model, both = Tables(), Tables()
            loaded = hf.load(tmp_path, {"model": model.model}, version.version)
            assert (loaded.version, loaded.step) == (version.version, version.step)
            assert (loaded.metadata, loaded.grown) == ({"loss": version.step}, {})
            assert hf.load(tmp_path, both.objects, version.version).version == version.version
            assert bits_of(model.model) == bits_of(both.model) == bits_of(run.model)
            assert bits_of(both.optimizer) == bits_of(run.optimizer)
            assert bits_of(model.optimizer) != bits_of(run.optimizer)
        assert hf.load(tmp_path, {"model": model.model}).version == found[-1].version


class Net(nn.Module):
    """A table, and layers with parameters and buffers."""

    def __init__(self, rows: int = ROWS, dim: int = DIM) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, dim)
        self.norm = nn.BatchNorm1d(dim)
        self.top = nn.Linear(dim, 1)

    def forward(self, users: Tensor) -> Tensor:
        found: Tensor = self.top(self.norm(self.users(users)))
        return found


def train(model: nn.Module, optimizers: list[Optimizer], steps: int = 2) -> None:
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.arange(step, ROWS, 3)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def saved(
    path: Any, make: Callable[[Any], Optimizer] = Adagrad, **policy: Any
) -> tuple[Net, Optimizer, dict[str, Any]]:
    """A store with two versions of a run: its objects."""
    model = Net()
    optimizer = make(model.parameters())
    objects = {"model": model, "optim": optimizer}
    with hf.Checkpointer(path, objects, hf.Policy(**policy)) as ckpt:
        for step in range(2):
            train(model, [optimizer])
            ckpt.save(step)
    return model, optimizer, objects


@pytest.mark.parametrize("options", [{}, {"quantize": 4}], ids=str)
def test_of_several_models_one_is_read(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tables are one group, of which runs of others' rows are left out; an average's is another."""
    monkeypatch.setattr(bundles, "STRETCH_BYTES", 20_000)
    models = {name: nn.EmbeddingBag(3000, 16) for name in ("left", "middle", "right")}
    optimizer = Adagrad([p for model in models.values() for p in model.parameters()])
    averaged = AveragedModel(models["left"])
    objects = {**models, "optim": optimizer, "averaged": averaged}
    for model in models.values():
        model.weight.detach()[::100, 3] = torch.nan  # rows that no codec holds
    with hf.Checkpointer(tmp_path, objects, hf.Policy(strategy="incremental", **options)) as ckpt:
        for version in range(3):
            # A row that no codec holds in a file of its own, and one that a codec does, of different models
            models["middle"].weight.detach()[7 * version + 1, version] = torch.inf
            models["left"].weight.detach()[8] = version
            ckpt.mark("middle.weight", [7 * version + 1])
            ckpt.mark("left.weight", [8])
            ckpt.save(version)
        ckpt.restore()
    with open_store(tmp_path, create=False) as store, open_version(store) as reader:
        whole, average = (3000 * group.record_bytes for group in reader.stored_groups[:2])
    for names in (["left"], ["middle"], ["right"], ["averaged"], ["left", "right"], ["right", "averaged"]):
        fresh: dict[str, nn.Module] = {
            name: AveragedModel(nn.EmbeddingBag(3000, 16))
            if name == "averaged"
            else nn.EmbeddingBag(3000, 16)
            for name in names
        }
        read = hf.load(tmp_path, fresh).bytes_read
        assert {name: bits_of(module) for name, module in fresh.items()} == {
            name: bits_of(objects[name]) for name in names
        }
        expected = sum(average if name == "averaged" else whole for name in names)
        assert expected < read < 1.1 * expected + 40_000
    with pytest.raises(
        hf.ModelMismatch, match=r"optim holds optim.sum of table middle.weight: load it toget"
    ):
        hf.load(tmp_path, {"left": nn.EmbeddingBag(3000, 16), "optim": optimizer})


def test_objects_without_tables_read_no_rows(tmp_path: Path) -> None:
    loader = hf.Synthetic(samples=100, batch_size=10, table_rows=[5], seed=1)
    model = nn.EmbeddingBag(5000, 16)
    objects = {"model": model, "optim": SGD(model.parameters(), lr=0.1), "loader": loader}
    with hf.Checkpointer(tmp_path, objects) as ckpt:
        next(iter(loader))
        ckpt.save(0)
    fresh = hf.Synthetic(samples=100, batch_size=10, table_rows=[5], seed=1)
    assert 0 < hf.load(tmp_path, {"loader": fresh}).bytes_read < 20_000
    assert fresh.state_dict() == loader.state_dict()


def test_random_states_and_the_store_are_left_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in tmp_path.rglob("*")}
    random_state, python_state = torch.get_rng_state(), random.getstate()
    model = Net()
    torch.set_rng_state(random_state)
    tmp_path.chmod(0o555)
    try:
        hf.load(tmp_path, {"model": model})
        hf.saved_shapes(tmp_path)
    finally:
        tmp_path.chmod(0o755)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state
    after = {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in tmp_path.rglob("*")}
    assert after.keys() == before.keys()
    assert {p: v for p, v in after.items() if p.is_file()} == {p: v for p, v in before.items() if p.is_file()}


def test_a_lock_does_not_matter(tmp_path: Path) -> None:
    model, optimizer, objects = saved(tmp_path)
    with hf.Checkpointer(tmp_path, objects) as ckpt:
        assert hf.load(tmp_path, {"model": Net()}).version == 2
        train(model, [optimizer])
        ckpt.save(2)
        ckpt.wait()
        assert hf.load(tmp_path, {"model": Net()}).version == 3


# Objects that are missing, and names


def test_objects_that_the_version_lacks(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path)
    before = bits_of(model)
    with pytest.raises(hf.ModelMismatch, match="holds no state of 'modle', only of model, optim"):
        hf.load(tmp_path, {"modle": model})
    with pytest.raises(hf.ModelMismatch, match="optim is Adagrad in the checkpoint and SGD here"):
        hf.load(tmp_path, {"model": model, "optim": SGD(model.parameters(), lr=0.1)})
    with pytest.raises(hf.ModelMismatch, match="load it together with the model"):
        hf.load(tmp_path, {"optim": optimizer})
    with pytest.raises(hf.ModelMismatch, match="model has other keys in the checkpoint; not here: norm"):
        hf.load(tmp_path, {"model": nn.ModuleDict({"users": nn.Embedding(ROWS, DIM)})})
    with pytest.raises(hf.ConfigError, match="there is nothing to load"):
        hf.load(tmp_path, {})
    assert bits_of(model) == before


def test_versions_and_stores_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(hf.StoreError):
        hf.load(tmp_path / "none", {"model": Net()})
    with pytest.raises(hf.StoreError):
        hf.saved_shapes(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with hf.Checkpointer(tmp_path / "empty", {"model": Net()}, allow_without_optimizer=True):
        pass
    saved(tmp_path / "two")
    for store, version in (("empty", None), ("empty", 1), ("two", 3)):
        with pytest.raises(hf.NoSuchVersion):
            hf.load(tmp_path / store, {"model": Net()}, version)
        with pytest.raises(hf.NoSuchVersion):
            hf.saved_shapes(tmp_path / store, version)


@pytest.fixture
def process_group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return cast("nn.Module", torch.compile(model))


def compiled_within(model: nn.Module) -> nn.Module:
    model.top = compiled(cast("nn.Module", model.top))
    return model


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "ddp": DistributedDataParallel,
    "compiled": compiled,
    "both": lambda model: compiled(DistributedDataParallel(model)),
    "within": compiled_within,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("here", WRAPPED)
@pytest.mark.parametrize("there", WRAPPED)
def test_wrapped_models_load_into_each_other(tmp_path: Path, there: str, here: str) -> None:
    torch.manual_seed(1)
    bare = Net()
    train(bare, [SGD(bare.parameters(), lr=0.1)])
    model = WRAPPED[there](bare)
    optimizer = Adagrad(model.parameters())
    with hf.Checkpointer(tmp_path, {"model": model, "optim": optimizer}) as ckpt:
        ckpt.save(3)
    mine = Net()
    other = WRAPPED[here](mine)
    fresh = Adagrad(other.parameters())
    assert hf.load(tmp_path, {"model": other, "optim": fresh}).step == 3
    assert list(bits_of(mine).values()) == list(bits_of(bare).values())
    assert bits_of(fresh) == bits_of(optimizer)
    shapes = hf.saved_shapes(tmp_path)
    assert {name: shape.shape for name, shape in shapes.tables.items()} == {"model.users.weight": (ROWS, DIM)}
    assert {name for name in shapes.tensors if name.startswith("model.")} == {
        f"model.{key}" for key in Net().state_dict() if key != "users.weight"
    }


def test_optimizers_in_the_backward_pass(tmp_path: Path) -> None:
    """Of a compiled model, so that names differ; they are loaded where they are, and else left out."""

    def make(wrap: bool, steps: bool) -> tuple[Net, nn.Module]:
        model = Net()
        if steps:
            _apply_optimizer_in_backward(Adagrad, model.users.parameters(), {"lr": 0.1})
        return model, compiled(model) if wrap else model

    model, whole = make(wrap=True, steps=True)
    dense = Adagrad([*model.norm.parameters(), *model.top.parameters()])
    train(model, [dense])
    with hf.Checkpointer(tmp_path / "with", {"model": whole, "optim": dense}) as ckpt:
        ckpt.save(0)
    other, _ = make(wrap=False, steps=True)
    hf.load(tmp_path / "with", {"model": other})
    assert bits_of(other) == bits_of(model)
    states = [vars(m.users.weight)["_in_backward_optimizers"][0].state_dict() for m in (model, other)]
    assert bits(states[0]["state"]) == bits(states[1]["state"])
    assert states[1]["state"][0]["sum"].any()

    plain, _ = make(wrap=False, steps=False)
    hf.load(tmp_path / "with", {"model": plain})
    assert bits_of(plain) == bits_of(model)

    saved_without, _, _ = saved(tmp_path / "without")
    before = bits(states[1])
    hf.load(tmp_path / "without", {"model": other})
    assert bits_of(other) == bits_of(saved_without)
    assert bits(vars(other.users.weight)["_in_backward_optimizers"][0].state_dict()) == before


def test_tied_tables(tmp_path: Path) -> None:
    def make() -> nn.ModuleDict:
        model = nn.ModuleDict({"a": nn.Embedding(ROWS, DIM), "b": nn.Embedding(ROWS, DIM)})
        model["b"].weight = model["a"].weight
        return model

    model, fresh = make(), make()
    with hf.Checkpointer(tmp_path, {"model": model, "optim": SGD(model.parameters(), lr=0.1)}) as ckpt:
        ckpt.save(0)
    hf.load(tmp_path, {"model": fresh})
    assert bits_of(fresh) == bits_of(model)
    assert set(hf.saved_shapes(tmp_path).tables) == {"model.a.weight", "model.b.weight"}
    with pytest.raises(hf.ModelMismatch):
        hf.load(tmp_path, {"model": nn.ModuleDict({n: nn.Embedding(ROWS, DIM) for n in "ab"})})


# Tables that have another number of rows


@pytest.mark.parametrize("options", [{}, {"quantize": 8}], ids=str)
def test_new_rows_stay_as_the_model_has_them(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, objects = saved(tmp_path, **options)
    with hf.Checkpointer(tmp_path, objects) as ckpt:
        ckpt.restore()
    larger = Net(ROWS + 9)
    state = Adagrad(larger.parameters(), initial_accumulator_value=0.25)
    new = larger.users.weight.detach()[ROWS:].clone()
    with caplog.at_level(logging.WARNING, "holdfast.checkpoint"):
        loaded = hf.load(tmp_path, {"model": larger, "optim": state})
    assert loaded.grown == {"model.users.weight": (ROWS, ROWS + 9)}
    assert "table model.users.weight has 40 rows in version 2 and 49 here" in caplog.text
    assert bits(larger.users.weight[:ROWS]) == bits(model.users.weight)
    assert bits(larger.users.weight[ROWS:]) == bits(new)
    assert bits_of(larger.top) == bits_of(model.top)
    sums = state.state[larger.users.weight]["sum"]
    assert bits(sums[:ROWS]) == bits(optimizer.state[model.users.weight]["sum"])
    assert torch.equal(sums[ROWS:], torch.full((9, DIM), 0.25))
    train(larger, [state])


def test_optimizers_that_make_their_state_later(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "adam", Adam)
    larger = Net(ROWS + 9)
    state = Adam(larger.parameters())
    hf.load(tmp_path / "adam", {"model": larger, "optim": state})
    for key in ("exp_avg", "exp_avg_sq"):
        found = state.state[larger.users.weight][key]
        assert bits(found[:ROWS]) == bits(optimizer.state[model.users.weight][key])
        assert found.shape == (ROWS + 9, DIM)
        assert not found[ROWS:].any()
    train(larger, [state])

    _, optimizer, _ = saved(tmp_path / "rprop", Rprop)
    larger = Net(ROWS + 9)
    rprop = Rprop(larger.parameters())
    with pytest.raises(hf.ModelMismatch, match=r"what optim \(Rprop\) begins with in optim.* is not known"):
        hf.load(tmp_path / "rprop", {"model": larger, "optim": rprop})
    train(larger, [rprop])
    before = rprop.state[larger.users.weight]["step_size"][ROWS:].clone()
    hf.load(tmp_path / "rprop", {"model": larger, "optim": rprop})
    assert bits(rprop.state[larger.users.weight]["step_size"][ROWS:]) == bits(before)


def test_a_table_that_shrank(tmp_path: Path) -> None:
    saved(tmp_path)
    smaller, narrow = Net(ROWS - 1), Net(dim=DIM - 1)
    before = bits_of(smaller)
    for model, shape in ((smaller, "39, 4"), (narrow, "40, 3")):
        where = rf"model.users.weight is F32 of shape \[40, 4\] in the checkpoint and .* \[{shape}\] here"
        with pytest.raises(hf.ModelMismatch, match=where if model is smaller else shape[:1]):
            hf.load(tmp_path, {"model": model})
    assert bits_of(smaller) == before


# Damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("place", ["header", "rows", "dense", "missing"])
def test_damaged_files(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """A version that is asked for is refused; else an older one is loaded, and the log says why."""
    model, _, _ = saved(tmp_path, strategy="full")
    (chunk,) = (tmp_path / "chunks").glob("00000002-*")
    (dense,) = (tmp_path / "dense").glob("00000002-*")
    if place == "missing":
        chunk.unlink()
    else:
        flip(*{"header": (chunk, 30), "rows": (chunk, -20), "dense": (dense, -20)}[place])
    fresh = Net()
    with pytest.raises(hf.CorruptCheckpoint, match="version 2") as caught:
        hf.load(tmp_path, {"model": fresh}, 2)
    assert (dense if place == "dense" else chunk).name in str(caught.value)
    with caplog.at_level(logging.WARNING, "holdfast.checkpoint"):
        assert hf.load(tmp_path, {"model": fresh}).version == 1
    assert "version 2 cannot be loaded" in caplog.text
    assert bits_of(fresh) != bits_of(model)
    flip(next((tmp_path / "dense").glob("00000001-*")), -20)
    with pytest.raises(
        hf.CorruptCheckpoint, match=r"no version .* can be loaded: version 2: .*; version 1: "
    ):
        hf.load(tmp_path, {"model": fresh})


def test_damaged_headers_of_shapes(tmp_path: Path) -> None:
    saved(tmp_path)
    (dense,) = (tmp_path / "dense").glob("00000002-*")
    whole = dense.read_bytes()
    flip(dense, -20)  # content, which is not read
    assert hf.saved_shapes(tmp_path).version == 2
    for damaged in (
        whole[:-1],
        whole[:100],
        bytes([whole[0] ^ 1, *whole[1:]]),
        whole.replace(b"bias", b"bios"),
    ):
        dense.write_bytes(damaged)
        with pytest.raises(hf.CorruptCheckpoint, match=dense.name):
            hf.saved_shapes(tmp_path)
    dense.unlink()
    with pytest.raises(hf.CorruptCheckpoint, match=dense.name):
        hf.saved_shapes(tmp_path)
    assert hf.saved_shapes(tmp_path, 1).version == 1


def test_no_row_of_a_damaged_version_stays(tmp_path: Path) -> None:
    """A larger version has been found damaged halfway; a smaller one would leave rows of it behind."""
    for rows in (ROWS, ROWS + 9):
        model = Net(rows)
        objects = {"model": model, "optim": SGD(model.parameters(), lr=0.1)}
        with hf.Checkpointer(tmp_path, objects, hf.Policy(strategy="full")) as ckpt:
            ckpt.save(0)
    flip(next((tmp_path / "chunks").glob("00000002-*")), -20)
    with pytest.raises(hf.CorruptCheckpoint, match="make the objects anew and restore this one"):
        hf.load(tmp_path, {"model": Net(ROWS + 9)})
    assert hf.load(tmp_path, {"model": Net(ROWS + 9)}, 1).grown


# A store that is being written


def test_a_version_that_is_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it is gone; else the newest one takes its place."""
    model, optimizer, objects = saved(tmp_path)
    real = read_newest
    left = [1]

    def and_then_deleted(*arguments: Any) -> Any:
        manifest = real(*arguments)
        if left[0]:
            left[0] -= 1
            with hf.Checkpointer(tmp_path, objects, hf.Policy(keep=1, strategy="full")) as ckpt:
                for step in (2, 3):  # files go with the version after
                    train(model, [optimizer])
                    ckpt.save(step)
        return manifest

    monkeypatch.setattr(loading, "read_newest", and_then_deleted)
    fresh = Net()
    assert hf.load(tmp_path, {"model": fresh}).version == 4
    assert bits_of(fresh) == bits_of(model)
    left[0] = 1
    with pytest.raises(hf.NoSuchVersion, match="no version 4: it has 6"):
        hf.load(tmp_path, {"model": fresh}, 4)


def test_files_that_go_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an object store, where a file that is open can be gone."""
    model, optimizer, objects = saved(tmp_path)
    real = VersionReader.read_rows
    left = [2]

    def gone(self: VersionReader, *arguments: Any, **options: Any) -> None:
        if not left[0]:
            return real(self, *arguments, **options)
        left[0] -= 1
        with hf.Checkpointer(tmp_path, objects, hf.Policy(keep=1)) as ckpt:
            train(model, [optimizer])
            ckpt.save(9 - left[0])
        raise hf.ObjectMissing("gone")

    monkeypatch.setattr(VersionReader, "read_rows", gone)
    fresh = Net()
    loaded = hf.load(tmp_path, {"model": fresh})
    assert (loaded.version, left) == (4, [0])
    assert bits_of(fresh) == bits_of(model)
    left[0] = 1
    with pytest.raises(hf.NoSuchVersion, match="no version 4"):
        hf.load(tmp_path, {"model": fresh}, 4)

    def always_gone(self: VersionReader, *arguments: Any, **options: Any) -> None:
        raise hf.ObjectMissing("gone for good")

    monkeypatch.setattr(VersionReader, "read_rows", always_gone)
    for version in (5, None):
        with pytest.raises(hf.CorruptCheckpoint, match="gone for good"):
            hf.load(tmp_path, {"model": fresh}, version)


def test_objects_that_are_deleted_while_they_are_read(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the version are open, and on an object store they go all the same."""
    url, options = f"s3://{s3_server.bucket}/deleted", s3_server.options()
    model = Net()
    optimizer = Adagrad(model.parameters())
    objects = {"model": model, "optim": optimizer}
    policy = hf.Policy(keep=1, strategy="full", deletion_delay_seconds=0.0)
    with hf.Checkpointer(url, objects, policy, options=options) as ckpt:
        ckpt.save(0)
        ckpt.wait()
        real = VersionReader.read_rows
        failed: list[hf.ObjectMissing] = []

        def deleted(self: VersionReader, *arguments: Any, **more: Any) -> None:
            if not failed:
                for step in (1, 2):  # files go with the version after
                    train(model, [optimizer])
                    ckpt.save(step)
                ckpt.wait()
            try:
                real(self, *arguments, **more)
            except hf.ObjectMissing as error:
                failed.append(error)
                raise

        monkeypatch.setattr(VersionReader, "read_rows", deleted)
        fresh = Net()
        assert hf.load(url, {"model": fresh}, options=options).version == 3
        assert len(failed) == 1
        assert bits_of(fresh) == bits_of(model)
        failed.clear()
        with pytest.raises(hf.NoSuchVersion, match="no version 3: it has 5"):
            hf.load(url, {"model": fresh}, 3, options=options)
        assert len(failed) == 1
        assert hf.saved_shapes(url, options=options).version == 5


def race(url: str, policy: dict[str, Any], options: dict[str, Any], loads: int, versions: int) -> int:
    """Load over and over while a process saves and deletes: right, or gone. How many were gone."""
    chance = random.Random(1)
    newest = gone = right = 0
    with (
        steady_trainer.training(url, policy, options),
        open_store(url, create=False, options=options) as store,
    ):
        while right < loads or newest < versions:
            model = steady_trainer.Model()
            loaded = hf.load(url, {"model": model}, options=options)
            steady_trainer.check(model, loaded.step)
            assert loaded.version >= newest
            newest = loaded.version
            right += 1
            chosen = chance.choice(read_newest(store).versions).version
            try:
                again = hf.load(url, {"model": model}, chosen, options=options)
            except hf.NoSuchVersion:
                gone += 1
                assert chosen not in {version.version for version in read_newest(store).versions}
            else:
                assert again.version == chosen
                steady_trainer.check(model, again.step)
            try:
                shapes = hf.saved_shapes(url, chosen, options=options)
            except hf.NoSuchVersion:
                continue
            assert shapes.tables["model.table.weight"].shape == (steady_trainer.ROWS, steady_trainer.DIM)
    return gone


@pytest.mark.parametrize("strategy", ["full", "chunked"])
def test_while_a_trainer_saves_and_deletes(tmp_path: Path, strategy: str) -> None:
    race(str(tmp_path), {"strategy": strategy, "keep": 2}, {}, loads=12, versions=25)


def test_while_a_trainer_saves_to_an_object_store(s3_server: S3Server) -> None:
    """Files are deleted at once, so that one that is being read may go."""
    url = f"s3://{s3_server.bucket}/loading"
    policy = {"keep": 2, "deletion_delay_seconds": 0.0}
    race(url, policy, s3_server.options(), loads=4, versions=6)


def test_shapes_are_those_of_the_model(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path, quantize=4)
    shapes = hf.saved_shapes(tmp_path)
    assert (shapes.version, shapes.step) == (2, 1)
    state = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    state |= {
        f"optim.state.{number}.{key}": tensor
        for number, values in optimizer.state_dict()["state"].items()
        for key, tensor in values.items()
    }
    found = {name: (t.shape, t.dtype) for name, t in {**shapes.tables, **shapes.tensors}.items()}
    assert found == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    assert list(shapes.tables) == ["model.users.weight"]
    assert hf.saved_shapes(tmp_path, 1).version == 1
    rows, dim = shapes.tables["model.users.weight"].shape
    hf.load(tmp_path, {"model": Net(rows, dim)})
    shutil.rmtree(tmp_path / "chunks")
    assert hf.saved_shapes(tmp_path) == shapes
