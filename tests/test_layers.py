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

# The same one level down. A role's process is on another floor than its machine, which knows no process.
CLUSTER = [
    {"session"},
    {"job"},
    {"runner", "make_plan"},
    {"server.process", "worker.process", "supervisor.process"},
    {"saving"},
    {"server", "worker", "supervisor"},
    {"runtime", "report", "redundancy"},
    {"protocol"},
]
CLUSTER_RANK = {room: rank for rank, layer in enumerate(CLUSTER) for room in layer}

# What a protocol must not know: it is told the time, and gives and takes messages.
IMPURE = {"os", "time", "threading", "zmq", "torch", "socket", "subprocess", "multiprocessing"}

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
    if not name(path).endswith("engines.ray"):
        assert "ray" not in roots


def cluster_room(module: str) -> str:
    """The room in ``cluster`` of a module."""
    parts = module.removeprefix("holdfast.cluster.").split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in CLUSTER_RANK else parts[0]


def wrong_in_cluster(module: str, imported: set[str]) -> list[str]:
    """What a module of ``cluster`` imports and must not."""
    mine = cluster_room(module)
    wrong = []
    for other in sorted(imported):
        if other.startswith("holdfast.cluster."):
            theirs = cluster_room(other)
            if theirs.split(".")[0] != mine.split(".")[0] and CLUSTER_RANK[theirs] <= CLUSTER_RANK[mine]:
                wrong.append(other)
    if is_pure(module):
        wrong += sorted(imported & IMPURE)
    return wrong


def is_pure(module: str) -> bool:
    rooms = ("holdfast.cluster.protocol", "holdfast.cluster.redundancy")
    return module.startswith(rooms) or module.endswith(".machine")


@pytest.mark.parametrize("path", [p for p in MODULES if name(p).startswith("holdfast.cluster.")], ids=name)
def test_rooms_of_a_cluster(path: Path) -> None:
    if path.name == "__init__.py":
        assert not imports(path), "so that to enter a room loads nothing"
        return
    assert cluster_room(name(path)) in CLUSTER_RANK, "it has no place in the layers: give it one"
    assert wrong_in_cluster(name(path), imports(path)) == []


@pytest.mark.parametrize(
    ("module", "imported", "forbidden"),
    [
        ("server.machine", "os", True),
        ("redundancy.lanes", "time", True),
        ("redundancy.lanes", "holdfast.cluster.server.ledger", True),
        ("protocol.wire", "holdfast.cluster.redundancy.lanes", True),
        ("worker.machine", "holdfast.cluster.server.machine", True),
        ("saving.coordinator", "holdfast.cluster.server.process", True),
        ("server.machine", "holdfast.cluster.server.ledger", False),
        ("server.machine", "numpy", False),
        ("server.process", "holdfast.cluster.saving.resume", False),
        ("server.process", "os", False),
    ],
)
def test_what_is_forbidden_is_seen(module: str, imported: str, forbidden: bool) -> None:
    assert wrong_in_cluster(f"holdfast.cluster.{module}", {imported}) == [imported] * forbidden


def test_the_check_sees_the_source() -> None:
    assert len(MODULES) > 10
