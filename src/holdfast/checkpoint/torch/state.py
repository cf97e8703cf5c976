"""A user's training objects as rows and plain data, and back.

Two halves: *rows* are the weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` and the optimizer states that
have an entry for each of their rows; they are seen through views of the live memory and never copied
here. All the rest (*dense* state) is small; it is copied into a tree of plain values in which a
``TablePlace`` stands for each of the rows' tensors.

To save: ``layout``, ``fields``, ``dense_tree``, at one instant between two steps. To restore, in this order:
``check_dense`` and ``prepare``, which change nothing that the objects have; write into ``fields``;
``load_dense``. If one of the last two goes wrong the objects are neither what they were nor what was saved:
restore another checkpoint, or make them anew. ``cancel_restore`` gives up after ``prepare``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.dense import TablePlace, map_tree
from holdfast.checkpoint.format.records import WEIGHT, Field, Group, make_groups
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.memory.shares import Share
from holdfast.checkpoint.torch.capture import Capturer, Places, State
from holdfast.checkpoint.torch.fit import check_begins_with_zero, check_module, check_objects, some
from holdfast.checkpoint.torch.sharded import cut, empty_rows, is_sharded, local, reshard, version
from holdfast.checkpoint.torch.tables import LiveTable, RowTensors, find_tables
from holdfast.checkpoint.torch.unseen import why_unseen_rows_change
from holdfast.checkpoint.torch.values import (
    TORCH_DTYPES,
    copy_random_states,
    live_leaf,
    plain_leaf,
    random_states,
    reseed,
    row_bytes,
    row_field,
    set_random_states,
)
from holdfast.errors import CheckpointError, ConfigError, CorruptCheckpoint, HoldfastError, ModelMismatch


class Unseen(NamedTuple):
    """Why any row of a table may have changed, and whether that ``lasts`` or was found just now."""

    why: str
    lasts: bool


class _Room(NamedTuple):
    """What a table's rows are restored into: tensors by field, with room for these rows or more."""

    rows: int
    tensors: dict[str, Tensor]


