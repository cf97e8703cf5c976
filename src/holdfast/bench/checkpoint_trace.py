"""The trace that ``bench checkpoint`` plays to each strategy, and a strategy's store while it is played."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.reading.version import VersionReader, open_version
from holdfast.data.criteo_shape import capped_rows
from holdfast.data.synthetic import Synthetic
from holdfast.models.dlrm import DLRM
from holdfast.models.recommender import Recommender
from holdfast.options import Policy, Strategy

DIM = 16
BATCH = 1024
ITERATIONS = 10
# More than the processor's caches hold: each side finds them as cold as the other.
_EVICT = np.zeros(64 << 20, np.uint8)


class Trace:
    """Which rows are looked up before each checkpoint, and how many records are live after it."""

    def __init__(self, versions: int, max_rows: int) -> None:
        self.rows = capped_rows("kaggle", max_rows)
        self.versions = versions
        size = BATCH * ITERATIONS
        self._reader = Synthetic(samples=size * versions, batch_size=size, table_rows=self.rows)
        seen = [np.zeros(r, bool) for r in self.rows]
        self.live: list[int] = []
        self.saved = 0
        for version in range(versions):
            for marks, ids in zip(seen, self.touched(version), strict=True):
                marks[ids] = True
                self.saved += len(ids)
            self.live.append(sum(int(marks.sum()) for marks in seen))

    def lookups(self, version: int) -> Sequence[NDArray[np.int64]]:
        """The ids of ten batches, table by table."""
        return self._reader.batch(version).ids

    def touched(self, version: int) -> list[NDArray[np.int64]]:
        """The same without repetition."""
        return [np.unique(ids) for ids in self.lookups(version)]


@dataclass
class StrategyRun:
    """One strategy's store, with what it cost to make it."""

    name: str
    folder: Path
    checkpointer: Checkpointer
    model: Recommender
    optimizer: torch.optim.Adagrad
    written: int = 0
    stalls: list[float] = field(default_factory=list)
    gathers: list[float] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """The version that each checkpoint of the trace became."""

    def open(self, checkpoint: int) -> VersionReader:
        """The version of a checkpoint."""
        return open_version(self.checkpointer.store, self.numbers[checkpoint])

    def stored(self) -> tuple[int, int]:
        """Bytes in the store: all of them, and those of baselines."""
        store = self.checkpointer.store
        files = [f for era in self.checkpointer.manifest.eras for f in era.files]
        return sum(i.size for i in store.list()), sum(f.bytes for f in files if f.kind == "baseline")

    def close(self) -> None:
        """Close the store and delete its files."""
        self.checkpointer.close()
        shutil.rmtree(self.folder)


def make_run(name: str, strategy: Strategy, trace: Trace, folder: Path) -> StrategyRun:
    """A model of the trace's sizes, and an empty store for it."""
    torch.manual_seed(0)
    network = DLRM(13, 26, DIM, bottom=(64, DIM), top=(64, 1))
    model = Recommender(network, trace.rows)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    objects = {"model": model, "optim": optimizer}
    checkpointer = Checkpointer(folder / name, objects, Policy(strategy=strategy))
    return StrategyRun(name, folder / name, checkpointer, model, optimizer)


def play(one: StrategyRun, trace: Trace, checkpoints: Sequence[int]) -> None:
    """A baseline, then the trace, saving at these checkpoints."""
    wanted = set(checkpoints)
    with _counted(one):
        one.checkpointer.save(0)
        one.checkpointer.wait()
        for checkpoint in range(trace.versions):
            one.model.tables([torch.from_numpy(ids) for ids in trace.lookups(checkpoint)], None)
            touched = trace.touched(checkpoint)
            _change(one, touched, checkpoint)
            if checkpoint in wanted:
                _save(one, touched, checkpoint)


def _change(one: StrategyRun, touched: Sequence[NDArray[np.int64]], checkpoint: int) -> None:
    """New bits in every touched row: what they are does not matter here."""
    for weight, ids in zip(one.model.tables.parameters(), touched, strict=True):
        weight.detach().numpy()[ids, 0] = checkpoint
        one.optimizer.state[weight]["sum"].numpy()[ids, 0] = checkpoint


def _save(one: StrategyRun, touched: Sequence[NDArray[np.int64]], checkpoint: int) -> None:
    """A save, and beside it the least that any incremental checkpoint must do while training waits."""
    ids = [torch.from_numpy(i) for i in touched]
    weights = list(one.model.tables.parameters())
    states = [one.optimizer.state[w]["sum"] for w in weights]

    def save() -> None:
        _EVICT[:] = checkpoint % 256
        started = time.perf_counter()
        version = one.checkpointer.save(checkpoint + 1)
        one.stalls.append(time.perf_counter() - started)
        assert version is not None
        one.numbers[checkpoint] = version
        one.checkpointer.wait()

    def gather() -> None:
        _EVICT[:] = checkpoint % 256
        copies = []
        started = time.perf_counter()
        for tensor, rows in zip((*weights, *states), (*ids, *ids), strict=True):
            copies.append(torch.index_select(tensor.detach(), 0, rows))
        one.gathers.append(time.perf_counter() - started)

    for side in (save, gather) if checkpoint % 2 else (gather, save):
        side()


@contextmanager
def _counted(one: StrategyRun) -> Iterator[None]:
    """Count every byte that goes to the store, manifests included."""
    store = one.checkpointer.store
    put, publish = store.put, store.publish

    def counting_put(name: str, parts: Sequence[Any]) -> int:
        size = put(name, parts)
        one.written += size
        return size

    def counting_publish(name: str, data: bytes) -> None:
        one.written += len(data)
        publish(name, data)

    store.put, store.publish = counting_put, counting_publish  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.put, store.publish = put, publish  # type: ignore[method-assign]
