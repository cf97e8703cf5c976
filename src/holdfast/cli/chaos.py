"""``holdfast chaos``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.notice import notice
from holdfast.errors import ConfigError
from holdfast.screen import RunConsole, say


def chaos(
    seed: Annotated[int, typer.Option(help="Decides the faults.")] = 0,
    minutes: Annotated[float, typer.Option(help="How long they happen.")] = 1.0,
    servers: Annotated[int, typer.Option(help="Processes that hold rows.")] = 4,
    workers: Annotated[int, typer.Option(help="Processes that compute.")] = 2,
    protect: Annotated[
        str,
        typer.Option(metavar="K+R", help="The code that protects servers, or [bold]replicate[/]."),
    ] = "2+1",
    atomic: Annotated[
        bool, typer.Option(help="Whether a batch counts at all servers or at none (two phases).")
    ] = True,
    dense: Annotated[
        str,
        typer.Option(
            metavar="WHO",
            help="Who has copies of the network: servers ([bold]replicate[/]) or [bold]workers[/], as ECRM.",
        ),
    ] = "replicate",
    beyond: Annotated[
        bool,
        typer.Option(
            "--beyond",
            help="Take more servers at once than the code covers: the job must say so, and go on from its "
            "last checkpoint.",
        ),
    ] = False,
    simulated: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Instead, run N jobs on virtual time, without processes: their shapes and faults come from "
            "seeds, of which --seed is the first.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's folder; a new one under runs/ by default.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every figure with its name to this file.")] = None,
) -> None:
    """Kill, stop and cut off the processes of a real job, and check that nothing was lost.

    Exit code 1 if anything was, if a row is wrong, if the job hung, or if a process was left behind.
    """
    from holdfast.chaos import session  # noqa: PLC0415
    from holdfast.chaos.run import ChaosOptions  # noqa: PLC0415

    options = ChaosOptions(seed, minutes, servers, workers, protect, atomic, dense, beyond, run)
    try:
        if simulated is None:
            good = session.run(options, json, Console()).good
        elif options != ChaosOptions(seed):
            raise ConfigError(
                "a simulated job has its shape from its seed: leave out all but --seed and --json"
            )
        else:
            good = not session.run_on_virtual_time(seed, simulated, json, Console()).violations
    except KeyboardInterrupt:
        notice.wait()
        say(RunConsole(), "stopped: what was not checked by then is not known to be right")
        raise typer.Exit(128 + signal.SIGINT) from None
    if not good:
        raise typer.Exit(1)
