"""The commands. No logic: each parses its arguments, calls the library and shows what it returns.

Exit codes: 0 done; 1 an error that a sentence on stderr explains; 2 wrong usage; 128 + n stopped by signal n.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from holdfast._version import __version__
from holdfast.errors import HoldfastError

app = typer.Typer(
    help="Keeps the training of recommendation models going when machines fail.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: holdfast train --set data.samples=200000 --set model.architecture=deepfm")
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="What to train; all keys have defaults.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as optimizer.lr=0.1."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=N.")] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's folder; a new one under runs/ by default.")
    ] = None,
) -> None:
    """Train a recommendation model in this process."""
    # Importing torch takes seconds: only commands that need it do.
    from holdfast.training import session  # noqa: PLC0415
    from holdfast.training.config import load  # noqa: PLC0415

    outcome = session.run(load(config, set_ or [], seed=seed, run=run), Console())
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


@app.command(epilog="Example: holdfast bench train --quick --json figures.json")
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


def main() -> None:
    """The ``holdfast`` command."""
    try:
        app()
    except HoldfastError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
