from __future__ import annotations

import pytest

from holdfast.checkpoint.torch.names import bare_names, matched_names, matched_paths, wrapping

BARE = ["users.weight", "top.weight", "top.bias"]


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "_dmp_wrapped_module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_names_of_wrappers_are_left_out(prefix: str) -> None:
    wrapped = [prefix + key for key in BARE]
    assert wrapping(wrapped) == prefix
    assert bare_names(wrapped) == dict(zip(wrapped, BARE, strict=True))
    assert matched_names(wrapped, BARE) == dict(zip(wrapped, BARE, strict=True))
    assert matched_names(BARE, wrapped) == dict(zip(BARE, wrapped, strict=True))
    assert matched_names(wrapped, wrapped) == dict(zip(wrapped, wrapped, strict=True))


def test_a_name_is_a_wrappers_only_if_all_keys_have_it() -> None:
    averaged = ["n_averaged", "module.weight"]
    assert wrapping(averaged) == ""
    assert bare_names(averaged) == {key: key for key in averaged}
    assert wrapping(["modules.weight", "modulex.bias"]) == ""
    assert wrapping([]) == ""
    assert bare_names([]) == {}


def test_wrappers_within() -> None:
    keys = ["net._orig_mod.weight", "net._orig_mod.bias", "_orig_mod.x"]
    assert list(bare_names(keys).values()) == ["net.weight", "net.bias", "x"]
    # DistributedDataParallel has no name of its own: deeper in a name, "module" may be anybody's.
    assert list(bare_names(["net.module.weight", "x"]).values()) == ["net.module.weight", "x"]


def test_names_that_would_become_one_stay() -> None:
    keys = ["net._orig_mod.weight", "net.weight"]
    assert bare_names(keys) == {key: key for key in keys}
    assert matched_names(["module.a", "module.b"], ["a", "c"]) == {"module.a": "a", "module.b": "module.b"}
    # "b" here is not what "module.b" stands for
    assert matched_names(["module.a", "module.b"], ["a", "module.b"]) == {
        "module.a": "module.a",
        "module.b": "module.b",
    }


def test_paths_of_modules() -> None:
    keys, wrapped = ["net.weight"], ["module._orig_mod.net.weight"]
    paths = {"": 1, "net": 2}
    wrapped_paths = {"": 5, "module": 6, "module._orig_mod": 1, "module._orig_mod.net": 2}
    assert matched_paths(paths, keys, paths, keys) == paths
    assert matched_paths(wrapped_paths, wrapped, paths, keys) == paths
    found = matched_paths(paths, keys, wrapped_paths, wrapped)
    assert found == {"module._orig_mod": 1, "module._orig_mod.net": 2}
    assert matched_paths(paths, keys, {"": 0, "other": 0}, ["other.x"]) == {"": 1}
