"""The commands. No logic: each parses its arguments, calls the library and shows what it returns.

Exit codes: 0 done; 1 an error that a sentence on stderr explains; 2 wrong usage; 3 trained, but the state at
the end is not saved; 128 + n stopped by signal n.
"""

from __future__ import annotations

import json as json_
import re
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from holdfast import cli_planning
from holdfast._version import __version__
from holdfast.errors import NO_THREAD, ConfigError, HoldfastError, is_lack_of_threads
from holdfast.recipe import find_own_modules
from holdfast.screen import RunConsole, say, say_error
from holdfast.stopping import Notice

_UNSAVED = 3
_notice = Notice()

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


@app.command(
    epilog="Example: holdfast train --set data.samples=200000 --set model.architecture=deepfm; "
    "holdfast train --servers 4 --workers 2 --protect 2+1 --kill server:1@step:200"
)
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
    servers: Annotated[
        int | None, typer.Option(help="Processes that hold the tables; without any, train in this process.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that compute, with --servers; 2 by default.")
    ] = None,
    protect: Annotated[
        str | None,
        typer.Option(
            metavar="K+R",
            help="What keeps the job going when servers die: R parities in memory for every K rows, on "
            "servers of their own, so that any R servers may die; or [bold]replicate[/] (every row twice); "
            "or [bold]partial[/] (lost rows go back to the last checkpoint); or [bold]none[/]. A code needs "
            "K+R servers or more.",
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE:SLOT@step:N", help="Kill a process at a step to see what happens; repeatable."
        ),
    ] = None,
) -> None:
    """Train a recommendation model: in this process, or with --servers in many."""
    job = {"servers": servers, "workers": workers, "kill": kill}
    overrides = [f"job.{key}={json_.dumps(value)}" for key, value in job.items() if value is not None]
    protection = [] if protect is None else [f"job.protection={json_.dumps(protect)}"]
    try:
        # First: what --set says of it is on top.
        code = _train(config, [*protection, *(set_ or []), *overrides], seed, run)
    except KeyboardInterrupt as stop:
        _notice.wait()
        lines = getattr(stop, "lines", ["stopped before training began", "nothing was saved"])
        say(RunConsole(), *lines)
        code = 128 + signal.SIGINT
    if code:
        raise typer.Exit(code)


def _train(config: Path | None, overrides: list[str], seed: int | None, run: str | None) -> int:
    """The exit code."""
    # Importing torch takes seconds: only commands that need it do.
    from holdfast.training.config import load  # noqa: PLC0415

    find_own_modules()
    loaded = load(config, overrides, seed=seed, run=run)
    console = RunConsole()
    if not loaded.job.servers:
        from holdfast.training import session  # noqa: PLC0415

        stopped_by = session.run(loaded, console, _notice).signal
        return 128 + stopped_by if stopped_by is not None else 0
    from holdfast.cluster import session as jobs  # noqa: PLC0415

    result = jobs.run(loaded, console, _notice)
    return 128 + result.signal if result.signal is not None else _UNSAVED if result.unsaved else 0


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


app.command(
    epilog="Example: holdfast plan --size 220GB --servers 5 --mtbf 20h --explain; "
    "holdfast plan job.yaml --failure-log failures.csv --out planned.yaml"
)(cli_planning.plan)
app.command(
    epilog="Example: holdfast simulate --size 4TB --servers 100 --mtbf 100h --hours 2000h --plot cost.png; "
    "holdfast simulate --paper --plot figure13.png"
)(cli_planning.simulate)
app.command(
    epilog="Example: holdfast emulate --seeds 3; "
    "holdfast emulate --ways cpr,cpr-mfu --at 20h --at 41h:3 --target-pls 0.05 --json"
)(cli_planning.emulate)


@app.command(
    epilog="Example: holdfast chaos --seed 1 --minutes 3 --json chaos.json; "
    "holdfast chaos --servers 5 --protect 3+2 --minutes 10; holdfast chaos --simulated 10000"
)
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
        _notice.wait()
        say(RunConsole(), "stopped: what was not checked by then is not known to be right")
        raise typer.Exit(128 + signal.SIGINT) from None
    if not good:
        raise typer.Exit(1)


