"""``restore()`` into tables that have more rows than were saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Rprop

import holdfast as hf
from tests.checkpoint.lineage import STRATEGIES

ROWS, MORE, DIM = 40, 7, 4


class Run:
    """A table whose optimizer is made first, or makes its state in its first step."""

    def __init__(self, rows: int, make: Any = lambda p: Adagrad(p, initial_accumulator_value=0.5)) -> None:
        self.model = nn.ModuleDict({"table": nn.Embedding(rows, DIM), "top": nn.Linear(DIM, 1)})
        self.optimizer = make(self.model.parameters())
        self.objects = {"model": self.model, "optim": self.optimizer}

    @property
    def weight(self) -> Tensor:
        weight = self.model["table"].weight
        assert isinstance(weight, Tensor)
        return weight

    def state(self, key: str) -> Tensor:
        found: Tensor = self.optimizer.state[self.weight][key]
        return found

    def train(self, seed: int) -> None:
        ids = torch.randint(len(self.weight), (9,), generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.model["top"](self.model["table"](ids)).square().mean().backward()
        self.optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_run_goes_on_with_larger_tables(
    tmp_path: Path, strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    small, policy = Run(ROWS), hf.Policy(strategy=strategy)
    with hf.Checkpointer(tmp_path, small.objects, policy) as ckpt:
        for step in range(4):
            small.train(step)
            ckpt.save(step)
    large = Run(ROWS + MORE)
    new = large.weight[ROWS:].detach().clone()
    with (
        caplog.at_level(logging.WARNING, "holdfast.checkpoint"),
        hf.Checkpointer(tmp_path, large.objects, policy) as ckpt,
    ):
        assert ckpt.restore() == 4
        assert torch.equal(large.weight[:ROWS], small.weight)
        assert torch.equal(large.weight[ROWS:], new)
        assert torch.equal(large.state("sum")[:ROWS], small.state("sum"))
        assert torch.equal(large.state("sum")[ROWS:], torch.full((MORE, DIM), 0.5))
        for step in range(4, 7):
            large.train(step)
            ckpt.save(step)
            assert ckpt.check() == 0
        ckpt.wait()
        assert ckpt.reports[0].baseline  # other tables: nothing can be based on what was saved
    assert "table model.table.weight has 40 rows in version 4 and 47 here" in caplog.text
    after = Run(ROWS + MORE)
    with hf.Checkpointer(tmp_path, after.objects, policy) as ckpt:
        assert ckpt.restore() == 7
        assert torch.equal(after.weight, large.weight)
        assert torch.equal(after.state("sum"), large.state("sum"))
    with (
        hf.Checkpointer(tmp_path, Run(ROWS).objects, policy) as ckpt,
        pytest.raises(hf.ModelMismatch, match=r"table.weight is .*\[47, 4\] in .*\[40, 4\] here"),
    ):
        ckpt.restore()


def test_state_that_the_optimizer_makes_in_its_first_step(tmp_path: Path) -> None:
    small = Run(ROWS, Adam)
    with hf.Checkpointer(tmp_path, small.objects) as ckpt:
        for step in range(2):
            small.train(step)
        ckpt.save(1)
    large = Run(ROWS + MORE, Adam)
    with hf.Checkpointer(tmp_path, large.objects) as ckpt:
        assert ckpt.restore() == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(large.state(key)[:ROWS], small.state(key))
            assert large.state(key).shape == large.weight.shape
            assert not large.state(key)[ROWS:].any()
        large.train(2)


def test_state_of_which_it_is_not_known_what_it_begins_with(tmp_path: Path) -> None:
    small = Run(ROWS, Rprop)
    with hf.Checkpointer(tmp_path, small.objects) as ckpt:
        small.train(0)
        ckpt.save(0)
    large = Run(ROWS + MORE, Rprop)
    before = large.weight.detach().clone()
    with hf.Checkpointer(tmp_path, large.objects) as ckpt:
        with pytest.raises(hf.ModelMismatch, match=r"model.table.weight has grown .* optim \(Rprop\) begins"):
            ckpt.restore()
        assert torch.equal(large.weight, before)
        large.train(1)
        known = large.state("step_size")[ROWS:].clone()
        assert ckpt.restore() == 1
        assert torch.equal(large.state("step_size")[ROWS:], known)
        assert torch.equal(large.state("step_size")[:ROWS], small.state("step_size"))


def test_rows_of_a_damaged_version_do_not_stay(tmp_path: Path) -> None:
    """The newest version has more rows than the one before, and is found damaged while they are read."""
    policy = hf.Policy(strategy="full")
    for run in (Run(ROWS), Run(ROWS + MORE)):
        with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
            ckpt.save(0)
    (chunk,) = (tmp_path / "chunks").glob("00000002-*")
    data = bytearray(chunk.read_bytes())
    data[-20] ^= 1
    chunk.write_bytes(data)
    run = Run(ROWS + MORE)
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        with pytest.raises(
            hf.CorruptCheckpoint, match=r"40 rows of table .*, but 47 were overwritten by one"
        ):
            ckpt.restore()
        with pytest.raises(hf.CorruptCheckpoint, match="make the objects anew"):
            ckpt.restore(1)
    with hf.Checkpointer(tmp_path, Run(ROWS + MORE).objects, policy) as ckpt:
        assert ckpt.restore(1) == 1
