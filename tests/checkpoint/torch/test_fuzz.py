"""Any model, any optimizers, any order of what a training loop can do: every version is what was saved.

A run is drawn from a seed: what the model is, what is done with it, when it is saved. What the objects'
states were at each save, bit for bit, is what each version that is listed must give back: in the same run,
and in objects that are made anew. A failure names its seed and all that was done.
"""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.memory import copy_on_write
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.errors import SaveVoid
from tests.checkpoint.torch.runs import BOTH, Net, Spec, any_spec, build, make_table

STRATEGIES: list[Any] = [
    hf.Full(), hf.Incremental(), hf.Differential("one-shot"), hf.Differential(), hf.Chunked(),
    hf.Chunked(round_versions=1), hf.Chunked("2d"), hf.Chunked("2d", threshold=0.0),
]  # fmt: skip
WEIGHTS: dict[str, float] = {
    "train": 12, "train_for_long": 1, "accumulate": 4, "step": 3, "clear": 1, "step_with_closure": 2,
    "keep": 3, "go_on": 3, "clip": 1, "evaluate": 2, "replace_gradients": 1, "write": 1,
    "write_and_mark": 1, "write_state_and_mark": 1, "load": 1, "add_group": 1, "decay": 1,
    "write_unseen": 0.5, "replace_table": 0.5, "hook": 2, "unhook": 1, "use_directly": 1,
    "train_in_threads": 1, "save": 14, "save_and_wait": 4, "restore": 2, "open_again": 1, "check": 2,
}  # fmt: skip
"""What is done, and about how often."""


