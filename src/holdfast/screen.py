"""Console output: consoles for long runs, and tables for any screen width."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000


class RunConsole(Console):
    """A console for long runs: if the reader of the output is gone, for example a ``tee`` that Ctrl-C has
    ended, the run continues."""

    def on_broken_pipe(self) -> None:
        """Drop this and all later output."""
        self.quiet = True
        drop_output()


def drop_output() -> None:
    """Redirect standard output to /dev/null."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def say(console: Console, *lines: str) -> None:
    """Print lines without markup or wrapping."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def say_error(message: str) -> None:
    """Print an error message to standard error."""
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


class Columns:
    """A table that never truncates numbers: if it is too wide, whole columns are dropped.

    If that is not enough, columns of words are folded. A line below names the dropped columns.

    Args:
        names: names of the columns.
        words: columns of words, left-aligned; all others are numbers, right-aligned.
        spare: columns that may be dropped, in this order.
        look: keyword arguments for rich's table.
    """

    def __init__(
        self, names: Sequence[str], *, words: Collection[str], spare: Sequence[str], **look: Any
    ) -> None:
        self._names = tuple(names)
        self._words = frozenset(words)
        self._spare = tuple(spare)
        self._look = look
        self._rows: list[tuple[dict[str, Text], str | None]] = []

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        """Add a row with a cell for each column. Cells are not parsed as markup."""
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        self._rows.append((dict(zip(self._names, texts, strict=True)), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        anywhere = options.update(max_width=_ANY_WIDTH)
        left_out: list[str] = []
        table = self._table(left_out)
        for name in self._spare:
            if Measurement.get(console, anywhere, table).maximum <= options.max_width:
                break
            left_out.append(name)
            table = self._table(left_out)
        yield table
        if left_out:
            yield Text(f"too narrow for: {', '.join(n for n in self._names if n in left_out)}", "dim")

    def _table(self, left_out: Collection[str]) -> Table:
        table = Table(**self._look)
        names = [name for name in self._names if name not in left_out]
        for name in names:
            words = name in self._words
            table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
        for cells, style in self._rows:
            table.add_row(*(cells[name] for name in names), style=style)
        return table
