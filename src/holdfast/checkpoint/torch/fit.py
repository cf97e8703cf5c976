"""Whether training objects can be saved at all, and whether a saved state is of objects like these."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.format.dense import Array, TablePlace
from holdfast.checkpoint.torch.values import DTYPE_NAMES
from holdfast.errors import ConfigError, CorruptCheckpoint, ModelMismatch

log = logging.getLogger("holdfast.checkpoint")


def check_objects(objects: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names the object, for what cannot be saved and restored."""
    names: dict[int, str] = {}
    for name, thing in objects.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a training object is named {name!r}: expected a name")
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"{name} is a {type(thing).__name__}, which lacks state_dict() or load_state_dict(): "
                "give it both, or leave it out"
            )
        if id(thing) in names:
            raise ConfigError(f"{name} and {names[id(thing)]} are the same object: pass it once")
        names[id(thing)] = name
        if any(name.startswith(f"{other}.") for other in objects):
            raise ConfigError(f"{name}'s name begins with another object's: their tables could be mixed up")


def check_module(name: str, module: nn.Module, saved: Any) -> None:
    """Compare keys, shapes and types before PyTorch does, which loads half and casts what does not fit."""
    if not isinstance(saved, dict):
        raise ModelMismatch(f"{name} is not a module in the checkpoint, but a {type(module).__name__} here")
    if any(m._load_state_dict_pre_hooks for m in module.modules()):
        return  # these may translate an older state: its load_state_dict must judge
    live = module.state_dict()
    for problem, keys in (
        ("not here", saved.keys() - live.keys()),
        ("only here", live.keys() - saved.keys()),
    ):
        if keys:
            raise ModelMismatch(f"{name} has other keys in the checkpoint; {problem}: {some(sorted(keys))}")
    for key, mine in live.items():
        value = saved[key]
        if not isinstance(mine, Tensor) or nn.parameter.is_lazy(mine):
            continue
        here = (tuple(mine.shape), DTYPE_NAMES.get(mine.dtype, str(mine.dtype)))
        there = (
            (value.shape, getattr(value, "dtype", here[1]))
            if isinstance(value, (Array, TablePlace))
            else None
        )
        grown = isinstance(value, TablePlace) and there is not None and _has_grown(there[0], here[0])
        if here != there and not grown:
            raise ModelMismatch(f"{name}.{key} is {_show(there)} in the checkpoint and {_show(here)} here")


def say_grown(grown: Mapping[str, tuple[int, int]], version: int) -> None:
    """Log which tables have fewer rows in a version than here: the number of rows there and here."""
    for name, (there, here) in grown.items():
        log.warning(
            "table %s has %d rows in version %d and %d here: the new rows stay as they were",
            name, there, version, here,
        )  # fmt: skip


def _has_grown(there: tuple[int, ...], here: tuple[int, ...]) -> bool:
    """Whether a table's shapes differ in the number of rows alone, of which there are more here."""
    return bool(there and here) and there[1:] == here[1:] and there[0] < here[0]


def check_begins_with_zero(optimizer: Optimizer, name: str, field: str, table: str) -> None:
    """Raise ModelMismatch if rows that are new in a table may need other optimizer state than zeros.

    Asked only for state that the optimizer has yet to make, in its first step.
    """
    if (type(optimizer).__name__, field.removeprefix(f"{name}.")) not in _BEGIN_WITH_ZERO:
        raise ModelMismatch(
            f"table {table} has grown since it was saved, and what {name} ({type(optimizer).__name__}) "
            f"begins with in {field} of new rows is not known: let it take a step before, or leave {name} out"
        )


_BEGIN_WITH_ZERO = {
    *(("Adam", key) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    *(("AdamW", key) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    *(("SparseAdam", key) for key in ("exp_avg", "exp_avg_sq", "step")),
    *(("Adamax", key) for key in ("exp_avg", "exp_inf")),
    *(("NAdam", key) for key in ("exp_avg", "exp_avg_sq")),
    *(("RAdam", key) for key in ("exp_avg", "exp_avg_sq")),
    *(("Adadelta", key) for key in ("square_avg", "acc_delta")),
    *(("RMSprop", key) for key in ("square_avg", "grad_avg", "momentum_buffer")),
    ("SGD", "momentum_buffer"),
    ("RowMomentum", "momentum_buffer"),
    ("RowWiseAdagrad", "sum"),
}
"""Optimizers and the state, one entry a row, that they make of zeros in their first step. SGD copies the
gradient instead, which is what it would make of zeros, too, without dampening."""


def _show(found: tuple[tuple[int, ...], str] | None) -> str:
    return f"{found[1]} of shape {list(found[0])}" if found else "no tensor"


@contextlib.contextmanager
def taken_for_damage(where: str) -> Iterator[None]:
    """Report data of an unexpected structure, such as a list instead of a dict, as corruption."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpoint(f"{where} holds no valid state of these objects: {error!r}") from error


def some(names: Any) -> str:
    """The first few of some names, for a message."""
    shown = list(names)
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return (", ".join(shown[:5]) or "none") + more
