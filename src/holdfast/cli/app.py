"""The ``holdfast`` command: read this first.

Exit codes: 0 success; 1 an error, explained in one sentence on stderr; 2 wrong usage; 3 training finished,
but its final state is not saved; 128 + n stopped by signal n.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, NoReturn

import typer

from holdfast._version import __version__
from holdfast.cli import bench, chaos, ckpt, jobs, planning, train
from holdfast.cli.notice import notice
from holdfast.errors import NO_THREAD, HoldfastError, is_lack_of_threads
from holdfast.screen import say_error

app = typer.Typer(
    help="Fault-tolerant training of recommendation models.",
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


app.command(
    epilog="Example: holdfast train --set data.samples=200000 --set model.architecture=deepfm; "
    "holdfast train --servers 4 --workers 2 --protect 2+1 --kill server:1@step:200"
)(train.train)
app.command(epilog="Example: holdfast bench train --quick --json figures.json")(bench.bench)
app.command(
    epilog="Example: holdfast plan --size 220GB --servers 5 --mtbf 20h --explain; "
    "holdfast plan job.yaml --failure-log failures.csv --out planned.yaml"
)(planning.plan)
app.command(
    epilog="Example: holdfast simulate --size 4TB --servers 100 --mtbf 100h --hours 2000h --plot cost.png; "
    "holdfast simulate --paper --plot figure13.png"
)(planning.simulate)
app.command(
    epilog="Example: holdfast emulate --seeds 3; "
    "holdfast emulate --ways cpr,cpr-mfu --at 20h --at 41h:3 --target-pls 0.05 --json"
)(planning.emulate)
app.command(
    epilog="Example: holdfast chaos --seed 1 --minutes 3 --json chaos.json; "
    "holdfast chaos --servers 5 --protect 3+2 --minutes 10; holdfast chaos --simulated 10000"
)(chaos.chaos)
app.add_typer(ckpt.ckpt, name="ckpt")
app.command(epilog="Example: holdfast attach ctr --run runs/ctr")(jobs.attach)
app.command(epilog="Example: holdfast stop ctr")(jobs.stop)
app.command(epilog="Example: holdfast jobs --address 10.0.0.1:6379")(jobs.jobs)


def main() -> None:
    """The ``holdfast`` command."""
    try:
        with notice:
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
        _fail(f"out of memory{much}: try fewer rows (data.max_rows), smaller layers or smaller batches")


def _fail(message: str) -> NoReturn:
    say_error(message)
    sys.exit(1)


def _is_lack_of_memory(error: Exception) -> bool:
    """PyTorch raises a plain RuntimeError when it cannot allocate memory."""
    said = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(text in str(error) for text in said)
