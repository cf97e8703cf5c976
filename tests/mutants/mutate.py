"""All mutants of a module: its source with one small change.

Left alone are annotations, decorators, arguments of classes, assertions (``strict`` of ``zip`` is one, too),
what is raised, f-strings, calls of a logger, ``__repr__``, and what only a type checker runs.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "|",
}
_FUNCTIONS = {"any": "all", "all": "any", "min": "max", "max": "min"}
_LOGGERS = {"log", "logger", "logging"}


@dataclass(frozen=True)
class Mutant:
    """One change of a module."""

    path: str
    """The module, from the root of the repository."""
    line: int
    start: int
    """The first of the bytes that are replaced."""
    end: int
    new: str
    """What takes their place."""
    before: str
    """The lines that are changed, as one."""
    after: str

    def apply(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} → {self.after}"


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a module, in the order of its lines.

    Args:
        path: how to name it in the mutants.
        source: its text, in UTF-8.
    """
    found = _Finder(path, source).find()
    return [mutant for mutant in found if _compiles(mutant.apply(source))]


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._tokens = list(self._read_tokens())
        self._found: dict[bytes, Mutant] = {}

    def find(self) -> list[Mutant]:
        self._visit(ast.parse(self._source))
        return sorted(self._found.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.new))

    def _read_tokens(self) -> Iterator[tuple[int, int, str]]:
        for token in tokenize.tokenize(io.BytesIO(self._source).readline):
            if token.type in (tokenize.OP, tokenize.NAME):
                yield self._byte(token.start), self._byte(token.end), token.string

    def _byte(self, place: tuple[int, int]) -> int:
        line, column = place  # columns of tokens count characters
        return self._starts[line - 1] + len(self._lines[line - 1].decode()[:column].encode())

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, start: int, end: int, new: str) -> None:
        first = self._source.rfind(b"\n", 0, start) + 1
        last = self._source.find(b"\n", end)
        lines = self._source[first : last if last >= 0 else None]
        changed = self._source[first:start] + new.encode() + lines[end - first :]
        mutant = Mutant(
            path=self._path,
            line=self._source.count(b"\n", 0, start) + 1,
            start=start,
            end=end,
            new=new,
            before=_one_line(lines),
            after=_one_line(changed),
        )
        self._found.setdefault(mutant.apply(self._source), mutant)

    def _replace(self, node: ast.expr | ast.stmt, after: str) -> None:
        self._add(self._start(node), self._end(node), after)

    def _replace_token(self, after_node: ast.expr, before_node: ast.expr, token: str, after: str) -> None:
        """The operator between two operands: parentheses and comments may stand there, too."""
        low, high = self._end(after_node), self._start(before_node)
        words = token.split()
        between = [place for place in self._tokens if low <= place[0] and place[1] <= high]
        for first, last in zip(between, between[len(words) - 1 :], strict=False):
            if first[2] == words[0] and last[2] == words[-1]:
                self._add(first[0], last[1], after)
                return
        raise AssertionError(f"no {token} in line {after_node.lineno} of {self._path}")

    def _visit(self, node: ast.AST) -> None:
        if _left_alone(node):
            return
        mutate = getattr(self, f"_mutate_{type(node).__name__}", None)
        if mutate is not None:
            mutate(node)
        for child in _parts(node):
            self._visit(child)

    def _mutate_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            for after in _COMPARISONS[type(operator)]:
                self._replace_token(left, right, _SYMBOLS[type(operator)], after)
            left = right

    def _mutate_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_token(left, right, before, after)

    def _mutate_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.BitOr) and (_is_type(node.left) or _is_type(node.right)):
            return
        if type(node.op) in _ARITHMETIC:
            self._replace_token(node.left, node.right, _SYMBOLS[type(node.op)], _ARITHMETIC[type(node.op)])

    def _mutate_UnaryOp(self, node: ast.UnaryOp) -> None:
        start = self._start(node)
        length = len("not ") if isinstance(node.op, ast.Not) else 1
        self._add(start, start + length, "")

    def _mutate_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))
            self._replace(node, str(node.value - 1))
        elif isinstance(node.value, float):
            self._replace(node, str(node.value + 1))

    def _mutate_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            self._replace(node.func, _FUNCTIONS[node.func.id])

    def _mutate_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")

    def _mutate_Assign(self, node: ast.Assign) -> None:
        if any(_is_inside_of_something(target) for target in node.targets):
            self._replace(node, "pass")

    def _mutate_AugAssign(self, node: ast.AugAssign) -> None:
        if _is_inside_of_something(node.target):
            self._replace(node, "pass")
        if type(node.op) in _ARITHMETIC:
            symbol, after = _SYMBOLS[type(node.op)], _ARITHMETIC[type(node.op)]
            self._replace_token(node.target, node.value, f"{symbol}=", f"{after}=")

    def _mutate_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and _is_inside_of_something(node.target):
            self._replace(node, "pass")

    def _mutate_Delete(self, node: ast.Delete) -> None:
        if all(_is_inside_of_something(target) for target in node.targets):
            self._replace(node, "pass")

    def _mutate_Return(self, node: ast.Return) -> None:
        # None in place of False is a question of types, which mypy answers.
        if node.value is not None and not (isinstance(node.value, ast.Constant) and not node.value.value):
            self._replace(node, "return None")

    def _mutate_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")

    def _mutate_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue")

    def _mutate_If(self, node: ast.If) -> None:
        self._decide(node.test)

    def _mutate_IfExp(self, node: ast.IfExp) -> None:
        self._decide(node.test)

    def _mutate_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._decide(test)

    def _mutate_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._replace(node.test, "False")

    def _decide(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Constant):
            self._replace(test, "True")
            self._replace(test, "False")


_SYMBOLS: dict[type[ast.cmpop] | type[ast.operator], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}


def _left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOGGERS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.keyword(arg="strict"):
            return True
        case _:
            return False


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """What in a node can be mutated."""
    left_out: tuple[str, ...] = ()
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            left_out = ("decorator_list", "returns")
        case ast.ClassDef():
            left_out = ("decorator_list", "bases", "keywords")
        case ast.arg() | ast.AnnAssign():
            left_out = ("annotation",)
        case ast.Call(func=ast.Name(id="cast")):
            left_out = ("args",)
    for name, value in ast.iter_fields(node):
        if name in left_out:
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part


def _is_inside_of_something(target: ast.expr) -> bool:
    """Whether an assignment to it changes an object, not just what a local name means."""
    if isinstance(target, ast.Tuple):
        return any(_is_inside_of_something(part) for part in target.elts)
    return isinstance(target, ast.Attribute | ast.Subscript)


def _is_type(node: ast.expr) -> bool:
    """Whether ``|`` beside it makes a union of types."""
    match node:
        case ast.Constant(value=None):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ("int", "float", "str", "bytes", "bool", "memoryview") or (
                name[0].isupper() and not name.isupper()
            )
        case ast.Subscript(value=value):
            return _is_type(value)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _is_type(left) or _is_type(right)
        case _:
            return False
