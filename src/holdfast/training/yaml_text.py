"""YAML as configurations are written in it: plain values, each key once, nothing that grows without end.

Anchors and aliases are fine as long as what they stand for stays small. Refused before anything is built: a
value that holds itself, nesting that no person writes, aliases that stand for billions of values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

LARGEST_FILE = 1 << 20
"""Bytes."""
_DEEPEST = 50
_MOST_VALUES = 20_000
_LONGEST_NUMBER = 100
"""Digits."""
_MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """Text that is not a configuration; the message says what is wrong with it, and where."""


class _Loader(yaml.SafeLoader):
    """Makes plain values only. Reads 1e-3 as a number, as YAML 1.2 does and everybody means it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._depth += 1
        self._values += 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self._depth > _DEEPEST:
            raise YamlError(f"line {mark.line + 1} is nested more than {_DEEPEST} deep")
        if self._values > _MOST_VALUES:
            raise YamlError(f"there are more than {_MOST_VALUES:,} values up to line {mark.line + 1}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Node | None:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > _MOST_VALUES:
            raise YamlError(f"its aliases expand to more than {_MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value if isinstance(node, MappingNode) else ():
            # What is merged from another mapping may be overridden here.
            if isinstance(key, ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    raise YamlError(
                        f"line {key.start_mark.line + 1}: the key {key.value[:50]} is there twice"
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: ScalarNode) -> int:
        # First by its length: making a number of a million digits takes minutes.
        value = int(super().construct_yaml_int(node)) if len(node.value) <= _LONGEST_NUMBER else 2**64
        if not -(2**63) <= value < 2**64:
            shown = node.value if len(node.value) <= _LONGEST_NUMBER else f"{node.value[:20]}…"
            raise YamlError(f"line {node.start_mark.line + 1}: the integer {shown} does not fit in 64 bits")
        return value


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse(text: str) -> Any:
    """The value of a YAML text; YamlError if it has none, or one that is not for a configuration."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())[:500]) from None
    except (ValueError, OverflowError) as error:  # of a date that does not exist, say
        raise YamlError(str(error)) from None


def read(path: Path) -> Any:
    """The value of a YAML file; raises YamlError, or OSError if it cannot be read."""
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise YamlError(f"it has more than {LARGEST_FILE:,} bytes")
    return parse(data.decode())


def _size(node: Node, known: dict[int, int | None]) -> int:
    """How many values a node stands for, aliases included; None in ``known`` is one that is being counted."""
    found = known.get(id(node), 0)
    if found is None:
        raise YamlError(f"line {node.start_mark.line + 1}: a value contains itself")
    if not found:
        known[id(node)] = None
        parts = [node.value] if isinstance(node, ScalarNode) else node.value
        children = [child for part in parts for child in (part if isinstance(part, tuple) else (part,))]
        found = known[id(node)] = 1 + sum(
            _size(child, known) for child in children if isinstance(child, Node)
        )
    return found
