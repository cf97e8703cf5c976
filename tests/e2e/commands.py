"""The command ``holdfast`` in a process of its own, with pipes or at a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from holdfast.events import read_events

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


def wait_for_step(folder: Path, step: int = 1) -> None:
    """Return when a run's log says that it has come so far."""
    wait_for_event(folder, "progress", step)


def wait_for_event(folder: Path, name: str, step: int = 0) -> None:
    """Return when a run's log has the event, of this step or a later one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (folder / "events.jsonl").exists() or not any(
        event["event"] == name and event.get("step", 0) >= step for event in read_events(folder)
    ):
        assert time.monotonic() < deadline, f"{folder} has not come to {name} {step}"
        time.sleep(0.05)


class Watched:
    """A command whose output is read all along, or it would wait for that.

    Attributes:
        process: the command's.
        shown: what it has shown so far.
    """

    process: subprocess.Popen[bytes]
    _screen: int

    def __init__(self) -> None:
        self.shown = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # if it has not ended
        self.process.wait()
        os.close(self._screen)

    def until(self, text: str) -> None:
        """Return when it has shown this."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text.encode() not in self.shown:
            assert self._read(deadline), f"it ended without showing {text!r}: {self.lines()[-40:]}"

    def end(self) -> int:
        """Wait for its end; the exit code."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE_SECONDS)

    def lines(self) -> list[str]:
        """What it has shown, without what tells a terminal how to show it."""
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown.decode())
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip("━╺╸ ")]

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"it hangs: {self.lines()[-40:]}"
        try:
            piece = os.read(self._screen, 65536)
        except OSError:  # how Linux says that the other end of a terminal is closed
            return False
        self.shown += piece
        return bool(piece)


class Terminal(Watched):
    """A command at a terminal, which is its own: keys can be pressed."""

    def __init__(self, *arguments: str, cwd: Path, columns: int) -> None:
        super().__init__()
        self._screen, keyboard = pty.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *HOLDFAST, *arguments],
            cwd=cwd, stdin=keyboard, stdout=keyboard, stderr=keyboard,
            env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
        )  # fmt: skip
        os.close(keyboard)

    def screen(self) -> list[str]:
        """The lines that can be read in the end, of a screen that is high enough."""
        rows: list[str] = [""]
        row = column = 0
        for move, count, text in re.findall(r"\x1b\[([0-9;?]*)([a-zA-Z])|([^\x1b])", self.shown.decode()):
            if count == "A":
                row = max(0, row - int(move or 1))
            elif count == "K":
                rows[row] = ""
            elif text == "\r":
                column = 0
            elif text == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif text:
                rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in rows]

    def stop(self) -> None:
        """Press Ctrl-C."""
        os.write(self._screen, b"\x03")


class Pipe(Watched):
    """A command whose output goes to a pipe; if ``full``, to one that takes nothing more."""

    def __init__(self, *arguments: str, cwd: Path, full: bool = False) -> None:
        super().__init__()
        self._screen, theirs = os.pipe()
        if full:
            os.write(theirs, bytes(fcntl.fcntl(theirs, fcntl.F_GETPIPE_SZ)))
        self.process = subprocess.Popen([*HOLDFAST, *arguments], cwd=cwd, stdout=theirs, stderr=theirs)
        os.close(theirs)

    def stop(self) -> None:
        """As Ctrl-C does at a terminal."""
        self.process.send_signal(signal.SIGINT)

    def stop_reading(self) -> None:
        """As a ``tee`` that Ctrl-C has ended, too."""
        os.close(self._screen)
        self._screen = os.open(os.devnull, os.O_RDONLY)
