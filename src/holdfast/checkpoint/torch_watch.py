"""Which rows of tables training changes: seen where they are looked up, and made sure of where they change.

Rows are marked by hooks on the tables' modules as they are looked up: that costs little, and is all there is
to do in most training loops. Rows change later, though, in the step of an optimizer, and nothing says that it
is the same rows: a save may come in between (gradients that are accumulated), gradients may be applied twice,
ids may be rewritten behind the hook, a table may be used in other ways than by its modules, hooks may not run
in compiled code. So optimizers have hooks, too. Gradients that are sparse say themselves which rows they are
of. Dense ones are looked through for such rows in the first steps and in every 64th, in those behind a save
that came between a lookup and its step, and in all if it turns out that lookups do not tell.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.torch_tables import LiveTable
from holdfast.checkpoint.tracker import Tracker
from holdfast.checkpoint.unseen import changes_unseen_rows

log = logging.getLogger("holdfast.checkpoint")

FIRST_CHECKS = 2
CHECK_EVERY = 64
_MOST_AHEAD = 8


@dataclass
class _Watched:
    """What is known of one table."""

    table: LiveTable
    sparse: bool
    """Whether its gradients are."""
    version: int
    """PyTorch's count of what was written to the weights, when the last step was done."""
    looked_up: bool = False
    """Since the last step that had gradients."""
    ahead: int = 1
    """Lookups by a module, one after the other, before any of them had a gradient or a step followed."""
    to_search: int = 0
    """Steps whose gradients are to be searched: a save came between a lookup and its step."""
    by_gradient: bool = False
    """Whether lookups do not tell all."""
    steps: int = 0
    """That had gradients."""
    applied: Callable[[], Tensor | None] = lambda: None
    """The gradient of the last step: if the next one finds the same, it has not been cleared."""

    @property
    def renormalized(self) -> bool:
        """Whether lookups write to it."""
        return any(module.max_norm is not None for module in self.table.modules)


class Watch:
    """Watches the tables of a training run.

    Args:
        tables: by name.
        optimizers: that may change them.
        tracker: gives the tracker that is to know of it; asked anew each time.
    """

    def __init__(
        self,
        tables: Mapping[str, LiveTable],
        optimizers: Mapping[str, Optimizer],
        tracker: Callable[[], Tracker],
    ) -> None:
        self._tracker = tracker
        self._optimizers = optimizers
        self._hooks = ExitStack()
        self.follow(tables)

    def follow(self, tables: Mapping[str, LiveTable]) -> None:
        """Watch these tables from now on, and no others."""
        self._hooks.close()
        self._tables = {
            name: _Watched(table, all(module.sparse for module in table.modules), _version(table))
            for name, table in tables.items()
        }
        for watched in self._tables.values():
            for module in watched.table.modules:
                hook = _Marker(self, watched)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                self._hooks.callback(handle.remove)
        for optimizer in self._optimizers.values():
            self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)

    def close(self) -> None:
        """Take all hooks away."""
        self._hooks.close()

    def saving(self) -> None:
        """A snapshot is taken: what has been looked up and not been stepped on changes only later."""
        for watched in self._tables.values():
            if watched.looked_up or watched.ahead > 1:
                watched.to_search = watched.ahead

    def written(self) -> list[str]:
        """Tables to which something other than a step has been written since this was last asked or a step
        was made, as far as PyTorch counts it."""
        found = []
        for name, watched in self._tables.items():
            version = _version(watched.table)
            if version != watched.version and not watched.renormalized:
                found.append(name)
            watched.version = version
        return found

    def accept(self, table: str | None = None) -> None:
        """What has been written to the table, or to all, is known."""
        for name, watched in self._tables.items():
            if table in (None, name):
                watched.version = _version(watched.table)

    def look_up(self, watched: _Watched, found: Any) -> None:
        """Mark the rows that a module is given."""
        watched.looked_up = True
        try:
            # Most are plain already, and every call of torch's takes as long as marking hundreds of rows.
            plain = found.dtype is torch.int64 and found.dim() == 1
            ids = (found if plain else found.detach().reshape(-1).long()).numpy()
        except (AttributeError, RuntimeError, TypeError):
            return  # no plain tensor of ids: what it changes shows in the gradients
        self._tracker().mark(watched.table.name, ids)

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tracker = self._tracker()
        answers: dict[tuple[Any, ...], bool] = {}  # tables of one parameter group are alike, as a rule
        for group, watched, weight, gradient in self._with_gradients(optimizer):
            name, sparse = watched.table.name, watched.sparse
            written = weight._version != watched.version and not watched.renormalized
            key = id(group), sparse, weight.dtype
            if key not in answers:
                answers[key] = changes_unseen_rows(optimizer, group, sparse=sparse, dtype=weight.dtype)
            if written or answers[key] or (sparse and not gradient.is_sparse):
                tracker.mark_table(name)
            elif gradient.is_sparse:
                tracker.mark(name, gradient._indices().numpy()[0], counts=False)  # as its lookup has
            else:
                self._search(watched, gradient, tracker)

    def _search(self, watched: _Watched, gradient: Tensor, tracker: Tracker) -> None:
        """Mark the rows of a dense gradient, if lookups may not have done so."""
        again = watched.applied() is gradient
        check = watched.steps < FIRST_CHECKS or watched.steps % CHECK_EVERY == 0
        if not (watched.by_gradient or watched.to_search or again or check):
            return
        name = watched.table.name
        rows = (gradient != 0).flatten(1).any(1).nonzero().reshape(-1).numpy()
        if not (watched.by_gradient or watched.to_search or again) and not tracker.has(name, rows):
            watched.by_gradient = True
            log.info("%s has gradients of rows that it was not seen to look up: they are searched", name)
            tracker.mark_table(name)  # what was missed so far is among them
        tracker.mark(name, rows, counts=watched.by_gradient)
        watched.to_search = max(0, watched.to_search - 1)

    def _after_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        for _, watched, weight, gradient in self._with_gradients(optimizer):
            watched.looked_up = False
            watched.steps += 1
            watched.applied = weakref.ref(gradient)
            watched.version = weight._version

    def _with_gradients(
        self, optimizer: Optimizer
    ) -> Iterator[tuple[Mapping[str, Any], _Watched, Tensor, Tensor]]:
        """The tables that a step changes: their parameter groups, what is known, weights and gradients."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for watched in self._tables.values():
            weight = watched.table.modules[0].weight
            group, gradient = groups.get(id(weight)), weight.grad
            if group is not None and gradient is not None:
                yield group, watched, weight, gradient


class _Marker:
    """The hook of one module. A copy of the module, or one that was pickled, is not watched."""

    def __init__(self, watch: Watch, watched: _Watched) -> None:
        self._watch, self._watched = watch, watched
        self._run = 0
        self._last: tuple[Any, ...] = ()

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Compiled code does without: what it looks up shows in the gradients.
        if torch.compiler.is_compiling():
            return
        # With max_norm even a lookup without gradients changes rows.
        if torch.is_grad_enabled() or module.max_norm is not None:
            watched = self._watched
            gradient = module.weight.grad
            now = watched.steps, id(gradient), None if gradient is None else gradient._version
            self._run = self._run + 1 if now == self._last else 1
            self._last = now
            if self._run > watched.ahead:
                watched.ahead = min(self._run, _MOST_AHEAD)
            self._watch.look_up(watched, inputs[0] if inputs else named.get("input"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoMarker, ()


class _NoMarker:
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Mark nothing."""


def _version(table: LiveTable) -> int:
    return int(table.weight._version)