def bits(tree: Any, path: str = "") -> dict[str, Any]:
    """Everything in a tree by its path; tensors as their bits.

    NaN is NaN: Adagrad changes the sign of one, in steps that have no gradient for it, with every step.
    """
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in bits(value, f"{path}.{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for i, value in enumerate(tree) for k, v in bits(value, f"{path}.{i}").items()}
    if isinstance(tree, Tensor):
        found = tree.detach().clone().reshape(-1)
        if found.is_floating_point():
            found[found.isnan()] = float("nan")
        found = found.view(torch.uint8)
        return {path: (tree.dtype, tuple(tree.shape), found.numpy().tobytes())}
    return {path: repr(tree)}


def states(objects: dict[str, Any]) -> dict[str, Any]:
    """Copies of all states, and of the random generators'."""
    found = {name: copy.deepcopy(thing.state_dict()) for name, thing in objects.items()}
    for name, parameter in objects["model"].named_parameters():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            found[f"{name} in backward"] = copy.deepcopy(optimizer.state_dict())
    return found | {"rng": [torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()]}


def differences(found: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """The paths at which two states differ, with the rows of tensors that do."""
    one, other = bits(found), bits(right)
    named = []
    for path in sorted(one.keys() | other.keys()):
        a, b = one.get(path), other.get(path)
        if a == b:
            continue
        if isinstance(a, tuple) and isinstance(b, tuple) and a[:2] == b[:2] and a[1]:
            left, right_ = (np.frombuffer(x[2], np.uint8).reshape(a[1][0], -1) for x in (a, b))
            named.append(f"{path}: rows {np.flatnonzero((left != right_).any(1)).tolist()}")
        else:
            named.append(f"{path}: {str(a)[:60]}, not {str(b)[:60]}")
    return named


def has_nan(tree: Any) -> bool:
    """Whether a state holds a number that is none.

    Rows whose sum is NaN become NaN in any step of Adagrad, with a gradient or without: once they are,
    nothing changes any more. Unless somebody gives them other weights, which is not done here.
    """
    if isinstance(tree, dict):
        return any(map(has_nan, tree.values()))
    return isinstance(tree, Tensor) and tree.is_floating_point() and bool(tree.isnan().any())


class Foreign:
    """A hook of an optimizer that is not the Checkpointer's: it changes what it can reach."""

    def __init__(self, seed: int, kind: str) -> None:
        self.rng, self.kind = random.Random(seed), kind

    def __call__(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.dim() == 2]
        if not parameters or self.rng.random() < 0.2:
            return
        weight = self.rng.choice(parameters)
        row = self.rng.randrange(len(weight))
        with torch.no_grad():
            if has_nan({"weight": weight, **optimizer.state.get(weight, {})}):
                return
            if self.kind == "weights":
                weight.clamp_(-0.1, 0.1) if self.rng.random() < 0.5 else weight[row].add_(0.5)
            elif self.kind == "state":
                for value in optimizer.state.get(weight, {}).values():
                    if isinstance(value, Tensor) and value.dim() and not value.is_sparse:
                        value[row].add_(0.5)
            elif weight.grad is not None and not weight.grad.is_sparse:
                if self.kind == "gradients":
                    weight.grad[row] += 0.5
                elif self.kind == "noise":
                    weight.grad += 0.01


class Run:
    """One run: what it is made of and what each of its versions must be."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.path = path
        torch.manual_seed(seed)
        self.spec: Spec = any_spec(self.rng)
        self.objects = build(self.spec)
        self.saved: dict[int, tuple[Spec, dict[str, Any]]] = {}
        self.kept: list[Tensor] = []
        self.done: list[str] = [repr(self.spec)]
        self.checks = 0
        self.hooks: list[Any] = []
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            self.do_hook()
        self.open()

    @property
    def net(self) -> Net:
        net: Net = self.objects["model"]
        return net

    def open(self) -> None:
        rng = self.rng
        policy = hf.Policy(
            strategy=rng.choice(STRATEGIES),
            keep=rng.choice([None, None, 1, 3]),
            when_busy=rng.choice(["wait", "wait", "skip", "cancel"]),
            verify=rng.choice([0, 0.0025, 0.5, "all"]),
            max_memory=rng.choice([None, None, 1, 2000]),
        )
        self.done.append(f"open({policy.strategy}, {policy.keep}, {policy.when_busy}, {policy.verify})")
        self.ckpt = hf.Checkpointer(self.path, self.objects, policy, allow_without_optimizer=True)

    # What a training loop does

    def ids(self, table: int) -> Tensor:
        rows = self.spec.tables[table].rows
        count = self.rng.choice([0, 1, 2, 5, 6])
        ids = torch.tensor([self.rng.randrange(rows) for _ in range(count)], dtype=torch.int64)
        if self.rng.random() < 0.2:
            ids = ids.int()
        return ids.reshape(1, -1) if self.rng.random() < 0.2 and count else ids

    def forward(self) -> Tensor:
        chosen = [i for i in range(len(self.spec.tables)) if self.rng.random() < 0.8]
        loss: Tensor = self.net({i: self.ids(i) for i in chosen})
        return loss * float("nan") if self.rng.random() < 0.03 else loss

    def backward(self, loss: Tensor) -> None:
        sparse = any(table.sparse or table.shared for table in self.spec.tables)
        try:
            torch.autograd.backward(loss, create_graph=self.rng.random() < 0.05 and not sparse)
        except RuntimeError as error:
            if "inplace operation" not in str(error):  # something was loaded in between
                raise

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [o for o in self.objects.values() if isinstance(o, torch.optim.Optimizer)]

    def clear(self) -> None:
        to_none = self.rng.random() < 0.8
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=to_none)
        if to_none:
            self.net.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers():
            if self.rng.random() < 0.9:
                optimizer.step()
        if "schedule" in self.objects and self.rng.random() < 0.5:
            self.objects["schedule"].step()

    def do_train(self) -> None:
        self.clear()
        self.backward(self.forward())
        if self.rng.random() < 0.2:
            self.do_clip()
        self.step()

    def do_train_for_long(self) -> None:
        for _ in range(self.rng.choice([3, 70])):
            self.do_train()

    def do_accumulate(self) -> None:
        for _ in range(self.rng.randint(1, 2)):
            self.backward(self.forward())

    def do_step(self) -> None:
        for _ in range(self.rng.randint(1, 2)):
            self.step()

    def do_clear(self) -> None:
        self.clear()

    def do_train_in_threads(self) -> None:
        """Gradients of two batches at once, one step."""
        self.clear()
        batches = [{i: self.ids(i) for i in range(len(self.spec.tables))} for _ in range(2)]
        if any(table.in_backward or "max_norm" in table.options for table in self.spec.tables):
            return  # these write in the forward or backward pass: PyTorch itself makes no promise
        threads = [threading.Thread(target=lambda b=b: self.backward(self.net(b))) for b in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.step()

    def do_use_directly(self) -> None:
        """From now on a table is looked up past its module, too; or no longer."""
        i, _, _ = self.table()
        if self.spec.tables[i].optimizer in (None, *BOTH):
            self.net.direct_now ^= {i}

    # What others do when an optimizer steps

    def do_hook(self) -> None:
        # The first is the network's: it has no rows.
        optimizer = self.rng.choice(self.optimizers()[1:] or self.optimizers())
        kinds = ["gradients", "noise", "weights", "weights", "state"]
        kind, post = self.rng.choice(kinds), self.rng.random() < 0.5
        register = optimizer.register_step_post_hook if post else optimizer.register_step_pre_hook
        self.done[-1] += f"({kind}, {'post' if post else 'pre'})"
        self.hooks.append(register(Foreign(self.rng.randrange(1 << 30), kind)))

    def do_unhook(self) -> None:
        if self.hooks:
            self.hooks.pop(self.rng.randrange(len(self.hooks))).remove()

    def do_step_with_closure(self) -> None:
        optimizer = self.rng.choice(self.optimizers())

        def closure() -> float:
            self.clear()
            loss = self.forward()
            self.backward(loss)
            return loss.item()

        optimizer.step(closure)

    def do_keep(self) -> None:
        """Look something up, and go on with it later."""
        self.kept.append(self.forward())

    def do_go_on(self) -> None:
        if self.kept:
            if self.rng.random() < 0.5:
                self.clear()
            self.backward(self.kept.pop(0))
            if self.rng.random() < 0.5:
                self.step()

    def do_clip(self) -> None:
        parameters = [p for p in self.net.parameters() if p.grad is not None]
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            parameters = [p for p in parameters if not (p.grad is not None and p.grad.is_sparse)]
        if parameters:
            if self.rng.random() < 0.2:
                assert parameters[-1].grad is not None
                parameters[-1].grad[0] = float("nan")
            nn.utils.clip_grad_norm_(parameters, 0.5)

    def do_evaluate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            self.forward()
        self.net.train()

    def do_replace_gradients(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    # What is done besides

    def table(self) -> tuple[int, Any, str]:
        i = self.rng.randrange(len(self.spec.tables))
        return i, self.net.tables[i], f"model.tables.{i}.weight"

    def any_nan(self) -> bool:
        return any(has_nan(thing.state_dict()) for thing in self.objects.values())

    def do_write(self) -> None:
        """As PyTorch counts it."""
        i, module, _ = self.table()
        if self.any_nan():
            return
        with torch.no_grad():
            module.weight[self.rng.randrange(self.spec.tables[i].rows)] = self.rng.random()

    def do_write_unseen(self) -> None:
        """As PyTorch does not count it: only digests tell, as long as the row is not looked up."""
        i, module, _ = self.table()
        if self.any_nan() or self.ckpt.policy.verify == 0:
            return
        if not self.ckpt._writer._unseen.digests_known:
            self.wait()  # nothing tells what is written unseen while the first baseline is read
        module.weight.data[self.rng.randrange(self.spec.tables[i].rows)] = self.rng.random()
        for _ in range(self.rng.choice([0, 1, 3])):
            self.do_save()
        if self.ckpt.policy.verify != "all":
            self.ckpt.check()
            self.do_save_and_wait()

    def do_write_and_mark(self) -> None:
        i, module, name = self.table()
        if self.any_nan():
            return
        if self.rng.random() < 0.5:
            row = self.rng.randrange(self.spec.tables[i].rows)
            module.weight.data[row] = self.rng.random()
            self.ckpt.mark(name, [row])
        else:
            module.weight.data.copy_(torch.randn_like(module.weight))
            self.ckpt.mark(name)

    def do_write_state_and_mark(self) -> None:
        _, module, name = self.table()
        for optimizer in self.optimizers():
            for value in optimizer.state.get(module.weight, {}).values():
                if isinstance(value, Tensor) and value.dim():
                    value.add_(0.5)
        self.ckpt.mark(name)

    def same_spec(self) -> list[int]:
        listed = self.trusted()
        return [n for n, (spec, _) in self.saved.items() if n in listed and spec == self.spec]

    def do_load(self) -> None:
        """What state_dict() gave at some save, into the model or an optimizer."""
        numbers = self.same_spec()
        if numbers:
            state = self.saved[self.rng.choice(numbers)][1]
            name = self.rng.choice(list(self.objects))
            if self.any_nan() or has_nan(state):
                return
            self.objects[name].load_state_dict(copy.deepcopy(state[name]))

    def do_add_group(self) -> None:
        owned = {p for _, groups in self.spec.groups for group in groups for p in group}
        for i, table in enumerate(self.spec.tables):
            for name, groups in self.spec.groups:
                if f"tables.{i}" not in owned and name in BOTH and not table.in_backward:
                    optimizer = self.objects[f"optim-{name}"]
                    optimizer.add_param_group({"params": list(self.net.tables[i].parameters())})
                    groups.append([f"tables.{i}"])
                    table.optimizer = name
                    return

    def do_decay(self) -> None:
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                weights = {id(p) for p in group["params"]}
                sparse = any(
                    id(module.weight) in weights and (table.sparse or table.shared)
                    for table, module in zip(self.spec.tables, self.net.tables, strict=True)
                )
                if "weight_decay" in group and not sparse:
                    group["weight_decay"] = self.rng.choice([0.0, 0.0, 0.01])
                if "maximize" in group:
                    group["maximize"] = self.rng.random() < 0.2

    def do_replace_table(self) -> None:
        """With one of other rows, or as many."""
        i, before, _ = self.table()
        table = self.spec.tables[i]
        if table.tied or table.shared is not None or table.in_backward:
            return
        table.rows += self.rng.choice([0, 0, 3])
        if table.options.get("padding_idx", 0) >= table.rows:
            return
        module = make_table(table, self.spec.dim)
        self.net.tables[i] = module
        for optimizer in self.optimizers():
            optimizer.state.pop(before.weight, None)
            for group in optimizer.param_groups:
                group["params"] = [module.weight if p is before.weight else p for p in group["params"]]
        if len(module.weight) != len(before.weight):
            self.do_save()  # new rows have no marks before

    # Checkpoints

    def do_save(self) -> None:
        self.remember(self.ckpt.save(len(self.done)))

    def do_save_and_wait(self) -> None:
        self.do_save()
        self.wait()

    def wait(self) -> None:
        with contextlib.suppress(SaveVoid):  # then the version is not listed
            self.ckpt.wait()

    def remember(self, version: int | None) -> None:
        if version is not None:
            self.saved[version] = copy.deepcopy(self.spec), states(self.objects)

    def do_restore(self) -> None:
        self.wait()
        numbers = self.same_spec()
        if numbers:
            number = self.rng.choice([numbers[-1], self.rng.choice(numbers)])
            self.done[-1] += f"({number})"
            self.ckpt.restore(number)
            self.compare(number, self.objects)

    def do_open_again(self) -> None:
        with contextlib.suppress(SaveVoid):
            self.ckpt.close()
        self.open()
        if self.rng.random() < 0.7:
            self.do_restore()

    def do_check(self) -> None:
        """Restore into objects that are made anew, from a copy of the store: this run has the lock."""
        self.wait()
        listed = self.trusted()
        if listed:
            self.check(self.rng.sample(listed, min(2, len(listed))))

    def trusted(self) -> list[int]:
        """Versions of which nothing is known against them."""
        return [v.version for v in self.ckpt.versions() if not v.unverified]

    def check(self, numbers: list[int]) -> None:
        random_states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self.checks += 1
        other = self.path.with_name(f"{self.path.name}-{self.checks}")
        shutil.copytree(self.path, other)
        for number in numbers:
            objects = build(copy.deepcopy(self.saved[number][0]))
            with hf.Checkpointer(other, objects, allow_without_optimizer=True) as ckpt:
                ckpt.restore(number)
                self.compare(number, objects)
        shutil.rmtree(other)
        torch.set_rng_state(random_states[0])
        np.random.set_state(random_states[1])
        random.setstate(random_states[2])

    def compare(self, number: int, objects: dict[str, Any]) -> None:
        found = differences(states(objects), self.saved[number][1])
        assert not found, f"version {number}: {found}"

    def run(self, actions: int) -> None:
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        mine = [w * self.rng.choice([0, 0.3, 1, 1]) for w in weights]
        mine[names.index("save")] = 10
        try:
            for name in self.rng.choices(names, mine, k=actions):
                self.done.append(name)
                getattr(self, f"do_{name}")()
            self.ckpt.check()
            self.do_save_and_wait()
            self.check(self.trusted())
        finally:
            self.ckpt.close()


def run(path: Path, seed: int, actions: int) -> None:
    """The run of a seed."""
    made = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = Run(path / str(seed), seed)
            made.run(actions)
    except Exception as error:
        done = "\n".join(made.done) if made is not None else ""
        raise AssertionError(f"seed {seed}: {error!r}\n{done}") from error
    finally:
        shutil.rmtree(path / str(seed), ignore_errors=True)


SEEDS = pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 2000), marks=pytest.mark.soak)], ids=len
)


@SEEDS
def test_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    for seed in seeds:
        run(tmp_path, seed, 60)


@SEEDS
def test_any_run_whose_rows_are_read_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    """Copy-on-write snapshots, in blocks of few rows, read slowly."""
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    monkeypatch.setattr(copy_on_write, "COPIED_BYTES", 0)
    monkeypatch.setattr(copy_on_write, "BLOCK_BYTES", 100)
    copied, rng = LiveTables.copy_range, random.Random(seeds[0])
    reads = 0

    def slowly(*arguments: Any) -> None:
        nonlocal reads
        reads += 1
        time.sleep(rng.choice([0, 0.001, 0.004]))
        copied(*arguments)
        time.sleep(rng.choice([0, 0.001, 0.004]))

    monkeypatch.setattr(LiveTables, "copy_range", slowly)
    for seed in seeds:
        run(tmp_path, seed, 60)
    assert reads > 20 * len(seeds)
