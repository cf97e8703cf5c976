"""A process that runs tests on mutants, one after the other, in a copy of the tree.

It has imported everything that takes long to import, except Holdfast, and forks for each mutant. Whatever a
mutant does, it is ended with all that it has started, and its files are removed. Asked and answered by a line
of JSON each; it ends when its input does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pytest

_MARK = "HOLDFAST_MUTANT"
_MOST_MEMORY_BYTES = 4 << 30
_MOST_FILE_BYTES = 2 << 30
_LOOK_SECONDS = 0.01
_UNSET = 70
_PRELOADED = ("numpy", "torch", "numba", "hypothesis", "pytest", "msgspec", "zmq", "xxhash", "fsspec")


@dataclass(frozen=True)
class Task:
    """Tests to run, on a mutant or on the tree as it is."""

    tests: list[str]
    """What pytest is told to run, in this order."""
    path: str = ""
    """The module that is mutated, from the root of the copy; empty: none is."""
    source: str = ""
    """Its text."""
    most_seconds: float = 600.0
    """After this, all of it is ended."""
    most_test_seconds: float = 300.0
    """After this, one test is."""


@dataclass
class Outcome:
    """How it ended."""

    code: int | None
    """What pytest returned; None: it was ended after ``most_seconds``."""
    seconds: float
    failed: str = ""
    """The first test that failed, or that did not end."""
    hung: bool = False
    test_seconds: dict[str, float] = field(default_factory=dict)
    """How long each test took."""
    output: str = ""
    """The end of what pytest printed."""

    @property
    def verdict(self) -> str:
        """What this says of a mutant: ``survived``, ``killed`` or ``timeout``."""
        if self.code == 0:
            return "survived"
        return "timeout" if self.hung else "killed"


class _Report:
    """What the tests say on their way, in a file, as their process may end at any time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def _say(self, kind: str, test: str, seconds: float) -> None:
        self._file.write(json.dumps([kind, test, seconds]) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say("begin", nodeid, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._say("failed" if report.failed else "passed", report.nodeid, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say("failed", report.nodeid, 0.0)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say("end", nodeid, 0.0)


def run(task: Task, root: Path) -> Outcome:
    """Run the tests of a task in the copy at ``root``, which is as before when this returns."""
    module = root / task.path
    kept = (module.read_bytes(), module.stat()) if task.path else None
    folder = Path(tempfile.mkdtemp(prefix="mutant-", dir=root.parent))
    try:
        if kept is not None:
            # Python takes what it has compiled for current if time and size agree, as those of a mutant may.
            Path(importlib.util.cache_from_source(str(module))).unlink(missing_ok=True)
            module.write_bytes(task.source.encode())
        return _run_apart(task, root, folder)
    finally:
        if kept is not None:
            module.write_bytes(kept[0])
            os.utime(module, ns=(kept[1].st_atime_ns, kept[1].st_mtime_ns))
        shutil.rmtree(folder, ignore_errors=True)


def _run_apart(task: Task, root: Path, folder: Path) -> Outcome:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(task, root, folder)
    code: int | None = None
    try:
        while time.monotonic() < began + task.most_seconds:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                child = 0
                break
            time.sleep(_LOOK_SECONDS)
    finally:
        _end_all(child, folder.name)
    return _outcome(code, time.monotonic() - began, folder)


def _become(task: Task, root: Path, folder: Path) -> NoReturn:
    """In the child: run pytest, and end."""
    code = _UNSET
    try:
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        os.environ[_MARK] = folder.name
        if task.path:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
        code = _run_pytest(task, root, folder)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_pytest(task: Task, root: Path, folder: Path) -> int:
    import hypothesis
    import pytest

    os.chdir(root)
    # The same examples for every mutant; the failure itself is enough, not its smallest example.
    hypothesis.settings.register_profile(
        "mutants",
        deadline=None,
        derandomize=True,
        database=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
    options = [
        "-x",
        "--tb=short",
        f"--basetemp={folder / 'pytest'}",
        "--hypothesis-profile=mutants",
        f"-ofaulthandler_timeout={task.most_test_seconds}",
        "-pno:cacheprovider",
        "-pno:xdist",
    ]
    return int(pytest.main([*options, *task.tests], plugins=[_Report(folder / "report")]))


def _end_all(child: int, mark: str) -> None:
    """End what a mutant has left running, wherever it hides."""
    if child:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def _outcome(code: int | None, seconds: float, folder: Path) -> Outcome:
    outcome = Outcome(code, seconds, hung=code is None)
    with contextlib.suppress(OSError):
        outcome.output = (folder / "output").read_bytes()[-3000:].decode(errors="replace")
    running = ""
    lines = (folder / "report").read_text().splitlines() if (folder / "report").exists() else []
    for line in lines:
        kind, test, taken = json.loads(line)
        if kind == "failed" and not outcome.failed:
            outcome.failed = test
        outcome.test_seconds[test] = outcome.test_seconds.get(test, 0.0) + taken
        running = {"begin": test, "end": ""}.get(kind, running)
    if running and not outcome.failed:  # it took too long, or has taken the process with it
        outcome.failed = running
        outcome.hung = outcome.hung or "Timeout (" in outcome.output
    return outcome


def main() -> None:
    """Do what the lines of the input ask for, in the current folder."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing but answers goes there

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, end)
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "holdfast" not in sys.modules
    for line in sys.stdin:
        answers.write(json.dumps(asdict(run(Task(**json.loads(line)), Path.cwd()))) + "\n")


if __name__ == "__main__":
    main()
