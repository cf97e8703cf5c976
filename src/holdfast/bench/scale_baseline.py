"""For ``bench scale``: what a baseline costs while it is written, by the size of the tables.

A DLRM of Terabyte's shape (dimension 64, Adagrad, batches of 2,048 samples) trains in a process of its own,
for each size one. Windows take turns: in one it trains while the first version of a new store is written,
which is a baseline, and for as long it trains as it is, shortly before and then after. A step is a training
step and the call of ``Checkpointer.step``. A step is *disturbed* if the machine is a virtual one and its host
took processors away meanwhile: such steps last several times as long, with a baseline or without one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.bench.harness import Report, Spread, stopwatch
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.data.criteo_shape import TERABYTE_ROWS
from holdfast.errors import HoldfastError
from holdfast.options import Policy
from holdfast.training.config import load
from holdfast.training.trainer import Trainer

BATCH = 2048
DIM = 64
RECORD_BYTES = 2 * DIM * 4
_LEAST_SECONDS = 3.0
_DISTURBED = 0.05  # of the processors' time


@dataclass(frozen=True, slots=True)
class Window:
    """Steps with or without a baseline being written."""

    steps: int
    longest_seconds: float
    median_seconds: float
    mean_seconds: float
    undisturbed_steps: int
    undisturbed_longest_seconds: float
    """Of all steps if all were disturbed; so are the next two."""
    undisturbed_median_seconds: float
    undisturbed_mean_seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """A window without a baseline, and one with."""

    plain: Window
    saving: Window
    extra_bytes: int
    """Resident memory at most, beyond what there was before the save."""
    save_call_seconds: float
    write_seconds: float
    copied_bytes: int
    waited_seconds: float


def measure_baseline(report: Report, *, gigabytes: Sequence[float], rounds: int, folder: Path | None) -> None:
    """Stall, slowdown and memory of a baseline for each size of the tables."""
    report.settings.update(baseline_gigabytes=list(gigabytes), baseline_rounds=rounds, baseline_batch=BATCH)
    for size in gigabytes:
        found = _in_a_new_process(size, rounds, folder)
        tables, torch_save = found["tables_bytes"], found["torch_save_seconds"]
        name = f"scale.baseline.gb{size:g}"
        each = [
            Round(**{**r, "plain": Window(**r["plain"]), "saving": Window(**r["saving"])})
            for r in found["rounds"]
        ]
        report.raw[name] = {"tables_bytes": tables, "rounds": [asdict(one) for one in each]}
        over = Spread.of([r.saving.longest_seconds / r.plain.median_seconds for r in each])
        usual = Spread.of([r.plain.longest_seconds / r.plain.median_seconds for r in each])
        slow = Spread.of([100 * (1 - r.plain.mean_seconds / r.saving.mean_seconds) for r in each])
        memory = Spread.of([100 * r.extra_bytes / tables for r in each])
        step = Spread.of([r.plain.median_seconds for r in each])
        report.figure(
            f"{name}.stall_over_step", over, f"longest step while {tables / 1e9:.1f} GB are written"
        )
        report.figure(f"{name}.plain_stall_over_step", usual, "longest step in as long without a baseline")
        report.figure(f"{name}.torch_save_over_step", torch_save / step.median, "torch.save stops training")
        report.figure(f"{name}.slowdown_percent", slow, "of training speed while it is written")
        report.figure(f"{name}.extra_memory_percent", memory, "of the tables")
        calm = Spread.of(
            [r.saving.undisturbed_longest_seconds / r.plain.undisturbed_median_seconds for r in each]
        )
        calm_usual = Spread.of(
            [r.plain.undisturbed_longest_seconds / r.plain.undisturbed_median_seconds for r in each]
        )
        calm_slow = Spread.of(
            [100 * (1 - r.plain.undisturbed_mean_seconds / r.saving.undisturbed_mean_seconds) for r in each]
        )
        disturbed = Spread.of([100 * (1 - r.saving.undisturbed_steps / r.saving.steps) for r in each])
        report.figure(
            f"{name}.undisturbed_stall_over_step", calm, "longest undisturbed step while it is written"
        )
        report.figure(
            f"{name}.undisturbed_plain_stall_over_step", calm_usual, "longest undisturbed step without it"
        )
        report.figure(f"{name}.undisturbed_slowdown_percent", calm_slow, "by undisturbed steps")
        report.figure(f"{name}.disturbed_steps_percent", disturbed, "the host took processors away")
        written = Spread.of([tables / 1e6 / r.write_seconds for r in each])
        report.figure(f"{name}.write_megabytes_per_second", written)
        largest = {
            "stall_over_step": over,
            "undisturbed_stall_over_step": calm,
            "slowdown_percent": slow,
            "undisturbed_slowdown_percent": calm_slow,
            "extra_memory_percent": memory,
        }
    for figure, spread in largest.items():
        report.figure(f"scale.baseline.{figure}", spread, "of the largest tables")


def _in_a_new_process(gigabytes: float, rounds: int, folder: Path | None) -> dict[str, Any]:
    code = "from holdfast.bench import scale_baseline; scale_baseline.train_and_save()"
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as name:
        task = json.dumps({"gigabytes": gigabytes, "rounds": rounds, "folder": name})
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            input=task,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise HoldfastError(
            f"the process that trains with {gigabytes:g} GB of tables ended with {done.returncode}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def max_rows_for(gigabytes: float) -> int:
    """The limit of the tables' rows with which they have about this size, optimizer state included."""
    wanted = gigabytes * 1e9 / RECORD_BYTES
    low, high = 1, max(TERABYTE_ROWS)
    while low < high:
        middle = (low + high) // 2
        if sum(min(rows, middle) for rows in TERABYTE_ROWS) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def train_and_save() -> None:
    """Run the windows that standard input asks for, and print what they cost."""
    task = json.loads(sys.stdin.read())
    folder = Path(task["folder"])
    trainer = Trainer(
        load(
            None,
            [
                "model.preset=criteo-terabyte", "data.cardinalities=terabyte", "optimizer.name=adagrad",
                f"data.max_rows={max_rows_for(task['gigabytes'])}", f"batch_size={BATCH}",
                "data.samples=1000000000", "data.test_samples=1",
            ],
        )
    )  # fmt: skip
    batches = iter(trainer.train_reader.split(0, 1))
    objects = {f"optim{n}": optimizer for n, optimizer in enumerate(trainer.optimizers)}
    objects |= {"model": trainer.model}  # type: ignore[dict-item]

    def step(after: Callable[[], object] = lambda: None) -> float:
        batch = next(batches)

        def work() -> None:
            trainer.train_step(batch)
            after()

        return stopwatch(work)

    for _ in range(5):
        step()
    _round(objects, step, folder / "warm-up", counts=False)
    rounds = [_round(objects, step, folder / str(number), counts=True) for number in range(task["rounds"])]
    states = {name: thing.state_dict() for name, thing in objects.items()}
    path = folder / "everything.pt"
    seconds = stopwatch(lambda: _torch_save(states, path))
    print(
        json.dumps(
            {
                "tables_bytes": RECORD_BYTES * sum(trainer.train_reader.table_rows),
                "torch_save_seconds": seconds,
                "rounds": [asdict(one) for one in rounds],
            }
        )
    )


