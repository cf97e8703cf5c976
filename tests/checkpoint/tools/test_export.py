"""What is taken out of a store, read back by the libraries that others would use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import holdfast as hf
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.tools.delta import export_as, export_delta
from holdfast.checkpoint.tools.export import export_dcp, export_model, restore_file
from tests.checkpoint.test_checkpointer import STRATEGIES, Run

FORMAT_PAGE = (Path(__file__).parents[3] / "docs" / "checkpoints-format.md").read_text()


def train(
    path: Path, strategy: Any, steps: int = 18, optimizer: str = "adagrad"
) -> tuple[Run, dict[int, dict[str, torch.Tensor]]]:
    """A run with a version every other step, and the model's state in each."""
    run = Run(optimizer)
    states: dict[int, dict[str, torch.Tensor]] = {}
    with hf.Checkpointer(path, run.objects, hf.Policy(every_steps=2, strategy=strategy)) as ckpt:
        for step in range(steps):
            run.train()
            version = ckpt.step(step, {"step": step})
            if version is not None:
                states[version] = {k: v.clone() for k, v in run.model.state_dict().items()}
    return run, states


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=str)
def test_a_models_file_of_any_version(tmp_path: Path, store: Store, strategy: Any) -> None:
    _, states = train(tmp_path / "store", strategy)
    for version, state in states.items():
        out = tmp_path / f"{version}.safetensors"
        written = export_model(store, version, out)
        assert (written.version, written.tensors, written.bytes) == (version, len(state), out.stat().st_size)
        assert equal(load_file(out), state)
    fresh = Run()
    fresh.model.load_state_dict(load_file(tmp_path / "3.safetensors"))
    assert equal(dict(fresh.model.state_dict()), states[3])


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise", "adam"])
def test_everything_in_one_file(tmp_path: Path, store: Store, optimizer: str) -> None:
    run, _ = train(tmp_path / "store", hf.Chunked(round_versions=2), optimizer=optimizer)
    out = tmp_path / "all.safetensors"
    restore_file(store, None, out)
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in run.model.state_dict().items():
        assert same_bits(tensors[f"model.{name}"], value)
    tables = set(map(id, run.model.tables.parameters()))
    for owner, each in run.optimizers.items():
        parameters = [p for g in each.param_groups for p in g["params"]]
        names = {id(p): f"model.{n}" for n, p in run.model.named_parameters()}
        for number, parameter in enumerate(parameters):
            for key, value in each.state[parameter].items():
                if id(parameter) in tables and isinstance(value, torch.Tensor) and value.dim():
                    name = f"{names[id(parameter)]}.{owner}.{key}"
                else:
                    name = f"{owner}.state.{number}.{key}"
                if isinstance(value, torch.Tensor):
                    assert same_bits(tensors[name], value), name
    tree = json.loads(metadata["tree"])
    assert tree["loader"]["next_index"] == 18
    assert json.loads(metadata["metadata"]) == {"step": 17}
    assert (metadata["version"], metadata["step"]) == ("9", "17")
    assert tree["model"]["tables.0.weight"] == {"$place": ["model.tables.0.weight", "weight", [50, 4]]}


def test_distributed_checkpoints_load(tmp_path: Path, store: Store) -> None:
    run, _ = train(tmp_path / "store", hf.Chunked(round_versions=2))
    export_dcp(store, None, tmp_path / "all")
    fresh = Run()
    fresh.train()  # so that the optimizer has state to load into
    wanted: dict[str, Any] = {
        "model": fresh.model.state_dict(),
        "optim0": fresh.optimizers["optim0"].state_dict(),
    }
    dcp_load(wanted, checkpoint_id=tmp_path / "all", no_dist=True)
    fresh.model.load_state_dict(wanted["model"])
    fresh.optimizers["optim0"].load_state_dict(wanted["optim0"])
    fresh.loader = run.loader
    assert fresh.digest() == run.digest()

    export_dcp(store, None, tmp_path / "model", object_name="model")
    other = Run().model
    state = other.state_dict()
    dcp_load(state, checkpoint_id=tmp_path / "model", no_dist=True)
    assert equal(dict(other.state_dict()), dict(run.model.state_dict()))


