"""Find the rows of tables that training changes, by lookups, and verify them at the optimizer's step.

Rows are marked by hooks on the tables' modules as they are looked up: that costs little, and is all there is
to do in most training loops. Rows change later, though, in the step of an optimizer, and nothing says that it
is the same rows: a save may come in between (gradients that are accumulated), gradients may be applied twice,
ids may be rewritten behind the hook, a table may be used in other ways than by its modules, hooks may not run
in compiled code. So lookups whose gradients come only after a save are marked again then, and optimizers have
hooks, too. Gradients that are sparse say themselves which rows they are of. Dense ones are looked through for
such rows in the first steps and in every 64th, in the last before each save and the first behind it, where no
module has looked anything up, if a row that is looked at in each step has one without a lookup, and in all
steps if it turns out that lookups do not tell.

Others write to tables, too. PyTorch counts what is written to a tensor; of a step's own writes the count is
taken right before and right after the step, so that everything else shows. For that, our hooks come last
before the step and first behind it, whatever hooks of others there are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.checkpoint.torch.sharded import local, version
from holdfast.checkpoint.torch.tables import LiveTable
from holdfast.checkpoint.torch.unseen import why_unseen_rows_change
from holdfast.kernels.ids import nonzero_rows
from holdfast.kernels.rows import copy_ranges

log = logging.getLogger("holdfast.checkpoint")

FIRST_CHECKS = 2
CHECK_EVERY = 64
SAMPLED = 4
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NOT_FINITE = {
    torch.float64: 0x7FF << 52, torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00,
}  # fmt: skip
_STRIDE = 40503  # in which rows are looked at; prime
WRITTEN = "something other than an optimizer's step wrote to it"
_STEPPED = "a step changed rows that were not known before it"


@dataclass
class _Watched:
    """The tracking state of one table."""

    table: LiveTable
    sparse: bool
    """Whether its gradients are."""
    version: int
    """PyTorch's count of what was written to the weights and their states, as far as it is known which rows
    that was."""
    by_gradient: bool
    """Whether lookups do not tell all."""
    complete: int
    """The last version that was taken when all rows with gradients were known from lookups."""
    by_digest: bool = False
    """Whether rows have changed unseen."""
    looked_up: bool = False
    """Since the last step that had gradients."""
    to_search: bool = True
    """Whether a save came since then: gradients may be of rows that were looked up before it."""
    searched: bool = False
    """Whether the gradient of the last step has been looked through."""
    saves: int = 0
    """Since the last step that had gradients."""
    checks: int = 0
    """Steps in which all rows with gradients were looked for among those that are marked."""
    next_check: int = 0
    """The step in which that is due again."""
    steps: int = 0
    """That had gradients."""
    first: int = 0
    """Number in the whole table of the first row that is here."""
    sample: Sequence[int] | NDArray[np.int64] = range(SAMPLED)
    """Some rows that a step has changed, or the first ones."""


@dataclass
class _Hooked:
    """The step hooks of one optimizer."""

    before: RemovableHandle
    after: RemovableHandle
    clean: bool = True
    """Whether nobody else's hook has run between ours and the step that is under way."""


