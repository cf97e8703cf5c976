from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.errors import ConfigError
from holdfast.recipe import Recipe, described, find_own_modules, make, plain, recipe_of


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, with a name that no other test has imported."""
    name = f"user_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(
        "NUMBER = 3\n"
        "def build(width, depth=2):\n    return (width, depth)\n"
        "class Maker:\n    @staticmethod\n    def make():\n        return 'made'\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("1 / 0\n")
    (tmp_path / f"{name}_lacks.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_it_imports_and_calls(module: str) -> None:
    assert make(Recipe(f"{module}:build", {"width": 4})) == (4, 2)
    assert make(Recipe(f"{module}:build", {"width": 4, "depth": 1}), depth=7) == (4, 7)
    assert make(Recipe(f"{module}:Maker.make")) == "made"


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("build", {}, r"'build' is not an import path: expected \"package\.module:callable\""),
        ("a:b:c", {}, r"is not an import path"),
        ("a b:c", {}, r"is not an import path"),
        (":c", {}, r"is not an import path"),
        (
            "no_such_package.models:build",
            {},
            r"no module no_such_package; install it, put.*PYTHONPATH.*this is /",
        ),
        ("USER.models:build", {}, r"importing .*is not a package|no module USER\.models"),
        ("USER_lacks:build", {}, r"importing USER_lacks failed: No module named 'not_installed_here'"),
        ("USER_broken:build", {}, r"importing USER_broken failed: ZeroDivisionError: division by zero"),
        ("USER:biuld", {}, r"USER \(.*USER\.py\) has no biuld; did you mean build\?"),
        ("USER:NUMBER", {}, r"USER:NUMBER is 3, which cannot be called"),
        ("USER:build", {}, r"missing a required argument: 'width'; it takes \(width, depth=2\)"),
        ("USER:build", {"width": 1, "x": 2}, r"\(width, x\): got an unexpected keyword argument 'x'"),
    ],
)
def test_mistakes_are_named(module: str, path: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("USER", module)):
        make(Recipe(path.replace("USER", module), arguments))


def through_json(recipe: Recipe) -> Recipe:
    return msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(recipe))), Recipe)


def test_models_say_how_they_were_made() -> None:
    models = [
        hf.DLRM(13, 26, dim=8, bottom=(16, 8), top=np.array([4, 1])),  # type: ignore[arg-type]
        hf.DeepFM(13, 26, 8, hidden=[4]),
        hf.PNN(dense_features=13, tables=26, dim=8, hidden=(4,)),
    ]
    for model in models:
        recipe = through_json(recipe_of(model))
        again = make(recipe)
        assert type(again) is type(model)
        shapes = [{n: p.shape for n, p in m.state_dict().items()} for m in (model, again)]
        assert shapes[0] == shapes[1]
        assert recipe_of(again) == recipe


def test_readers_say_how_they_were_made(tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    path.write_text("\t".join(["1", *["3"] * 13, *["a1b2c3d4"] * 26]) + "\n")
    synthetic = hf.Synthetic(samples=100, batch_size=7, table_rows=np.array([5, 6]), seed=3)  # type: ignore[arg-type]
    again = make(through_json(recipe_of(synthetic)))
    assert again.state_dict() == synthetic.state_dict()
    test = make(recipe_of(synthetic), part="test")
    assert (test.part, test.batch(0).labels.tobytes()) != ("train", synthetic.batch(0).labels.tobytes())
    criteo = hf.Criteo(path, batch_size=4, table_rows=(9,) * 26, part="all")
    assert make(through_json(recipe_of(criteo))).state_dict() == criteo.state_dict()


class Wider(hf.PNN):
    """Made as its parent is."""


class Other(hf.PNN):
    def __init__(self) -> None:
        super().__init__(3, 2, 4, (5,))


def test_subclasses_are_described_unless_they_are_made_otherwise() -> None:
    recipe = recipe_of(Wider(3, 2, 4, (5,)))
    assert recipe.path == "tests.test_recipe:Wider"
    assert isinstance(make(recipe), Wider)
    with pytest.raises(ConfigError, match=r"test_recipe:Other cannot be made.*give its import path"):
        recipe_of(Other())


def test_what_cannot_be_described_is_named() -> None:
    with pytest.raises(ConfigError, match=r"torch.*Linear cannot be made.*\"package\.module:function\""):
        recipe_of(torch.nn.Linear(2, 2))

    @described
    class Local:
        def __init__(self, value: object) -> None:
            self.value = value

    with pytest.raises(ConfigError, match="Local cannot be imported in another process: move it"):
        recipe_of(Local(3))
    Local.__qualname__ = "Local"
    assert recipe_of(Local(3)).arguments == {"value": 3}
    with pytest.raises(ConfigError, match=r"Local cannot be made.*value\[1\] is object: expected"):
        recipe_of(Local([1, object()]))


def test_a_wrong_call_raises_what_python_says() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sample'"):
        hf.Synthetic(sample=3, batch_size=2)  # type: ignore[call-arg]


def test_plain_values() -> None:
    value = {"a": (1, 2.5, None, True), "b": np.float32(0.5), "c": Path("x"), "d": [np.arange(2)]}
    assert plain(value, "v") == {"a": [1, 2.5, None, True], "b": 0.5, "c": "x", "d": [[0, 1]]}
    for bad in (float("nan"), b"bytes", {1: 2}, {1, 2}, np.array([np.inf])):
        with pytest.raises(ConfigError, match=r"v(\[0\])? is .*: expected"):
            plain(bad, "v")


def test_the_current_folder_is_behind_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for before in (
        ["/installed", "/more"],
        ["", "/installed", "/more"],
        [str(tmp_path), "/installed", "/more"],
    ):
        monkeypatch.setattr(sys, "path", list(before))
        monkeypatch.delenv("PYTHONPATH", raising=False)
        find_own_modules()
        find_own_modules()
        assert sys.path == ["/installed", "/more", str(tmp_path)]
    # Who asks for it to be first gets that.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/elsewhere", str(tmp_path)]))
    monkeypatch.setattr(sys, "path", ["/elsewhere", str(tmp_path), "/installed"])
    find_own_modules()
    assert sys.path == ["/elsewhere", str(tmp_path), "/installed"]
