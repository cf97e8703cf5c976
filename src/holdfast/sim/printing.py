"""What ``holdfast simulate`` prints."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from holdfast.policy.units import show_hours, show_percent
from holdfast.sim.scaling import Point

_ENDLESS = 10.0
_WIDE = 150
_GAP = 2
_HEADER = "percent added:\nexpected | simulated"


def show_points(points: Sequence[Point], console: Console) -> None:
    """A table for each way to fail: each cell has what was expected and what happened."""
    for model in dict.fromkeys(point.failures for point in points):
        of_model = [point for point in points if point.failures == model]
        for number, table in enumerate(_tables(of_model, console.width)):
            table.title = None if number else model
            console.print(table)
        _show_remarks(of_model, console)


def _tables(points: Sequence[Point], width: int) -> Iterator[Table]:
    """As many columns side by side as fit; the others follow below, so that no figure is cut."""
    columns: dict[int, dict[str, str]] = {}
    headers: dict[int, str] = {}
    for point in points:
        headers[point.servers] = f"{point.servers:,} servers\nMTBF {show_hours(point.mtbf_hours)}"
        columns.setdefault(point.servers, {})[point.kind] = _cell(point, errors=width >= _WIDE)
    kinds = list(dict.fromkeys(point.kind for point in points))
    left = list(columns)
    while left:
        room = width - max(map(len, [*kinds, *_HEADER.splitlines()]))
        shown: list[int] = []
        for servers in left:
            texts = [*headers[servers].splitlines(), *columns[servers].values()]
            room -= _GAP + max(map(len, texts))
            if shown and room < 0:
                break
            shown.append(servers)
        left = left[len(shown) :]
        table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left")
        table.add_column(_HEADER, no_wrap=True)
        for servers in shown:
            table.add_column(headers[servers], justify="right", no_wrap=True)
        for kind in kinds:
            table.add_row(kind, *(columns[servers].get(kind, "–") for servers in shown))
        yield table


def _cell(point: Point, *, errors: bool) -> str:
    expected = (
        f"{_percent(point.expected)} | " if point.expected < _ENDLESS else f"> {100 * _ENDLESS:,.0f} | "
    )
    if not math.isfinite(point.simulated):
        return f"{expected}never ends"
    error = ""
    if errors and not math.isnan(point.error):
        error = f" ± {float(f'{100 * point.error:.1g}'):.4f}".rstrip("0").rstrip(".")
    return f"{expected}{_percent(point.simulated)}{error}"


def _percent(share: float) -> str:
    """Three digits, and no more than four behind the point."""
    percent = 100 * share
    return f"{percent:.0f}" if percent >= 100 else f"{float(f'{percent:.3g}'):.4f}".rstrip("0").rstrip(".")


def _show_remarks(points: Sequence[Point], console: Console) -> None:
    finite = [p for p in points if math.isfinite(p.simulated) and p.kind != "none"]
    if finite:
        worst = max(finite, key=lambda point: abs(point.off))
        console.print(
            f"The closed forms are off by at most {show_percent(abs(worst.off))} of a run's time: "
            f"{worst.kind} on {worst.servers:,} servers"
            + ("." if math.isnan(worst.error) else f" (standard error {show_percent(worst.error)})."),
            soft_wrap=True,
        )
    partial = [point for point in points if point.kind == "partial"]
    if partial:
        pls = ", ".join(f"{p.expected_pls:.3g} | {p.simulated_pls:.3g} on {p.servers:,}" for p in partial)
        console.print(f"Portion of lost samples, expected | simulated: {pls}.", soft_wrap=True)
    lossy = [point for point in points if point.losses]
    if lossy:
        said = ", ".join(f"{p.losses:.2g} of {p.kind} on {p.servers:,}" for p in lossy)
        console.print(f"More failures at once than the code bears, a run: {said}.", soft_wrap=True)
    console.print()


def points_json(points: Sequence[Point]) -> str:
    """All of it; what is infinite or not known is null."""

    def plain(value: object) -> object:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps([{k: plain(v) for k, v in asdict(point).items()} for point in points], indent=2)


@contextlib.contextmanager
def progress_bar(text: str = "simulating") -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the share done; draws a bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
