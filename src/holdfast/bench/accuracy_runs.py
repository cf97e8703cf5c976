"""The training runs of ``bench quantize-accuracy``, each by itself, on all cores."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.codecs.quantize import UniformCodec
from holdfast.data.reader import Batch
from holdfast.data.synthetic import Synthetic
from holdfast.models.dlrm import DLRM
from holdfast.models.recommender import Recommender
from holdfast.options import Policy
from holdfast.training.config import OptimizerConfig
from holdfast.training.metrics import auc
from holdfast.training.optimizers import build_optimizers
from holdfast.training.parallel import run_all

Scored: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Scores and labels of some samples."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the runs."""

    steps: int = 1000
    batch: int = 512
    test_samples: int = 1_000_000
    tables: int = 8
    rows: int = 5000
    dim: int = 16


class Cell(NamedTuple):
    """The bits (None: raw) and the number of restores."""

    bits: int | None
    restores: int

    @property
    def name(self) -> str:
        """As figures have it."""
        return (
            f"raw.restores{self.restores}"
            if self.bits is None
            else f"bits{self.bits}.restores{self.restores}"
        )


PLAIN = Cell(None, 0)


class Run(NamedTuple):
    """A training run: which of the bench's parts it belongs to, that part's size, its seed, its restores."""

    part: str
    size: Size
    seed: int
    cell: Cell

    @property
    def name(self) -> str:
        """What the JSON keeps its scores under."""
        return f"{self.part}seed{self.seed}.{self.cell.name}"


class Scores(NamedTuple):
    """AUC on test samples at the end, and over all samples of training, each scored before it is learned."""

    test: float
    lifetime: float


def codec_digest() -> str:
    """Changes with what any of the codecs makes of rows: scores of other codecs are other figures."""
    rows = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    state = xxhash.xxh3_64()
    for bits in (2, 3, 4, 8):
        codec = UniformCodec(bits)
        stored = np.empty((len(rows), codec.stored_bytes(rows.shape[1])), np.uint8)
        codec.encode(rows, stored)
        state.update(stored.data)
    return state.hexdigest()


def results(runs: Sequence[Run], workers: int | None = None) -> Iterator[tuple[Run, Scores]]:
    """Each run with its scores, in the order in which they end."""
    yield from run_all(train, runs, workers)


def train(run: Run) -> Scores:
    """The scores of one run."""
    return _student(run.size, run.seed).train(run.cell)


@functools.lru_cache(maxsize=1)
def _student(size: Size, seed: int) -> _Student:
    return _Student(size, seed)


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

    def train(self, cell: Cell) -> Scores:
        """Train from the start, with so many restores from checkpoints of these bits."""
        size = self._size
        torch.manual_seed(self._seed)
        network = DLRM(13, size.tables, size.dim, bottom=(64, size.dim), top=(64, 1))
        model = Recommender(network, [size.rows] * size.tables)
        optimizers = build_optimizers(OptimizerConfig(name="rowwise-adagrad"), model)
        objects = {"model": model} | {f"optim{i}": o for i, o in enumerate(optimizers)}
        restore_after = {size.steps * (i + 1) // (cell.restores + 1) for i in range(cell.restores)}
        assert len(restore_after) == cell.restores
        scored: list[Scored] = []
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
            Checkpointer(folder, objects, Policy(quantize=cell.bits, keep=1)) as checkpointer,  # type: ignore[arg-type]
        ):
            for step in range(size.steps):
                if step in restore_after:
                    checkpointer.save(step - 1)
                    assert checkpointer.restore() == step
                batch = self._train.batch(step)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                logits = _logits(model, batch)
                scored.append((logits.detach().numpy(), batch.labels))
                loss: Tensor = self._loss(logits, torch.from_numpy(batch.labels))
                loss.backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
        return Scores(_auc(self._test_scores(model)), _auc(scored))

    @torch.no_grad()
    def _test_scores(self, model: Recommender) -> list[Scored]:
        batches = (self._test.batch(i) for i in range(self._test.batches))
        return [(_logits(model, batch).numpy(), batch.labels) for batch in batches]


def _auc(scored: Sequence[Scored]) -> float:
    return auc(np.concatenate([s for s, _ in scored]), np.concatenate([labels for _, labels in scored]))


def _logits(model: Recommender, batch: Batch) -> Tensor:
    logits: Tensor = model(torch.from_numpy(batch.dense), [torch.from_numpy(i) for i in batch.ids], None)
    return logits