def _torch_save(states: dict[str, Any], path: Path) -> None:
    torch.save(states, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.unlink()


def _round(objects: dict[str, Any], step: Callable[..., float], path: Path, *, counts: bool) -> Round:
    policy = Policy(when_busy="skip")
    with Checkpointer(path, objects, policy) as checkpointer:
        number = 0

        def told() -> None:
            nonlocal number
            number += 1
            checkpointer.step(number)

        step(told)
        before = _steps(lambda: step(told), lambda seconds: seconds < _LEAST_SECONDS)
        with _Memory() as memory:
            call = 0.0

            def save() -> None:
                nonlocal call
                call = stopwatch(lambda: checkpointer.save(number))

            saving = _steps(
                lambda: step(told),
                lambda seconds: not checkpointer.reports or seconds < 0.1,
                first=lambda: step(save),
            )
        # As long again without: the longest of many steps is longer than the longest of a few.
        as_long = max(_LEAST_SECONDS, sum(one.seconds for one in saving) if counts else 0.0)
        after = _steps(lambda: step(told), lambda seconds: seconds < as_long)
        checkpointer.wait()
        (report,) = checkpointer.reports
    subprocess.run(["rm", "-rf", str(path)], check=True)
    return Round(
        _window(before + after),
        _window(saving),
        memory.extra,
        call,
        report.write_seconds,
        report.copied_bytes,
        report.waited_seconds,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    is_disturbed: bool


def _steps(
    step: Callable[[], float],
    goes_on: Callable[[float], bool],
    first: Callable[[], float] | None = None,
) -> list[_Step]:
    """Train as long as ``goes_on`` says, given the seconds so far."""
    done: list[_Step] = []
    while first is not None or goes_on(sum(one.seconds for one in done)):
        stolen = _stolen_seconds()
        seconds = (first or step)()
        first = None
        most = _DISTURBED * seconds * (os.cpu_count() or 1)
        done.append(_Step(seconds, _stolen_seconds() - stolen > most))
    return done


def _window(steps: Sequence[_Step]) -> Window:
    seconds = [one.seconds for one in steps]
    calm = [one.seconds for one in steps if not one.is_disturbed] or seconds
    return Window(
        len(steps), max(seconds), float(np.median(seconds)), float(np.mean(seconds)),
        sum(not one.is_disturbed for one in steps), max(calm), float(np.median(calm)), float(np.mean(calm)),
    )  # fmt: skip


def _stolen_seconds() -> float:
    """Time of processors that the host has taken away from this virtual machine; 0 if it is none."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


class _Memory:
    """Follows the resident memory of this process; ``extra`` is the most beyond the beginning."""

    def __init__(self) -> None:
        self._pages = os.sysconf("SC_PAGE_SIZE")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.extra = 0

    def __enter__(self) -> _Memory:
        self._began = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.extra = max(self.extra, self._now() - self._began)

    def _now(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * self._pages
