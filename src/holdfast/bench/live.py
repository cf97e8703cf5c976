"""Jobs that benches run in windows, and what a window cost.

The sides of a comparison take turns: while one runs, the other jobs' processes are stopped. A window begins
and ends with every worker between two batches, so that samples are counted exactly. It lasts until the last
batch was applied: a stand takes a little longer, most of all where pushes must be kept before it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.messages import Happening, NodeStatus, Status
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.errors import HoldfastError
from holdfast.events import EventLog
from holdfast.training.config import Config, load

BATCH = 2048
WORKERS = 2
PARTS = ("pull", "compute", "push", "transport", "server")
_PATIENCE_SECONDS = 120.0


def preset_config(preset: str, max_rows: int, optimizer: str = "adagrad") -> Config:
    """Training of a preset that does not end by itself, on made-up data of Criteo's shape."""
    return load(
        None,
        [
            f"model.preset=criteo-{preset}", f"data.max_rows={max_rows}", f"data.cardinalities={preset}",
            f"batch_size={BATCH}", "data.samples=1000000000", "data.test_samples=1",
            f"optimizer.name={optimizer}",
        ],
    )  # fmt: skip


def with_servers(config: Config, servers: int, **job: Any) -> Config:
    """The same in so many servers and two workers, or as ``job`` says."""
    return replace(config, job=replace(config.job, servers=servers, **{"workers": WORKERS, **job}))


class _WithoutSpares(LocalLauncher):
    """Starts no spare processes."""

    def warm(self, role: str, slot: int | None = None) -> None:
        """Nothing."""


class LiveJob:
    """A job that runs in windows: between them all of its processes are stopped.

    To hold is not enough: the little that waiting processes do costs a loop with two threads, each of which
    waits for the other all the time, several times as much.

    Args:
        config: the job's.
        spares: whether processes are to wait for others to die.
    """

    def __init__(self, config: Config, *, spares: bool = False) -> None:
        self.plan: JobPlan = plan_job(config)
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-bench-")
        self._status: Status | None = None
        self._news = threading.Condition()
        self._holding = True
        self._stopping = False
        self._running = threading.Event()
        self._running.set()
        self._engine = (LocalLauncher if spares else _WithoutSpares)(Path(self._folder.name))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        folder = Path(self._folder.name)
        try:
            with EventLog(folder) as events:
                runner = Runner(self.plan, self._engine, folder, events)
                runner.run(self._note, lambda: self._stopping, self._wants_hold)
        except BaseException as error:
            with self._news:
                self._error = error
                self._news.notify_all()

    def _wants_hold(self) -> bool:
        self._running.wait()
        return self._holding

    def freeze(self) -> None:
        """Suspend all processes, and the thread that watches them."""
        self._running.clear()
        for peer in self._engine.pids():
            self._engine.signal(peer, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume all processes."""
        for peer in self._engine.pids():
            self._engine.signal(peer, signal.SIGCONT)
        self._running.set()

    def _note(self, status: Status) -> None:
        with self._news:
            self._status = status
            self._news.notify_all()

    def wait(self, until: Callable[[Status], bool], what: str) -> Status:
        """The first report, from the last one on, of which the condition holds; ``what`` is waited for."""
        with self._news:
            while True:
                if self._error is not None:
                    raise self._error
                if self._status is not None and until(self._status):
                    return self._status
                if not self._news.wait(_PATIENCE_SECONDS):
                    raise HoldfastError(f"{what}: it has not come within {_PATIENCE_SECONDS:.0f} s")

    def hold(self) -> Status:
        """Let all workers come to a stand; how things are then."""
        self._holding = True

        def stand(status: Status) -> bool:
            workers = [n for n in status.nodes if n.peer.role == "worker"]
            return status.phase == "holding" and bool(workers) and all(n.state == "held" for n in workers)

        return self.wait(stand, "a stand of all workers")

    def go_on(self) -> None:
        """Let workers continue."""
        self._holding = False

    def window(self, seconds: float) -> tuple[Status, Status, float]:
        """Run for about so long: how things were before and after, and the seconds between."""
        self.thaw()
        before = self.hold()
        started = time.monotonic()
        self.go_on()
        time.sleep(seconds)
        self.wait(lambda status: status.steps > before.steps, "a step")
        after = self.hold()
        self.freeze()
        ended = max(node.figures.stepped_at for node in after.nodes if node.peer.role == "worker")
        return before, after, ended - started

    def kill_server(self, slot: int) -> float:
        """kill -9; when that was, in Unix seconds."""
        pids = self._engine.pids()
        (pid,) = (pid for peer, pid in pids.items() if (peer.role, peer.slot) == ("server", slot))
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def server_cpu_seconds(self, slot: int) -> float:
        """Processor time of the process that now fills a slot."""
        (pid,) = (
            pid for peer, pid in self._engine.pids().items() if (peer.role, peer.slot) == ("server", slot)
        )
        return cpu_seconds(pid)

    def wait_for_spares(self) -> None:
        """Until the processes that wait for others to die have loaded what they need."""
        self.wait(lambda status: status.phase in ("running", "holding"), "the start of the job")
        used = -1.0
        while (now := self._used_by_spares()) != used:
            used = now
            time.sleep(0.5)

    def _used_by_spares(self) -> float:
        """Processor time, in ticks of the kernel."""
        total = 0.0
        for pid in [pid for role in ("server", "worker") for pid in self._engine.warm_pids(role)]:
            with contextlib.suppress(FileNotFoundError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])  # utime, stime
        return total

    def close(self) -> None:
        """End the job and remove its files."""
        self._stopping, self._holding = True, False
        self.thaw()
        self._thread.join()
        self._folder.cleanup()


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    # The kernel's number of a process's clock, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime(~pid << 3 | 2)


def happened(status: Status, event: str, since: float = 0.0) -> list[Happening]:
    """The events of a name, from a time on (Unix seconds), oldest first."""
    return [h for h in status.happened if h.event == event and h.at >= since]


def servers_of(status: Status) -> list[NodeStatus]:
    """The servers."""
    return [node for node in status.nodes if node.peer.role == "server"]


def cpu_ms(before: Status, after: Status) -> dict[str, float]:
    """Processor time of a step, by part of the work."""
    steps = after.steps - before.steps
    used: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for old, new in zip(before.nodes, after.nodes, strict=True):
        gone = _used(old, new)
        process = gone.pop("process", 0.0)
        for part, seconds in gone.items():
            used[part] += seconds
        used["server" if new.peer.role == "server" else "transport"] += process - sum(gone.values())
    return {part: seconds / steps * 1000 for part, seconds in used.items()}


def server_cpu_ms(before: Status, after: Status) -> list[float]:
    """Processor time of a step at each server."""
    pairs = zip(servers_of(before), servers_of(after), strict=True)
    return [_used(old, new)["process"] / (after.steps - before.steps) * 1000 for old, new in pairs]


def _used(old: NodeStatus, new: NodeStatus) -> dict[str, float]:
    then, now = dict(old.figures.cpu_seconds), dict(new.figures.cpu_seconds)
    return {part: now[part] - then.get(part, 0.0) for part in now}
