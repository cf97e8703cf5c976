"""``holdfast bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def bench(
    name: Annotated[str | None, typer.Argument(help="The benchmark to run. Lists all if omitted.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test of at most a minute.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures by name to this JSON file.")] = None,
) -> None:
    """Run a benchmark. Alternatives are interleaved in one run."""
    from holdfast.bench import harness  # noqa: PLC0415

    if name is None:
        harness.list_benches(Console())
        return
    harness.run_bench(name, quick=quick, json_path=json, console=Console())
