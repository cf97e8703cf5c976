"""``bench quantize-accuracy``: what restores from quantized checkpoints cost in AUC (Check-N-Run, Figure 10).

A DLRM is trained on made-up clicks (``holdfast.data.Synthetic``). Evenly spaced over the run it is saved
through a ``Checkpointer`` that stores weights in a few bits and optimizer state as it is, and restored from
that at once: everything else that a failure does leaves no trace in the model. At the end it is tested on
samples that it was not trained on, and its AUC compared with that of the same run without restores: same
teacher, same samples in the same order, same start. What is reported is by how many percent the AUC is lower,
as the mean over seeds with its 95 % interval (Student's t). Each seed is another teacher, another start and
other samples. A loss below zero says that the rounded run did better.

Restores from raw checkpoints change no bit; a run with them is made to show it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.bench.harness import Report, Spread
from holdfast.checkpoint.api import Checkpointer
from holdfast.checkpoint.encoding import choose_bits
from holdfast.data.reader import Batch
from holdfast.data.synthetic import Synthetic
from holdfast.models.dlrm import DLRM
from holdfast.models.recommender import Recommender
from holdfast.options import AutoBits, Policy
from holdfast.training.config import OptimizerConfig
from holdfast.training.metrics import auc
from holdfast.training.optimizers import build_optimizers

RESTORES = (1, 3, 20, 100)
BITS = (2, 3, 4, 8)
TARGET_PERCENT = 0.01
# Student's t for 95 %, two-sided, by degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

Cell = tuple[int | None, int]
"""Bits (None: raw), and how often the run is restored."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the runs are."""

    steps: int = 1000
    batch: int = 512
    test_samples: int = 200_000
    tables: int = 8
    rows: int = 5000
    dim: int = 16


def auto_bits(restores: int) -> int:
    """What ``AutoBits`` picks for a run that is expected to be restored so often."""
    return choose_bits(AutoBits(expected_restores=restores), 0).bits


DIAGONAL: tuple[Cell, ...] = tuple((auto_bits(r), r) for r in RESTORES)
ALL_CELLS: tuple[Cell, ...] = tuple((b, r) for b in BITS for r in RESTORES)


def run(report: Report) -> None:
    """All cells for a few seeds, and those that ``AutoBits`` picks for more."""
    if report.quick:
        seeds = dict.fromkeys(range(3), DIAGONAL[:3])
        measure(report, Size(steps=300, test_samples=100_000), seeds)
    else:
        measure(report, Size(), {seed: ALL_CELLS if seed < 2 else DIAGONAL for seed in range(8)})


def measure(report: Report, size: Size, seeds: Mapping[int, Sequence[Cell]]) -> None:
    """Train for each seed without restores and with those of its cells; report the losses."""
    report.settings.update(
        steps=size.steps, batch_size=size.batch, test_samples=size.test_samples, tables=size.tables,
        rows=size.rows, dim=size.dim, optimizer="rowwise-adagrad", state="raw", seeds=len(seeds),
    )  # fmt: skip
    aucs: dict[int, dict[Cell, float]] = {}
    for seed, cells in seeds.items():
        control = [(None, 3)] if not aucs else []
        aucs[seed] = train_all(size, seed, [*control, *cells])
        report.console.print(f"  (seed {seed}: AUC {aucs[seed][None, 0]:.5f} without restores)")
    report_losses(report, aucs)