class TrainingObjects:
    """Everything that a training run would lose in a crash.

    Args:
        objects: by name, all that have ``state_dict`` and ``load_state_dict``: modules, optimizers,
            schedulers, loaders. A name is part of what is stored: give the same ones when restoring.
            Optimizers that step in the backward pass of a module's parameters are found, and added as
            "<object's name>.<parameter's name>:backward".
        kind_of: tables for which it says different things are not put into one group.
        share_of: which of a table's so many rows this process saves; by default all. Other ranks save the
            others.

    Attributes:
        objects: those that were given and those that were found.
        tables: every table of the modules, by name.
        optimizers: those among the objects.
        overwritten: how many rows of each table a restore that failed may have overwritten.
        grown: the tables with more rows here than in the checkpoint that ``prepare`` was called for, with the
            number of rows there and here.
        apart: the names of all others, which each rank has by itself: loaders, schedulers.
        loaders: the names of those that are read.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        kind_of: Callable[[str], object] = lambda table: None,
        share_of: Callable[[int], Share] | None = None,
    ) -> None:
        check_objects(objects)
        self._kind_of, self._share_of = kind_of, share_of
        objects = {name: bare(o, is_rank=share_of is not None) for name, o in objects.items()}
        self._modules = {n: o for n, o in objects.items() if isinstance(o, nn.Module)}
        self._in_backward = find_in_backward(self._modules, known=objects.values())
        self.objects = dict(objects) | self._in_backward
        self._capturers = {name: Capturer(name, thing) for name, thing in self.objects.items()}
        self.optimizers = {n: o for n, o in self.objects.items() if isinstance(o, Optimizer)}
        known = self._modules.keys() | self.optimizers.keys()
        self.apart = [name for name in self.objects if name not in known]
        self.loaders = [name for name in self.apart if hasattr(self.objects[name], "__iter__")]
        reshard(self._modules.values())
        self.tables: Mapping[str, LiveTable] = find_tables(self._modules)
        self._users = self._find_users()
        self.overwritten: dict[str, int] = {}
        self.grown: dict[str, tuple[int, int]] = {}
        self._incoming: dict[str, _Room] = {}
        self._known: dict[str, RowTensors] = {}
        self._replaced: set[str] = set()
        self._live_tables: LiveTables | None = None
        self._places: Places | None = None
        self._seen_versions = self._versions()

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules among the objects."""
        return self._modules

    def find_again(self) -> bool:
        """Look for the tables once more; whether there are others now, or other modules that use them.

        Raises ConfigError if a parameter has got an optimizer that steps in the backward pass.
        """
        reshard(self._modules.values())
        users = self._find_users()
        if users == self._users:
            return False
        for name in find_in_backward(self._modules, known=self.objects.values()):
            raise ConfigError(
                f"{name.removesuffix(BACKWARD)} has got an optimizer that steps in the backward pass, after "
                "the Checkpointer was made: its state would not be saved; make the Checkpointer after it"
            )
        before, self.tables, self._users = self.tables, find_tables(self._modules), users
        same = {n for n, table in self.tables.items() if n in before and before[n].modules == table.modules}
        self._known = {name: rows for name, rows in self._known.items() if name in same}
        self._replaced |= self.tables.keys() - same
        self._live_tables = self._places = None
        # Of those that stay, what was written to them before is yet to be noticed.
        self._seen_versions = self._versions() | {n: self._seen_versions[n] for n in same}
        return True

    def _find_users(self) -> list[tuple[int, int]]:
        """Modules that look up rows, and their weights; and parameters that step in the backward pass."""
        users: list[tuple[int, int]] = []
        for model in self._modules.values():
            for module in model.modules():
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                    users.append((id(module), id(module._parameters.get("weight"))))
                for parameter in module._parameters.values():
                    if parameter is not None and _IN_BACKWARD in vars(parameter):
                        users.append((id(parameter), len(vars(parameter)[_IN_BACKWARD])))
        return users

    # Saving

    def layout(self) -> list[tuple[str, int, tuple[Field, ...]]]:
        """Name, rows and fields of each table, as ``make_groups`` takes them.

        Optimizers make their state when they first need it: the layout may grow from one call to the next.
        """
        for table in self.tables.values():
            self._look_at(table)
        return [(name, len(rows.tensors[WEIGHT]), rows.fields) for name, rows in self._known.items()]

    def live_tables(self) -> LiveTables:
        """All tables in groups, to copy rows from; the same object until some tensor is replaced."""
        for table in self.tables.values():  # asked at every save: no more than that, as a rule
            self._look_at(table)
        if self._live_tables is None:
            known = self._known
            shares = {name: rows.share for name, rows in known.items() if rows.share is not None}
            layout = [
                (name, shares[name].rows if name in shares else rows, fields)
                for name, rows, fields in self.layout()
            ]
            groups = make_groups(layout, self._kind_of)
            self._live_tables = LiveTables(groups, lambda table: known[table].saved_views, shares)
        return self._live_tables

    def fields(self, table: str) -> tuple[NDArray[np.uint8], ...]:
        """The live memory of a table's fields, each [rows, bytes], in the order of ``layout``.

        Between ``prepare`` and ``load_dense`` it is what the checkpoint's rows are to be written into, in the
        order of the group that names the table. Ask anew for every save: states may have been replaced.
        """
        incoming = self._incoming.get(table)
        if incoming is not None:
            return tuple(row_bytes(local(tensor))[: incoming.rows] for tensor in incoming.tensors.values())
        return self._look_at(self.tables[table]).views

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks have parts of a module's parameters."""
        return any(is_sharded(p) for module in self._modules.values() for p in module.parameters())

    def held(self) -> dict[str, Share]:
        """The tables of which this process has some rows only, and which."""
        self.layout()
        return {name: rows.held for name, rows in self._known.items() if rows.held is not None}

    def dense_tree(self) -> dict[str, Any]:
        """A copy of everything but the rows, independent of further training.

        Raises UnsupportedState, with the path to it, for a value that is not plain data.
        """
        self.layout()
        return self.capture()()

    def capture(
        self, tracking: Mapping[str, str] | None = None, only: Collection[str] | None = None
    ) -> Callable[[], dict[str, Any]]:
        """Copy everything but the rows, now, and return a function that makes a ``dense_tree`` of the copy.

        ``tracking`` says of each table how its changed rows are found, for people who look at the version.
        ``only`` names the objects to copy; by default all.

        The copy is all that has to happen between two steps; what the function does can wait, in another
        thread. It raises what ``dense_tree`` raises. Rows are known by the last ``layout``.
        """
        places = self._find_places()
        states: dict[str, State] = {}
        metadata: dict[str, Mapping[str, Any]] = {}
        for name, capturer in self._capturers.items():
            if only is not None and name not in only:
                continue
            states[name], metadata[name] = capturer.capture(places)
        optimizers = {name: type(o).__name__ for name, o in self.optimizers.items()}
        # Last: a loader's state_dict() may draw random numbers.
        random_copy = copy_random_states()

        def tree() -> dict[str, Any]:
            return {
                "objects": {name: state() for name, state in states.items()},
                "optimizers": optimizers,
                "tracking": dict(tracking or {}),
                # Versions of modules' formats, which PyTorch keeps in an attribute of the state.
                "metadata": {
                    name: map_tree(metadata[name], plain_leaf, name)
                    for name in metadata.keys() & self._modules
                },
                "rng": random_states(random_copy),
            }

        return tree

    def sample(self, rows_of: Callable[[str], Sequence[int]]) -> str:
        """A checksum of a few weights that every rank has completely: parameters, and rows of tables."""
        tables = {id(table.parameter): name for name, table in self.tables.items()}
        sampled: list[Any] = []
        for module in self._modules.values():
            plain = [p for p in module.parameters() if p.device.type == "cpu" and not is_sharded(p)]
            dense = [p for p in plain if id(p) not in tables and p.requires_grad]
            for parameter in dense[:: max(1, len(dense) // _SAMPLED)]:
                sampled.append(parameter.detach().reshape(-1)[:_SAMPLED])
            for name in {tables[id(p)]: None for p in plain if id(p) in tables}:
                rows = [row for row in rows_of(name) if row < len(self.tables[name].parameter)]
                sampled += [torch.tensor(rows), self.tables[name].parameter.detach()[rows]]
        return checksum(*(t.contiguous().view(torch.uint8).numpy() for t in sampled if t.numel()))

    # Restoring

    def check_dense(self, tree: Any) -> None:
        """Raise ModelMismatch, which names what differs, if ``tree`` is not of objects like these."""
        saved = tree.get("objects") if isinstance(tree, dict) else None
        if not isinstance(saved, dict):
            raise CorruptCheckpoint("the checkpoint's dense state has no objects")
        for name in saved.keys() - self.objects.keys():
            raise ModelMismatch(
                f"the checkpoint holds the state of {name!r}, which was not given: pass it too"
            )
        for name in self.objects.keys() - saved.keys():
            raise ModelMismatch(
                f"the checkpoint holds no state of {name!r}, only of {', '.join(saved)}: leave it out, or "
                "restore a checkpoint that was saved with it"
            )
        for name, thing in self.objects.items():
            if _is_iterating(thing):
                raise CheckpointError(f"{name} is being iterated over: call restore() before iter(loader)")
        for name, module in self._modules.items():
            check_module(name, module, saved[name])
        for name, optimizer in self.optimizers.items():
            here, there = type(optimizer).__name__, tree.get("optimizers", {}).get(name)
            if here != there:
                raise ModelMismatch(f"{name} is {there or 'no optimizer'} in the checkpoint and {here} here")
            self._check_optimizer(name, optimizer, saved[name])

    def prepare(self, groups: Sequence[Group]) -> None:
        """Make ``fields`` give room for every row of a checkpoint; raise ModelMismatch if the tables differ.

        Optimizer state that these optimizers do not have yet is allocated, and theirs with ``load_dense``.
        A table may have more rows here: the new ones stay as they are, and their optimizer state is what the
        optimizer has, or begins with. ``grown`` says which those are.
        """
        self._incoming = {}
        self.grown = {}
        saved = {table.name: (table.rows, group.fields) for group in groups for table in group.tables}
        for name in saved.keys() - self.tables.keys():
            raise ModelMismatch(
                f"the checkpoint has a table {name}, which the model lacks; the model's: {some(self.tables)}"
            )
        for name in self.tables.keys() - saved.keys():
            raise ModelMismatch(
                f"table {name} of the model is not in the checkpoint; the checkpoint's: {some(saved)}"
            )
        self._incoming = {name: self._room(self.tables[name], *found) for name, found in saved.items()}
        sizes = {name: (room.rows, len(self.tables[name].weight)) for name, room in self._incoming.items()}
        for name, (there, _) in sizes.items():
            # Rows beyond those of an older version would be neither of it nor as they were.
            if there < self.overwritten.get(name, 0):
                raise CorruptCheckpoint(
                    f"the checkpoint has {there} rows of table {name}, but {self.overwritten[name]} were "
                    "overwritten by one that was found damaged: make the objects anew and restore this one"
                )
        self.overwritten.update({name: there for name, (there, _) in sizes.items()})
        self.grown = {name: (there, here) for name, (there, here) in sizes.items() if here > there}

    def leave_out(self, names: Iterable[str]) -> None:
        """Have nothing to do with objects that were found: the checkpoint holds nothing of them."""
        for name in names:
            del self.objects[name], self._capturers[name], self.optimizers[name]

    def load_dense(
        self,
        tree: Any,
        *,
        leave: Collection[str] = (),
        seed: Sequence[int] = (),
        random_states: bool = True,
    ) -> None:
        """Load the state of every object, with the tensors of ``fields`` in it, and the random states.

        Objects to ``leave`` stay as they are. With ``seed``, the random states follow from the saved ones and
        these numbers.
        """
        self.check_dense(tree)
        for name, thing in self.objects.items():
            if name in leave:
                continue
            state = self._distribute(thing, map_tree(tree["objects"][name], self._revive, name))
            try:
                self._load(name, thing, state, tree)
            except HoldfastError:
                raise
            except Exception as error:
                raise ModelMismatch(f"{name} does not take the checkpoint's state: {error}") from error
        if random_states:
            set_random_states(tree.get("rng"))
        if seed:
            reseed(seed)
        self.overwritten.clear()
        self.cancel_restore()

    def cancel_restore(self) -> None:
        """Undo ``prepare``: ``fields`` returns the objects' own tensors again."""
        self._incoming = {}
        self._seen_versions = self._versions()

    # Tracking

    def tables_without_optimizer(self) -> list[str]:
        """The trainable tables that no optimizer among the objects owns.

        Averages of a model (``AveragedModel``) have no optimizer, and none is missed.
        """
        owned = {
            id(p)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for model in self._modules.values():
            for module in model.modules():
                if isinstance(module, AveragedModel):
                    owned |= set(map(id, module.parameters()))
        return [n for n, t in self.tables.items() if t.weight.requires_grad and id(t.weight) not in owned]

    def tables_with_unseen_changes(self) -> dict[str, Unseen]:
        """The tables of which rows may change, or may have changed, without a lookup that named them.

        Any row of such a table may differ from what was saved last. Ask at every save: settings of optimizers
        can change. Writing to weights behind the optimizers' back goes unnoticed, except in a table that no
        optimizer has.
        """
        owners: dict[int, list[tuple[Optimizer, dict[str, Any]]]] = {}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owners.setdefault(id(parameter), []).append((optimizer, group))
        answers: dict[tuple[Any, ...], str | None] = {}  # tables of one parameter group are usually alike
        replaced, self._replaced = self._replaced, set()
        found: dict[str, Unseen] = {}
        for name, table in self.tables.items():
            unseen = self._unseen(table, owners, answers)
            if unseen is None and name in replaced:
                unseen = Unseen("its tensors were replaced", lasts=False)
            if unseen is not None:
                found[name] = unseen
        return found

    def forget_replaced(self) -> None:
        """Accept the replacements of tensors so far."""
        self._replaced.clear()

    def _unseen(
        self,
        table: LiveTable,
        owners: Mapping[int, Sequence[tuple[Optimizer, dict[str, Any]]]],
        answers: dict[tuple[Any, ...], str | None],
    ) -> Unseen | None:
        weight = table.parameter
        mine = owners.get(id(weight))
        if mine is None:
            if weight.requires_grad:
                return Unseen("it is trainable, and no optimizer among the objects owns it", lasts=True)
            # An average of a model has such tables. PyTorch counts what is written to a tensor.
            written = version(weight) != self._seen_versions[table.name]
            return Unseen("it was written to", lasts=False) if written else None
        if not table.only_looked_up:
            return Unseen("a module that is no embedding has the same weight", lasts=True)
        sparse = all(module.sparse for module in table.modules)
        gradient = weight.grad
        if sparse and gradient is not None and gradient.layout == torch.strided:
            return Unseen("its gradient is dense, though its modules ask for sparse ones", lasts=False)
        for optimizer, group in mine:
            key = (id(optimizer), id(group), sparse, weight.dtype)
            if key not in answers:
                answers[key] = why_unseen_rows_change(optimizer, group, sparse=sparse, dtype=weight.dtype)
            why = answers[key]
            if why is not None:
                return Unseen(why, lasts=True)
        return None

    # Inside

    def _versions(self) -> dict[str, int]:
        return {name: version(table.weight) for name, table in self.tables.items()}

    def _row_tensors(self, table: LiveTable) -> dict[str, Tensor]:
        """The live tensors of a table by field: the weights, then optimizer states by name."""
        return self._look_at(table).tensors

    def _look_at(self, table: LiveTable) -> RowTensors:
        """A table's current tensors. They seldom change, and a full look is slow, so it is cached."""
        known = self._known.get(table.name)
        if known is None or not known.valid():
            self._places = None
            self._live_tables = None
            before, known = known, RowTensors.of(table, self.optimizers, self._share_of)
            self._known[table.name] = known
            if before is not None and known.has_replaced(before):
                self._replaced.add(table.name)  # the content of the new tensors is unknown
        return known

    def _find_places(self) -> Places:
        """The tensors that are stored as rows, as the last ``layout`` found them."""
        if self._places is None:
            self._places = Places({}, {})
            for name, rows in self._known.items():
                for field, tensor in rows.tensors.items():
                    self._places.add(tensor, TablePlace(name, field, tuple(tensor.shape)))
        return self._places

    def _room(self, table: LiveTable, rows: int, fields: Sequence[Field]) -> _Room:
        """The tensor to restore each field of the checkpoint into."""
        live = self._row_tensors(table)
        if all(field.name != WEIGHT for field in fields):
            raise ModelMismatch(f"the checkpoint has no weights of table {table.name}")
        room: dict[str, Tensor] = {}
        for field in sorted(fields, key=lambda field: field.name != WEIGHT):
            tensor = live.get(field.name)
            if tensor is None:
                tensor = self._new_state(table, rows, field)
            found = row_field(field.name, tensor)
            # Of a table that has grown, a rank's part would begin elsewhere.
            if len(tensor) < rows or (is_sharded(tensor) and len(tensor) > rows) or found != field:
                what = table.name if field.name == WEIGHT else f"{field.name} of {table.name}"
                raise ModelMismatch(
                    f"{what} is {rows} × {field.width} {field.dtype} in the checkpoint and "
                    f"{len(tensor)} × {found.width} {found.dtype} here"
                )
            room[field.name] = tensor
        return _Room(rows, {field.name: room[field.name] for field in fields})

    def _new_state(self, table: LiveTable, rows: int, field: Field) -> Tensor:
        weight = table.weight
        owner = next((n for n in self.optimizers if field.name.startswith(f"{n}.")), None)
        if owner is None or not any(_holds(g, weight) for g in self.optimizers[owner].param_groups):
            raise ModelMismatch(
                f"the checkpoint has {field.name} of table {table.name}, but no optimizer was given that has "
                f"this name and this table; optimizers: {some(self.optimizers)}"
            )
        if len(weight) > rows:
            check_begins_with_zero(self.optimizers[owner], owner, field.name, table.name)
        return empty_rows(weight, field.width, TORCH_DTYPES[field.dtype])

    def _check_optimizer(self, name: str, optimizer: Optimizer, saved: Any) -> None:
        if not isinstance(saved, dict) or not {"param_groups", "state"} <= saved.keys():
            return  # a state_dict of its own making: its load_state_dict must judge
        here = [len(g["params"]) for g in optimizer.param_groups]
        there = [len(g["params"]) for g in saved["param_groups"]]
        if here != there:
            raise ModelMismatch(
                f"{name} has groups of {there} parameters in the checkpoint and of {here} here"
            )
        names = {id(table.weight): table.name for table in self.tables.values()}
        for index, parameter in _numbered(optimizer, saved):
            for value in saved["state"].get(index, {}).values():
                mine = names.get(id(parameter), "no table")
                if isinstance(value, TablePlace) and value.table != mine:
                    raise ModelMismatch(
                        f"parameter {index} of {name} is {value.table} in the checkpoint, {mine} here: give "
                        "the optimizer its parameters in the same order"
                    )

    def _revive(self, value: Any, path: str) -> Any:
        if not isinstance(value, TablePlace):
            return live_leaf(value)
        table = self.tables.get(value.table)
        room = self._incoming.get(value.table)
        tensors = room.tensors if room else self._row_tensors(table) if table else {}
        tensor = tensors.get(value.field)
        if tensor is None:
            raise ModelMismatch(f"{path} is {value.field} of table {value.table}, which the checkpoint lacks")
        shape = (len(tensor), *value.shape[1:])  # a table that has grown has more rows than were saved
        return tensor if tuple(tensor.shape) == shape else tensor.view(shape)

    def _distribute(self, thing: Any, state: Any) -> Any:
        """The state of a module or an optimizer, with this rank's part of what it has only a part of."""
        if not self.is_sharded or not isinstance(state, dict):
            return state
        if isinstance(thing, nn.Module):
            live = thing.state_dict()
            return {key: _cut(value, live.get(key)) for key, value in state.items()}
        if isinstance(thing, Optimizer) and {"param_groups", "state"} <= state.keys():
            for index, parameter in _numbered(thing, state):
                mine = state["state"].get(index, {})
                if is_sharded(parameter) and isinstance(mine, dict):
                    state["state"][index] = {key: _cut(value, parameter) for key, value in mine.items()}
        return state

    def _load(self, name: str, thing: Any, state: Any, tree: dict[str, Any]) -> None:
        if isinstance(thing, nn.Module):
            state = OrderedDict(state)
            state._metadata = OrderedDict(tree.get("metadata", {}).get(name, {}))
            # Tables are loaded from themselves, which PyTorch sees and copies nothing.
            thing.load_state_dict(state)
        elif isinstance(thing, Optimizer):
            thing.load_state_dict(state)
            _undo_casts(thing, state)
        else:
            thing.load_state_dict(state)
            if hasattr(thing, "_initial_iter_for_state_dict"):
                # A StatefulDataLoader draws random numbers when it goes to its position. It does so now,
                # before the random states are restored: the run that wrote them was past that.
                thing.state_dict()


def bare(thing: Any, *, is_rank: bool) -> Any:
    """The model in the wrapper of ``DistributedDataParallel``, whose names are those of any model.

    In ranks also the one that ``torch.compile`` has wrapped. One process saves that under the names of the
    wrapper, as it always has.
    """
    while True:
        if isinstance(thing, nn.parallel.DistributedDataParallel):
            thing, is_rank = thing.module, True
        elif is_rank and type(thing).__name__ == "OptimizedModule":
            thing = thing._orig_mod
        else:
            return thing


_SAMPLED = 8
BACKWARD = ":backward"
"""What ends the names of optimizers that step in the backward pass."""
_IN_BACKWARD = "_in_backward_optimizers"


def find_in_backward(modules: Mapping[str, nn.Module], known: Iterable[Any]) -> dict[str, Optimizer]:
    """Optimizers that step in the backward pass, of parameters of the modules; ``known`` ones are left out.

    ``torch.distributed.optim._apply_optimizer_in_backward``, and what TorchRec makes of it, keeps them there.
    """
    found: dict[str, Optimizer] = {}
    seen = {id(thing) for thing in known}
    for root, model in modules.items():
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                for optimizer in vars(parameter).get(_IN_BACKWARD, ()) if parameter is not None else ():
                    if id(optimizer) not in seen:
                        seen.add(id(optimizer))
                        key = ".".join(filter(None, (root, path, name))) + BACKWARD
                        number = sum(other.startswith(key) for other in found)
                        found[f"{key}{number or ''}"] = optimizer
    return found


def _cut(value: Any, like: Any) -> Any:
    """A tensor, distributed as one of the same shape is."""
    if is_sharded(like) and type(value) is Tensor and value.shape == like.shape:
        return cut(value, like)
    return value


def _holds(group: Mapping[str, Any], weight: Tensor) -> bool:
    return any(parameter is weight for parameter in group["params"])


def _numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """The parameters of an optimizer with their indices in its state."""
    for here, there in zip(optimizer.param_groups, state["param_groups"], strict=True):
        yield from zip(there["params"], here["params"], strict=True)


def _undo_casts(optimizer: Optimizer, state: Any) -> None:
    """Restore the dtype of states that PyTorch has cast to their parameter's, which loses bits."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return  # its own load_state_dict is responsible
    for index, parameter in _numbered(optimizer, state):
        loaded = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(index, {}).items():
            other = loaded.get(key)
            if type(other) is not type(value):
                continue
            if isinstance(value, Tensor):
                loaded[key] = other if other.dtype == value.dtype else value.to(other.device)
            elif parameter.device.type == "cpu":  # PyTorch also moves tensors that lie deeper
                loaded[key] = value


def _is_iterating(thing: Any) -> bool:
    """Whether a StatefulDataLoader, or what looks like one, has handed out an iterator; or a Prefetch."""
    if getattr(thing, "is_iterating", False) is True:
        return True
    # One that state_dict() made for itself is replaced when a state is loaded: nobody has it.
    return getattr(thing, "_iterator", None) is not None and not getattr(
        thing, "_initial_iter_for_state_dict", False
    )
