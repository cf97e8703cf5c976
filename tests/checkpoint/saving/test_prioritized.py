"""A Checkpointer that saves the rows first that matter most: what is in a version, and what comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Checkpointer, ConfigError, Policy
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.memory.priority import MostUsed
from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.options import PRIORITIES, PriorityName

ROWS, SMALL = 4000, 3


class Model(nn.Module):
    """A large table and one that is so small that it is saved whole."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.small = nn.EmbeddingBag(SMALL, 4, mode="sum", sparse=True)
        self.optimizer = [torch.optim.SGD(self.parameters(), lr=1.0)]

    @property
    def objects(self) -> dict[str, object]:
        return {"model": self, "optim": self.optimizer[0]}

    def look_up(self, *rows: int) -> None:
        """Look up rows of both tables, and train."""
        ids = torch.tensor(rows)
        self.optimizer[0].zero_grad()
        found = self.large(ids, torch.arange(len(rows))) + self.small(ids % SMALL, torch.arange(len(rows)))
        found.sum().backward()
        self.optimizer[0].step()


def tables(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    return model.large.weight.detach().clone(), model.small.weight.detach().clone()


@pytest.mark.parametrize("name", PRIORITIES)
@pytest.mark.parametrize("strategy", ["incremental", "differential", "chunked"])
def test_rows_come_back_as_they_were_last_saved(tmp_path: Path, name: PriorityName, strategy: str) -> None:
    """The first rows are those that all three ways agree on; the others stay as old as the baseline."""
    model = Model()
    hot = list(range(16)) * 30
    policy = Policy(every_steps=8, prioritize=name, fraction=0.01, strategy=strategy, save_last=False)  # type: ignore[arg-type]
    with Checkpointer(tmp_path, model.objects, policy) as checkpointer:
        assert checkpointer.step(0) == 1  # a baseline: everything
        before = tables(model)
        model.look_up(*hot)
        model.look_up(*range(1000, 1200))  # ssu does not look at this batch
        now = tables(model)
        assert checkpointer.step(1) == 2
        checkpointer.wait()
        assert checkpointer.reports[1].rows <= 40 + SMALL
        other = Model()
    with Checkpointer(tmp_path, other.objects, policy) as second:
        assert second.restore() == 2
    large, small = tables(other)
    assert torch.equal(small, now[1])
    assert torch.equal(large[:16], now[0][:16])
    saved = (large == now[0]).all(1) & (now[0] != before[0]).any(1)
    assert int(saved.sum()) <= 40
    assert torch.equal(large[~saved], before[0][~saved])
    assert int((large[1000:1200] != now[0][1000:1200]).any(1).sum()) >= 160


def test_what_is_left_out_comes_later_and_save_leaves_nothing_out(tmp_path: Path) -> None:
    model = Model()
    policy = Policy(every_steps=1, prioritize="mfu", fraction=0.01)
    with Checkpointer(tmp_path, model.objects, policy) as checkpointer:
        checkpointer.step(0)
        model.look_up(*range(100))
        for step in (1, 2, 3):
            checkpointer.step(step)
        checkpointer.wait()
        assert [report.rows for report in checkpointer.reports[1:]] == [40 + SMALL, 40, 20]
        model.look_up(*range(200))
        assert checkpointer.save(4) is not None
        checkpointer.wait()
        assert checkpointer.reports[-1].rows == 200 + SMALL
        other = Model()
        now = tables(model)
    with Checkpointer(tmp_path, other.objects, policy) as second:
        second.restore()
    assert torch.equal(other.large.weight, now[0])
    assert torch.equal(other.small.weight, now[1])


def test_a_fraction_of_the_rows_is_saved_after_that_fraction_of_the_steps(tmp_path: Path) -> None:
    model = Model()
    policy = Policy(every_steps=16, prioritize="mfu", fraction=0.125)
    with Checkpointer(tmp_path, model.objects, policy) as checkpointer:
        saved = [step for step in range(1, 17) if checkpointer.step(step) is not None]
    assert saved == [2, 4, 6, 8, 10, 12, 14, 16]


def test_rows_of_a_save_that_failed_come_first() -> None:
    (group,) = make_groups([("a", 100, (Field("weight", "F32", 2),)), ("b", 4, (Field("weight", "F32", 2),))])
    tracker = Tracker([group], {"a": MostUsed(100, 0.02)})
    tracker.mark("a", np.array([5, 5, 7, 7, 9, 9, 9]))
    tracker.mark("b", np.array([0, 3]))
    assert tracker.take(whole=False)[0].tolist() == [5, 9, 100, 103]
    tracker.mark("a", np.repeat(np.arange(20, 24), 10))
    tracker.give_back()
    assert tracker.take(whole=False)[0].tolist() == [5, 9, 100, 103]
    tracker.confirm()
    tracker.suspect("a")
    assert tracker.take()[0].tolist() == list(range(100))


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match="prioritize is 'lru': expected mfu, ssu, scar or None"):
        Policy(prioritize="lru")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fraction is 0: expected above 0"):
        Policy(prioritize="mfu", fraction=0)
    with pytest.raises(ConfigError, match="cannot be combined with strategy 'full'"):
        Policy(prioritize="mfu", strategy="full")


def test_scar_needs_floats_of_32_bits(tmp_path: Path) -> None:
    model = nn.EmbeddingBag(100, 4, mode="sum", sparse=True, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"weights of model.weight are F64: .* use 'mfu' or 'ssu'"):
        Checkpointer(tmp_path, {"model": model}, Policy(prioritize="scar"), allow_without_optimizer=True)
