"""``holdfast chaos``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from holdfast.cli.notice import notice
from holdfast.errors import ConfigError
from holdfast.screen import RunConsole, say


def chaos(
    seed: Annotated[int, typer.Option(help="Seed of the fault schedule.")] = 0,
    minutes: Annotated[float, typer.Option(help="Duration of the faults.")] = 1.0,
    servers: Annotated[
        int | None,
        typer.Option(help="Processes that hold rows. Default: 4; with --engine ray one less than hosts."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that compute.")] = 2,
    protect: Annotated[
        str,
        typer.Option(metavar="K+R", help="The erasure code, or [bold]replicate[/]."),
    ] = "2+1",
    atomic: Annotated[
        bool, typer.Option(help="Apply a batch on all servers or on none (two phases).")
    ] = True,
    dense: Annotated[
        str,
        typer.Option(
            metavar="WHO",
            help="Who keeps copies of the network: servers ([bold]replicate[/]), or [bold]workers[/] as in "
            "ECRM.",
        ),
    ] = "replicate",
    beyond: Annotated[
        bool,
        typer.Option(
            "--beyond",
            help="Take down more servers at once than the code covers. The job must report the loss and "
            "resume from its last checkpoint.",
        ),
    ] = False,
    simulated: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Instead, simulate N jobs on virtual time, without processes. Seeds starting at --seed "
            "decide their shapes and faults.",
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(
            help="[bold]local[/]: processes of this machine. [bold]ray[/]: a lab of several hosts on this "
            "machine, whose machines are switched off, cut off and suspended.",
        ),
    ] = "local",
    hosts: Annotated[int, typer.Option(help="Hosts of the lab, for --engine ray.")] = 5,
    run: Annotated[str | None, typer.Option(help="The run's folder. Default: a new one under runs/.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures by name to this JSON file.")] = None,
) -> None:
    """Kill, suspend and partition the processes of a real job, and check that nothing is lost.

    Exit code 1 if an update is lost, a row is wrong, the job hangs, or a process is left behind.
    """
    from holdfast.chaos import session  # noqa: PLC0415
    from holdfast.chaos.run import ChaosOptions  # noqa: PLC0415

    if servers is None:
        servers = hosts - 1 if engine == "ray" else 4
    options = ChaosOptions(
        seed, minutes, servers, workers, protect, atomic, dense, beyond, run, engine=engine, hosts=hosts
    )
    try:
        if simulated is None:
            good = session.run(options, json, Console()).good
        elif options != ChaosOptions(seed):
            raise ConfigError(
                "--simulated takes only --seed and --json: the seed decides the shape of a simulated job"
            )
        else:
            good = not session.run_on_virtual_time(seed, simulated, json, Console()).violations
    except KeyboardInterrupt:
        notice.wait()
        say(RunConsole(), "stopped: the remaining checks were not done")
        raise typer.Exit(128 + signal.SIGINT) from None
    if not good:
        raise typer.Exit(1)
