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
    {"chaos"},
    {"bench"},
    {"testing"},
    {"sim"},
    {"cluster"},
    {"training"},
    {"checkpoint", "policy", "tables", "models", "data"},
    {"coding"},
    {"kernels"},
    {"events", "stopping"},
    {"options", "recipe", "screen", "buckets"},
    {"errors"},
    {"redaction"},
    {"_version"},
]
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}

# The same one level down. A role's process is on another floor than its machine, which knows no process.
CLUSTER = [
    {"session"},
    {"job"},
    {"runner", "make_plan", "memory"},
    {"server.process", "worker.process", "supervisor.process"},
    {"saving"},
    {"server", "worker", "supervisor"},
    {"runtime", "report", "redundancy"},
    {"protocol"},
]
CHECKPOINT = [
    {"checkpointer", "loading"},
    {"tools"},
    {"ranks"},
    {"torch"},
    {"saving"},
    {"layout"},
    {"reading"},
    {"memory"},
    {"format"},
    {"codecs"},
    {"store", "background", "progress_bar"},
]
RANKS_BELOW = {
    house: {room: rank for rank, layer in enumerate(layers) for room in layer}
    for house, layers in {"cluster": CLUSTER, "checkpoint": CHECKPOINT}.items()
}

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
            may = mine in ("testing", "bench", "chaos")  # which make labs
            assert theirs != "testing" or may, f"{name(path)} imports {module}: a job must not"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_what_must_not_be_imported(path: Path) -> None:
    roots = {module.split(".")[0] for module in imports(path)}
    assert not roots & NEVER
    if room(name(path)) in WITHOUT_TORCH:
        assert "torch" not in roots
    if not name(path).endswith("engines.ray"):
        assert "ray" not in roots


def room_below(module: str) -> tuple[str, str]:
    """A module's room, and the one in that."""
    _, house, *parts = module.split(".")
    two = ".".join(parts[:2])
    return house, two if two in RANKS_BELOW[house] else parts[0]


def wrong_below(module: str, imported: set[str]) -> list[str]:
    """What a module of a room with rooms of its own imports and must not."""
    house, mine = room_below(module)
    ranks = RANKS_BELOW[house]
    wrong = []
    for other in sorted(imported):
        if other.startswith(f"holdfast.{house}."):
            theirs = room_below(other)[1]
            if theirs.split(".")[0] != mine.split(".")[0] and ranks[theirs] <= ranks[mine]:
                wrong.append(other)
    if is_pure(module):
        wrong += sorted(imported & IMPURE)
    return wrong


def is_pure(module: str) -> bool:
    rooms = ("holdfast.cluster.protocol", "holdfast.cluster.redundancy")
    return module.startswith(rooms) or module.endswith(".machine")


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room(name(p)) in RANKS_BELOW and p.parent.parent != SOURCE], ids=name
)
def test_rooms_below(path: Path) -> None:
    if path.name == "__init__.py" and path.parent.name != "store":
        assert not imports(path), "so that to enter a room loads nothing"
        return
    house, below = room_below(name(path))
    assert below in RANKS_BELOW[house], "it has no place in the layers: give it one"
    assert wrong_below(name(path), imports(path)) == []


def test_no_floor_is_crowded() -> None:
    floors = [folder for house in RANKS_BELOW for folder in (SOURCE / house).rglob("*") if folder.is_dir()]
    modules = {floor: len(list(floor.glob("[!_]*.py"))) for floor in floors}
    assert max(modules.values()) <= 12, modules


@pytest.mark.parametrize(
    ("module", "imported", "forbidden"),
    [
        ("cluster.server.machine", "os", True),
        ("cluster.redundancy.lanes", "time", True),
        ("cluster.redundancy.lanes", "holdfast.cluster.server.ledger", True),
        ("cluster.protocol.wire", "holdfast.cluster.redundancy.lanes", True),
        ("cluster.worker.machine", "holdfast.cluster.server.machine", True),
        ("cluster.saving.coordinator", "holdfast.cluster.server.process", True),
        ("cluster.server.machine", "holdfast.cluster.server.ledger", False),
        ("cluster.server.machine", "numpy", False),
        ("cluster.server.process", "holdfast.cluster.saving.resume", False),
        ("cluster.server.process", "os", False),
        ("checkpoint.format.chunk", "holdfast.checkpoint.saving.writer", True),
        ("checkpoint.reading.loader", "holdfast.checkpoint.torch.state", True),
        ("checkpoint.saving.writer", "holdfast.checkpoint.layout.shard", False),
    ],
)
def test_what_is_forbidden_is_seen(module: str, imported: str, forbidden: bool) -> None:
    assert wrong_below(f"holdfast.{module}", {imported}) == [imported] * forbidden


def test_the_check_sees_the_source() -> None:
    assert len(MODULES) > 10
