"""``bench quantize-accuracy``: what restores from quantized checkpoints cost in AUC (Check-N-Run, Figure 10).

A DLRM is trained on made-up clicks (``holdfast.data.Synthetic``). Evenly spaced over the run it is saved
through a ``Checkpointer`` that stores weights in a few bits and optimizer state as it is, and restored from
that at once: everything else that a failure does leaves no trace in the model. At the end it is tested on
samples that it was not trained on, and its AUC compared with that of the same run without restores: same
teacher, same samples in the same order, same start. What is reported is by how many percent the AUC is lower,
as the mean over seeds with its 95 % interval (Student's t). Each seed is another teacher, another start and
other samples. A loss below zero says that the rounded run did better.

``lifetime`` figures are of the AUC over all samples of training, each scored before it is learned from:
what a run loses over its whole length, not what is missing when it ends.

In the first part the model learns what single rows say and hardly more, and at the end improves slowly. The
``learning`` part has six times the samples, to where it begins to learn what rows say together and its AUC
rises fast again. There, a delay in learning shows that costs next to nothing before.

Restores from raw checkpoints change no bit; a run with them is made to show it. Each run's scores are kept in
the JSON as soon as they are known. If the bench is stopped, the same command goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from holdfast.bench.accuracy_runs import PLAIN, Cell, Run, Scores, Size, codec_digest, results
from holdfast.bench.harness import Report, Spread
from holdfast.options import AutoBits

RESTORES = (1, 3, 10, 20, 100)
BITS = (2, 3, 4, 8)
TARGET_PERCENT = 0.01
# Student's t for 95 %, two-sided, by degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunPart:
    """Runs of one size: for each seed its cells. Figures begin with the prefix."""

    prefix: str
    size: Size
    seeds: Mapping[int, Sequence[Cell]]

    def runs(self) -> list[Run]:
        """All of them, seed by seed, that without restores first."""
        return [
            Run(self.prefix, self.size, seed, cell)
            for seed, cells in self.seeds.items()
            for cell in (PLAIN, *cells)
        ]


def auto_bits(restores: int) -> int:
    """What ``AutoBits`` picks for a run that is expected to be restored so often."""
    return AutoBits(expected_restores=restores).choose(0).bits


DIAGONAL: tuple[Cell, ...] = tuple(Cell(auto_bits(r), r) for r in RESTORES)
# Check-N-Run uses 4 bits up to here, ``AutoBits`` does not: measured as often, to say why.
PAPERS_CHOICE = Cell(4, 20)
ALL_CELLS: tuple[Cell, ...] = tuple(Cell(b, r) for b in BITS for r in RESTORES)
CONTROL = Cell(None, 3)


def run(report: Report) -> None:
    """The cells that ``AutoBits`` or the paper picks for all seeds, and all cells for the last two."""
    if report.quick:
        seeds = {0: (CONTROL, *DIAGONAL[:3]), 1: DIAGONAL[:3], 2: DIAGONAL[:3]}
        measure(report, [RunPart("", Size(steps=300, test_samples=100_000), seeds)])
        return
    # What matters most comes first: it stands, too, if the bench is stopped.
    picked = (*DIAGONAL, PAPERS_CHOICE)
    seeds = dict.fromkeys(range(18), picked) | {18: (CONTROL, *ALL_CELLS), 19: ALL_CELLS}
    learning = Size(steps=1500, batch=2048)
    measure(
        report, [RunPart("", Size(), seeds), RunPart("learning.", learning, dict.fromkeys(range(4), picked))]
    )


def measure(report: Report, parts: Sequence[RunPart], workers: int | None = None) -> None:
    """Train for each seed without restores and with those of its cells; report the losses."""
    report.settings.update(optimizer="rowwise-adagrad", state="raw", codecs=codec_digest())
    for part in parts:
        settings = asdict(part.size) | {"seeds": len(part.seeds)}
        report.settings.update({part.prefix + name: value for name, value in settings.items()})
    scores = {name: Scores(*values) for name, values in report.kept_runs().items()}
    report.raw.update(unfinished=True, runs=scores)
    runs = [run for part in parts for run in part.runs()]
    missing = [run for run in runs if run.name not in scores]
    if scores:
        report.console.print(f"  (going on: {len(runs) - len(missing)} of {len(runs)} runs are in the JSON)")
    for done, (finished, result) in enumerate(results(missing, workers), len(runs) - len(missing) + 1):
        scores[finished.name] = result
        report.save()
        report.console.print(
            f"  ({done} of {len(runs)}: {finished.name}, AUC {result.test:.5f})", highlight=False
        )
    for part in parts:
        report_losses(report, part, scores)
    del report.raw["unfinished"]


def report_losses(report: Report, part: RunPart, scores: Mapping[str, Scores]) -> None:
    """The figures of a part, from its runs' scores by name."""
    plain = [scores[Run(part.prefix, part.size, seed, PLAIN).name] for seed in part.seeds]
    report.figure(f"{part.prefix}auc.without_restores", float(np.mean([s.test for s in plain])))
    losses: dict[Cell, list[Scores]] = {}
    for (seed, cells), base in zip(part.seeds.items(), plain, strict=True):
        for cell in cells:
            score = scores[Run(part.prefix, part.size, seed, cell).name]
            lost = Scores(*(100 * (b - s) / b for b, s in zip(base, score, strict=True)))
            losses.setdefault(cell, []).append(lost)
    for cell in sorted(losses, key=lambda cell: (cell.bits or 0, cell.restores)):
        _figures(report, part.prefix + cell.name, losses[cell])
    for cell in DIAGONAL:
        if cell in losses:
            _figures(report, f"{part.prefix}auto.{cell.restores}", losses[cell], f"{cell.bits} bits: ")


def _figures(report: Report, name: str, losses: Sequence[Scores], text: str = "") -> None:
    _figure(report, f"{name}.auc_loss_percent", [loss.test for loss in losses], text)
    _figure(report, f"{name}.lifetime_auc_loss_percent", [loss.lifetime for loss in losses], text)


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
