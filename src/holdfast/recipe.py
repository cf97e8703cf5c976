"""How a model or a reader gets to another process: not as bytes that run, but as what to call there.

A recipe names a callable by its import path and the arguments to call it with, all of which JSON can hold.
Holdfast's own models and readers remember how they were made (``described``), so that one at hand can be
made again elsewhere; whoever brings their own gives its import path.
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
    """What to call, "package.module:callable", and the arguments to call it with, by name."""

    path: str
    arguments: dict[str, Any] = {}


def described(kind: Kind) -> Kind:
    """Decorate a class so that its objects remember the arguments that they were made with."""
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
    """How to make an equal object: as it was when it was made, whatever became of it since.

    Raises ConfigError for an object that cannot say so.
    """
    kind = type(thing)
    path = f"{kind.__module__}:{kind.__qualname__}"
    cure = 'write a function that makes it and give its import path, "package.module:function", instead'
    made_with = getattr(thing, _MADE_WITH, None)
    # A subclass with an __init__ of its own was called with other arguments than were remembered.
    if made_with is None or not getattr(kind.__init__, "describes", False):
        raise ConfigError(
            f"{path} cannot be constructed in another process, because its arguments are not known: {cure}"
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigError(f"{path} cannot be imported in another process: move it to a module, or {cure}")
    try:
        return Recipe(path, {name: plain(value, name) for name, value in made_with[1].items()})
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be constructed in another process: {error}; {cure}") from None


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value as JSON holds it: arrays and tuples become lists, paths strings; ``where`` is its name."""
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
    """The callable of that import path. Raises ConfigError that says which part of it is wrong."""
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
    """Import what the recipe names and call it with its arguments; ``extra`` come on top of those.

    Raises ConfigError if there is no such thing or it takes other arguments. What it raises itself goes
    through.
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
    """Whether what the path names has a parameter of that name, or one that takes all."""
    try:
        parameters = inspect.signature(find(path)).parameters
    except ValueError:
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def check_has(thing: object, names: Sequence[str], path: str, expected: str) -> None:
    """Raises ConfigError, which names the recipe's path, if the object lacks one of these attributes."""
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise ConfigError(
            f"{path} gave a {type(thing).__name__} without {', '.join(missing)}: expected {expected}"
        )


def find_own_modules() -> None:
    """Let modules be imported from the folder that a command is started in.

    It comes behind everything that is installed: a file ``torch.py`` there, which anybody may have put into a
    shared folder, does not take the place of the package. A PYTHONPATH that names the folder is left alone.
    """
    here = os.getcwd()
    asked_for = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in map(os.path.abspath, filter(None, asked_for)):
        sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here] + [here]
