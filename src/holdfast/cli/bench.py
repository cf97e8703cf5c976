"""``holdfast bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def bench(
    name: Annotated[str | None, typer.Argument(help="Which one; without it, all are listed.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The same comparison in at most a minute.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write every figure with its name to this file.")] = None,
) -> None:
    """Measure a claim side by side in one run."""
    from holdfast.bench import harness  # noqa: PLC0415

    if name is None:
        harness.list_benches(Console())
        return
    harness.run_bench(name, quick=quick, json_path=json, console=Console())