class Watch:
    """Tracks which rows of a training run's tables change.

    Args:
        tables: by name.
        optimizers: that may change them.
        tracker: gives the tracker that is to know of it; asked anew each time.
        last_version: gives the number of the version that was taken last.
        on_missed: told when it turns out that changes of a table may have been missed: its name, why, and the
            last version that lacks none.
        others_look_up: other ranks look up other rows, which change here, too: gradients alone tell all.
    """

    def __init__(
        self,
        tables: Mapping[str, LiveTable],
        optimizers: Mapping[str, Optimizer],
        tracker: Callable[[], Tracker],
        last_version: Callable[[], int],
        on_missed: Callable[[str, str, int], None],
        *,
        others_look_up: bool = False,
    ) -> None:
        self._others_look_up = others_look_up
        self.tracker = tracker
        self.saves = 0
        self._last_version = last_version
        self._on_missed = on_missed
        self._optimizers = optimizers
        self._hooks = ExitStack()
        self._hooked: dict[int, _Hooked] = {}
        self._tables: dict[str, _Watched] = {}
        self.follow(tables)

    def follow(self, tables: Mapping[str, LiveTable]) -> None:
        """Watch exactly these tables from now on. The state of tables that were watched before is kept."""
        self._hooks.close()
        before, self._tables = self._tables, {}
        for name, table in tables.items():
            known = before.get(name)
            if known is not None and known.table.modules == table.modules:
                known.table = table
            else:
                sparse, plain = (m.sparse for m in table.modules), map(_is_plain, table.modules)
                by_gradient = self._others_look_up or not all(plain)
                known = _Watched(
                    table, all(sparse), self.version_of(table), by_gradient, self._last_version()
                )
            known.first = table.first
            self._tables[name] = known
            if self._others_look_up:
                continue
            for module in table.modules:
                mine = self, known, _is_plain(module)
                handle = module.register_forward_hook(_Marker(*mine), with_kwargs=True)
                self._hooks.callback(handle.remove)
                if module.max_norm is not None:
                    self._hooks.callback(module.register_forward_pre_hook(_Before(*mine)).remove)
        for optimizer in self._optimizers.values():
            hooked = _Hooked(
                optimizer.register_step_pre_hook(_StepHook(self._before_step)),
                optimizer.register_step_post_hook(_StepHook(self._after_step)),
            )
            self._hooked[id(optimizer)] = hooked
            self._hooks.callback(hooked.before.remove)
            self._hooks.callback(hooked.after.remove)

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def search_last(self) -> None:
        """Search the gradients of the last step, if they still exist, right before rows are taken."""
        tracker = self.tracker()
        for watched in self._tables.values():
            gradient = watched.table.parameter.grad
            if not watched.searched and gradient is not None and self._tells(watched, gradient, tracker):
                self._search(watched, gradient, tracker, _STEPPED)

    def restored(self) -> None:
        """What is in the tables is what marks go by; gradients are those that there were."""
        self.saving()
        self.accept()

    def saving(self) -> None:
        """A snapshot is taken: what has been looked up and not been stepped on changes only later."""
        self.saves += 1
        for watched in self._tables.values():
            watched.to_search = True
            watched.saves += 1

    def _tells(self, watched: _Watched, gradient: Tensor, tracker: Tracker) -> bool:
        """Whether a gradient shows if lookups miss rows of a table for which they are relied upon."""
        relied_upon = not (watched.sparse or watched.by_gradient or tracker.is_suspect(watched.table.name))
        return relied_upon and not gradient.is_sparse and watched.steps > 0

    def written(self) -> list[str]:
        """Tables to which something other than a step or a lookup has been written since this was last asked
        or a step was made, as far as PyTorch counts it; and those of which rows have changed unseen."""
        found = []
        for name, watched in self._tables.items():
            version = self.version_of(watched.table)
            if version != watched.version or watched.by_digest:
                found.append(name)
            watched.version = version
        return found

    def is_known(self, table: str) -> bool:
        """Whether only steps and lookups have written to a table, by PyTorch's version counters."""
        watched = self._tables[table]
        return not watched.by_digest and self.version_of(watched.table) == watched.version

    def unannounced(self) -> list[str]:
        """Tables of which rows change before the tracker hears of it: by lookups, or unseen."""
        return [
            name
            for name, watched in self._tables.items()
            if watched.by_digest or any(m.max_norm is not None for m in watched.table.modules)
        ]

    def accept(self, table: str | None = None) -> None:
        """Accept the writes to the table, or to all tables, so far."""
        for name, watched in self._tables.items():
            if table in (None, name):
                watched.version = self.version_of(watched.table)

    def sample(self, table: str) -> list[int]:
        """Some rows of a table: those that the last step has changed, if it was seen which."""
        return [int(row) for row in self._tables[table].sample]

    def distrust(self, table: str) -> None:
        """Stop relying on lookups for a table: its rows have changed unreported."""
        self._tables[table].by_digest = True

    def how(self, table: str) -> tuple[str, str]:
        """How the watch finds changed rows of a table, and why."""
        watched = self._tables[table]
        if watched.by_digest:
            return "digests", "rows have changed unseen before"
        if watched.sparse:
            return "gradients", "they are sparse"
        if self._others_look_up:
            return "gradients", "the ranks look up different rows"
        if watched.by_gradient:
            return "gradients", "lookups do not tell all rows that change"
        return "lookups", "only rows that are looked up change"

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hooked = self._hooked.get(id(optimizer))
        if hooked is not None:
            hooked.clean = _comes_last(optimizer._optimizer_step_pre_hooks, hooked.before.id)
            # Hooks that run after the step are not being gone through now: they can be put in order.
            if not _comes_first(optimizer._optimizer_step_post_hooks, hooked.after.id):
                _move(optimizer._optimizer_step_post_hooks, hooked.after.id, last=False)
        self._mark_changes(optimizer, late=None)

    def _mark_changes(self, optimizer: Optimizer, *, late: str | None) -> None:
        """Mark what a step changes by its gradients, before the step; or after it, for the reason ``late``.

        Before the step, find also tables that something else was written to.
        """
        tracker = self.tracker()
        answers: dict[tuple[Any, ...], str | None] = {}  # tables of one parameter group are usually alike
        dense: list[tuple[_Watched, Tensor]] = []
        for group, watched, weight, gradient in self._with_gradients(optimizer):
            name, sparse = watched.table.name, watched.sparse
            key = id(group), sparse, weight.dtype
            if key not in answers:
                answers[key] = why_unseen_rows_change(optimizer, group, sparse=sparse, dtype=weight.dtype)
            if late is None and self.version_of(watched.table) != watched.version:
                tracker.suspect(name, late=WRITTEN)
            elif late is None and tracker.snapshot is not None:
                tracker.snapshot.has_not_changed_unannounced([name])
            if (
                answers[key] is not None
                or (sparse and not gradient.is_sparse)
                or getattr(gradient, "placements", None) != getattr(weight, "placements", None)
            ):
                tracker.suspect(name, late=late)
            elif gradient.is_sparse:
                if gradient._nnz():  # NumPy would keep PyTorch from adding to one that is empty
                    rows = gradient._indices().numpy()[0]
                    if self._others_look_up:
                        watched.sample = rows[:SAMPLED].copy()
                    # It counts as its lookup has.
                    tracker.mark(name, rows, counts=self._others_look_up, late=late)
            elif not tracker.is_suspect(name):
                watched.searched = False
                dense.append((watched, gradient))
        if dense:
            # If all of them are searched anyway, none is looked at before.
            odd_ones = [True] * len(dense) if self._others_look_up else _odd_ones(dense, tracker)
            for (watched, gradient), odd in zip(dense, odd_ones, strict=True):
                known = watched.by_gradient or watched.to_search or not watched.looked_up
                if known or odd or watched.steps >= watched.next_check:
                    self._search(watched, gradient, tracker, late)

    def _search(self, watched: _Watched, gradient: Tensor, tracker: Tracker, late: str | None) -> None:
        """Mark the rows of a dense gradient, and see whether lookups have told of all of them."""
        name = watched.table.name
        rows = _rows_of(local(gradient))
        if watched.first:
            rows += watched.first
        if not watched.by_gradient and len(rows):
            watched.checks += watched.looked_up
            watched.next_check = watched.steps + (1 if watched.checks < FIRST_CHECKS else CHECK_EVERY)
            if tracker.explains(name, rows):
                watched.complete = self._last_version()
            elif watched.saves < 2:  # else they may have been looked up before the last save but one
                self._miss(watched, rows, late)
        watched.sample = rows[:SAMPLED]
        tracker.mark(name, rows, counts=watched.by_gradient, late=late)
        watched.to_search = False
        watched.searched = True

    def _miss(self, watched: _Watched, rows: NDArray[np.int64], late: str | None) -> None:
        """Rows have gradients that were not looked up: so may have others before that nobody has seen."""
        name = watched.table.name
        if len(rows) > 0.5 * len(watched.table.parameter):
            self.tracker().suspect(name, late=late)  # noise, or NaN: all rows change, and no search is needed
        else:
            watched.by_gradient = True
            log.info("%s has gradients of rows that it was not seen to look up: they are searched", name)
        why = "rows had gradients that no lookup of its modules shows"
        self._on_missed(name, why, watched.complete)
        watched.complete = self._last_version()

    def _after_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hooked = self._hooked.get(id(optimizer))
        closure = len(arguments) > 1 or bool(named)
        clean = hooked is None or (
            hooked.clean and _comes_first(optimizer._optimizer_step_post_hooks, hooked.after.id)
        )
        if hooked is not None and not hooked.clean:
            _move(optimizer._optimizer_step_pre_hooks, hooked.before.id, last=True)
        if closure or not clean:
            # Gradients have come, or were changed, after they were looked at. Whoever did that may have
            # written to weights as well, which the count does not tell from what the step has written.
            self._mark_changes(optimizer, late=_STEPPED)
        tracker = self.tracker()
        for _, watched, _, _ in self._with_gradients(optimizer):
            if closure or not clean:
                tracker.suspect(watched.table.name, late=_STEPPED)
            watched.looked_up = False
            watched.saves = 0
            watched.steps += 1
            watched.version = self.version_of(watched.table)

    def _with_gradients(
        self, optimizer: Optimizer
    ) -> Iterator[tuple[Mapping[str, Any], _Watched, Tensor, Tensor]]:
        """The tables that a step changes: their parameter groups, what is known, weights and gradients."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for watched in self._tables.values():
            weight = watched.table.parameter
            group, gradient = groups.get(id(weight)), weight.grad
            if group is not None and gradient is not None:
                yield group, watched, weight, gradient

    def version_of(self, table: LiveTable) -> int:
        """PyTorch's version counters of the weights and their optimizer states, added up."""
        weight = table.parameter
        total = version(weight)
        for optimizer in self._optimizers.values():
            state = optimizer.state.get(weight)
            if state:
                for value in state.values():
                    if isinstance(value, Tensor):
                        total += version(value)
        return total