def apply_example() -> Any:
    """The function that the format's page shows."""
    (code,) = re.findall(
        r"```python\n(def apply_delta.*?|[^`]*?def apply_delta.*?)```", FORMAT_PAGE, re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(code, "checkpoints-format.md", "exec"), names)  # noqa: S102
    return names["apply_delta"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_delta_leads_from_any_version_to_any_other(tmp_path: Path, store: Store, strategy: Any) -> None:
    _, states = train(tmp_path / "store", strategy, steps=10)
    apply_delta = apply_example()
    for since in states:
        for version in states:
            out = tmp_path / "delta.safetensors"
            written = export_delta(store, since, version, out, force=True)
            assert equal(apply_delta(states[since], out), states[version]), (since, version)
            changed = sum(
                int((states[since][k] != states[version][k]).any(dim=1).sum())
                for k in states[1]
                if k.startswith("tables")
            )
            assert written.rows is not None
            assert changed <= written.rows <= 453
            if since == version:
                assert written.rows == 0
            if isinstance(strategy, hf.Full):
                assert written.rows == changed, "versions that were compared differ in what is listed"


def test_a_delta_holds_little(tmp_path: Path, store: Store) -> None:
    train(tmp_path / "store", hf.Chunked(round_versions=2, reset="never"))
    written = export_delta(store, 8, 9, tmp_path / "d.safetensors")
    assert written.rows is not None
    assert 0 < written.rows <= 2 * 16 * 3


def test_a_delta_with_all_fields(tmp_path: Path, store: Store) -> None:
    run, _ = train(tmp_path / "store", hf.Chunked(round_versions=2, reset="never"))
    out = tmp_path / "d.safetensors"
    export_delta(store, 5, None, out, all_fields=True)
    tensors = load_file(out)
    weight = list(run.model.tables.parameters())[1]
    sums = run.optimizers["optim0"].state[weight]["sum"]
    ids = tensors["rows/tables.1.weight"]
    assert len(ids)
    assert same_bits(tensors["values/tables.1.weight/optim0.sum"], sums[ids])


def test_a_delta_of_an_optimizer_is_refused(tmp_path: Path, store: Store) -> None:
    """Its rows are not listed as a module's are: they would be missing."""
    train(tmp_path / "store", hf.Full(), steps=2)
    out = tmp_path / "d.safetensors"
    with pytest.raises(hf.ConfigError, match=r"state\.\d+\.sum of this object is .*--all-fields"):
        export_delta(store, 1, None, out, object_name="optim0")
    assert not out.exists()


class Tied(nn.Module):
    def __init__(self, rows: int = 20) -> None:
        super().__init__()
        self.one = nn.EmbeddingBag(rows, 3, mode="sum", sparse=True)
        self.two = nn.EmbeddingBag(rows, 3, mode="sum", sparse=True)
        self.two.weight = self.one.weight
        self.odd = nn.Embedding(7, 5, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))


def test_tied_odd_and_empty_tensors(tmp_path: Path, store: Store) -> None:
    model = Tied()
    with hf.Checkpointer(
        tmp_path / "store", {"m": model}, hf.Policy(strategy="incremental"), allow_without_optimizer=True
    ) as ckpt:
        ckpt.save(0)
        first = {k: v.clone() for k, v in model.state_dict().items()}
        with torch.no_grad():
            model.one.weight[3] = float("nan")
            model.odd.weight[6] = -0.0
        ckpt.mark("m.one.weight", [3])
        ckpt.mark("m.odd.weight", [6])
        ckpt.save(1)
    export_model(store, None, tmp_path / "m.safetensors")
    bits = {k: v.reshape(-1).view(torch.uint8) for k, v in model.state_dict().items()}
    found = load_file(tmp_path / "m.safetensors")
    assert equal({k: v.reshape(-1).view(torch.uint8) for k, v in found.items()}, bits)
    export_delta(store, 1, 2, tmp_path / "d.safetensors")
    applied = apply_example()(first, tmp_path / "d.safetensors")
    assert equal({k: v.reshape(-1).view(torch.uint8) for k, v in applied.items()}, bits)
    restore_file(store, None, tmp_path / "all.safetensors")
    export_dcp(store, None, tmp_path / "dcp", object_name="m")
    other = Tied()
    state = other.state_dict()
    dcp_load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(state)
    assert equal({k: v.reshape(-1).view(torch.uint8) for k, v in other.state_dict().items()}, bits)


