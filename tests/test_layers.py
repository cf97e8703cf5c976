"""The house's rules about who may import whom, read off the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "holdfast"

# From the top down; rooms of one line are siblings and do not import each other.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"cli_planning"},
    {"testing"},
    {"chaos"},
    {"bench"},
    {"sim"},
    {"cluster"},
    {"training"},
    {"checkpoint", "policy", "tables", "coding", "models", "data"},
    {"kernels"},
    {"events", "stopping"},
    {"options", "recipe", "screen"},
    {"errors"},
    {"redaction"},
    {"_version"},
]
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}

# Rooms whose processes must start quickly and stay small.
WITHOUT_TORCH = {
    "data",
    "tables",
    "coding",
    "policy",
    "kernels",
    "events",
    "options",
    "recipe",
    "errors",
    "redaction",
}
NEVER = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


MODULES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def name(path: Path) -> str:
    return ".".join(("holdfast", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_go_down_only(path: Path) -> None:
    mine = room(name(path))
    assert mine in RANK, f"{mine} has no place in the layers: give it one"
    for module in imports(path):
        if module.startswith("holdfast."):
            theirs = room(module)
            assert theirs == mine or RANK[theirs] > RANK[mine], f"{name(path)} imports {module}"
            assert theirs != "testing" or mine == "testing", f"{name(path)} imports {module}: only tests may"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_what_must_not_be_imported(path: Path) -> None:
    roots = {module.split(".")[0] for module in imports(path)}
    assert not roots & NEVER
    if room(name(path)) in WITHOUT_TORCH:
        assert "torch" not in roots
    if not name(path).endswith("launch.ray"):
        assert "ray" not in roots


def test_the_check_sees_the_source() -> None:
    assert len(MODULES) > 10
