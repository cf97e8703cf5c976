"""A model that trains quickly in one process, out of the parts that a job's servers and workers are made of.

Tables are records of a ``GroupShard``, as at a server, and the network computes on looked-up rows, as at a
worker: a failure that takes a server's rows is a change of some records, and nothing else need be imitated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.cluster.worker.model import WorkerModel, plan_groups
from holdfast.coding.placement import Placement
from holdfast.data.criteo import Criteo
from holdfast.data.criteo_shape import KAGGLE_ROWS, TERABYTE_ROWS, Cardinalities
from holdfast.data.reader import Batch, Reader
from holdfast.data.synthetic import Synthetic
from holdfast.errors import ConfigError, DataError
from holdfast.models.dlrm import DLRM
from holdfast.tables.lookup import Placed, Placer
from holdfast.tables.plan import OptimizerPlan
from holdfast.tables.shard import GroupShard
from holdfast.training.metrics import auc

CRITEO: dict[Cardinalities, tuple[Sequence[int], int]] = {
    "kaggle": (KAGGLE_ROWS, 39_291_958),
    "terabyte": (TERABYTE_ROWS, 4_195_197_692),
}
"""Rows of the tables and samples of the one epoch that is trained: six of seven days, and 23 of 24."""
_TEST_BATCH = 8192
_FEWEST_ROWS = 3
_MOST_LR = 1e37
_MOST_SAMPLES = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What is trained: a DLRM on clicks of Criteo's shape, made up or real, on a smaller scale.

    Args:
        shape: of which data set: Kaggle has 1.2 samples for each row of its tables, Terabyte 22.
        scale: what its rows are divided by.
        samples: to train with; None divides its samples too: there remain as many for each row.
        criteo: files in Criteo's format, whose first clicks are trained with in place of made-up ones; the
            test is on the last seventh of them. ``zipf_exponent`` and ``noise`` say nothing then.
        batch_size: samples of a step.
        test_samples: of the test at the end.
        lr: of SGD, which CPR's model is trained with; the best of 0.3, 1 and 3 by AUC without failures.
        zipf_exponent: how skewed lookups are. On a hundredth of Kaggle's rows 1.12 leaves the most frequent
            eighth of a table the same share of its lookups, 91 %, as 1.05 on all of them.
        noise: of the teacher (see ``Synthetic``). With 1.4 training without failures ends near the AUC of
            CPR's model on Kaggle's data, 0.803.
        dim: weights of a row; 16 are the 64 bytes of CPR's Kaggle model.
        hidden: width of the network's layers.
        seed: another one is another teacher, other samples and another start; with files, the latter alone.
    """

    shape: Cardinalities = "kaggle"
    scale: float = 100.0
    samples: int | None = None
    criteo: tuple[str, ...] = ()
    batch_size: int = 256
    test_samples: int = 200_000
    lr: float = 1.0
    zipf_exponent: float = 1.12
    noise: float = 1.4
    dim: int = 16
    hidden: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("scale", "batch_size", "test_samples", "lr", "noise", "dim", "hidden"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name):g}: expected above 0")
        if not 1e-3 <= self.scale <= 1e12:
            raise ConfigError(f"scale is {self.scale:g}: expected 0.001 to 1e+12")
        if self.lr > _MOST_LR:  # else it would be infinite in 32 bits
            raise ConfigError(f"lr is {self.lr:g}: expected at most {_MOST_LR:g}")
        if self.samples is not None and not self.batch_size <= self.samples <= _MOST_SAMPLES:
            raise ConfigError(
                f"samples is {self.samples}: expected {self.batch_size} (batch_size) to {_MOST_SAMPLES:,}"
            )
        if self.steps < 1:
            raise ConfigError(f"scale is {self.scale:g}: that leaves no batch of {self.batch_size} samples")

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(max(_FEWEST_ROWS, round(rows / self.scale)) for rows in CRITEO[self.shape][0])

    @property
    def steps(self) -> int:
        """Batches of the whole training."""
        samples = CRITEO[self.shape][1] / self.scale if self.samples is None else self.samples
        return int(samples / self.batch_size)

    def batches(self, part: Literal["train", "test"] = "train") -> Iterator[Batch]:
        """Its samples, so many as there are to be."""
        testing = part == "test"
        batch_size = _TEST_BATCH if testing else self.batch_size
        samples = self.test_samples if testing else self.steps * self.batch_size
        reader: Reader
        if self.criteo:
            reader = Criteo(self.criteo, batch_size=batch_size, table_rows=self.table_rows, part=part)
        else:
            reader = Synthetic(
                samples=samples,
                batch_size=batch_size,
                table_rows=self.table_rows,
                zipf_exponent=self.zipf_exponent,
                noise=self.noise,
                seed=self.seed,
                part=part,
            )
        return itertools.islice(reader, -(-samples // batch_size))


def lesson_of(shape: str, **given: Any) -> Lesson:
    """The usual lesson of a data set's shape, with what is given (and not None) in place of its own."""
    if shape not in CRITEO:
        raise ConfigError(f"shape is {shape!r}: expected one of {', '.join(CRITEO)}")
    usual: dict[str, Any] = {"kaggle": {}, "terabyte": {"shape": "terabyte", "scale": 10_000.0}}[shape]
    return Lesson(**(usual | {name: value for name, value in given.items() if value is not None}))


@functools.lru_cache(maxsize=1)
def _schoolbook(lesson: Lesson) -> _Schoolbook:
    return _Schoolbook(lesson)


class _Schoolbook:
    """Batches with their lookups, made once for all runs of a lesson that a process does one by one."""

    def __init__(self, lesson: Lesson) -> None:
        self._lesson = lesson
        self._coming = lesson.batches()
        self._known: list[tuple[Batch, Placed]] = []

    def batch(self, step: int, placer: Placer) -> tuple[Batch, Placed]:
        while len(self._known) <= step:
            batch = next(self._coming, None)
            if batch is None:
                lesson, found = self._lesson, sum(len(batch) for batch, _ in self._known)
                raise DataError(
                    f"{', '.join(lesson.criteo)}: {found:,} samples to train with, "
                    f"expected {lesson.steps * lesson.batch_size:,}: ask for fewer (--samples)"
                )
            self._known.append((batch, placer.place(batch.ids, batch.offsets)))
        return self._known[step]


class Student:
    """A model of a lesson, at its start.

    Attributes:
        records: of all rows of all tables, table after table: weights and, if there is any, optimizer state.
        firsts: the first row of each table, and the number of all rows.
    """

    records: NDArray[np.uint32]
    firsts: Sequence[int]

    def __init__(self, lesson: Lesson) -> None:
        rows, dims = lesson.table_rows, [lesson.dim] * len(lesson.table_rows)
        torch.manual_seed(lesson.seed)
        network = DLRM(
            Synthetic.dense_features, len(rows), lesson.dim, (lesson.hidden, lesson.dim), (lesson.hidden, 1)
        )
        optimizer = OptimizerPlan(name="sgd", lr=lesson.lr)
        plan, network_plan = plan_groups(network, rows, dims, optimizer, optimizer)
        here = Placement(1)
        self._lesson = lesson
        self._model = WorkerModel(network, rows, dims)
        self._placer = Placer(plan, here)
        self._tables = GroupShard(plan, here, 0, lesson.seed)
        self._network = GroupShard(network_plan, here, 0, lesson.seed)
        self._network_rows = np.arange(network_plan.rows)
        self._network.install(self._network_rows, self._model.initial_network())
        self._book = _schoolbook(lesson)
        self.records = self._tables.records
        self.firsts = plan.firsts

    @property
    def weights(self) -> NDArray[np.float32]:
        """Of all rows, not a copy."""
        return self._tables.field("weight")

    @property
    def network(self) -> NDArray[np.uint32]:
        """Records of the network's parameters, not a copy; ``load_network`` after changing them."""
        return self._network.records

    def load_network(self) -> None:
        """Compute with what ``network`` is now."""
        self._model.load_network(self._network.pull(self._network_rows))

    def train(self, step: int) -> tuple[Sequence[NDArray[np.int64]], NDArray[np.uint32]]:
        """Learn from a batch; what it looked up in each table, and the rows of ``records`` it changed."""
        batch, placed = self._book.batch(step, self._placer)
        done = self._model.train(batch, [placed], [self._tables.pull(placed.places)])
        self._tables.push(placed.places, done.gradients[0])
        self._network.push(self._network_rows, done.network)
        self.load_network()
        places: NDArray[np.uint32] = np.asarray(placed.places, np.uint32)
        return batch.ids, places

    def test(self) -> float:
        """AUC on samples that it was not trained with."""
        scores, labels = [], []
        for batch in self._lesson.batches("test"):
            placed = self._placer.place(batch.ids, batch.offsets)
            scores.append(self._model.predict(batch, [placed], [self._tables.pull(placed.places)]))
            labels.append(batch.labels)
        if not labels:
            raise DataError(f"{', '.join(self._lesson.criteo)}: no sample in the last seventh to test with")
        return auc(np.concatenate(scores), np.concatenate(labels))