def train_all(size: Size, seed: int, cells: Iterable[Cell]) -> dict[Cell, float]:
    """The AUC of the run of a seed without restores, as (None, 0), and of those of the cells."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # runs are paired: sums must be taken in the same order
    try:
        student = _Student(size, seed)
        return {cell: student.train(*cell) for cell in [(None, 0), *cells]}
    finally:
        torch.set_num_threads(threads)


def report_losses(report: Report, aucs: Mapping[int, Mapping[Cell, float]]) -> None:
    """The figures, from the AUCs by seed and cell."""
    losses: dict[Cell, list[float]] = {}
    for by_cell in aucs.values():
        plain = by_cell[None, 0]
        for cell, value in by_cell.items():
            if cell != (None, 0):
                losses.setdefault(cell, []).append(100 * (plain - value) / plain)
    report.raw["auc"] = {
        seed: {f"bits{b}.restores{r}": value for (b, r), value in cells.items()}
        for seed, cells in aucs.items()
    }
    report.figure("auc.without_restores", float(np.mean([cells[None, 0] for cells in aucs.values()])))
    for cell in sorted(losses, key=lambda cell: (cell[0] or 0, cell[1])):
        name = f"raw.restores{cell[1]}" if cell[0] is None else f"bits{cell[0]}.restores{cell[1]}"
        _figure(report, f"{name}.auc_loss_percent", losses[cell])
    for bits, restores in DIAGONAL:
        if (bits, restores) in losses:
            _figure(report, f"auto.{restores}.auc_loss_percent", losses[bits, restores], f"{bits} bits: ")


def _figure(report: Report, name: str, losses: Sequence[float], text: str = "") -> None:
    interval = mean_with_interval(losses)
    report.raw[f"{name}.by_seed"] = list(losses)
    report.raw[f"{name}.median"] = float(np.median(losses))
    report.figure(name, interval, f"{text}{verdict(interval)}; mean, 95 % interval, {len(losses)} seeds")


def verdict(interval: Spread) -> str:
    """Whether a loss below the target has been shown."""
    if interval.high < TARGET_PERCENT:
        return f"below {TARGET_PERCENT} % shown"
    if interval.low >= TARGET_PERCENT:
        return f"below {TARGET_PERCENT} % refuted"
    return f"below {TARGET_PERCENT} % not shown"


def mean_with_interval(values: Sequence[float]) -> Spread:
    """The mean and its 95 % interval; without bounds for a single value that is not zero."""
    mean = float(np.mean(values))
    if not np.any(values):
        return Spread(0.0, 0.0, 0.0)
    freedom = len(values) - 1
    if not freedom:
        return Spread(mean, -math.inf, math.inf)
    half = _T95[min(freedom, len(_T95)) - 1] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Spread(mean, mean - half, mean + half)


class _Student:
    """The runs of one seed."""

    def __init__(self, size: Size, seed: int) -> None:
        self._size = size
        self._seed = seed
        rows = [size.rows] * size.tables
        self._train = Synthetic(
            samples=size.steps * size.batch, batch_size=size.batch, table_rows=rows, seed=seed
        )
        self._test = Synthetic(
            samples=size.test_samples, batch_size=20_000, table_rows=rows, seed=seed, part="test"
        )
        self._loss = nn.BCEWithLogitsLoss()

    def train(self, bits: int | None, restores: int) -> float:
        """Train from the start, with so many restores from checkpoints of these bits; the AUC at the end."""
        size = self._size
        torch.manual_seed(self._seed)
        network = DLRM(13, size.tables, size.dim, bottom=(64, size.dim), top=(64, 1))
        model = Recommender(network, [size.rows] * size.tables)
        optimizers = build_optimizers(OptimizerConfig(name="rowwise-adagrad"), model)
        objects = {"model": model} | {f"optim{i}": o for i, o in enumerate(optimizers)}
        restore_after = {size.steps * (i + 1) // (restores + 1) for i in range(restores)}
        assert len(restore_after) == restores
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
            Checkpointer(folder, objects, Policy(quantize=bits, keep=1)) as checkpointer,  # type: ignore[arg-type]
        ):
            for step in range(size.steps):
                if step in restore_after:
                    checkpointer.save(step - 1)
                    assert checkpointer.restore() == step
                batch = self._train.batch(step)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss: Tensor = self._loss(_logits(model, batch), torch.from_numpy(batch.labels))
                loss.backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
        return self._evaluate(model)

    @torch.no_grad()
    def _evaluate(self, model: Recommender) -> float:
        batches = [self._test.batch(i) for i in range(self._test.batches)]
        scores = np.concatenate([_logits(model, batch).numpy() for batch in batches])
        return auc(scores, np.concatenate([batch.labels for batch in batches]))


def _logits(model: Recommender, batch: Batch) -> Tensor:
    logits: Tensor = model(torch.from_numpy(batch.dense), [torch.from_numpy(i) for i in batch.ids], None)
    return logits