ckpt = typer.Typer(
    help="Look at checkpoints, check them, take them out, and free space.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(ckpt, name="ckpt")

_Path = Annotated[str, typer.Argument(metavar="PATH", help="The store: a folder, or a URL such as s3://…")]
_Version = Annotated[
    int | None, typer.Argument(metavar="[VERSION]", help="Its number, as ls shows it; the newest by default.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
_Object = Annotated[
    str | None, typer.Option("--object", metavar="NAME", help="Whose state; by default of the only module.")
]


@ckpt.command(epilog="Example: holdfast ckpt ls runs/today/checkpoints")
def ls(path: _Path, json: _Json = False) -> None:
    """List the versions of a store."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import inspect as tools  # noqa: PLC0415
    from holdfast.checkpoint.tools import view  # noqa: PLC0415

    with open_store(path, create=False) as store:
        listing = tools.list_versions(store)
    if json:
        view.print_json(listing)
    else:
        view.show_listing(listing, view.make_console())


@ckpt.command(epilog="Example: holdfast ckpt show runs/today/checkpoints 12")
def show(path: _Path, version: _Version = None, json: _Json = False) -> None:
    """Show what a version is made of: tables, files, and all other state."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import inspect as tools  # noqa: PLC0415
    from holdfast.checkpoint.tools import view  # noqa: PLC0415

    with open_store(path, create=False) as store:
        found = tools.describe_version(store, version)
    if json:
        view.print_json(found)
    else:
        view.show_description(found, view.make_console())


@ckpt.command(epilog="Example: holdfast ckpt verify s3://bucket/run1")
def verify(
    path: _Path,
    versions: Annotated[
        list[int] | None, typer.Argument(metavar="[VERSION]…", help="Which ones; all by default.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All versions, also when some are named.")] = False,
    json: _Json = False,
) -> None:
    """Read every byte that versions need and check it; exit code 1 if something is damaged."""
    from holdfast.checkpoint.progress import byte_progress  # noqa: PLC0415
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import view  # noqa: PLC0415
    from holdfast.checkpoint.tools.verify import bytes_to_verify, verify_versions  # noqa: PLC0415

    wanted = [] if all_ else versions or []
    with open_store(path, create=False) as store:
        total = bytes_to_verify(store, wanted)
        with byte_progress("checking", total) as on_progress:
            report = verify_versions(store, wanted, on_progress)
    if json:
        view.print_json(report)
    else:
        view.show_verification(report, view.make_console())
    if not report.good:
        raise typer.Exit(1)


@ckpt.command(epilog="Example: holdfast ckpt restore runs/today/checkpoints 12 --out state.safetensors")
def restore(
    path: _Path,
    version: _Version = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The safetensors file to write.")] = ...,  # type: ignore[assignment]
    force: _Force = False,
) -> None:
    """Write all state of a version to one safetensors file: tables, optimizer rows, everything else."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import export, view  # noqa: PLC0415

    with open_store(path, create=False) as store:
        written = export.restore_file(store, version, out, force=force)
    view.show_written(written, view.make_console())


@ckpt.command(
    "export",
    epilog="Examples: holdfast ckpt export run1 --format safetensors --out model.safetensors; "
    "holdfast ckpt export run1 12 --since 11 --format delta --out 11-12.safetensors",
)
def export_(
    path: _Path,
    version: _Version = None,
    format_: Annotated[
        Literal["safetensors", "dcp", "delta"],
        typer.Option(
            "--format",
            help="A model's state_dict; a folder for torch.distributed.checkpoint; or what changed.",
        ),
    ] = "safetensors",
    out: Annotated[Path, typer.Option(metavar="FILE_OR_FOLDER", help="What to write.")] = ...,  # type: ignore[assignment]
    object_: _Object = None,
    since: Annotated[
        int | None, typer.Option(metavar="VERSION", help="delta: the version that is there already.")
    ] = None,
    all_fields: Annotated[
        bool, typer.Option("--all-fields", help="delta: optimizer state of the rows too.")
    ] = False,
    force: _Force = False,
) -> None:
    """Write a version's model in a format that other programs read."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import view  # noqa: PLC0415
    from holdfast.checkpoint.tools.delta import export_as  # noqa: PLC0415

    with open_store(path, create=False) as store:
        written = export_as(
            store, version, out, format_, object_name=object_, since=since, all_fields=all_fields, force=force
        )
    view.show_written(written, view.make_console())


@ckpt.command(epilog="Example: holdfast ckpt gc runs/today/checkpoints --keep 5 --keep-every 100 --dry-run")
def gc(
    path: _Path,
    keep: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest so many versions.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="M", help="Keep every version that this divides, too.")
    ] = None,
    keep_seconds: Annotated[
        float | None, typer.Option(metavar="T", help="Keep every version younger than this, too.")
    ] = None,
    delay: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long files stay for restores that are under way.")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    json: _Json = False,
) -> None:
    """Delete versions that are not to be kept, and files that no version needs.

    Without a --keep option no version is deleted. The store must have no other writer.
    """
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import inspect as tools  # noqa: PLC0415
    from holdfast.checkpoint.tools import view  # noqa: PLC0415
    from holdfast.options import Policy  # noqa: PLC0415

    policy = Policy(keep=keep, keep_every=keep_every, keep_seconds=keep_seconds, deletion_delay_seconds=delay)
    with open_store(path, create=False) as store:
        report = tools.collect_garbage(store, policy, dry_run=dry_run)
    if json:
        view.print_json(report)
    else:
        view.show_garbage(report, view.make_console())


def main() -> None:
    """The ``holdfast`` command."""
    try:
        with _notice:
            app()
    except HoldfastError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if is_lack_of_threads(error):
            _fail(NO_THREAD)
        if not _is_lack_of_memory(error):
            raise
        asked = re.search(r"allocate (\d+ bytes|[\d.]+ \w+)|overflowed", str(error))
        much = f" ({asked[1]} at once)" if asked and asked[1] else ""
        _fail(
            f"this machine has too little memory for that{much}: try fewer rows (data.max_rows), smaller "
            "layers or smaller batches"
        )


def _fail(message: str) -> NoReturn:
    say_error(message)
    sys.exit(1)


def _is_lack_of_memory(error: Exception) -> bool:
    """PyTorch has no error of its own for it."""
    said = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(text in str(error) for text in said)
