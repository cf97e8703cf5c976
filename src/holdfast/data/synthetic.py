"""Synthetic click logs: Criteo's shape, Zipf-distributed ids, labels from a hidden teacher.

Every sample is a function of only (seed, sample number): a hash of the two seeds the sample's own
random stream. So batch *i* is the same in any process and any run, and nothing has to be stored or skipped
to reach it.

For equal bits on every machine, the sampling loop uses only integer arithmetic and
additions, multiplications and comparisons of floats, which IEEE 754 defines exactly. Distributions are
interpolated tables of knots, rounded so coarsely that differences between math libraries do not show.

The teacher gives each row of each table a hidden weight and a hidden vector. A sample's click
probability is the logistic function of the sum of its rows' weights, of the products of their vectors
(what a factorization machine or DLRM's interaction can learn), and of a linear function of its dense
features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.data.criteo_shape import DENSE_FEATURES, capped_rows
from holdfast.data.reader import Batch, ReadCount
from holdfast.data.synthetic_kernel import CURVE_BITS, GUIDE_BITS, fill
from holdfast.errors import ConfigError, WrongReaderState
from holdfast.recipe import described

# Test samples are numbered from here, so that no number of training samples reaches them.
_FIRST_TEST_SAMPLE = 1 << 48
_HEAD_RANKS = 512


@described
class Synthetic:
    """A reader of synthetic click data (see ``Reader``).

    Args:
        samples: number of samples; the last batch may be shorter than the others.
        batch_size: samples per batch.
        table_rows: rows of each table. Default: Criteo Kaggle's, capped at 100,000.
        ids_per_sample: ids of a sample in each table: one number, or one per table.
        zipf_exponent: skew of the ids: the row of rank *k* is drawn with a probability proportional to
            ``k ** -zipf_exponent``; 0 is uniform.
        noise: divisor of the teacher's logit: with more noise clicks are more random, and there is less to
            learn.
        seed: seed of the teacher and of the samples.
        part: "train" and "test" are different samples of the same teacher.
    """

    dense_features = DENSE_FEATURES

    def __init__(
        self,
        *,
        samples: int,
        batch_size: int,
        table_rows: Sequence[int] | None = None,
        ids_per_sample: int | Sequence[int] = 1,
        zipf_exponent: float = 1.05,
        noise: float = 1.0,
        seed: int = 0,
        part: Literal["train", "test"] = "train",
    ) -> None:
        self.table_rows = tuple(capped_rows("kaggle", 100_000) if table_rows is None else table_rows)
        hots = (ids_per_sample,) * len(self.table_rows) if isinstance(ids_per_sample, int) else ids_per_sample
        self.ids_per_sample = tuple(hots)
        self.samples = samples
        self.batch_size = batch_size
        self.zipf_exponent = zipf_exponent
        self.noise = noise
        self.seed = seed
        self.part = part
        self._check()
        self._worker, self._workers = 0, 1
        self._next_index = 0
        self._iterating = False
        self.read_count = ReadCount()
        self._sampler = _Sampler(self.table_rows, self.ids_per_sample, zipf_exponent, noise, seed)

    def _check(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples is {self.samples}: expected at least 1")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}: expected at least 1")
        if not self.table_rows or min(self.table_rows) < 1 or max(self.table_rows) >= 1 << 32:
            raise ConfigError("table_rows needs a number from 1 to 2**32 - 1 for every table")
        if not math.isfinite(self.zipf_exponent) or self.zipf_exponent < 0:
            raise ConfigError(f"zipf_exponent is {self.zipf_exponent}: expected 0 (uniform) or more")
        if not 0 < self.noise < math.inf:
            raise ConfigError(f"noise is {self.noise}: expected above 0")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}: expected a number from 0 to 2**63 - 1")
        if len(self.ids_per_sample) != len(self.table_rows) or min(self.ids_per_sample) < 1:
            raise ConfigError(
                f"ids_per_sample is {list(self.ids_per_sample)}: expected a number from 1 "
                f"for each of the {len(self.table_rows)} tables"
            )
        if self.part not in ("train", "test"):
            raise ConfigError(f"part is {self.part!r}: expected 'train' or 'test'")

    @property
    def batches(self) -> int:
        """The number of batches of the whole stream, over all workers."""
        return -(-self.samples // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Batch ``index`` of the whole stream."""
        if not 0 <= index < self.batches:
            raise IndexError(f"batch {index} of a stream of {self.batches}")
        first = index * self.batch_size
        count = min(self.batch_size, self.samples - first)
        return self._sampler.batch(index, first + (_FIRST_TEST_SAMPLE if self.part == "test" else 0), count)

    def __iter__(self) -> Iterator[Batch]:
        self._iterating = True
        self.read_count.begin()
        try:
            while self._next_index < self.batches:
                index = self._next_index
                self._next_index += self._workers
                self.read_count.count()
                yield self.batch(index)
            self._next_index = self._worker
        finally:
            self._iterating = False

    def split(self, worker: int, workers: int) -> Self:
        """A new reader of the batches with ``index % workers == worker``."""
        if not 0 <= worker < workers:
            raise ConfigError(f"worker {worker} of {workers}: expected a number from 0 to {workers - 1}")
        mine = copy.copy(self)
        mine._worker, mine._workers = worker, workers
        mine._next_index = worker
        mine._iterating = False
        mine.read_count = ReadCount()
        return mine

    def skip_to(self, index: int) -> None:
        """Skip the batches before ``index``, at no cost."""
        if self._iterating:
            raise WrongReaderState("skip_to was called too late: skip before iter()")
        self._next_index = max(self._next_index, index + (self._worker - index) % self._workers)

    def progress(self) -> float:
        """The share of the stream that has been handed out, from 0 to 1."""
        return min(1.0, self._next_index / self.batches)

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "synthetic",
            "samples": self.samples,
            "batch_size": self.batch_size,
            "table_rows": list(self.table_rows),
            "ids_per_sample": list(self.ids_per_sample),
            "zipf_exponent": self.zipf_exponent,
            "noise": self.noise,
            "seed": self.seed,
            "part": self.part,
            "worker": self._worker,
            "workers": self._workers,
        }

    def state_dict(self) -> dict[str, Any]:
        """The index of the next batch, and the options that identify the stream."""
        return {**self._identity(), "next_index": self._next_index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches that had been handed out when ``state`` was taken."""
        if self._iterating:
            raise WrongReaderState(
                "load_state_dict was called after iter(): load the state before you iterate"
            )
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise WrongReaderState(
                    f"the saved reader state has {name} = {state.get(name)!r}, this reader {mine!r}: "
                    "make the reader with the options that it was saved with"
                )
        self._next_index = int(state["next_index"])


class _Sampler:
    """The tables that the sampling loop reads, computed once per stream."""

    def __init__(
        self, rows: Sequence[int], hots: Sequence[int], exponent: float, noise: float, seed: int
    ) -> None:
        curves = [_zipf_curve(r, exponent) for r in rows]
        self.knot_start = np.cumsum([0] + [len(c[0]) for c in curves]).astype(np.int64)
        self.knot_rank = np.concatenate([c[0] for c in curves])
        self.knot_mass = np.concatenate([c[1] for c in curves])
        self.guide = np.stack([_guide(c[1]) for c in curves])
        self.rows = np.asarray(rows, np.int64)
        self.hots = np.asarray(hots, np.int64)
        self.stride = np.asarray([_coprime_stride(r) for r in rows], np.int64)
        self.seed = np.uint64(seed)
        # Inverse distribution functions: dense features like log(1 + count), label noise logistic.
        u = np.linspace(0, 1, (1 << CURVE_BITS) + 1).clip(1e-4, 1 - 1e-4)
        self.dense_curve = _coarse(-np.log1p(-u))
        self.noise_curve = _coarse(noise * (np.log(u) - np.log1p(-u)))

    def batch(self, index: int, first: int, count: int) -> Batch:
        hots = self.hots
        dense = np.empty((count, DENSE_FEATURES), np.float32)
        labels = np.empty(count, np.float32)
        starts = np.concatenate(([0], np.cumsum(hots * count)))
        flat = np.empty(starts[-1], np.int64)
        fill(
            np.uint64(first), self.seed, self.rows, self.stride, hots, starts,
            self.knot_start, self.knot_rank, self.knot_mass, self.guide,
            self.dense_curve, self.noise_curve, dense, flat, labels,
        )  # fmt: skip
        ids = [flat[starts[t] : starts[t + 1]] for t in range(len(hots))]
        offsets = None if (hots == 1).all() else [np.arange(count, dtype=np.int64) * h for h in hots]
        return Batch(index, dense, ids, offsets, labels)


def _coarse(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.round(curve * 2**20) / 2**20


def _zipf_curve(rows: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.uint32]]:
    """Knots (rank, share of all draws below that rank as a fraction of 2**32) of the distribution.

    The first ranks stand exactly; behind them, knots in geometric steps, between which all ranks
    are taken as equally likely.
    """
    head = min(rows, _HEAD_RANKS)
    ranks = np.arange(head + 1, dtype=np.float64)
    if rows > head:
        steps = math.ceil(math.log(rows / head) / math.log(1.1))
        ranks = np.concatenate((ranks, np.unique(np.round(np.geomspace(head, rows, steps + 1)))[1:]))
    exact = (np.arange(1, head + 1) ** -exponent).cumsum()
    edges = ranks[head:] + 0.5  # the sum from rank a to b is close to the integral from a+.5 to b+.5
    if exponent == 1.0:
        tail = np.log(edges / edges[0])
    else:
        tail = (edges ** (1 - exponent) - edges[0] ** (1 - exponent)) / (1 - exponent)
    mass = np.concatenate(([0.0], exact, exact[-1] + tail[1:]))
    fraction = np.minimum(np.floor(mass / mass[-1] * 2.0**32), 2.0**32 - 1)
    return ranks, fraction.astype(np.uint32)


def _guide(mass: NDArray[np.uint32]) -> NDArray[np.int64]:
    """For each value of a draw's top bits, a knot at or below it, from where to look on."""
    tops = np.arange(1 << GUIDE_BITS, dtype=np.uint64) << np.uint64(32 - GUIDE_BITS)
    return np.minimum(np.searchsorted(mass, tops, side="right") - 1, len(mass) - 2).astype(np.int64)


def _coprime_stride(rows: int) -> int:
    """A multiplier that scatters ranks over ids one to one, so that hot rows are not neighbours."""
    stride = max(1, round(rows * 0.6180339887))
    while math.gcd(stride, rows) != 1:
        stride += 1
    return stride
