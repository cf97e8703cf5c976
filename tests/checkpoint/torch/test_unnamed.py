"""Rows that change without a lookup that names them just then: found by fuzzing, each on its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import holdfast as hf
from tests.checkpoint.torch.test_watch import DIM, ROWS, Hashed, Net, ids, state_of, usual


def nothing() -> None:
    pass


class Saves:
    """What is saved, and what must come back."""

    def __init__(self, checkpointer: hf.Checkpointer, objects: dict[str, Any]) -> None:
        self.checkpointer, self.objects = checkpointer, objects
        self.right: dict[int, dict[str, Any]] = {}

    def __call__(self) -> None:
        version = self.checkpointer.save(len(self.right))
        assert version is not None
        self.right[version] = state_of(self.objects)

    def check(self) -> None:
        for version, right in self.right.items():
            self.checkpointer.restore(version)
            for name, value in self.objects["model"].state_dict().items():
                one, other = (
                    t.resolve_conj().reshape(-1).view(torch.uint8) for t in (value, right["model"][name])
                )
                assert torch.equal(one, other), f"{name} of version {version}"


Do = Callable[[Net, torch.optim.Optimizer, Saves], None]


def run(path: Path, net: Net, do: Do) -> None:
    """After some steps as usual, and a save, do something; all versions are right."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"model": net, "optim": optimizer}
    with hf.Checkpointer(path, objects, hf.Policy(strategy="incremental")) as checkpointer:
        saves = Saves(checkpointer, objects)
        for i in range(5):
            usual(i, net, optimizer, nothing)
        saves()
        do(net, optimizer, saves)
        saves.check()


