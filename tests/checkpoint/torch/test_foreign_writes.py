"""What others do to tables in and around an optimizer's step: every version has it, whatever the order."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import holdfast as hf
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.memory.tracker import Tracker
from tests.checkpoint.torch.test_watch import Net, check, ids, optimizer_of, state_of, usual

_ROUNDS = 40
Hook = Callable[[torch.optim.Optimizer, Any, Any], None]


def clamps(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.5, 0.5)


def evicts(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    weight = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        weight[torch.randint(0, len(weight), (3,))] = 0.25


def resets_state(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if value.dim() == 2:
                value[torch.randint(0, len(value), (3,))] = 0.5


def adds_noise(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    gradient = optimizer.param_groups[0]["params"][0].grad
    if gradient is not None and not gradient.is_sparse:
        gradient.add_(0.01)


def adds_other_rows(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    """As an all-reduce does: other ranks have looked up other rows."""
    weight = optimizer.param_groups[0]["params"][0]
    if weight.grad is None:
        return
    if weight.grad.is_sparse:
        rows = torch.randint(0, len(weight), (1, 3))
        weight.grad = weight.grad + torch.sparse_coo_tensor(
            rows, torch.ones(3, weight.shape[1]), weight.shape
        )
    else:
        weight.grad[torch.randint(0, len(weight), (3,))] += 1.0


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("first", [True, False], ids=["registered before", "registered after"])
@pytest.mark.parametrize("post", [True, False], ids=["post", "pre"])
@pytest.mark.parametrize(
    "hook", [clamps, evicts, resets_state, adds_noise, adds_other_rows], ids=lambda hook: hook.__name__
)
def test_hooks_of_others(
    tmp_path: Path, hook: Hook, post: bool, first: bool, name: str, sparse: bool
) -> None:
    torch.manual_seed(0)
    net = Net(sparse)
    optimizer = optimizer_of(net, name)

    def register() -> None:
        (optimizer.register_step_post_hook if post else optimizer.register_step_pre_hook)(hook)

    if first:
        register()
    check(tmp_path / "s", net, optimizer, usual, object if first else register)


def test_hooks_that_come_later_and_two_checkpointers(tmp_path: Path) -> None:
    """Each puts its own hooks next to the step; that of somebody else may come at any time."""
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizer_of(net, "adagrad")
    steps = 0

    def step(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
        nonlocal steps
        if i in (2, 4):
            optimizer.register_step_pre_hook(adds_other_rows)
        if i in (3, 5):
            optimizer.register_step_post_hook(evicts)
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(next(reversed(hooks)), last=False)
        usual(i, net, optimizer, save)
        steps += 1

    with hf.Checkpointer(tmp_path / "other", {"model": net, "optim": optimizer}) as other:
        other.save(0)
        check(tmp_path / "s", net, optimizer, step)
    assert steps == 10


def test_closures_that_write(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()

    def step(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            evicts(optimizer, (), {})
            loss = net(ids())
            loss.backward()
            return float(loss)

        optimizer.step(closure)
        save()

    check(tmp_path / "s", net, optimizer_of(net, "adagrad"), step)


def late(net: Net, i: int) -> Tensor:
    """From the middle on, a table is used past its module, too."""
    loss: Tensor = net(ids())
    if i % 10 > 4:
        loss = loss + functional.embedding(ids(), net.table.weight).sum() + net.other.weight[i % 50].sum()
    return loss


@pytest.mark.parametrize("verify", [0, 0.0025, "all"])
@pytest.mark.parametrize("clears_first", [True, False], ids=["clears before", "clears behind"])
def test_direct_use_that_begins_late(tmp_path: Path, verify: Any, clears_first: bool) -> None:
    """Versions are right, or flagged: where gradients are cleared right behind the step, a save cannot see
    them, and only the next step tells."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    objects = {"model": net, "optim": optimizer}
    right: dict[int, dict[str, Any]] = {}
    policy = hf.Policy(strategy="incremental", verify=verify)
    with hf.Checkpointer(tmp_path / "s", objects, policy) as checkpointer:
        for i in range(60):
            if clears_first:
                optimizer.zero_grad()
            torch.autograd.backward(late(net, i))
            optimizer.step()
            if not clears_first:
                optimizer.zero_grad()
            if i % 10 in (3, 9):
                right[checkpointer.save(i) or 0] = state_of(objects)
        checkpointer.save(60)
        checkpointer.wait()
        flagged = {v.version for v in checkpointer.versions() if v.unverified}
        wrong = set()
        for version, state in right.items():
            checkpointer.restore(version)
            if not torch.equal(net.table.weight, state["model"]["table.weight"]):
                wrong.add(version)
    assert wrong <= flagged
    if clears_first or verify == "all":
        assert not wrong


