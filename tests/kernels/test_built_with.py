"""Numba keeps what it compiled of a file until that file changes, whatever becomes of those it calls."""

from __future__ import annotations

import hashlib
import importlib
import re
from pathlib import Path

import pytest

import holdfast.kernels

FOLDER = Path(holdfast.kernels.__file__ or "").parent
SOURCES = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
COMPILED = sorted(name for name, source in SOURCES.items() if "cache=True" in source or "@compiled" in source)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_kernels_change_with_what_they_are_built_with(name: str) -> None:
    """Each says the checksums of the files it takes loops from; a change of one changes the other."""
    module = importlib.import_module(f"holdfast.kernels.{name}")
    helpers = set(re.findall(r"^from holdfast\.kernels\.(\w+) import", SOURCES[name], re.MULTILINE))
    expected = {
        helper: hashlib.sha256((FOLDER / f"{helper}.py").read_bytes()).hexdigest()[:12] for helper in helpers
    }
    assert getattr(module, "BUILT_WITH", {}) == expected, f"say BUILT_WITH = {expected} in {name}.py"
