from __future__ import annotations

import pytest

from tests.mutants.mutate import mutants

CHANGES = [
    ("x < y", {"x <= y", "x >= y"}),
    ("x >= y", {"x > y", "x < y"}),
    ("x == y", {"x != y"}),
    ("x is None", {"x is not None"}),
    ("x is not None", {"x is None"}),
    ("x not in y", {"x in y"}),
    ("x < y == z", {"x <= y == z", "x >= y == z", "x < y != z"}),
    ("(x) and (y)", {"(x) or (y)"}),
    ("x or y or z", {"x and y or z", "x or y and z"}),
    ("not x", {"x"}),
    ("-x", {"x"}),
    ("x + y", {"x - y"}),
    ("x << y", {"x >> y"}),
    ("x & y", {"x | y"}),
    ("7", {"8", "6"}),
    ("0.5", {"1.5"}),
    ("True", {"False"}),
    ("any(x)", {"all(x)"}),
    ("min(x)", {"max(x)"}),
    ("x if y else z", {"x if True else z", "x if False else z"}),
    ("[x for x in y if x]", {"[x for x in y if True]", "[x for x in y if False]"}),
    ("'é' + x", {"'é' - x"}),  # columns are counted in bytes
    ("int | None", set()),
    ("isinstance(x, int | str)", set()),
    ("zip(x, y, strict=True)", set()),
    ("f'{x + 1}'", set()),
    ("x.y", set()),
]
STATEMENTS = [
    ("x.y(z)", {"pass"}),
    ("x.y = z", {"pass"}),
    ("x[y] = z", {"pass"}),
    ("x.y, z = w", {"pass"}),
    ("x.y: int = z", {"pass"}),
    ("x.y += z", {"pass", "x.y -= z"}),
    ("x += y", {"x -= y"}),
    ("x = y", set()),
    ("del x[y]", {"pass"}),
    ("if x: y = z", {"if True: y = z", "if False: y = z"}),
    ("while x: y = z", {"while False: y = z"}),
    ("for x in y: continue", {"for x in y: break"}),
    ("for x in y: break", {"for x in y: continue"}),
    ("def f(x): return y", {"def f(x): return None"}),
    ("def f(x): return None", set()),
    ("def f(x): return False", {"def f(x): return True"}),
    ("def f(x=1): y = z", {"def f(x=2): y = z", "def f(x=0): y = z"}),
    ("assert x == 1", set()),
    ("raise Error(x + 1)", set()),
    ("log.warning(x, 1)", set()),
    ("x: tuple[Literal[1], int] = y", set()),
    ("'a docstring of 1 < 2'", set()),
]


@pytest.mark.parametrize(("before", "changed"), CHANGES)
def test_expressions_are_changed_one_place_at_a_time(before: str, changed: set[str]) -> None:
    found = mutants("x.py", f"w = {before}\n".encode())
    assert {mutant.after.removeprefix("w = ") for mutant in found} == changed
    assert {mutant.apply(f"w = {before}\n".encode()).decode() for mutant in found} == {
        f"w = {after}\n" for after in changed
    }


@pytest.mark.parametrize(("before", "changed"), STATEMENTS)
def test_statements_with_an_effect_are_changed(before: str, changed: set[str]) -> None:
    assert {mutant.after for mutant in mutants("x.py", before.encode())} == changed


def test_what_tests_cannot_see_is_left_alone() -> None:
    source = '''
"""Text with 1 < 2."""

if TYPE_CHECKING:
    from x import y

@dataclass(frozen=True)
class Frozen(Struct, kw_only=True):
    """Text."""

    size: Annotated[int, Meta(ge=0)]

    def __repr__(self) -> str:
        return "x" * 3
'''
    assert mutants("x.py", source.encode()) == []


def test_a_mutant_says_where_it_is_and_what_it_changes() -> None:
    (mutant,) = mutants("room/x.py", b"if (  # why\n    x\n    and  # because\n    y\n):\n    z\n")[2:]
    assert str(mutant) == "room/x.py:3: and # because → or # because"


def test_every_mutant_is_another_module() -> None:
    source = b"def f(x):\n    if not x and x.y < 3:\n        x.y = True\n    return x\n"
    changed = [mutant.apply(source) for mutant in mutants("x.py", source)]
    assert len({*changed, source}) == len(changed) + 1