def test_optimizers_that_step_in_the_backward_pass(tmp_path: Path) -> None:
    def make() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Net()
        _apply_optimizer_in_backward(torch.optim.Adagrad, net.table.parameters(), {"lr": 0.1})
        _apply_optimizer_in_backward(torch.optim.Adam, net.top.parameters(), {"lr": 0.1})
        return net, torch.optim.SGD(net.other.parameters(), lr=0.1)

    def states(net: Net) -> list[Any]:
        parameters: list[Any] = [net.table.weight, *net.top.parameters()]
        found = [parameter._in_backward_optimizers[0] for parameter in parameters]
        return copy.deepcopy([optimizer.state_dict() for optimizer in found])

    net, optimizer = make()
    right = {}
    with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": optimizer}) as checkpointer:
        for i in range(8):
            usual(i, net, optimizer, lambda: None)
            right[checkpointer.save(i)] = states(net), copy.deepcopy(net.state_dict())
    for version, (optimizers, weights) in right.items():
        net, optimizer = make()
        with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": optimizer}) as checkpointer:
            checkpointer.restore(version)
        for name, value in net.state_dict().items():
            assert torch.equal(value, weights[name]), f"{name} of version {version}"
        for one, other in zip(states(net), optimizers, strict=True):
            for name, value in one["state"][0].items():
                assert torch.equal(value, other["state"][0][name]), f"{name} of version {version}"


def test_optimizers_that_come_too_late_are_refused(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": optimizer}) as checkpointer:
        checkpointer.save(0)
        _apply_optimizer_in_backward(torch.optim.Adagrad, net.top.parameters(), {"lr": 0.1})
        with pytest.raises(hf.ConfigError, match=r"model\.top\.weight has got an optimizer that steps in"):
            checkpointer.save(1)


def test_tables_that_nobody_owns_are_refused(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD([*net.other.parameters(), *net.top.parameters()], lr=0.1)
    objects = {"model": net, "optim": optimizer}
    with pytest.raises(hf.ConfigError, match=r"no optimizer among the objects owns model\.table\.weight"):
        hf.Checkpointer(tmp_path / "s", objects)
    assert not (tmp_path / "s").exists()
    with hf.Checkpointer(tmp_path / "s", objects, allow_without_optimizer=True) as checkpointer:
        checkpointer.save(0)
    average = AveragedModel(net)
    net.table.requires_grad_(False)
    with hf.Checkpointer(tmp_path / "t", objects | {"average": average}) as checkpointer:
        checkpointer.save(0)


def test_threads_that_mark_at_once() -> None:
    """Rows of two threads share every word of the bitmap."""
    rows = 1 << 20
    tracker = Tracker(make_groups([("t", rows, (Field("weight", "F32", 1),))]))
    parts = np.arange(0, rows, 2), np.arange(rows - 1, 0, -2)  # they meet in some word
    begin, end = threading.Barrier(2), threading.Barrier(2)

    def mark_odd() -> None:
        for _ in range(_ROUNDS):
            begin.wait()
            tracker.mark("t", parts[1])
            end.wait()

    thread = threading.Thread(target=mark_odd)
    thread.start()
    found = []
    for _ in range(_ROUNDS):
        begin.wait()
        tracker.mark("t", parts[0])
        end.wait()
        found.append(len(tracker.take()[0]))
        tracker.confirm()
    thread.join()
    assert found == [rows] * _ROUNDS


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_compiled_steps(tmp_path: Path, backend: str, sparse: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = Net(sparse)
    optimizer = optimizer_of(net, "sgd")
    compiled = torch.compile(optimizer.step, backend=backend)

    def step(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
        optimizer.zero_grad()
        net(ids()).backward()
        compiled()
        save()

    check(tmp_path / "s", net, optimizer, step)


@pytest.mark.parametrize("how", [functional.embedding, "numpy", "data"], ids=["function", "numpy", "data"])
def test_writes_that_nobody_counts(tmp_path: Path, how: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The net below: whatever changed, sooner or later it is found, saved and said."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"model": net, "optim": optimizer}
    right: dict[int, dict[str, Any]] = {}
    with hf.Checkpointer(
        tmp_path / "s", objects, hf.Policy(strategy="incremental", verify=1e-9)
    ) as checkpointer:
        for i in range(6):
            usual(i, net, optimizer, lambda: None)
            if i == 3:
                if how == "numpy":
                    net.table.weight.detach().numpy()[5] = 1.0
                else:
                    net.table.weight.data[5] = 1.0
            right[checkpointer.save(i) or 0] = state_of(objects)
        assert checkpointer.check() == 1
        assert checkpointer.check() == 0
        right[checkpointer.save(6) or 0] = state_of(objects)
        checkpointer.wait()
        versions = {v.version: v.unverified for v in checkpointer.versions()}
        assert [v for v, why in versions.items() if why] == [2, 3, 4, 5, 6]  # the first is a baseline
        assert "1 rows of model.table.weight have changed unseen" in caplog.text
        checkpointer.restore()
        assert torch.equal(net.table.weight, right[7]["model"]["table.weight"])
