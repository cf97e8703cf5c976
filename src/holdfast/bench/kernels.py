"""``bench kernels``: what the hand-written kernels gain over their plain fallbacks.

``simd``: rows per second of a codec, or of a server's update of rows, whose loops use LLVM vectors, over
those of the same loops with ``HOLDFAST_SIMD=0``. Each side is a process of its own, since the choice is made
at import; they take turns.

``openmp``: the stall of ``Checkpointer.save`` right after a training step, with rows copied by a thread of
our own (``HOLDFAST_OPENMP=0``), over the stall with rows copied by PyTorch's threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.bench.harness import Report, Spread, interleave, ratio, stopwatch
from holdfast.checkpoint.codecs.quantize import LogCodec, RowCodec, UniformCodec
from holdfast.coding.placement import Placement
from holdfast.kernels import openmp
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

CODECS: dict[str, RowCodec] = {
    "adaptive.2": UniformCodec(2, method="adaptive"),
    "adaptive.4": UniformCodec(4, method="adaptive"),
    "asymmetric.8": UniformCodec(8, method="asymmetric"),
    "log.8": LogCodec(),
}
CASES = [
    *(("encode", name) for name in CODECS),
    *(("decode", name) for name in CODECS if name != "log.8"),  # whose decoder is a table lookup
    ("update", "sgd"),
    ("update", "adagrad"),
    ("update", "adam"),
]
_TABLE_ROWS = 200_000


def run(report: Report) -> None:
    """Measure both."""
    if report.quick:
        measure_simd(report, rows=4096, rounds=5)
        measure_openmp(report, rounds=5, max_rows=100_000)
    else:
        measure_simd(report, rows=16_384, rounds=31)
        measure_openmp(report, rounds=31, max_rows=1_000_000)


def measure_simd(report: Report, *, rows: int, rounds: int, dims: tuple[int, ...] = (16, 64)) -> None:
    """Rows per second of codecs and updates, vectors over scalars, on one thread."""
    report.settings.update(simd_rows=rows, simd_rounds=rounds, dims=list(dims))
    with _KernelProcess(vectors=True) as vectors, _KernelProcess(vectors=False) as scalars:
        for dim in dims:
            for work, name in CASES:
                case = f"{work} {name} {rows} {dim}"
                sides = {"vectors": vectors.side(case), "scalars": scalars.side(case)}
                interleave(sides, 1)  # compiles
                seconds = interleave(sides, rounds)
                report.raw[f"simd.{work}.{name}.dim{dim}"] = seconds
                report.figure(f"simd.{work}.{name}.dim{dim}", ratio(seconds["scalars"], seconds["vectors"]))


class _KernelProcess:
    """A process that times loops, with or without vectors."""

    def __init__(self, *, vectors: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.bench.kernels"],
            env={**os.environ, "HOLDFAST_SIMD": "1" if vectors else "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def side(self, case: str) -> Callable[[], float]:
        """A function that has the case run once and returns its seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None

        def seconds() -> float:
            stdin.write(case + "\n")
            stdin.flush()
            return float(stdout.readline())

        return seconds

    def __enter__(self) -> _KernelProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, which ends it


def answer_cases() -> None:
    """For each line of input, run that case and print its seconds."""
    for line in sys.stdin:
        work, name, rows, dim = line.split()
        if work == "update":
            print(time_update(name, int(rows), int(dim)), flush=True)
        else:
            print(time_codec(CODECS[name], int(rows), int(dim), encode=work == "encode"), flush=True)


def time_codec(codec: RowCodec, rows: int, dim: int, *, encode: bool) -> float:
    """Seconds to encode or to decode so many rows, which are the same in every process."""
    random = np.random.default_rng(dim)
    values: NDArray[np.float32] = (random.normal(size=(rows, dim)) * 0.02).astype(np.float32)
    if isinstance(codec, LogCodec):
        values = np.abs(values)
    stored = np.zeros((rows, codec.stored_bytes(dim)), np.uint8)
    seconds = stopwatch(lambda: codec.encode(values, stored))
    return seconds if encode else stopwatch(lambda: codec.decode(stored, values))


def time_update(optimizer: Any, rows: int, dim: int) -> float:
    """Seconds of a push of so many rows to a server's table."""
    shard = _shard(optimizer, dim)
    random = np.random.default_rng(dim)
    places = np.sort(random.choice(_TABLE_ROWS, rows, replace=False)).astype(np.uint32)
    gradients = random.normal(size=(rows, dim)).astype(np.float32)
    return stopwatch(lambda: shard.push(places, gradients))


@cache
def _shard(optimizer: Any, dim: int) -> GroupShard:
    plan = OptimizerPlan(name=optimizer, lr=0.01)
    group = GroupPlan(name="t", dim=dim, tables=(TablePlan("t", _TABLE_ROWS),), optimizer=plan)
    return GroupShard(group, Placement(1, 1, 0), 0, seed=1)


def measure_openmp(report: Report, *, rounds: int, max_rows: int, threads: int = 2) -> None:
    """The stall of a save after ten steps of a DLRM, with our own thread and with PyTorch's threads."""
    import torch  # noqa: PLC0415 (the processes above do without)

    from holdfast.checkpoint.checkpointer import Checkpointer  # noqa: PLC0415
    from holdfast.training.config import load  # noqa: PLC0415
    from holdfast.training.trainer import Trainer  # noqa: PLC0415

    report.settings.update(openmp_rounds=rounds, openmp_max_rows=max_rows, openmp_threads=threads)
    before = torch.get_num_threads(), openmp.ENABLED
    torch.set_num_threads(threads)
    trainer = Trainer(load(None, ["data.samples=100000000", f"data.max_rows={max_rows}"]))
    optimizers = {f"optim{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
    batches = iter(trainer.train_reader.split(0, 1))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
            Checkpointer(folder, {"model": trainer.model} | optimizers) as checkpointer,
        ):

            def stall(enabled: bool) -> float:
                for _ in range(10):
                    trainer.train_step(next(batches))
                openmp.ENABLED = enabled
                checkpointer.save(len(checkpointer.reports))
                checkpointer.wait()
                return checkpointer.reports[-1].stall_seconds

            sides = {"openmp": lambda: stall(enabled=True), "own_thread": lambda: stall(enabled=False)}
            interleave(sides, 2)
            stalls = interleave(sides, rounds)
            rows = checkpointer.reports[-1].rows
    finally:
        torch.set_num_threads(before[0])
        openmp.ENABLED = before[1]
    report.raw["openmp.stall_seconds"] = stalls
    report.figure("openmp.own_thread_stall_over_openmp", ratio(stalls["own_thread"], stalls["openmp"]))
    for name, seconds in stalls.items():
        report.figure(f"openmp.{name}.stall_milliseconds", Spread.of([1e3 * s for s in seconds]))
    report.figure("openmp.rows", rows, "rows of the last save")


if __name__ == "__main__":
    answer_cases()
