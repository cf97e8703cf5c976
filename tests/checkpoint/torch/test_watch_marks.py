"""What the watch tells a tracker, call by call: all rows that change, and no more than it has to."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.checkpoint.torch.tables import LiveTable, find_tables
from holdfast.checkpoint.torch.watch import (
    CHECK_EVERY,
    FIRST_CHECKS,
    Watch,
    _comes_first,
    _comes_last,
    _move,
    _StepHook,
)

ROWS = 200


class Told:
    """A tracker that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.snapshot = None
        self.marked: set[int] = set()
        self.suspects: set[str] = set()

    def mark(self, name: str, ids: NDArray[np.int64], counts: bool = True, **_: Any) -> None:
        self.calls.append(("looked up" if counts else "changed", sorted(ids.tolist())))
        self.marked |= set(ids.tolist())

    def suspect(self, name: str, late: str | None = None) -> None:
        self.calls.append(("suspect", name))
        self.suspects.add(name)

    def is_suspect(self, name: str) -> bool:
        return name in self.suspects

    def explains(self, name: str, rows: NDArray[np.int64]) -> bool:
        return set(rows.tolist()) <= self.marked


class Run:
    """A table, its optimizer and a watch."""

    def __init__(self, module: nn.Module, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        self.module = cast("Any", module)
        self.told = Told()
        self.version = 0
        self.missed: list[tuple[str, str, int]] = []
        self.optimizer = optimizer(module.parameters(), **{"lr": 0.1, **options})
        self.watch = Watch(
            self.tables(),
            {"o": self.optimizer},
            lambda: cast("Tracker", self.told),
            lambda: self.version,
            lambda *what: self.missed.append(what),
        )

    def tables(self) -> dict[str, LiveTable]:
        return find_tables({"m": self.module})

    def step(self, *ids: int) -> list[tuple[Any, ...]]:
        """One step of training with these rows; what the tracker was told."""
        self.told.calls.clear()
        self.optimizer.zero_grad()
        self.module(torch.tensor(ids)).sum().backward()
        self.optimizer.step()
        return list(self.told.calls)

    def settle(self) -> None:
        """Steps after which lookups are believed."""
        for _ in range(FIRST_CHECKS):
            self.step(1, 2)


@pytest.fixture
def dense() -> Run:
    torch.manual_seed(0)
    return Run(nn.Embedding(ROWS, 4))


@pytest.fixture
def sparse() -> Run:
    torch.manual_seed(0)
    return Run(nn.Embedding(ROWS, 4, sparse=True))


class TestLookups:
    @pytest.mark.parametrize(
        "ids",
        [
            torch.tensor([3, 1, 3]),
            torch.tensor([[3], [1], [3]]),
            torch.tensor([3, 1, 3], dtype=torch.int32),
            torch.tensor([[3, 1, 3]], dtype=torch.int32),
        ],
    )
    def test_ids_of_any_shape(self, dense: Run, ids: Tensor) -> None:
        dense.module(ids)
        dense.module(input=ids)
        assert dense.told.calls == [("looked up", [1, 3, 3])] * 2

    def test_those_without_gradients_change_nothing(self, dense: Run) -> None:
        with torch.no_grad():
            dense.module(torch.tensor([1]))
        assert dense.told.calls == []

    def test_but_with_a_largest_norm_they_do(self) -> None:
        run = Run(nn.Embedding(ROWS, 4, max_norm=0.01))
        with torch.no_grad():
            run.module(torch.tensor([1]))
        assert run.told.calls == [("looked up", [1])]
        assert run.watch.is_known("m.weight")  # what the lookup has written is what it has named

    def test_writes_before_such_a_lookup_are_not_its_own(self) -> None:
        run = Run(nn.Embedding(ROWS, 4, max_norm=0.01))
        with torch.no_grad():
            run.module.weight[5] = 1.0
        run.module(torch.tensor([1]))
        assert run.told.calls == [("suspect", "m.weight"), ("looked up", [1])]

    def test_rows_whose_gradients_come_after_a_save_are_marked_again(self, dense: Run) -> None:
        early = dense.module(torch.tensor([3, 4])).sum()
        early.backward()
        assert dense.told.calls == [("looked up", [3, 4])]
        late = dense.module(torch.tensor([5])).sum()
        dense.watch.saving()
        late.backward()
        assert dense.told.calls[1:] == [("looked up", [5]), ("changed", [5])]

    def test_sparse_gradients_tell_themselves(self, sparse: Run) -> None:
        late = sparse.module(torch.tensor([5])).sum()
        sparse.watch.saving()
        late.backward()
        assert sparse.told.calls == [("looked up", [5])]

    def test_what_is_no_tensor_of_ids_is_left_to_the_gradients(self) -> None:
        class Any_(nn.Embedding):
            def forward(self, *given: Any, **named: Any) -> Tensor:
                return self.weight[:2].sum()

        run = Run(Any_(ROWS, 4))
        run.module("text")
        run.module()
        assert run.told.calls == []

    def test_after_the_end_nothing_is_said(self, dense: Run) -> None:
        dense.watch.close()
        assert dense.step(1, 2) == []
        assert not dense.optimizer._optimizer_step_pre_hooks
        assert not dense.optimizer._optimizer_step_post_hooks

    def test_a_copy_is_not_watched(self, dense: Run) -> None:
        other = copy.deepcopy(dense.module)
        other(torch.tensor([1]))
        assert dense.told.calls == []


class TestDenseGradients:
    def test_they_are_searched_in_the_first_steps_and_now_and_then(self, dense: Run) -> None:
        searched = [
            number for number in range(2 * CHECK_EVERY + 5) if dense.step(3, 4)[1:] == [("changed", [3, 4])]
        ]
        assert searched == [0, 1, CHECK_EVERY + 1, 2 * CHECK_EVERY + 1]
        assert not dense.missed

    def test_lookups_are_said_once(self, dense: Run) -> None:
        dense.settle()
        assert dense.step(3, 4) == [("looked up", [3, 4])]

    def test_behind_a_save(self, dense: Run) -> None:
        dense.settle()
        dense.watch.saving()
        assert dense.step(3, 4) == [("looked up", [3, 4]), ("changed", [3, 4])]
        assert dense.step(3, 4) == [("looked up", [3, 4])]

    def test_where_nothing_was_looked_up(self, dense: Run) -> None:
        dense.settle()
        dense.told.calls.clear()
        dense.optimizer.step()  # applies its last gradient again
        assert dense.told.calls == [("changed", [1, 2])]

    def test_in_the_last_step_before_a_save(self, dense: Run) -> None:
        dense.settle()
        dense.step(3, 4)
        dense.told.calls.clear()
        dense.watch.search_last()
        assert dense.told.calls == [("changed", [3, 4])]
        dense.watch.search_last()
        assert dense.told.calls == [("changed", [3, 4])]

    def test_but_not_if_it_was_searched_or_gone(self, dense: Run) -> None:
        dense.step(3, 4)
        dense.told.calls.clear()
        dense.watch.search_last()
        assert dense.told.calls == []
        dense.settle()
        dense.step(3, 4)
        dense.optimizer.zero_grad()
        dense.told.calls.clear()
        dense.watch.search_last()
        assert dense.told.calls == []

    def test_and_not_before_the_first_step(self, dense: Run) -> None:
        dense.module(torch.tensor([1])).sum().backward()
        dense.told.calls.clear()
        dense.watch.search_last()
        assert dense.told.calls == []

    def test_a_table_that_is_marked_as_a_whole_is_not_searched(self, dense: Run) -> None:
        dense.told.suspects.add("m.weight")
        assert dense.step(3, 4) == [("looked up", [3, 4])]
        dense.watch.search_last()
        assert dense.told.calls == [("looked up", [3, 4])]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_a_row_that_is_not_finite_gives_the_others_away(self, value: float, dtype: torch.dtype) -> None:
        dense = Run(nn.Embedding(ROWS, 4, dtype=dtype))
        dense.settle()
        row = dense.watch._tables["m.weight"].steps * 40503 % ROWS
        dense.told.marked |= {row}
        dense.told.calls.clear()
        dense.optimizer.zero_grad()
        dense.module(torch.tensor([row])).sum().backward()
        dense.module.weight.grad[row] = value
        dense.optimizer.step()
        assert dense.told.calls == [("looked up", [row]), ("changed", [row])]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_a_row_that_is_finite_does_not(self, dtype: torch.dtype) -> None:
        dense = Run(nn.Embedding(ROWS, 4, dtype=dtype))
        dense.settle()
        row = dense.watch._tables["m.weight"].steps * 40503 % ROWS
        dense.told.calls.clear()
        dense.optimizer.zero_grad()
        dense.module(torch.tensor([row])).sum().backward()
        dense.module.weight.grad[row] = torch.finfo(dtype).max
        dense.optimizer.step()
        assert dense.told.calls == [("looked up", [row])]

    def test_so_does_one_that_nobody_has_looked_up(self, dense: Run) -> None:
        dense.settle()
        row = dense.watch._tables["m.weight"].steps * 40503 % ROWS
        assert row not in dense.told.marked
        dense.told.calls.clear()
        dense.optimizer.zero_grad()
        dense.module(torch.tensor([1])).sum().backward()
        dense.module.weight.grad[row] = 1.0
        dense.optimizer.step()
        assert dense.told.calls == [("looked up", [1]), ("looked up", [1, row])]
        assert len(dense.missed) == 1

    def test_rows_are_told_by_their_bits(self, dense: Run) -> None:
        """What is subtracted from a weight of -0 is not the same for both kinds of 0."""
        dense.optimizer.zero_grad()
        dense.module(torch.tensor([1])).sum().backward()
        gradient = torch.zeros(ROWS, 4)
        gradient[7, 3] = -0.0
        dense.module.weight.grad = gradient
        dense.told.marked.add(7)
        dense.told.calls.clear()
        dense.optimizer.step()
        assert dense.told.calls == [("changed", [7])]

    def test_a_gradient_that_is_not_contiguous(self, dense: Run) -> None:
        gradient = torch.zeros(4, ROWS).t()
        gradient[9, 2] = 1.0
        dense.module.weight.grad = gradient
        dense.told.marked.add(9)
        dense.optimizer.step()
        assert dense.told.calls == [("changed", [9])]


class TestMissedRows:
    def direct(self, run: Run, *ids: int) -> list[tuple[Any, ...]]:
        """A step that uses the table without its module."""
        run.told.calls.clear()
        run.optimizer.zero_grad()
        rows = functional.embedding(torch.tensor(ids), run.module.weight)
        (run.module(torch.tensor([1])).sum() + rows.sum()).backward()
        run.optimizer.step()
        return list(run.told.calls)

    def test_they_are_reported_with_the_last_version_that_lacks_none(self, dense: Run) -> None:
        dense.version = 4
        dense.step(1, 2)
        dense.version = 7
        assert self.direct(dense, 50) == [("looked up", [1]), ("looked up", [1, 50])]
        (missed,) = dense.missed
        assert missed == ("m.weight", "rows had gradients that no lookup of its modules shows", 4)

    def test_from_then_on_gradients_are_searched_in_each_step(self, dense: Run) -> None:
        assert dense.watch.how("m.weight") == ("lookups", "only rows that are looked up change")
        self.direct(dense, 50)
        assert dense.watch.how("m.weight") == ("gradients", "lookups do not tell all rows that change")
        for _ in range(4):
            assert dense.step(3, 4) == [("looked up", [3, 4]), ("looked up", [3, 4])]
        assert self.direct(dense, 60) == [("looked up", [1]), ("looked up", [1, 60])]
        assert len(dense.missed) == 1

    @pytest.mark.parametrize(("rows", "how"), [(ROWS // 2, "searched"), (ROWS // 2 + 1, "suspect")])
    def test_where_most_rows_change_none_is_searched(self, dense: Run, rows: int, how: str) -> None:
        calls = self.direct(dense, *range(rows))
        assert (("suspect", "m.weight") in calls) is (how == "suspect")
        assert dense.watch.how("m.weight")[0] == ("lookups" if how == "suspect" else "gradients")
        assert len(dense.missed) == 1

    def test_what_was_looked_up_before_the_last_save_but_one_is_not_missed(self, dense: Run) -> None:
        dense.settle()
        dense.watch.saving()
        dense.watch.saving()
        dense.told.marked.clear()
        assert dense.step(3, 4)[-1] == ("changed", [3, 4])
        dense.told.marked.clear()
        dense.watch.saving()
        self.direct(dense, 50)
        assert len(dense.missed) == 1  # one save since the last step: it must have been seen

    def test_a_module_that_looks_up_other_rows_is_searched_from_the_first_step(self) -> None:
        class Hashed(nn.Embedding):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input * 7 % ROWS)

        run = Run(Hashed(ROWS, 4))
        assert run.watch.how("m.weight")[0] == "gradients"
        for _ in range(4):
            assert run.step(3)[-1] == ("looked up", [21])
        assert not run.missed


class TestSparseGradients:
    def test_they_are_marked_and_not_counted_again(self, sparse: Run) -> None:
        assert sparse.watch.how("m.weight") == ("gradients", "they are sparse")
        for _ in range(5):
            assert sparse.step(3, 4) == [("looked up", [3, 4]), ("changed", [3, 4])]
        sparse.watch.search_last()
        assert len(sparse.told.calls) == 2

    def test_an_empty_one_says_nothing(self, sparse: Run) -> None:
        sparse.module(torch.empty(0, dtype=torch.int64)).sum().backward()
        sparse.told.calls.clear()
        sparse.optimizer.step()
        assert sparse.told.calls == []

    def test_a_dense_one_in_its_place_may_be_of_any_row(self, sparse: Run) -> None:
        sparse.module.weight.grad = torch.zeros(ROWS, 4)
        sparse.optimizer.step()
        assert sparse.told.calls == [("suspect", "m.weight")]


class TestOptimizers:
    @pytest.mark.parametrize("is_sparse", [False, True])
    def test_one_that_changes_other_rows(self, is_sparse: bool) -> None:
        run = Run(nn.Embedding(ROWS, 4, sparse=is_sparse), momentum=0.9)
        assert run.step(3, 4)[1:] == [("suspect", "m.weight")]

    def test_settings_of_each_parameter_group(self) -> None:
        a, b = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)
        run = Run(nn.ModuleDict({"a": a, "b": b}))
        run.optimizer.param_groups.clear()
        run.optimizer.add_param_group({"params": list(a.parameters()), "momentum": 0.9})
        run.optimizer.add_param_group({"params": list(b.parameters())})
        loss: Any = a(torch.tensor([1])).sum() + b(torch.tensor([2])).sum()
        loss.backward()
        run.told.calls.clear()
        run.optimizer.step()
        assert run.told.calls == [("suspect", "m.a.weight"), ("changed", [2])]

    def test_a_closure_may_do_anything(self, sparse: Run) -> None:
        def closure() -> Tensor:
            sparse.optimizer.zero_grad()
            loss = sparse.module(torch.tensor([5])).sum()
            loss.backward()
            return cast("Tensor", loss)

        sparse.optimizer.step(closure)
        expected = [("looked up", [5]), ("changed", [5]), ("suspect", "m.weight")]
        assert sparse.told.calls == expected
        sparse.told.calls.clear()
        sparse.optimizer.zero_grad()
        sparse.optimizer.step(closure=closure)
        assert sparse.told.calls == expected

    def test_hooks_of_others_are_gone_around(self, dense: Run) -> None:
        """The first step finds them and is not sure; from the next on ours are closest to the step."""
        dense.settle()
        dense.optimizer.register_step_pre_hook(lambda *_: None)
        dense.optimizer.register_step_post_hook(lambda *_: None)
        assert ("suspect", "m.weight") in dense.step(3, 4)
        dense.told.suspects.clear()
        assert dense.step(3, 4) == [("looked up", [3, 4])]

    def test_a_hook_before_the_step_that_comes_first_is_none_of_ours(self) -> None:
        module = nn.Embedding(ROWS, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        run = Run(module, lambda parameters, lr: optimizer)
        run.settle()
        assert run.step(3, 4) == [("looked up", [3, 4])]

    def test_a_hook_behind_the_step_is_put_behind_ours(self) -> None:
        module = nn.Embedding(ROWS, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        run = Run(module, lambda parameters, lr: optimizer)
        assert run.step(3, 4) == [("looked up", [3, 4]), ("changed", [3, 4])]

    def test_hooks_of_another_watch_change_nothing(self, dense: Run) -> None:
        others = [
            Watch(
                dense.tables(),
                {"o": dense.optimizer},
                lambda: cast("Tracker", Told()),
                lambda: 0,
                lambda *what: None,
            )
            for _ in range(2)
        ]
        dense.settle()
        assert dense.step(3, 4) == [("looked up", [3, 4])]
        assert others[0].is_known("m.weight")


class TestOrderOfHooks:
    OURS, THEIRS = _StepHook(lambda: None), object()

    @pytest.mark.parametrize(
        ("hooks", "last", "first"),
        [
            ({1: OURS}, True, True),
            ({1: OURS, 2: THEIRS}, False, True),
            ({0: THEIRS, 1: OURS}, True, False),
            ({0: OURS, 1: OURS, 2: OURS}, True, True),
            ({0: THEIRS, 1: OURS, 2: OURS, 3: THEIRS}, False, False),
            ({}, True, True),
            ({2: OURS}, True, True),
        ],
    )
    def test_who_comes_last_and_first(self, hooks: dict[int, Any], last: bool, first: bool) -> None:
        assert _comes_last(hooks, 1) is last
        assert _comes_first(hooks, 1) is first

    def test_ours_can_be_moved(self) -> None:
        hooks = OrderedDict.fromkeys([0, 1, 2])
        _move(hooks, 1, last=True)
        assert list(hooks) == [0, 2, 1]
        _move(hooks, 1, last=False)
        assert list(hooks) == [1, 0, 2]
        _move(hooks, 9, last=True)


class TestWrites:
    def test_steps_are_known_and_other_writes_are_not(self, dense: Run) -> None:
        dense.step(3, 4)
        assert dense.watch.is_known("m.weight")
        assert dense.watch.written() == []
        with torch.no_grad():
            dense.module.weight[7] = 1.0
        assert not dense.watch.is_known("m.weight")
        assert dense.watch.written() == ["m.weight"]
        assert dense.watch.written() == []
        assert dense.watch.is_known("m.weight")

    def test_a_write_before_a_step_may_be_of_any_row(self, dense: Run) -> None:
        dense.settle()
        with torch.no_grad():
            dense.module.weight[7] = 1.0
        assert dense.step(3, 4) == [("looked up", [3, 4]), ("suspect", "m.weight")]
        dense.told.suspects.clear()
        assert dense.step(3, 4) == [("looked up", [3, 4])]

    def test_writes_to_optimizer_state_count(self) -> None:
        run = Run(nn.Embedding(ROWS, 4), torch.optim.Adagrad)
        run.settle()
        assert run.watch.is_known("m.weight")
        run.optimizer.state[run.module.weight]["sum"].add_(1)
        assert not run.watch.is_known("m.weight")
        with torch.no_grad():
            run.module.weight.add_(1)
        assert not run.watch.is_known("m.weight")

    def test_what_is_accepted_is_known(self) -> None:
        tables = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)
        run = Run(nn.ModuleDict(dict(zip("ab", tables, strict=True))))
        with torch.no_grad():
            for table in tables:
                table.weight[7] = 1.0
        run.watch.accept("m.a.weight")
        assert run.watch.written() == ["m.b.weight"]
        with torch.no_grad():
            for table in tables:
                table.weight[7] = 1.0
        run.watch.restored()
        assert run.watch.written() == []
        assert run.watch.saves == 1

    def test_rows_that_have_changed_unseen_are_looked_for_from_now_on(self, dense: Run) -> None:
        dense.watch.distrust("m.weight")
        assert dense.watch.how("m.weight") == ("digests", "rows have changed unseen before")
        assert not dense.watch.is_known("m.weight")
        assert dense.watch.written() == ["m.weight"]
        assert dense.watch.written() == ["m.weight"]


class TestFollowing:
    def test_what_is_known_of_a_table_that_stays_is_kept(self, dense: Run) -> None:
        dense.settle()
        dense.watch.follow(dense.tables())
        assert dense.step(3, 4) == [("looked up", [3, 4])]
        dense.watch.distrust("m.weight")
        dense.watch.follow(dense.tables())
        assert dense.watch.how("m.weight")[0] == "digests"

    def test_another_module_under_its_name_is_another_table(self, dense: Run) -> None:
        dense.settle()
        dense.watch.distrust("m.weight")
        dense.version = 5
        old = dense.module
        dense.module = nn.Embedding(ROWS, 4)
        dense.optimizer.param_groups[0]["params"] = list(dense.module.parameters())
        dense.watch.follow(dense.tables())
        assert dense.watch.how("m.weight")[0] == "lookups"
        dense.told.calls.clear()
        old(torch.tensor([1]))
        assert dense.told.calls == []
        loss: Any = functional.embedding(torch.tensor([9]), dense.module.weight).sum()
        loss.backward()
        dense.optimizer.step()
        assert dense.missed[0][2] == 5

    def test_a_table_that_is_gone_is_not_watched(self, dense: Run) -> None:
        dense.watch.follow({})
        assert dense.step(1, 2) == []
        assert dense.watch.written() == []
