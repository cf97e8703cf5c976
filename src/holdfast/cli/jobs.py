"""``holdfast attach``, ``stop`` and ``jobs``: jobs on a cluster, which go on when nobody watches them."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.notice import notice
from holdfast.screen import RunConsole, say

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The job's name, as [bold]holdfast jobs[/] lists it.")
]
_Address = Annotated[
    str, typer.Option(help="The Ray cluster. Default: the one that this machine belongs to.")
]


def attach(
    name: _Name,
    address: _Address = "auto",
    run: Annotated[str | None, typer.Option(help="The run's folder. Default: a new one under runs/.")] = None,
) -> None:
    """Watch a job on a cluster, with all that it has written so far. Ctrl-C leaves it running."""
    from holdfast.cluster import session  # noqa: PLC0415 (imports torch)

    result = session.attach(name, address, run, RunConsole(), notice)
    if result.unsaved:
        raise typer.Exit(3)


def stop(name: _Name, address: _Address = "auto") -> None:
    """Stop a job on a cluster: workers finish their batch, and it tests, saves and ends."""
    from holdfast.cluster import session  # noqa: PLC0415

    say(RunConsole(), session.stop(name, address))


def jobs(address: _Address = "auto") -> None:
    """List the jobs on a cluster."""
    from holdfast.cluster import session  # noqa: PLC0415

    console = RunConsole()
    found = session.jobs(address)
    if not found:
        say(console, "no job is on the cluster")
    for name, state in found.items():
        say(console, f"{name}  {state}")
