"""Rows change in steps, not in lookups: whatever a training loop does in between, versions are right."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import holdfast as hf
from holdfast.checkpoint.torch import watch as torch_watch

ROWS, DIM = 300, 4


class Net(nn.Module):
    """Two tables, of which one is looked up as usual."""

    def __init__(self, sparse: bool = False, table: nn.Embedding | None = None) -> None:
        super().__init__()
        self.table = table or nn.Embedding(ROWS, DIM, sparse=sparse)
        self.other = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.top(self.table(ids) + self.other(ids))
        return (x - 1).square().mean()


class Hashed(nn.Embedding):
    """Looks up other rows than it is given."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input * 7 + 3) % ROWS)


class Whole(nn.Embedding):
    """Uses all rows in every lookup."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(input, self.weight - self.weight.mean(0))


class Named(nn.Embedding):
    """Calls its argument something else."""

    def forward(self, *, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


class NamedNet(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.top(self.table(ids=ids) + self.other(ids))
        return (x - 1).square().mean()


class DirectNet(Net):
    """Uses a table without its module."""

    def forward(self, ids: Tensor) -> Tensor:
        sparse = self.table.sparse
        rows = functional.embedding((ids * 11) % ROWS, self.table.weight, sparse=sparse)
        x: Tensor = self.top(self.table(ids) + rows)
        return (x - 1).square().mean()


class TiedNet(Net):
    """Uses a table as its last layer, too."""

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(self.table(ids), self.table.weight), ids)


Step = Callable[[int, Net, torch.optim.Optimizer, Callable[[], None]], None]


def ids() -> Tensor:
    return torch.randint(0, ROWS, (6,))


def usual(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    optimizer.zero_grad()
    net(ids()).backward()
    optimizer.step()
    save()


def accumulates(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    net(ids()).backward()
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
    save()


def saves_before_steps(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    optimizer.zero_grad()
    net(ids()).backward()
    save()
    optimizer.step()


def looks_ahead(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    """What is looked up is computed with after the next lookup."""
    before = net.__dict__.get("ahead")
    net.__dict__["ahead"] = net.table(ids()).sum() + net.other(ids()).sum()
    if before is not None:
        optimizer.zero_grad()
        before.backward()
        optimizer.step()
    save()


def clears_seldom(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    if i % 4 == 0:
        optimizer.zero_grad()
    net(ids()).backward()
    optimizer.step()
    save()


def clears_in_place(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    optimizer.zero_grad(set_to_none=False)
    net(ids()).backward()
    optimizer.step()
    save()


def decays_for_a_while(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    for decay in (0.1, 0.0):
        for group in optimizer.param_groups:
            group["weight_decay"] = decay if not net.table.sparse else 0.0
        optimizer.zero_grad()
        net(ids()).backward()
        optimizer.step()
    save()


def writes(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    usual(i, net, optimizer, lambda: None)
    if i == 4:
        with torch.no_grad():
            net.table.weight[7:9] = 1.0
    save()
    if i == 5:
        net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})


def replaces(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
    if i == 4:
        net.table.weight.data = torch.randn(ROWS, DIM)
    if i == 6:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for state in optimizer.state.values():
            for value in state.values():
                if value.dim():
                    value.add_(1)
    usual(i, net, optimizer, save)


STEPS = [
    usual, accumulates, saves_before_steps, looks_ahead, clears_seldom, clears_in_place, decays_for_a_while,
    writes, replaces,
]  # fmt: skip


def state_of(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(thing.state_dict()) for name, thing in objects.items()}


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}.{key}").items()}
    return {path: tree}


def check(
    path: Path, net: Net, optimizer: torch.optim.Optimizer, step: Step, prepare: Callable[[], object] = object
) -> None:
    """Every version of ten steps comes back as it was when it was saved."""
    objects = {"model": net, "optim": optimizer}
    saved: dict[int, dict[str, Any]] = {}
    with hf.Checkpointer(path, objects) as checkpointer:
        prepare()

        def save() -> None:
            version = checkpointer.save(len(saved))
            assert version is not None
            saved[version] = state_of(objects)

        for i in range(10):
            step(i, net, optimizer, save)
        for version, right in saved.items():
            checkpointer.restore(version)
            found = state_of(objects)
            for name, value in flat(right).items():
                if isinstance(value, Tensor):
                    assert torch.equal(flat(found)[name], value), f"{name} of version {version}"


def optimizer_of(net: nn.Module, name: str) -> torch.optim.Optimizer:
    makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    return makes[name](net.parameters(), lr=0.1)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_whatever_comes_between_a_lookup_and_its_step(
    tmp_path: Path, step: Step, name: str, sparse: bool
) -> None:
    torch.manual_seed(0)
    net = Net(sparse)
    check(tmp_path / "s", net, optimizer_of(net, name), step)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("kind", "table"),
    [(Net, Hashed), (Net, Whole), (NamedNet, Named), (DirectNet, None), (TiedNet, None)],
    ids=["hashed", "whole", "named", "direct", "tied"],
)
def test_tables_that_are_used_in_ways_that_lookups_do_not_show(
    tmp_path: Path, kind: type[Net], table: type[nn.Embedding] | None, sparse: bool
) -> None:
    torch.manual_seed(0)
    net = kind(sparse, None if table is None else table(ROWS, DIM, sparse=sparse))
    check(tmp_path / "s", net, torch.optim.Adagrad(net.parameters(), lr=0.1), usual)


def test_ids_that_another_hook_rewrites(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    rewrite = lambda module, inputs: ((inputs[0] + 1) % ROWS,)  # noqa: E731
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    check(tmp_path / "s", net, optimizer, usual, lambda: net.table.register_forward_pre_hook(rewrite))


def test_use_that_begins_later_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_watch, "CHECK_EVERY", 4)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"model": net, "optim": optimizer}
    with hf.Checkpointer(tmp_path / "s", objects) as checkpointer:
        for i in range(9):
            optimizer.zero_grad()
            (net(ids()) + (net.table.weight[i].sum() if i > 2 else 0)).backward()
            optimizer.step()
            checkpointer.save(i)
        right = state_of(objects)
        checkpointer.save(9)
        checkpointer.restore()
        assert torch.equal(net.table.weight, right["model"]["table.weight"])


@pytest.mark.parametrize("before", [False, True], ids=["compiled later", "compiled before"])
def test_compiled_models(tmp_path: Path, before: bool) -> None:
    """Hooks do not run in what was compiled before, and must not break what is compiled later."""
    torch.manual_seed(0)
    net = Net()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    if before:
        compiled(ids())

    def step(i: int, net: Net, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
        optimizer.zero_grad()
        compiled(ids()).backward()
        optimizer.step()
        save()

    check(tmp_path / "s", net, torch.optim.Adagrad(net.parameters(), lr=0.1), step)


def test_copies_and_pickles_of_a_watched_model_are_not_watched(tmp_path: Path) -> None:
    net = Net()
    with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": torch.optim.SGD(net.parameters(), lr=0.1)}):
        torch.save(net, tmp_path / "net.pt")
        for other in (copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)):
            assert torch.equal(other(torch.arange(5)), net(torch.arange(5)))
        torch.func.grad(lambda w: torch.func.functional_call(net, w, torch.arange(3)))(
            dict(net.named_parameters())
        )


def test_tables_that_come_go_and_grow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": optimizer}) as checkpointer:
        usual(0, net, optimizer, lambda: None)
        checkpointer.save(0)
        net.table = nn.Embedding(ROWS + 20, DIM)
        optimizer.param_groups[0]["params"] = list(net.parameters())
        for i in range(1, 4):
            usual(i, net, optimizer, lambda: None)
            checkpointer.save(i)
    right = net.table.weight.detach().clone()
    again = Net(table=nn.Embedding(ROWS + 20, DIM))
    others = {"model": again, "optim": torch.optim.SGD(again.parameters(), lr=0.1)}
    with hf.Checkpointer(tmp_path / "s", others) as checkpointer:
        assert checkpointer.restore() == 4
    assert torch.equal(again.table.weight, right)


def test_an_interrupt_loses_no_marks_and_blocks_nothing(tmp_path: Path) -> None:
    """As Ctrl-C, at many moments of a save; the next one has what that one was to have."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    main = threading.get_ident()

    def strike(seconds: float) -> None:
        time.sleep(seconds)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with hf.Checkpointer(tmp_path / "s", {"model": net, "optim": optimizer}) as checkpointer:
            # Not while kernels are being loaded: LLVM does not survive that.
            for i in range(3):
                usual(i, net, optimizer, lambda: None)
                checkpointer.save(i)
            checkpointer.wait()
            interrupted = 0
            for i in range(3, 120):
                usual(i, net, optimizer, lambda: None)
                thread = threading.Thread(target=strike, args=(5e-6 * i,))
                with contextlib.suppress(KeyboardInterrupt):
                    thread.start()
                    try:
                        checkpointer.save(i)
                    except KeyboardInterrupt:
                        interrupted += 1
                    thread.join()
                thread.join()
            checkpointer.save(200)
            right = net.table.weight.detach().clone()
            checkpointer.restore()
            assert torch.equal(net.table.weight, right)
            assert interrupted
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("step", "metadata", "says"),
    [
        (1, "best so far", "expected a dict"),
        (1, [1], "expected a dict"),
        (1, {"loss": float("nan")}, "not JSON-serializable"),
        (1, {"ids": {1, 2}}, "not JSON-serializable"),
        (1, {"x": "\ud800"}, "not JSON-serializable"),
        (2.5, {}, "whole number"),
        ("7", {}, "whole number"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_with_a_version_is_refused(
    tmp_path: Path, step: Any, metadata: Any, says: str
) -> None:
    with hf.Checkpointer(tmp_path / "s", {"model": Net()}, allow_without_optimizer=True) as checkpointer:
        checkpointer.save(0)
        with pytest.raises(hf.ConfigError, match=says):
            checkpointer.save(step, metadata)
        checkpointer.wait()
        assert len(checkpointer.versions()) == 1


def test_metadata_is_what_it_was_then(tmp_path: Path) -> None:
    notes: dict[str, Any] = {"losses": []}
    with hf.Checkpointer(tmp_path / "s", {"model": Net()}, allow_without_optimizer=True) as checkpointer:
        for i in range(3):
            notes["losses"].append(i)
            checkpointer.save(i, notes)
        checkpointer.wait()
        assert [v.metadata["losses"] for v in checkpointer.versions()] == [[0], [0, 1], [0, 1, 2]]


def test_steps_that_are_counted_anew_in_each_epoch(tmp_path: Path) -> None:
    with hf.Checkpointer(
        tmp_path / "s", {"model": Net()}, hf.Policy(every_steps=5), allow_without_optimizer=True
    ) as checkpointer:
        for _ in range(3):
            for step in range(10):
                checkpointer.step(step)
        checkpointer.wait()
        assert len(checkpointer.versions()) == 6


@pytest.mark.parametrize(
    "wrong",
    [{"strategy": hf.Chunked}, {"strategy": None}, {"keep": 5.0}, {"quantize": 4.0}, {"every_steps": "3"}],
    ids=str,
)
def test_policies_that_could_only_fail_later(wrong: dict[str, Any]) -> None:
    with pytest.raises(hf.ConfigError, match=next(iter(wrong))):
        hf.Policy(**wrong)