class _StepHook:
    """A hook of an optimizer. Compiled steps do without: PyTorch counts what they write."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._method(optimizer, arguments, named)


def _comes_last(hooks: Mapping[int, Any], mine: int) -> bool:
    """Whether no hook of somebody else comes behind ours; other Checkpointers' change nothing."""
    for key in reversed(hooks):
        if key == mine:
            return True
        if not isinstance(hooks[key], _StepHook):
            return False
    return True


def _comes_first(hooks: Mapping[int, Any], mine: int) -> bool:
    """Whether no hook of somebody else comes before ours."""
    for key, hook in hooks.items():
        if key == mine:
            return True
        if not isinstance(hook, _StepHook):
            return False
    return True


def _move(hooks: Any, mine: int, *, last: bool) -> None:
    if mine in hooks:
        hooks.move_to_end(mine, last=last)


def _rows_of(gradient: Tensor) -> NDArray[np.int64]:
    """The nonzero rows of a dense gradient.

    By their bits: what is subtracted from a weight of -0 is not the same for both kinds of 0.
    """
    if not len(gradient):
        return np.empty(0, np.int64)
    if gradient.is_contiguous() and gradient.device.type == "cpu":
        rows = np.empty(len(gradient), np.int64)
        count = nonzero_rows(gradient.data_ptr(), gradient.nbytes // max(len(gradient), 1), rows)
        return rows[:count].copy()
    found = gradient.view(_BITS[gradient.itemsize]) != 0
    return found.flatten(1).any(1).nonzero().reshape(-1).numpy()


def _odd_ones(dense: Sequence[tuple[_Watched, Tensor]], tracker: Tracker) -> list[bool]:
    """Of each gradient, whether a row of it, another one in each step, is not 0 and yet not marked, or NaN.

    What is done to gradients as a whole, and changes those that were 0, shows there: a norm to clip by that
    is NaN, noise, a loss that all rows are part of.
    """
    rows = [watched.steps * _STRIDE % gradient.shape[0] for watched, gradient in dense]
    sizes = [gradient.itemsize for _, gradient in dense]
    places = [
        gradient.data_ptr() + row * gradient.stride(0) * size
        for (_, gradient), row, size in zip(dense, rows, sizes, strict=True)
    ]
    found = np.empty(sum(sizes), np.uint8)
    copy_ranges(np.array(places, np.int64), np.array(sizes, np.int64), found)
    odd = [False] * len(dense)
    if found.any():
        end = 0
        for number, ((watched, gradient), row, size) in enumerate(zip(dense, rows, sizes, strict=True)):
            begin, end = end, end + size
            bits = int.from_bytes(found[begin:end].tobytes(), sys.byteorder)
            not_finite = _NOT_FINITE.get(gradient.dtype, 0)
            odd[number] = bits != 0 and (
                bits & not_finite == not_finite
                or not tracker.explains(watched.table.name, np.array([row], np.int64))
            )
    return odd


def _is_plain(module: nn.Embedding | nn.EmbeddingBag) -> bool:
    """Whether it looks up what it is given, as PyTorch's own do."""
    kinds = (nn.Embedding.forward, nn.EmbeddingBag.forward)
    return type(module).forward in kinds and "forward" not in vars(module)


class _Hook:
    """A hook of one module. A copy of the module, or one that was pickled, is not watched."""

    def __init__(self, watch: Watch, watched: _Watched, plain: bool) -> None:
        self._watch, self._watched, self._plain = watch, watched, plain

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoMarker, ()


class _Before(_Hook):
    """Of a module whose lookups write: what has been written before them is not theirs."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        watched = self._watched
        if not torch.compiler.is_compiling() and not self._watch.is_known(watched.table.name):
            self._watch.tracker().suspect(watched.table.name, late=WRITTEN)


class _Marker(_Hook):
    """A forward hook that marks the rows that a module looked up."""

    def __call__(self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any], found: Any) -> None:
        # Compiled code does without: what it looks up shows in the gradients.
        if torch.compiler.is_compiling():
            return
        # With max_norm even a lookup without gradients changes rows.
        if not torch.is_grad_enabled() and module.max_norm is None:
            return
        watch, watched = self._watch, self._watched
        watched.looked_up = True
        try:
            given: Any = inputs[0] if inputs else named.get("input")
            # Most are plain already, and every call of torch's takes as long as marking hundreds of rows.
            plain = given.dtype is torch.int64 and given.dim() == 1
            ids = (given if plain else given.detach().reshape(-1).long()).numpy()
        except (AttributeError, RuntimeError, TypeError):
            return  # no plain tensor of ids: what it changes shows in the gradients
        name = watched.table.name
        # Sparse gradients name their rows before a step changes them.
        watch.tracker().mark(name, ids, again=watched.sparse)
        if module.max_norm is not None and self._plain:
            watched.version = watch.version_of(watched.table)
        if not module.sparse:
            node = getattr(found, "grad_fn", None)
            if node is not None:
                node.register_prehook(_Again(watch, name, ids, watch.saves))


class _Again:
    """Runs when gradients of a lookup are computed: if there has been a save since, rows are marked again."""

    __slots__ = ("_arguments",)

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __call__(self, gradients: Any) -> None:
        watch, name, ids, saves = self._arguments
        if saves != watch.saves:
            watch.tracker().mark(name, ids, counts=False)


class _NoMarker:
    def __call__(self, *arguments: Any) -> None:
        """Do nothing."""
