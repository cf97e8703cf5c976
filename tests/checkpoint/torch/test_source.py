"""What a save takes from a training run: its tables, which of them to search, and everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.format.dense import decode_tree
from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.checkpoint.torch.source import CapturedTree, EncodedTree, TrainingSource
from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.checkpoint.torch.watch import Watch
from holdfast.errors import UnsupportedState
from holdfast.events import EventLog


class Events(EventLog):
    def __init__(self) -> None:
        super().__init__(None)
        self.told: list[tuple[list[str], str]] = []

    def emit(self, event: str, /, **figures: Any) -> None:
        assert event == "checkpoint_tracking"
        self.told.append((figures["tables"], figures["how"]))


class Extra:
    """An object with a state that a test sets."""

    def __init__(self) -> None:
        self.value: Any = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Case:
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SparseAdam) -> None:
        self.model = nn.ModuleDict({"a": nn.Embedding(9, 2, sparse=optimizer is torch.optim.SparseAdam)})
        self.optimizer = optimizer([self.model["a"].weight], lr=0.1)  # type: ignore[call-arg, arg-type]
        self.extra = Extra()
        objects = {"m": self.model, "o": self.optimizer, "x": self.extra}
        self.objects = TrainingObjects(objects, lambda table: None)
        self.tracker = Tracker(self.objects.live_tables().groups)
        self.watch = Watch(
            self.objects.tables, self.objects.optimizers, lambda: self.tracker, lambda: 0, lambda *_: None
        )
        self.events = Events()
        self.source = TrainingSource(self.objects, self.watch, "digests", self.events)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model["a"](torch.tensor([1, 2])).sum().backward()
        self.optimizer.step()


def captured(source: TrainingSource) -> Any:
    parts = source.capture().parts()
    return decode_tree(b"".join(bytes(memoryview(part).cast("B")) for part in parts), "here")


def test_the_tables_as_they_are_and_nothing_to_search() -> None:
    case = Case()
    case.step()
    tables, searched = case.source.look()
    assert [t.name for g in tables.groups for t in g.tables] == ["m.a.weight"]
    assert list(searched) == []
    assert not case.source.is_searched("m.a.weight")


def test_a_table_that_any_step_changes_as_a_whole_is_searched() -> None:
    case = Case(torch.optim.Adam)
    case.step()
    _, searched = case.source.look()
    assert list(searched) == ["m.a.weight"]
    assert case.source.is_searched("m.a.weight")
    (names, how), *_ = case.events.told
    assert names == ["m.a.weight"]
    assert how.startswith("digests: ")


def test_how_tables_are_tracked_is_told_once_and_saved() -> None:
    case = Case()
    case.step()
    case.source.look()
    case.source.look()
    assert [names for names, _ in case.events.told] == [["m.a.weight"]]
    assert captured(case.source)["tracking"] == {"m.a.weight": case.events.told[0][1]}


def test_a_table_that_is_added_is_found() -> None:
    case = Case()
    case.model["b"] = nn.Embedding(5, 3)
    case.model["b"].weight.requires_grad_(False)
    case.source.find_tables()
    assert sorted(case.objects.tables) == ["m.a.weight", "m.b.weight"]
    tables, _ = case.source.look()
    assert sum(g.rows for g in tables.groups) == 14


def test_a_save_finds_tables_that_were_added() -> None:
    case = Case()
    case.source.look()
    case.model["b"] = nn.Embedding(5, 3)
    case.model["b"].weight.requires_grad_(False)
    tables, _ = case.source.look()
    assert sum(g.rows for g in tables.groups) == 14


def test_what_cannot_be_stored_is_raised_at_once_the_first_time() -> None:
    case = Case()
    case.extra.value = object()
    with pytest.raises(UnsupportedState):
        case.source.capture()
    with pytest.raises(UnsupportedState):
        case.source.capture()  # it has not been stored yet: at once, again
    case.extra.value = 2
    assert isinstance(case.source.capture(), EncodedTree)
    case.extra.value = 3
    later = case.source.capture()
    assert isinstance(later, CapturedTree)
    case.extra.value = 4
    assert "3" in str(later.tree()["objects"]["x"]), "as it was when it was captured"
