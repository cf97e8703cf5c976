"""The command ``holdfast`` in a process of its own, with pipes or at a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

HOLDFAST = [sys.executable, "-m", "holdfast"]
SMALL = [
    f"--set={pair}"
    for pair in (
        "model.dim=8", "model.bottom=[16, 8]", "model.top=[16, 1]", "data.test_samples=2000",
        "data.max_rows=500", "batch_size=128", "threads=1",
    )
]  # fmt: skip
ENDLESS = "--set=data.samples=100000000"
"""It would train for hours."""
PATIENCE_SECONDS = 250.0
"""Longer than anything takes on a slow and busy machine; what hangs is found all the same."""


def holdfast(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOLDFAST, *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip


class Terminal:
    """A command at a terminal; what it shows is read all along, or it would wait for that.

    Attributes:
        process: the command's.
        shown: what it has shown so far.
    """

    def __init__(self, *arguments: str, cwd: Path, columns: int) -> None:
        self.shown = b""
        self._screen, keyboard = pty.openpty()
        self.process = subprocess.Popen(
            [*HOLDFAST, *arguments],
            cwd=cwd, stdout=keyboard, stderr=keyboard,
            env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
        )  # fmt: skip
        os.close(keyboard)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # if it has not ended
        self.process.wait()
        os.close(self._screen)

    def until(self, text: str) -> None:
        """Return when it shows something that it has not shown before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text.encode() not in self.shown:
            assert self._read(deadline), f"it ended without showing {text!r}: {self.shown.decode()}"

    def end(self) -> int:
        """Wait for its end; the exit code."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE_SECONDS)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"it hangs: {self.shown.decode()}"
        try:
            piece = os.read(self._screen, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.shown += piece
        return bool(piece)
