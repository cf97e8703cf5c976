from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.equivalent import Equivalents
from tests.mutants.mutate import Mutant, mutants
from tests.mutants.rooms import TESTS, meant_for, modules
from tests.mutants.running import BaselineFailed, Runner

ROOT = Path(__file__).resolve().parents[2]
MODULE = b"""
def smaller(x, y):
    return x < y

def count(x):
    while x > 0:
        x -= 1
    return x
"""
SMALL_TESTS = """
from holdfast.small import count, smaller

def test_smaller():
    assert smaller(1, 2)
    assert not smaller(2, 1)

def test_count():
    assert count(3) == 0
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package with a module and its tests, and the mutator."""
    root = tmp_path / "tree"
    for name in ("src/holdfast", "tests/mutants", "docs"):
        (root / name).mkdir(parents=True)
    for name in ("README.md", "pyproject.toml", "src/holdfast/__init__.py", "tests/__init__.py"):
        (root / name).touch()
    for source in Path(__file__).parent.glob("*.py"):
        (root / "tests/mutants" / source.name).write_bytes(source.read_bytes())
    (root / "src/holdfast/small.py").write_bytes(MODULE)
    (root / "tests/test_small.py").write_text(SMALL_TESTS)
    return root


def _mutant(after: str) -> Mutant:
    (mutant,) = (m for m in mutants("src/holdfast/small.py", MODULE) if m.after == after)
    return mutant


def test_the_tests_decide_what_becomes_of_a_mutant(tree: Path) -> None:
    chosen = [_mutant("return x <= y"), _mutant("return x >= y"), _mutant("while False:"), _mutant("x += 1")]
    before = {path: path.stat().st_mtime_ns for path in (tree / "src").rglob("*.py")}
    with Runner(tree, workers=1, grace_seconds=2.0) as runner:
        asked = [(mutant, MODULE, ("tests/test_small.py",)) for mutant in chosen]
        outcomes = dict(runner.run(asked))
    assert [outcomes[mutant].verdict for mutant in chosen] == ["survived", "killed", "killed", "timeout"]
    assert outcomes[chosen[1]].failed == "tests/test_small.py::test_smaller"
    assert outcomes[chosen[3]].failed == "tests/test_small.py::test_count"  # its loop does not end
    assert {path: path.stat().st_mtime_ns for path in (tree / "src").rglob("*.py")} == before


def test_tests_that_fail_without_a_mutant_say_nothing_about_any(tree: Path) -> None:
    (tree / "tests/test_small.py").write_text("def test_no():\n    assert False\n")
    with Runner(tree, workers=1) as runner, pytest.raises(BaselineFailed, match="test_no"):
        list(runner.run([(_mutant("return x <= y"), MODULE, ("tests/test_small.py",))]))


def test_every_mutated_module_has_tests() -> None:
    found = modules(ROOT)
    assert len(found) > 40
    assert "src/holdfast/checkpoint/memory/copy_on_write.py" in found, "alone of its folder"
    assert len(found) == len(set(found))
    for module in found:
        assert meant_for(ROOT, module), module
        for test in meant_for(ROOT, module):
            assert (ROOT / test.partition("::")[0]).is_file(), test


def test_the_table_names_nothing_that_is_gone() -> None:
    assert [name for name in TESTS if not (ROOT / "src/holdfast" / name).exists()] == []
    named = {test.partition("::")[0] for tests in TESTS.values() for test in tests}
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.soak
def test_every_mutant_that_is_accepted_as_equivalent_can_be_made() -> None:
    accepted = Equivalents.read(Path(__file__).with_name("equivalent.txt"))
    made = {
        path: {(mutant.before, mutant.after) for mutant in mutants(path, (ROOT / path).read_bytes())}
        for path in {path for path, _, _ in accepted.reasons}
    }
    for path, before, after in accepted.reasons:
        assert (before, after) in made[path], path


def test_an_equivalent_mutant_needs_a_reason(tmp_path: Path) -> None:
    listed = tmp_path / "equivalent.txt"
    listed.write_text("# Some.\n\nsrc/holdfast/small.py\n    x < y\n    x <= y\n    why: they never meet\n")
    assert Equivalents.read(listed).reasons == {
        ("src/holdfast/small.py", "x < y", "x <= y"): "they never meet"
    }
    listed.write_text("src/holdfast/small.py\nx < y\nx <= y\n")
    with pytest.raises(ValueError, match="why"):
        Equivalents.read(listed)
