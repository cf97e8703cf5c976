"""``holdfast train``."""

from __future__ import annotations

import json as json_
import signal
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.notice import notice
from holdfast.recipe import find_own_modules
from holdfast.screen import RunConsole, say

_UNSAVED = 3


def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.yaml]", help="The configuration. All keys have defaults."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as optimizer.lr=0.1."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=N.")] = None,
    run: Annotated[str | None, typer.Option(help="The run's folder. Default: a new one under runs/.")] = None,
    servers: Annotated[
        int | None,
        typer.Option(help="Server processes, which hold the tables. Default: train in this process."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes, which compute; needs --servers. Default: 2.")
    ] = None,
    protect: Annotated[
        str | None,
        typer.Option(
            metavar="K+R",
            help="Protection against dead servers: an erasure code with R parities for every K rows, so that "
            "any R servers may die (needs at least K+R servers); [bold]replicate[/] (two copies of every "
            "row); [bold]partial[/] (lost rows revert to the last checkpoint); or [bold]none[/].",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Where processes run: [bold]local[/], or [bold]ray[/], the machines of a Ray cluster."
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE:SLOT@step:N",
            help="Kill a process at a step, such as server:1@step:200. Repeatable.",
        ),
    ] = None,
) -> None:
    """Train a recommendation model in this process, or with --servers in many."""
    job = {"servers": servers, "workers": workers, "kill": kill}
    overrides = [f"job.{key}={json_.dumps(value)}" for key, value in job.items() if value is not None]
    kinds = {"protection": protect, "engine": engine}
    chosen = [f"job.{key}={json_.dumps(value)}" for key, value in kinds.items() if value is not None]
    try:
        # --protect and --engine come first, so that --set can override their parts.
        code = _train(config, [*chosen, *(set_ or []), *overrides], seed, run)
    except KeyboardInterrupt as stop:
        notice.wait()
        lines = getattr(stop, "lines", ["stopped before training began", "nothing was saved"])
        say(RunConsole(), *lines)
        code = 128 + signal.SIGINT
    if code:
        raise typer.Exit(code)


def _train(config: Path | None, overrides: list[str], seed: int | None, run: str | None) -> int:
    """Train, and return the exit code."""
    # Importing torch takes seconds: only commands that need it do.
    from holdfast.training.config import load  # noqa: PLC0415

    find_own_modules()
    loaded = load(config, overrides, seed=seed, run=run)
    console = RunConsole()
    if not loaded.job.servers:
        from holdfast.training import session  # noqa: PLC0415

        stopped_by = session.run(loaded, console, notice).signal
        return 128 + stopped_by if stopped_by is not None else 0
    from holdfast.cluster import session as jobs  # noqa: PLC0415

    result = jobs.run(loaded, console, notice)
    return 128 + result.signal if result.signal is not None else _UNSAVED if result.unsaved else 0
