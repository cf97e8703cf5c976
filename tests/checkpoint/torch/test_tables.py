"""Which tables a model has, and which tensors go with their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.checkpoint.torch.tables import RowTensors, find_tables
from holdfast.errors import ConfigError


class TestFinding:
    def test_embeddings_of_both_kinds_wherever_they_are(self) -> None:
        model = nn.ModuleDict(
            {"a": nn.Embedding(4, 2), "deep": nn.Sequential(nn.EmbeddingBag(5, 2), nn.Linear(2, 1))}
        )
        found = find_tables({"m": model, "n": nn.Embedding(3, 2)})
        assert list(found) == ["m.a.weight", "m.deep.0.weight", "n.weight"]
        assert [table.name for table in found.values()] == list(found)
        assert found["m.a.weight"].modules == (model["a"],)
        assert found["m.a.weight"].weight is model["a"].weight
        assert all(table.only_looked_up for table in found.values())

    def test_shared_weights_are_one_table(self) -> None:
        a, b = nn.Embedding(4, 2), nn.EmbeddingBag(4, 2)
        b.weight = a.weight
        (table,) = find_tables({"m": nn.ModuleList([a, b, a])}).values()
        assert (table.name, table.modules) == ("m.0.weight", (a, b))

    def test_a_weight_that_another_module_has_too(self) -> None:
        model = nn.ModuleDict({"a": nn.Embedding(4, 2), "top": nn.Linear(2, 4), "b": nn.Embedding(4, 2)})
        model["top"].weight = model["a"].weight
        found = find_tables({"m": model})
        assert [table.only_looked_up for table in found.values()] == [False, True]

    def test_what_has_no_rows_is_no_table(self) -> None:
        computed = torch.nn.utils.parametrizations.weight_norm(nn.Embedding(4, 2))
        assert find_tables({"a": nn.Embedding(0, 2), "b": computed, "c": nn.Linear(2, 2)}) == {}

    def test_one_without_memory_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"table m\.weight is on meta"):
            find_tables({"m": nn.Embedding(4, 2, device="meta")})

    @pytest.mark.parametrize(("begin", "overlaps"), [(0, True), (3, True), (4, False)])
    def test_tables_in_the_same_memory(self, begin: int, overlaps: bool) -> None:
        memory = torch.zeros(8, 2)
        a, b = (nn.Embedding(4, 2, _weight=memory[at : at + 4]) for at in (0, begin))
        for tables in ({"a": a, "b": b}, {"b": b, "a": a}):
            if overlaps:
                with pytest.raises(ConfigError, match=r"tables \w\.weight and \w\.weight share memory"):
                    find_tables(tables)
            else:
                assert len(find_tables(tables)) == 2


class Run:
    def __init__(self) -> None:
        self.module = nn.Embedding(4, 2)
        self.optimizer = torch.optim.Adam(self.module.parameters())
        (self.table,) = find_tables({"m": self.module}).values()
        self.step()

    def step(self) -> None:
        self.module(torch.tensor([1])).sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> dict[Any, Any]:
        found: dict[Any, Any] = self.optimizer.state[self.module.weight]
        return found

    def look(self) -> RowTensors:
        return RowTensors.of(self.table, {"o": self.optimizer})


@pytest.fixture
def run() -> Run:
    return Run()


class TestRowTensors:
    def test_weights_and_states_with_an_entry_a_row(self, run: Run) -> None:
        run.state["rows"] = torch.zeros(4)
        run.state["parameter"] = nn.Parameter(torch.zeros(4))
        run.state["other"] = torch.zeros(5)
        run.state["number"] = 3
        run.state[7] = torch.zeros(4)
        run.state["sparse"] = torch.zeros(4, 2).to_sparse()
        run.state["meta"] = torch.zeros(4, 2, device="meta")
        found = run.look()
        assert list(found.tensors) == ["weight", "o.exp_avg", "o.exp_avg_sq", "o.parameter", "o.rows"]
        assert [field.width for field in found.fields] == [2, 2, 2, 1, 1]
        assert [view.shape for view in found.views] == [(4, 8), (4, 8), (4, 8), (4, 4), (4, 4)]
        assert found.tensors["weight"] is run.module.weight

    def test_an_optimizer_of_other_parameters_has_none(self, run: Run) -> None:
        other = torch.optim.Adam(nn.Linear(2, 2).parameters())
        assert list(RowTensors.of(run.table, {"o": other}).tensors) == ["weight"]

    def test_they_are_valid_until_one_is_replaced(self, run: Run) -> None:
        found = run.look()
        assert found.valid()
        run.step()
        assert found.valid()

    @pytest.mark.parametrize(
        ("change", "replaced"),
        [
            (lambda run: setattr(run.module, "weight", nn.Parameter(torch.zeros(4, 2))), True),
            (lambda run: setattr(run.module.weight, "data", torch.zeros(4, 2)), True),
            (lambda run: setattr(run.module.weight, "data", run.module.weight.data.view(8, 1)), False),
            (lambda run: run.state.update(exp_avg=torch.zeros(4, 2)), True),
            (lambda run: setattr(run.state["exp_avg"], "data", torch.zeros(4, 2)), True),
            (lambda run: run.state.update(more=torch.zeros(4, 2)), False),
            (lambda run: run.state.pop("exp_avg"), False),
            (lambda run: run.state.update(exp_avg=None), False),
        ],
    )
    def test_whatever_is_changed_is_noticed(
        self, run: Run, change: Callable[[Run], object], replaced: bool
    ) -> None:
        before = run.look()
        change(run)
        assert not before.valid()
        assert run.look().has_replaced(before) is replaced

    def test_a_module_without_weights(self, run: Run) -> None:
        found = run.look()
        run.module.weight = None  # type: ignore[assignment]
        assert not found.valid()

    def test_sparse_states_are_known_by_themselves(self, run: Run) -> None:
        run.state["sparse"] = torch.zeros(4, 2).to_sparse()
        found = run.look()
        assert found.valid()
        run.state["sparse"] = torch.zeros(4, 2).to_sparse()
        assert not found.valid()

    def test_new_states_replace_nothing(self, run: Run) -> None:
        before = run.look()
        run.state["more"] = torch.zeros(4, 2)
        assert not run.look().has_replaced(before)

    def test_looking_changes_nothing(self) -> None:
        module = nn.Embedding(4, 2)
        optimizer = torch.optim.Adam(module.parameters())
        (table,) = find_tables({"m": module}).values()
        RowTensors.of(table, {"o": optimizer})
        assert not optimizer.state
        assert isinstance(table.weight, Tensor)
