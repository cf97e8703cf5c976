"""Names of parameters as the bare model has them, whatever the model is wrapped in.

``DistributedDataParallel`` puts ``module.`` before every name, ``torch.compile`` ``_orig_mod.``, TorchRec's
``DistributedModelParallel`` ``_dmp_wrapped_module.``; a model that is wrapped in several has several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_WRAPPERS = ("module.", "_orig_mod.", "_dmp_wrapped_module.")
_NOBODYS = ("_orig_mod", "_dmp_wrapped_module")
"""No model of a user has parts of these names, so they are wrappers anywhere in a name."""


def wrapping(keys: Iterable[str]) -> str:
    """The wrappers' names that all keys of a ``state_dict`` begin with, such as "module._orig_mod."."""
    left = list(keys)
    found = ""
    while left:
        wrapper = next((w for w in _WRAPPERS if all(key.startswith(w) for key in left)), None)
        if wrapper is None:
            break
        found += wrapper
        left = [key.removeprefix(wrapper) for key in left]
    return found


def bare_names(keys: Iterable[str]) -> dict[str, str]:
    """The bare model's name of each key of a ``state_dict``; the key itself if two would have one name."""
    all_keys = list(keys)
    prefix = wrapping(all_keys)
    names = {key: _bare(key, prefix) for key in all_keys}
    return names if len(set(names.values())) == len(names) else {key: key for key in all_keys}


def matched_names(saved: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """For each key of a saved ``state_dict`` that of the live model's, or itself where that has none."""
    here = {bare: key for key, bare in bare_names(live).items()}
    there = bare_names(saved)
    if any(bare not in here and key in here.values() for key, bare in there.items()):
        return {key: key for key in there}  # what looks like a wrapper's name is the model's own
    return {key: here.get(bare, key) for key, bare in there.items()}


def matched_paths(
    saved: Mapping[str, object], saved_keys: Iterable[str], live: Iterable[str], live_keys: Iterable[str]
) -> dict[str, object]:
    """What is saved by modules' paths, by the paths of the live model's modules.

    Args:
        saved: values by path, "" for the outermost module.
        saved_keys: of the ``state_dict`` that was saved with them.
        live: paths of the live model.
        live_keys: of its ``state_dict``.
    """
    there, here = wrapping(saved_keys), wrapping(live_keys)
    by_bare = {
        _bare(f"{path}.", there): value
        for path, value in saved.items()
        if f"{path}.".removeprefix(".").startswith(there)
    }
    found = {path: _bare(f"{path}.", here) for path in live if f"{path}.".removeprefix(".").startswith(here)}
    return {path: by_bare[bare] for path, bare in found.items() if bare in by_bare}


def _bare(name: str, prefix: str) -> str:
    parts = name.removeprefix(".").removeprefix(prefix).split(".")
    return ".".join(part for part in parts if part not in _NOBODYS)
