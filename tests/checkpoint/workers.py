"""Real processes that write and restore, to be stopped and killed by a test.

``python -m tests.checkpoint.workers`` loads everything once and then forks a worker for each line of its
input, so that a test can afford to kill dozens. What workers have to say comes as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import NoSuchVersion, ObjectMissing
from holdfast.events import EventLog
from holdfast.options import Policy
from tests.checkpoint.lineage import STRATEGIES, Lineage, QuickFiles, check_version

Say = Callable[..., None]


class DeadlyFiles(QuickFiles):
    """The process is killed at the n-th call of an operation, before or after it is carried out."""

    def __init__(self, operation: str, at: int, after: bool) -> None:
        super().__init__()
        self._left = at
        real = getattr(self, operation)

        def deadly(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments)
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(self, operation, deadly)


def store_of(order: dict[str, Any]) -> Store:
    url, options = order["url"], order.get("options")
    if "://" in url:
        return open_store(url, create=True, options=options)
    # A killed process takes nothing with it that it has written, synced or not.
    files = DeadlyFiles(*order["kill"]) if order.get("kill") else QuickFiles()
    return LocalStore(url, create=True, files=files)


def write(order: dict[str, Any], say: Say) -> None:
    """Save in a loop until SIGTERM, with rounds in the background; says what is durable."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    policy = Policy(strategy=STRATEGIES[order["strategy"]], **order.get("policy", {}))
    events = EventLog(Path(order["events"]) if "events" in order else None)
    with store_of(order) as store, store.lock_writer() as lock, events:
        stop_at(store, *order.get("stop_at", ("publish", 0)))
        line = Lineage(store, policy, events)
        say("open")
        waiting: tuple[int, int] | None = None
        for _ in range(order.get("saves", 10**9)):
            if told:
                break
            lock.renew()
            for _ in range(order.get("steps", 1)):
                line.train()
            number = line.save()  # returns when the one before is durable
            if waiting:
                say("saved", version=waiting[0], step=waiting[1])
            waiting = number, line.step
        line.writer.close()
        if waiting:
            say("saved", version=waiting[0], step=waiting[1])


def stop_at(store: Store, operation: str, at: int) -> None:
    """Let the process stop itself before the n-th call of an operation of the store; never if n is 0."""
    real, left = getattr(store, operation), [at]

    def stop(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments)

    setattr(store, operation, stop)


def read(order: dict[str, Any], say: Say) -> None:
    """Restore versions until so many were right and the store has seen so many, for so long at least.

    Says how many were right, and how many were gone by then.
    """
    chance = random.Random(order["seed"])
    right = gone = slow = newest = 0
    with open_store(order["url"], create=False, options=order.get("options")) as store:
        earliest = time.monotonic() + order.get("seconds", 0.0)
        while right < order["right"] or newest < order["version"] or time.monotonic() < earliest:
            manifest = read_newest(store)
            newest = manifest.last_version
            if not manifest.versions:
                continue
            version = chance.choice(manifest.versions)
            started = time.monotonic()
            try:
                reader = open_version(store, version.version, manifest)
                time.sleep(chance.choice((0.0, 0.0, 0.02)))  # tidying may go on under it
                check_version(store, version, reader)
                right += 1
            except NoSuchVersion:
                assert version.version not in {v.version for v in read_newest(store).versions}
                gone += 1
            except ObjectMissing:
                # What is open can be read on only for so long on such a store.
                assert not store.keeps_open_files
                assert time.monotonic() - started > order["policy"]["deletion_delay_seconds"] / 2
                slow += 1
    say("read", right=right, gone=gone, slow=slow)


def work(order: dict[str, Any]) -> NoReturn:
    def say(event: str, **values: Any) -> None:
        line = json.dumps({"pid": os.getpid(), "event": event, **values}) + "\n"
        os.write(1, line.encode())  # in one piece, whoever else writes

    try:
        {"write": write, "read": read}[order["role"]](order, say)
        say("done")
    except BaseException as error:
        say("error", kind=type(error).__name__, error=str(error))
    os._exit(0)


def warm_up() -> None:
    """Load what is compiled here, not in every worker."""
    with tempfile.TemporaryDirectory() as folder:
        order = {"url": folder, "strategy": 4, "saves": 6}
        write(order, lambda *_, **__: None)
        read({**order, "seed": 0, "right": 3, "version": 6}, lambda *_, **__: None)


def serve() -> None:
    warm_up()
    children: set[int] = set()

    def reap(*_: Any) -> None:
        for child in list(children):
            try:
                pid, status = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:  # a later signal interrupted this handler and its handler was first
                continue
            if pid:
                children.discard(child)
                ended = {"pid": pid, "event": "ended", "code": os.waitstatus_to_exitcode(status)}
                os.write(1, json.dumps(ended).encode() + b"\n")

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            work(json.loads(line))
        children.add(pid)
        os.write(1, json.dumps({"pid": pid, "event": "started"}).encode() + b"\n")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for child in children:
        os.kill(child, signal.SIGKILL)


class Workers:
    """Starts workers and hears what they say."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, role: str, **order: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"role": role, **order}) + "\n")
        self._process.stdin.flush()
        return int(self.hear("started")["pid"])

    def hear(self, event: str, pid: int | None = None) -> dict[str, Any]:
        """The next event of that name, of a worker if it is given; others are kept for later."""
        for i, said in enumerate(self._kept):
            if said["event"] == event and pid in (None, said["pid"]):
                return self._kept.pop(i)
        while True:
            said = self._lines.get(timeout=self._seconds)
            if said["event"] == event and pid in (None, said["pid"]):
                return said
            self._kept.append(said)

    def end(self, pid: int) -> tuple[int, list[dict[str, Any]]]:
        """Wait for a worker's end; its exit code and everything else that it said."""
        code = int(self.hear("ended", pid)["code"])
        mine = [said for said in self._kept if said["pid"] == pid]
        self._kept = [said for said in self._kept if said["pid"] != pid]
        return code, mine

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))


@contextmanager
def running_workers(seconds: float = 60.0) -> Iterator[Workers]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.checkpoint.workers"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=root, start_new_session=True
    ) as process:
        try:
            yield Workers(process, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: these workers and no others


def wait_until_stopped(pid: int) -> None:
    """Return when a process, and every thread of it, obeys a SIGSTOP."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        if all(text.rpartition(")")[2].split()[0] == "T" for text in threads):
            return
        time.sleep(0.01)
    raise AssertionError("it did not stop")


def versions(said: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Steps of the versions that a worker said were durable."""
    return {e["version"]: e["step"] for e in said if e["event"] == "saved"}


if __name__ == "__main__":
    serve()
