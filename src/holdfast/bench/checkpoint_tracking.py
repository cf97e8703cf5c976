"""For ``bench checkpoint``: what it costs to know which rows have changed, and what that saves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.bench.harness import Report, Spread, interleave, stopwatch
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.saving.writer import SaveReport
from holdfast.data.criteo_shape import capped_rows
from holdfast.data.synthetic import Synthetic
from holdfast.training.config import load
from holdfast.training.trainer import Trainer

_TOUCHED = 0.1
_DIM = 16
_BATCH = 1024
_ITERATIONS = 10


def measure_tracking(report: Report, rounds: int) -> None:
    """The time of hooks and of the net below them, against a training step's.

    DLRM of Kaggle sizes, batch 2048, on all cores. Hooks are called by themselves, between steps. The net is
    what ``step()`` takes with the default policy: it compares rows with digests for a share of the time.
    """
    trainer = Trainer(load(None, ["data.samples=1000000"]))
    optimizers = {f"optim{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
    checks: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, {"model": trainer.model} | optimizers) as checkpointer,
    ):
        bags = list(trainer.model.tables)
        before = [hook for o in trainer.optimizers for hook in o._optimizer_step_pre_hooks.values()]
        after = [hook for o in trainer.optimizers for hook in o._optimizer_step_post_hooks.values()]
        hooks = [next(iter(bag._forward_hooks.values())) for bag in bags]
        batches = iter(trainer.train_reader.split(0, 1))

        def mark() -> float:
            ids = [torch.from_numpy(i) for i in next(batches).ids]

            def run() -> None:
                for hook, bag, i in zip(hooks, bags, ids, strict=True):
                    hook(bag, (i,), {}, None)
                for step_hook, optimizer in zip([*before, *after], trainer.optimizers * 2, strict=True):
                    step_hook(optimizer, (), {})

            return stopwatch(run)

        def step() -> float:
            batch = next(batches)
            seconds = stopwatch(lambda: trainer.train_step(batch))
            checks.append(stopwatch(lambda: checkpointer.step(0)))
            return seconds

        trainer.train_step(next(batches))  # optimizers make their state
        checkpointer.save(0)  # from here on digests are known
        checkpointer.wait()
        interleave({"mark": mark, "step": step}, 2)
        checks.clear()
        times = interleave({"mark": mark, "step": step}, 5 * rounds)
    report.raw["tracking"] = times | {"check": checks}
    digest = 100 * sum(checks) / sum(times["step"])
    hooks_alone = [100 * a / b for a, b in zip(times["mark"], times["step"], strict=True)]
    report.figure(
        "tracking_percent", Spread.of([hook + digest for hook in hooks_alone]), "of a step, all of it"
    )
    report.figure("digest.percent", digest, "of the time of all steps, comparing rows with their digests")


def measure_dense_adam(report: Report, *, versions: int, max_rows: int) -> None:
    """Adam on dense gradients: a step may move any row, and only rows that were ever touched really move.

    A tenth of the rows is ever looked up. Each checkpoint is beside ``torch.save`` of everything.
    """
    rows = capped_rows("kaggle", max_rows)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Embedding(r, _DIM) for r in rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    steps: list[float] = []
    sizes: list[int] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        objects: dict[str, Any] = {"model": model, "optim": optimizer}
        with Checkpointer(Path(folder) / "store", objects) as checkpointer:
            for number, batches in enumerate(_touching(rows, versions)):
                for ids in batches:
                    steps.append(stopwatch(lambda ids=ids: _train(model, optimizer, ids)))  # type: ignore[misc]
                checkpointer.save(number)
                checkpointer.wait()
                torch.save({name: thing.state_dict() for name, thing in objects.items()}, f"{folder}/full.pt")
                sizes.append(Path(f"{folder}/full.pt").stat().st_size)
            reports = checkpointer.reports
    written = sum(r.bytes + r.tidied_bytes for r in reports)
    report.figure(
        "dense_adam.written_over_full", written / sum(sizes), f"{versions} checkpoints, rewriting included"
    )
    report.figure(
        "dense_adam.rows_over_touched", _rows_over_touched(reports[1:], rows), "rows of a checkpoint"
    )
    later = Spread.of([r.stall_seconds for r in reports[1:]])
    report.figure("dense_adam.stall_over_step", later.median / Spread.of(steps).median, "digests compared")


def _rows_over_touched(reports: list[SaveReport], rows: Sequence[int]) -> float:
    return float(np.mean([r.rows for r in reports])) / sum(max(1, int(_TOUCHED * r)) for r in rows)


def _touching(rows: Sequence[int], versions: int) -> Iterator[list[list[Tensor]]]:
    """Batches before each checkpoint: a tenth of the rows once, then some of them by Zipf's law."""
    rng = np.random.default_rng(0)
    some = [torch.from_numpy(rng.permutation(r)[: max(1, int(_TOUCHED * r))]) for r in rows]
    yield [some]
    reader = Synthetic(samples=_BATCH * _ITERATIONS * (versions - 1), batch_size=_BATCH, table_rows=rows)
    batches = iter(reader)
    for _ in range(versions - 1):
        yield [
            [
                mine[torch.from_numpy(ids) % len(mine)]
                for mine, ids in zip(some, next(batches).ids, strict=True)
            ]
            for _ in range(_ITERATIONS)
        ]


def _train(model: nn.ModuleList, optimizer: torch.optim.Optimizer, ids: list[Tensor]) -> None:
    """A step with dense gradients; what the loss is does not matter here."""
    optimizer.zero_grad()
    found = [table(i).square().mean() for table, i in zip(model, ids, strict=True)]
    torch.autograd.backward(torch.stack(found).sum())
    optimizer.step()
