"""How to construct a model or a reader in another process: an import path with arguments, not a pickle.

A recipe is the import path of a callable and its arguments, as plain values. Holdfast's own models and
readers remember their arguments (``described``), so that they can be constructed again; for your own, give an
import path.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from holdfast.errors import ConfigError

Kind = TypeVar("Kind", bound=type)
_MADE_WITH = "_holdfast_made_with"
_DEEPEST = 100


class Recipe(Struct, frozen=True):
    """The import path of a callable, "package.module:callable", and its keyword arguments."""

    path: str
    arguments: dict[str, Any] = {}


def described(kind: Kind) -> Kind:
    """Decorate a class so that its objects remember the arguments of their constructor."""
    init = kind.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _, *given = signature.bind(self, *args, **kwargs).arguments.items()
        # Not by setattr, as modules look at every attribute that they are given.
        self.__dict__[_MADE_WITH] = (type(self), dict(given))

    kind.__init__ = remember  # type: ignore[misc]
    remember.describes = True  # type: ignore[attr-defined]
    return kind


def recipe_of(thing: object) -> Recipe:
    """The recipe that constructs an object like this one, in its initial state.

    Raises ConfigError if the object does not know its arguments.
    """
    kind = type(thing)
    path = f"{kind.__module__}:{kind.__qualname__}"
    cure = 'write a function that makes it and give its import path, "package.module:function", instead'
    made_with = getattr(thing, _MADE_WITH, None)
    # A subclass with an __init__ of its own was called with other arguments than were remembered.
    if made_with is None or not getattr(kind.__init__, "describes", False):
        raise ConfigError(
            f"{path} cannot be made in another process, because its arguments are not known: {cure}"
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigError(f"{path} cannot be imported in another process: move it to a module, or {cure}")
    try:
        return Recipe(path, {name: plain(value, name) for name, value in made_with[1].items()})
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be made in another process: {error}; {cure}") from None


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Convert a value to plain data: arrays and tuples to lists, paths to strings. ``where`` is its name."""
    if depth > _DEEPEST:
        raise ConfigError(f"{where[:100]}… is nested more than {_DEEPEST} deep, or contains itself")
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError(
            f"{where} is an integer that does not fit in 64 bits: it cannot be sent to other processes"
        )
    if value is None or isinstance(value, bool | int | str) or _is_number(value):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(inner, f"{where}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(inner, f"{where}[{i}]", depth + 1) for i, inner in enumerate(value)]
    what = value if isinstance(value, float) else type(value).__name__
    raise ConfigError(f"{where} is {what}: expected numbers, strings, lists and mappings of them")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def find(path: str) -> Callable[..., Any]:
    """Import the callable of that path. Raises ConfigError that says which part of it is wrong."""
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise ConfigError(f'{path!r} is not an import path: expected "package.module:callable"')
    module = _import(module_name, path)
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"did you mean {near[0]}?" if near else "name something that it defines"
        raise ConfigError(f"{path}: {module_name} ({_file(module)}) has no {name}; {hint}") from None
    if not callable(found):
        raise ConfigError(f"{path} is {found!r}, which cannot be called: expected a function or a class")
    return found  # type: ignore[no-any-return]


def _import(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{path}: there is no module {error.name}; install it, put its folder on PYTHONPATH, or start"
                f" from that folder (this is {os.getcwd()})"
            ) from None
        raise ConfigError(f"{path}: importing {name} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path}: importing {name} failed: {type(error).__name__}: {error}") from error


def _file(module: Any) -> str:
    return getattr(module, "__file__", None) or "built in"


def make(recipe: Recipe, **extra: Any) -> Any:
    """Import the recipe's callable and call it with its arguments and ``extra``.

    Raises ConfigError if it does not exist or takes other arguments. Its own exceptions propagate.
    """
    target = find(recipe.path)
    arguments = {**recipe.arguments, **extra}
    try:
        signature = inspect.signature(target)
    except ValueError:  # some that are written in C have none: they must judge for themselves
        return target(**arguments)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "no arguments"
        given = ", ".join(arguments) or "none"
        raise ConfigError(
            f"{recipe.path} cannot be called with these arguments ({given}): {error}; it takes ({takes})"
        ) from None
    return target(**arguments)


def takes(path: str, name: str) -> bool:
    """Whether the callable has a parameter of that name, or ``**kwargs``."""
    try:
        parameters = inspect.signature(find(path)).parameters
    except ValueError:
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def check_has(thing: object, names: Sequence[str], path: str, expected: str) -> None:
    """Raise ConfigError, which names the recipe's path, if the object lacks one of these attributes."""
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise ConfigError(
            f"{path} gave a {type(thing).__name__} without {', '.join(missing)}: expected {expected}"
        )


def find_own_modules() -> None:
    """Make modules in the working folder importable.

    The folder comes last in ``sys.path``: a file ``torch.py`` there, which anybody may have put into a
    shared folder, does not shadow the package. A PYTHONPATH that names the folder is respected.
    """
    here = os.getcwd()
    asked_for = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in map(os.path.abspath, filter(None, asked_for)):
        sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here] + [here]
