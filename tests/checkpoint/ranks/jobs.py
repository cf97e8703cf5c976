"""Starts ranks of jobs and hears what they say."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_numbers = itertools.count()


def free_port() -> int:
    """A port that nobody uses; somebody might until it is bound, which a job would notice."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Outcome:
    """What the ranks of one job said until all of them had ended."""

    def __init__(self, said: list[dict[str, Any]], codes: dict[int, int]) -> None:
        self.said, self.codes = said, codes

    def of(self, rank: int, event: str) -> list[dict[str, Any]]:
        return [said for said in self.said if said["rank"] == rank and said["event"] == event]

    def one(self, rank: int, event: str) -> dict[str, Any]:
        found = self.of(rank, event)
        assert len(found) == 1, self.said
        return found[0]

    def all_ended_well(self) -> Outcome:
        assert set(self.codes.values()) == {0}, (self.codes, self.said)
        return self


class Jobs:
    """A process that forks ranks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._order, self._said = process.stdin, process.stdout
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(
        self, folder: Path, world_size: int, *, most_seconds: float = 120.0, tcp: bool = False, **order: Any
    ) -> Outcome:
        """Run a job to its end; ranks that have not ended by then are killed, and the test fails.

        With ``tcp``, rank 0 has the store of the process group; otherwise it is a file.
        """
        folder.mkdir(exist_ok=True)
        meeting = folder / f"meeting-{next(_numbers)}"
        where = f"tcp://127.0.0.1:{free_port()}" if tcp else f"file://{meeting}"
        order = {"path": str(folder / "store"), "init_method": where, **order}
        pids: dict[int, int] = {}
        for rank in range(world_size):
            own = {**order, "rank": rank, "world_size": world_size}
            if rank == 1:
                own |= order.get("of_rank_1", {})
            self._order.write(json.dumps(own) + "\n")
        self._order.flush()
        said: list[dict[str, Any]] = []
        codes: dict[int, int] = {}
        started: list[int] = []
        deadline = time.monotonic() + most_seconds
        while len(codes) < world_size:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for pid in set(started) - set(codes):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"a job did not end: {said}") from None
            if line["event"] == "started":
                started.append(line["pid"])
            elif line["event"] == "ended":
                codes[line["pid"]] = line["code"]
            else:
                pids[line["pid"]] = line["rank"]
                said.append(line)
        return Outcome(said, {pids.get(pid, -pid): code for pid, code in codes.items()})

    def _listen(self) -> None:
        for line in self._said:
            self._lines.put(json.loads(line))


@contextmanager
def running_jobs() -> Iterator[Jobs]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "tests.checkpoint.ranks.trainer"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            yield Jobs(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: these ranks and no others
