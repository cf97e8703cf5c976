"""Copies of the tree, and processes that run mutants in them, side by side."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.mutants.mutate import Mutant
from tests.mutants.nursery import Outcome, Task

_Key = TypeVar("_Key")
_COPIED = ("src", "tests", "docs", "pyproject.toml", "README.md")


class BaselineFailed(Exception):
    """Tests fail without a mutant, so that nothing can be said of any."""


class _Nursery:
    """A process with a copy of the tree of its own."""

    def __init__(self, copy: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(copy / "src"),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",  # there is one of these for each processor
            "TORCHINDUCTOR_CACHE_DIR": str(copy.parent / "inductor"),  # what is compiled once stays compiled
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.nursery"],
            cwd=copy,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, task: Task) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Runner:
    """Runs mutants, each in one of a few copies of the tree, which are removed at the end.

    Args:
        root: of the tree.
        workers: how many run side by side.
        grace_seconds: how long tests may take beyond several times what they take without a mutant.
    """

    def __init__(self, root: Path, workers: int, grace_seconds: float = 20.0) -> None:
        self._root = root
        self._grace_seconds = grace_seconds
        self._workers = workers
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._nurseries: list[_Nursery] = []
        self._closed = threading.Event()

    def __enter__(self) -> Runner:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
        for number in range(self._workers):
            copy = Path(self._folder.name, str(number), "tree")
            copy.mkdir(parents=True)
            for name in _COPIED:
                _copy(self._root / name, copy / name)
            self._nurseries.append(_Nursery(copy))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        for nursery in self._nurseries:
            nursery.close()
        assert self._folder is not None
        self._folder.cleanup()

    def run(self, asked: Sequence[tuple[Mutant, bytes, tuple[str, ...]]]) -> Iterator[tuple[Mutant, Outcome]]:
        """What becomes of mutants, each given with its module's source and the tests that are meant for it.

        Raises:
            BaselineFailed: the tests fail without a mutant.
        """
        files = list(dict.fromkeys(test for _, _, tests in asked for test in tests))
        baseline = dict(self._run_all([(file, Task([file])) for file in files]))
        for file, outcome in baseline.items():
            if outcome.code != 0:
                raise BaselineFailed(f"{file}: {outcome.failed}\n{outcome.output}")
        tasks = []
        for mutant, source, tests in asked:
            seconds = sum(baseline[test].seconds for test in tests)
            longest = max(max(baseline[test].test_seconds.values(), default=0.0) for test in tests)
            mutated = mutant.apply(source).decode()
            task = Task(
                list(tests),
                mutant.path,
                mutated,
                most_seconds=self._grace_seconds + 5 * seconds,
                most_test_seconds=self._grace_seconds + 10 * longest,
            )
            tasks.append((mutant, task))
        yield from self._run_all(tasks)

    def _run_all(self, tasks: Sequence[tuple[_Key, Task]]) -> Iterator[tuple[_Key, Outcome]]:
        """In the order in which they end."""
        waiting = queue.SimpleQueue[tuple[_Key, Task]]()
        for task in tasks:
            waiting.put(task)
        done = queue.SimpleQueue[tuple[_Key, Outcome] | Exception]()

        def work(nursery: _Nursery) -> None:
            try:
                while not self._closed.is_set():
                    key, task = waiting.get_nowait()
                    done.put((key, nursery.run(task)))
            except queue.Empty:
                pass
            except Exception as error:
                done.put(error)

        for nursery in self._nurseries:
            threading.Thread(target=work, args=(nursery,), daemon=True).start()
        for _ in tasks:
            result = done.get()
            if isinstance(result, Exception):
                raise result
            yield result


def _copy(source: Path, target: Path) -> None:
    """With times, so that what Python and numba have compiled stays valid."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".hypothesis"))
    else:
        shutil.copy2(source, target)
