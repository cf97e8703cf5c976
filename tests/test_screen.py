from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.screen import Columns


def shown(width: int) -> str:
    table = Columns(
        ("way [a]", "costs", "rows", "bytes"), words=("way [a]",), spare=("bytes", "rows"),
        box=None, pad_edge=False,
    )  # fmt: skip
    table.add_row("a long way [of saving]", "1,234.5 %", "1,234,567,890", "987,654,321 B", style="dim")
    table.add_row("a short one", "2 %", "7", "9 B")
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_all_columns_where_there_is_room() -> None:
    text = shown(80)
    assert "a long way [of saving]  1,234.5 %  1,234,567,890  987,654,321 B\n" in text
    assert "narrow" not in text


@pytest.mark.parametrize(
    ("width", "left_out"), [(60, ["bytes"]), (40, ["rows", "bytes"]), (20, ["rows", "bytes"])]
)
def test_columns_are_left_out_and_numbers_never_cut(width: int, left_out: list[str]) -> None:
    text = shown(width)
    assert "…" not in text
    assert "1,234.5 %" in text
    assert ("1,234,567,890" in text) == ("rows" not in left_out)
    assert "987,654,321" not in text
    assert f"too narrow for: {', '.join(left_out)}" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