def test_a_delta_to_a_model_that_has_grown(tmp_path: Path, store: Store) -> None:
    for rows in (20, 25):
        model = Tied(rows)
        with hf.Checkpointer(tmp_path / "store", {"m": model}, allow_without_optimizer=True) as ckpt:
            ckpt.save(0)
            if rows == 20:
                first = {k: v.clone() for k, v in model.state_dict().items()}
    export_delta(store, 1, 2, tmp_path / "d.safetensors")
    applied = apply_example()(first, tmp_path / "d.safetensors")
    assert applied["one.weight"].shape == (25, 3)
    assert torch.equal(applied["two.weight"], model.one.weight)


def test_which_object(tmp_path: Path, store: Store) -> None:
    pair = {"a": nn.Embedding(4, 2), "b": nn.Linear(2, 2)}
    with hf.Checkpointer(tmp_path / "store", pair, allow_without_optimizer=True) as ckpt:
        ckpt.save(0)
    out = tmp_path / "x.safetensors"
    with pytest.raises(hf.ConfigError, match="has 2 modules: choose one object with --object, of a, b"):
        export_model(store, None, out)
    with pytest.raises(hf.ConfigError, match="no object 'c': it has a, b"):
        export_model(store, None, out, object_name="c")
    export_model(store, None, out, object_name="b")
    assert set(load_file(out)) == {"weight", "bias"}
    with pytest.raises(hf.ConfigError, match="--since"):
        export_as(store, None, tmp_path / "y", "delta")
    with pytest.raises(hf.ConfigError, match="for --format delta"):
        export_as(store, None, tmp_path / "y", "dcp", since=1)


@pytest.mark.parametrize("name", ["ä" * 120, "日" * 80, "x" * 250])
def test_long_names(tmp_path: Path, store: Store, name: str) -> None:
    train(tmp_path / "store", hf.Full(), steps=2)
    export_model(store, None, tmp_path / name)
    assert load_file(tmp_path / name)


def test_files_are_not_overwritten_unasked(tmp_path: Path, store: Store) -> None:
    train(tmp_path / "store", hf.Full(), steps=2)
    out = tmp_path / "x.safetensors"
    out.write_text("mine")
    for write in (export_model, restore_file):
        with pytest.raises(hf.ConfigError, match="exists: name another file, or overwrite it with --force"):
            write(store, None, out)
    assert out.read_text() == "mine"
    export_model(store, None, out, force=True)
    load_file(out)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "diary").write_text("mine")
    with pytest.raises(hf.ConfigError, match="not empty"):
        export_dcp(store, None, folder)
    with pytest.raises(hf.ConfigError, match="not a distributed checkpoint and is not overwritten"):
        export_dcp(store, None, folder, force=True)
    (folder / "diary").unlink()
    export_dcp(store, None, folder)
    export_dcp(store, None, folder, force=True)
    with pytest.raises(hf.ConfigError, match="no folder"):
        export_model(store, None, tmp_path / "none" / "x.safetensors")


def test_a_damaged_version_leaves_no_file(tmp_path: Path, store: Store) -> None:
    train(tmp_path / "store", hf.Full(), steps=2)
    (chunk,) = (tmp_path / "store" / "chunks").iterdir()
    data = bytearray(chunk.read_bytes())
    data[-9] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(hf.CorruptCheckpoint, match="checksum"):
        export_model(store, None, tmp_path / "x.safetensors")
    with pytest.raises(hf.CorruptCheckpoint, match="checksum"):
        export_dcp(store, None, tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_a_large_table_is_not_held_in_memory(tmp_path: Path, store: Store) -> None:
    """Rows go through the mapped file: memory of the process itself grows by far less than the table."""
    table = nn.Embedding(400_000, 32)
    with hf.Checkpointer(tmp_path / "store", {"m": table}, allow_without_optimizer=True) as ckpt:
        ckpt.save(0)
    before = anonymous_bytes()
    peak = 0

    def watch(done: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes() - before)

    from holdfast.checkpoint.tools import export

    class Watched(export.RowSink):
        def __call__(self, group: int, rows: Any) -> None:
            super().__call__(group, rows)
            watch(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "RowSink", Watched)
        export_model(store, None, tmp_path / "x.safetensors")
    assert peak < table.weight.nbytes * 0.8
    assert np.array_equal(
        load_file(tmp_path / "x.safetensors")["weight"].numpy(), table.weight.detach().numpy()
    )


def anonymous_bytes() -> int:
    (line,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024
