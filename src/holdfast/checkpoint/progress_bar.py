"""A progress bar for long operations."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SHOW_AFTER_SECONDS = 2.0


@contextlib.contextmanager
def byte_progress(text: str, total: int, wanted: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes done; draws a bar on stderr after two seconds.

    ``wanted``: True or False; None is only on a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda done: None
        return
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(text, total=total)
    shown = False

    def update(done: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - started > _SHOW_AFTER_SECONDS:
            bar.start()
            shown = True
        if shown:
            bar.update(task, completed=done)

    try:
        yield update
    finally:
        if shown:
            bar.stop()
