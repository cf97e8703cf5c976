"""What tests of documentation pages share."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def names_in(path: Path, dot: str) -> set[str]:
    """Functions and classes of a file, those of classes as ``Class``, dot, ``function``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}{dot}{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)
            }
    return found