def looks_up_before_steps(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    """The next batch, between the gradients of one and their step."""
    loss = net.table(ids()).sum()
    for i in range(20):
        optimizer.zero_grad()
        loss.backward()
        loss = net.table(ids()).sum()
        optimizer.step()
        if i % 5 == 4:
            saves()


def keeps_for_long(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    usual(0, net, optimizer, nothing)
    kept = net.table(ids()).sum()
    for i in range(5):
        usual(i, net, optimizer, saves)
    usual(0, net, optimizer, nothing)
    optimizer.zero_grad()
    kept.backward()
    optimizer.step()
    saves()


def clips_by_nan(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    optimizer.zero_grad()
    net(ids()).backward()
    optimizer.step()
    optimizer.zero_grad()
    (net(ids()) * float("nan")).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    saves()


def clips_by_nan_when_most_rows_are_marked(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    usual(0, net, optimizer, nothing)
    saves.checkpointer.mark("model.table.weight", range(1, ROWS))
    clips_by_nan(net, optimizer, saves)


def negates(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    """A gradient of -0 makes 0 of a weight of -0."""
    with torch.no_grad():
        net.table.weight[7] = -0.0
    usual(0, net, optimizer, saves)
    optimizer.zero_grad()
    net(torch.tensor([1, 2])).backward()
    assert net.table.weight.grad is not None
    net.table.weight.grad.neg_()
    optimizer.step()
    saves()


def computes_in_closures(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        rows = functional.embedding(ids(), net.table.weight, sparse=net.table.sparse)
        torch.autograd.backward(rows.sum())
        return rows.sum().item()

    for _ in range(3):
        optimizer.step(closure)
        saves()


def writes_and_replaces(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    with torch.no_grad():
        net.table.weight[7:9] = 1.0
    net.other = nn.Embedding(ROWS, DIM, sparse=net.other.sparse)
    optimizer.param_groups[0]["params"] = list(net.parameters())
    saves()


def is_used_directly_alone(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
    """As compiled code does: hooks do not run."""
    for i in range(3):
        optimizer.zero_grad()
        rows = functional.embedding(torch.tensor([i]), net.table.weight, sparse=net.table.sparse)
        torch.autograd.backward(rows.sum())
        optimizer.step()
        saves()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "do",
    [
        looks_up_before_steps, keeps_for_long, computes_in_closures, writes_and_replaces,
        is_used_directly_alone,
    ],
    ids=lambda do: do.__name__,
)  # fmt: skip
def test_after_some_usual_steps(tmp_path: Path, do: Do, sparse: bool) -> None:
    run(tmp_path / "s", Net(sparse), do)


@pytest.mark.parametrize(
    "do", [clips_by_nan, clips_by_nan_when_most_rows_are_marked, negates], ids=lambda do: do.__name__
)
def test_what_changes_a_whole_dense_gradient(tmp_path: Path, do: Do) -> None:
    run(tmp_path / "s", Net(), do)


@pytest.mark.parametrize("how", ["write", "load"])
def test_writes_to_a_table_whose_lookups_write_too(tmp_path: Path, how: str) -> None:
    def do(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
        if how == "load":
            net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})
        else:
            with torch.no_grad():
                net.table.weight[7:9] = 1.0
        usual(0, net, optimizer, saves)

    run(tmp_path / "s", Net(table=nn.Embedding(ROWS, DIM, max_norm=1.0)), do)


def test_lookups_that_write_to_other_rows_than_they_are_given(tmp_path: Path) -> None:
    def do(net: Net, optimizer: torch.optim.Optimizer, saves: Saves) -> None:
        with torch.no_grad():
            net(torch.arange(20))
        saves()

    table = Hashed(ROWS, DIM, max_norm=1.0)
    with torch.no_grad():
        table.weight.fill_(9.0)
    run(tmp_path / "s", Net(table=table), do)


def test_tables_that_are_marked_as_a_whole_are_looked_at_later(tmp_path: Path) -> None:
    """In the first steps every row was marked, which said nothing about lookups."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"model": net, "optim": optimizer}
    with hf.Checkpointer(tmp_path / "s", objects) as checkpointer:
        saves = Saves(checkpointer, objects)
        checkpointer.mark("model.table.weight")
        for i in range(30):
            optimizer.zero_grad()
            (net(ids()) + net.table.weight[i].sum()).backward()
            optimizer.step()
            if i % 5 == 4:
                saves()
        saves.check()


def test_batches_without_ids_say_nothing_about_lookups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"model": net, "optim": optimizer}
    with hf.Checkpointer(tmp_path / "s", objects) as checkpointer:
        saves = Saves(checkpointer, objects)
        for i in range(30):
            optimizer.zero_grad()
            given = ids()[: 0 if i < 4 else None]
            unnamed = functional.embedding(given * 7 % ROWS, net.table.weight)
            torch.autograd.backward(net.table(given).sum() + unnamed.sum())
            optimizer.step()
            if i % 5 == 4:
                saves()
        saves.check()


def test_restoring_into_a_table_that_has_been_replaced(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": optimizer}) as checkpointer:
        usual(0, net, optimizer, nothing)
        checkpointer.save(0)
        right = net.table.weight.detach().clone()
        optimizer.state.pop(net.table.weight)
        net.table = nn.Embedding(ROWS, DIM)
        optimizer.param_groups[0]["params"] = list(net.parameters())
        checkpointer.restore()
        assert torch.equal(net.table.weight, right)


def test_another_checkpointer_that_restores(tmp_path: Path) -> None:
    net = Net(table=nn.Embedding(ROWS, DIM, max_norm=1.0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"model": net, "optim": optimizer}
    with hf.Checkpointer(tmp_path / "a", objects) as one, hf.Checkpointer(tmp_path / "b", objects) as other:
        saves = Saves(one, objects)
        other.save(0)
        usual(0, net, optimizer, nothing)
        saves()
        other.restore()
        saves()
        saves.check()


def test_accumulating_upon_an_empty_sparse_gradient(tmp_path: Path) -> None:
    """NumPy, once it had seen the empty list of rows, kept PyTorch from adding any to it."""
    net = Net(sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": optimizer}):
        net.table(torch.empty(0, dtype=torch.int64)).sum().backward()
        optimizer.step()
        net.table(ids()).sum().backward()
        optimizer.step()


class Odd(Net):
    """Has a buffer whose memory is not its values."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.view_as_complex(torch.randn(4, 2)).conj()
        self.register_buffer("phases", values)
        self.square = nn.Parameter(torch.randn(4, 4))


def test_tensors_whose_memory_is_not_their_values(tmp_path: Path) -> None:
    net = Odd()
    objects = {"model": net, "optim": torch.optim.SGD(net.parameters(), lr=0.1)}
    with hf.Checkpointer(tmp_path / "s", objects) as checkpointer:
        saves = Saves(checkpointer, objects)
        saves()
        saves()
        net.square.data = net.square.data.t()
        saves()
        saves()
        saves.check()
