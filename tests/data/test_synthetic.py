from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xxhash

from holdfast.data.reader import Batch, Reader
from holdfast.data.synthetic import Synthetic
from holdfast.errors import ConfigError, WrongReaderState

ROWS = (3, 50, 700, 100_000)


def reader(**options: Any) -> Synthetic:
    return Synthetic(**{"samples": 1000, "batch_size": 64, "table_rows": ROWS, **options})


def digest(batch: Batch) -> str:
    state = xxhash.xxh3_128(batch.dense.tobytes() + batch.labels.tobytes())
    for ids in batch.ids:
        state.update(ids.tobytes())
    return state.hexdigest()


def digests(source: Reader) -> dict[int, str]:
    return {batch.index: digest(batch) for batch in source}


def test_conforms_to_the_protocol() -> None:
    assert isinstance(reader(), Reader)


def test_shapes_types_and_ranges() -> None:
    batches = list(reader())
    assert [len(b) for b in batches] == [64] * 15 + [40]
    for batch in batches:
        assert batch.dense.shape == (len(batch), 13)
        assert batch.dense.dtype == np.float32
        assert batch.offsets is None
        assert set(np.unique(batch.labels)) <= {0.0, 1.0}
        for ids, rows in zip(batch.ids, ROWS, strict=True):
            assert ids.shape == (len(batch),)
            assert ids.dtype == np.int64
            assert ids.min() >= 0
            assert ids.max() < rows


def test_same_batch_in_another_process_and_order() -> None:
    code = (
        "import sys; from tests.data.test_synthetic import reader, digest;"
        "r = reader(); print(digest(r.batch(7)), digest(r.batch(3)))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    here = digests(reader())
    assert there == [here[7], here[3]]


def test_samples_do_not_depend_on_the_batch_size() -> None:
    small = np.concatenate([b.ids[2] for b in reader(batch_size=10)])
    large = np.concatenate([b.ids[2] for b in reader(batch_size=333)])
    assert np.array_equal(small, large)


def test_pinned_samples() -> None:
    """Results of other machines and other days refer to these bits: changing them is a new data set."""
    assert digest(Synthetic(samples=4096, batch_size=4096).batch(0)) == PINNED


PINNED = "030e5ba301433561c6fd194546338986"


def test_seed_and_part_change_the_samples() -> None:
    first = [digest(reader(**o).batch(0)) for o in ({}, {"seed": 1}, {"part": "test"})]
    assert len(set(first)) == 3


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 20])
def test_split_gives_each_batch_once(workers: int) -> None:
    together: dict[int, str] = {}
    for worker in range(workers):
        part = digests(reader().split(worker, workers))
        assert not together.keys() & part.keys()
        together |= part
    assert together == digests(reader())


@pytest.mark.parametrize("stop", [0, 1, 9, 16])
def test_resume_goes_on_exactly(stop: int) -> None:
    source = reader().split(0, 1)
    batches = iter(source)
    for _ in range(stop):
        next(batches)
    state = json.loads(json.dumps(source.state_dict()))
    assert source.progress() == stop / 16
    resumed = reader()
    resumed.load_state_dict(state)
    assert list(digests(resumed).items()) == list(digests(reader()).items())[stop:]
    assert digests(resumed) == digests(reader()), "the next epoch starts over"


def test_state_of_another_stream_is_refused() -> None:
    with pytest.raises(WrongReaderState, match=r"seed = 1, this reader 0"):
        reader().load_state_dict(reader(seed=1).state_dict())
    with pytest.raises(WrongReaderState, match="workers = 2"):
        reader().load_state_dict(reader().split(0, 2).state_dict())


def test_loading_after_iter_is_refused() -> None:
    source = reader()
    batches = iter(source)
    next(batches)
    with pytest.raises(WrongReaderState, match="was called after iter"):
        source.load_state_dict(source.state_dict())


def test_multi_hot_offsets() -> None:
    batch = reader(ids_per_sample=[1, 2, 3, 4]).batch(0)
    assert batch.offsets is not None
    for hots, ids, offsets in zip((1, 2, 3, 4), batch.ids, batch.offsets, strict=True):
        assert len(ids) == 64 * hots
        assert np.array_equal(offsets, np.arange(64) * hots)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.05, 1.5])
def test_ids_follow_zipf(exponent: float) -> None:
    """Shares of the most frequent rows against the distribution itself, within sampling noise."""
    rows, draws = 5000, 200_000
    source = reader(samples=draws, batch_size=draws, table_rows=[rows], zipf_exponent=exponent)
    counts = np.sort(np.bincount(source.batch(0).ids[0], minlength=rows))[::-1]
    weights = np.arange(1, rows + 1) ** -exponent
    expected = weights / weights.sum()
    if exponent > 0:  # with 0, the top of the sorted counts is all noise
        for head in (1, 10, 100, 1000):
            share, should = counts[:head].sum() / draws, expected[:head].sum()
            assert abs(share - should) < 4 * np.sqrt(should * (1 - should) / draws) + 0.02 * should
    else:
        assert counts.max() < 4 * draws / rows
        assert counts.min() > 0


def test_hot_rows_are_not_neighbours() -> None:
    ids = reader(samples=50_000, batch_size=50_000).batch(0).ids[3]
    hottest = np.argsort(np.bincount(ids))[::-1][:20]
    assert np.abs(np.diff(np.sort(hottest))).min() > 10


def test_labels_follow_the_rows() -> None:
    """Two rows of one small table must differ in their click rates by far more than noise."""
    batch = reader(samples=100_000, batch_size=100_000).batch(0)
    assert 0.1 < batch.labels.mean() < 0.4
    rates = [batch.labels[batch.ids[0] == row].mean() for row in range(3)]
    assert max(rates) - min(rates) > 0.05


def test_noise_leaves_less_of_what_rows_say() -> None:
    """The same samples, other clicks: the rates of a table's rows are nearer to each other."""
    spreads = []
    for noise in (1.0, 4.0, 16.0):
        batch = reader(samples=100_000, batch_size=100_000, noise=noise).batch(0)
        rates = [batch.labels[batch.ids[0] == row].mean() for row in range(3)]
        spreads.append(max(rates) - min(rates))
    assert spreads[0] > 1.3 * spreads[1] > 2 * spreads[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"table_rows": []}, "table_rows"),
        ({"table_rows": [4, 0]}, "table_rows"),
        ({"table_rows": [1 << 32]}, "table_rows"),
        ({"zipf_exponent": -1.0}, "zipf_exponent"),
        ({"zipf_exponent": float("nan")}, "zipf_exponent"),
        ({"noise": 0.0}, "noise is 0"),
        ({"noise": float("nan")}, "noise is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"ids_per_sample": [1]}, "ids_per_sample"),
        ({"ids_per_sample": 0}, "ids_per_sample"),
        ({"part": "dev"}, "part is 'dev'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reader(**options)


def test_a_worker_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="worker 2 of 2"):
        reader().split(2, 2)
    with pytest.raises(IndexError):
        reader().batch(16)
