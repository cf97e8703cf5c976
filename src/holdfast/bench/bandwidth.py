"""``bench bandwidth``: what quantized increments save to write and to store, against everything every time.

The trace is that of Check-N-Run's Figure 8: a checkpoint an interval, the first a full version; in each
interval a quarter of all rows is touched, the popular ones again and again, so that after ten intervals a
little more than half of them has been touched at least once. Tables have dim 64, with row-wise Adagrad (one
word of state a row) and, beside it, with Adagrad (64 words). Rows start as small normals and are moved a
little whenever they are touched; a step of training would cost the same whatever the checkpoints are, and
is left out. The store keeps one version.

What is written is every byte that is handed to the store: rows, ids, state, headers, dense part, manifests,
and what is rewritten to tidy up. What is stored is counted in three ways, each the same for both sides:

- ``stored_over``: what the newest version needs, with its manifest: what is left when everything that it
  replaced has been deleted. That is how the paper counts. The peak over all checkpoints.
- ``listed_over``: what lies in the store when a save has returned. The manifest before the newest is kept
  with its files, in case the newest is damaged: the side with full versions has two of them then.
- ``moment_over``: the most that ever lies in the store, while a save is under way, too.

Full versions differ in their manifests' numbers alone: three are really saved, and the bytes of the last
count for each checkpoint. All bytes are the same on every machine, but for a few in the manifests.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from holdfast.bench.harness import Report, Spread, interleave, ratio
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.codecs.quantize import UniformCodec
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.records import WEIGHT
from holdfast.checkpoint.reading.version import open_version
from holdfast.models.recommender import EmbeddingTables
from holdfast.options import AutoBits, Chunked, Differential, Full, Policy, Strategy
from holdfast.training.config import load
from holdfast.training.optimizers import RowWiseAdagrad
from holdfast.training.trainer import Trainer

DIM = 64
RESTORES = (1, 3, 10, 20, 100)
# The row of rank u (0 to 1) is touched SCALE * u ** -EXPONENT times an interval on average: a quarter of the
# rows is touched in the first interval, 52.5 % in the first ten.
EXPONENT = 2.8805
SCALE = 0.0076469
CHECKPOINTS = 16
"""Two rounds of baselines by Check-N-Run's rule. With ours the last one is a baseline: what it saves is not
counted any more, so the average is a little worse than that of a longer run."""
_PARTS = (0.5, 0.25, 0.125, 0.125)
_STATE = "sum"


@dataclass(frozen=True, slots=True)
class Setting:
    """A part of the table: figures' prefix, optimizer, bits of its state, and for which restores."""

    prefix: str
    optimizer: str
    state_bits: Literal[8, 16] | None
    restores: Sequence[int]


_ENDS = (RESTORES[0], RESTORES[-1])
SETTINGS = (
    Setting("", "rowwise", None, RESTORES),
    Setting("state16.", "rowwise", 16, _ENDS),
    Setting("adagrad.", "adagrad", None, RESTORES),
    Setting("adagrad.state8.", "adagrad", 8, _ENDS),
)


def run(report: Report) -> None:
    """Measure all strategies, bits and optimizers, then the slowdown of training."""
    if report.quick:
        measure(
            report, rows=24_000, settings=[SETTINGS[0], *(replace(s, restores=(1,)) for s in SETTINGS[1:])]
        )
        measure_slowdown(report, rows=60_000, seconds=0.5, rounds=2)
    else:
        measure(report, rows=120_000)
        measure_slowdown(report, rows=300_000, seconds=1.0, rounds=15)


def measure(
    report: Report,
    *,
    rows: int,
    checkpoints: int = CHECKPOINTS,
    settings: Sequence[Setting] = SETTINGS,
) -> None:
    """Bytes of each strategy over the same trace, as multiples of what full versions take."""
    trace = Trace(rows, checkpoints)
    report.settings.update(
        rows=sum(trace.rows), tables=len(trace.rows), dim=DIM, checkpoints=checkpoints, keep=1,
        exponent=EXPONENT, scale=SCALE,
    )  # fmt: skip
    unions = trace.unions()
    report.raw["touched_since_the_start"] = unions
    report.figure("trace.touched.1", unions[0], "share of the rows after one interval")
    if checkpoints > 10:
        report.figure("trace.touched.10", unions[9], "after ten, each counted once")
    strategies: dict[str, Strategy] = {
        "differential": Differential(),
        "chunked": Chunked(),
        # Check-N-Run's own rule for new baselines, which heeds only what is written.
        "paper_rule": Differential(extra_writes=0),
    }
    for setting in settings:
        full = _play(trace, setting.optimizer, Policy(strategy=Full(), keep=1), checkpoints=3)
        for restores, (name, strategy) in itertools.product(setting.restores, strategies.items()):
            if name == "paper_rule" and (setting.prefix or restores not in _ENDS):
                continue
            policy = Policy(
                strategy=strategy,
                keep=1,
                quantize=AutoBits(expected_restores=restores),
                quantize_state=setting.state_bits,
            )
            ours = _play(trace, setting.optimizer, policy)
            _compare(report, f"{setting.prefix}{name}.{restores}", full, ours)
            if name == "differential" and ours.bits == 2 and not setting.prefix:
                report.figure(
                    "metadata_share.2.dim64", ours.metadata_share, "ids and grids / bytes of an increment"
                )


def _compare(report: Report, name: str, full: Usage, ours: Usage) -> None:
    per_full = full.per_save[-1]
    written = per_full * len(ours.per_save) / sum(ours.per_save)
    note = f"{ours.bits} bits, {ours.baselines} full of {len(ours.per_save)} versions"
    report.figure(f"{name}.written_over", written, note)
    report.figure(f"{name}.stored_over", max(full.needed) / max(ours.needed))
    report.figure(f"{name}.listed_over", max(full.listed) / max(ours.listed))
    report.figure(f"{name}.moment_over", full.moment / ours.moment)
    report.raw[name] = {"full": full, "ours": ours}


class Trace:
    """Which rows are touched in each interval, table by table."""

    def __init__(self, rows: int, checkpoints: int, seed: int = 0) -> None:
        self.rows = [int(rows * part) for part in _PARTS]
        self.seed = seed
        random = np.random.default_rng(seed)
        total = sum(self.rows)
        ranks = (random.permutation(total) + 0.5) / total  # popular rows are not neighbours
        chance = 1 - np.exp(-SCALE * ranks**-EXPONENT)
        edges = np.cumsum(self.rows)[:-1]
        self.touched: list[list[NDArray[np.int64]]] = []
        """Before each checkpoint but the first."""
        for _ in range(checkpoints - 1):
            hit = random.random(total) < chance
            self.touched.append([np.flatnonzero(part) for part in np.split(hit, edges)])

    def unions(self) -> list[float]:
        """After each interval, the share of all rows that has been touched so far."""
        seen = [np.zeros(r, bool) for r in self.rows]
        shares = []
        for interval in self.touched:
            for marks, ids in zip(seen, interval, strict=True):
                marks[ids] = True
            shares.append(sum(int(m.sum()) for m in seen) / sum(self.rows))
        return shares


class Model(nn.Module):
    """Tables that look as if they had been trained, and a small network beside them."""

    def __init__(self, rows: Sequence[int], random: np.random.Generator) -> None:
        super().__init__()
        self.tables = EmbeddingTables(rows, DIM)
        self.network = nn.Linear(DIM, 1)
        for weight in self.tables.parameters():
            values = weight.detach().numpy()
            random.standard_normal(out=values, dtype=np.float32)
            values *= 0.05


class Run:
    """A model with an optimizer, and how touched rows change."""

    def __init__(self, trace: Trace, optimizer: str) -> None:
        self.random = np.random.default_rng(trace.seed + 1)
        self.model = Model(trace.rows, self.random)
        self.weights = list(self.model.tables.parameters())
        kind = RowWiseAdagrad if optimizer == "rowwise" else torch.optim.Adagrad
        self.optimizer = kind(self.weights, lr=0.01)
        for weight in self.weights:
            shape = (len(weight),) if optimizer == "rowwise" else (len(weight), DIM)
            self.optimizer.state[weight][_STATE] = torch.zeros(shape)

    @property
    def objects(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optim": self.optimizer}

    @property
    def states(self) -> list[torch.Tensor]:
        """The optimizer's state, table by table."""
        return [self.optimizer.state[weight][_STATE] for weight in self.weights]

    def touch(self, checkpointer: Checkpointer, touched: Sequence[NDArray[np.int64]]) -> None:
        """Move these rows and their state a little, as a few steps of training would."""
        pairs = zip(self.weights, self.states, touched, strict=True)
        for number, (weight, state, ids) in enumerate(pairs):
            values, sums = weight.detach().numpy(), state.numpy()
            values[ids] += 0.01 * self.random.standard_normal((len(ids), DIM), np.float32)
            sums[ids] += 1e-4 * self.random.standard_exponential((len(ids), *sums.shape[1:]), np.float32)
            checkpointer.mark(f"model.tables.{number}.weight", ids)


@dataclass
class Usage:
    """The bytes of a run's checkpoints."""

    bits: int | None
    per_save: list[int] = field(default_factory=list)
    """Bytes written for each, rewriting included."""
    needed: list[int] = field(default_factory=list)
    """What the newest version needs after each save."""
    listed: list[int] = field(default_factory=list)
    """What lies in the store after each save."""
    moment: int = 0
    """The most that ever lay in the store."""
    baselines: int = 0
    metadata_share: float = 0.0
    """Of the pieces of the last increment: ids, scales and zero points."""
    profile: dict[str, int] = field(default_factory=dict)
    """What the bytes are, of the version that needs the most."""
    largest_error_in_steps: float = 0.0
    """Of the weights, when the last version is restored."""
    seconds: float = 0.0


def _play(trace: Trace, optimizer: str, policy: Policy, checkpoints: int | None = None) -> Usage:
    """Save after each interval, measure, and restore the last version into a model of its own."""
    started = time.perf_counter()
    torch.manual_seed(trace.seed)
    one = Run(trace, optimizer)
    auto = policy.bits_of("model.tables.0.weight")
    usage = Usage(auto.choose(0).bits if isinstance(auto, AutoBits) else auto)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        with Checkpointer(folder, one.objects, policy) as checkpointer, _metered(checkpointer, usage):
            for step in range(checkpoints or len(trace.touched) + 1):
                if step:
                    one.touch(checkpointer, trace.touched[step - 1])
                usage.per_save.append(0)
                checkpointer.save(step)
                checkpointer.wait()
                _measure_store(checkpointer, usage)
            usage.baselines = sum(r.baseline for r in checkpointer.reports)
        _check_restore(Path(folder), trace, one, optimizer, policy, usage)
    usage.seconds = time.perf_counter() - started
    return usage


@contextmanager
def _metered(checkpointer: Checkpointer, usage: Usage) -> Iterator[None]:
    """Count every byte that goes to the store, manifests included, and how much ever lies there."""
    store = checkpointer.store
    put, publish = store.put, store.publish

    def note(size: int) -> None:
        usage.per_save[-1] += size
        usage.moment = max(usage.moment, sum(i.size for i in store.list()))

    def counting_put(name: str, parts: Sequence[Any]) -> int:
        size = put(name, parts)
        note(size)
        return size

    def counting_publish(name: str, data: bytes) -> None:
        publish(name, data)
        note(len(data))

    store.put, store.publish = counting_put, counting_publish  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.put, store.publish = put, publish  # type: ignore[method-assign]


def _measure_store(checkpointer: Checkpointer, usage: Usage) -> None:
    store, manifest = checkpointer.store, checkpointer.manifest
    sizes = {info.name: info.size for info in store.list()}
    usage.listed.append(sum(sizes.values()))
    profile = {"manifest": sizes[manifests.name_of(manifest.number)]}
    with open_version(store) as reader:
        profile["dense"] = reader.version.dense.bytes
        profile.update(ids=0, grid=0, weights=0, state=0, raw_rows=0, headers=0, padding=0)
        increment = {"metadata": 0, "all": 0}
        for file in reader.files:
            profile["headers"] += file.entry.header_bytes
            for piece in file.pieces:
                group = reader.stored_groups[piece.group]
                if group.raw_rows_of is not None:
                    profile["raw_rows"] += piece.length
                    continue
                index, padding = sum(piece.lengths[:3]), piece.lengths[3] + piece.lengths[-1]
                profile["ids"] += index
                profile["padding"] += padding
                grid = 0
                for part, length in zip(group.fields, piece.lengths[4:-1], strict=True):
                    if isinstance(part.codec, UniformCodec):
                        grid += piece.rows * part.codec.grid_bits // 4
                    profile["weights" if part.name == WEIGHT else "state"] += length
                profile["grid"] += grid
                profile["weights"] -= grid
                if file.entry.kind == "increment":
                    increment["metadata"] += piece.index_length + grid
                    increment["all"] += piece.length
        needed = sum(sizes[f.entry.name] for f in reader.files) + profile["dense"] + profile["manifest"]
    assert needed == sum(profile.values())  # every byte has a name
    if needed > max(usage.needed, default=0):
        usage.profile = profile
    usage.needed.append(needed)
    if increment["all"]:
        usage.metadata_share = increment["metadata"] / increment["all"]


def _check_restore(
    folder: Path, trace: Trace, one: Run, optimizer: str, policy: Policy, usage: Usage
) -> None:
    """The last version comes back, each weight within a step of its row's grid."""
    other = Run(trace, optimizer)
    with torch.no_grad():
        for tensor in (*other.weights, *other.states):
            tensor.fill_(7.0)
    with Checkpointer(folder, other.objects, policy) as checkpointer:
        step = checkpointer.restore()
    assert step == len(usage.per_save)
    for true, found in zip(one.weights, other.weights, strict=True):
        expected = true.detach().numpy()
        error = np.abs(found.detach().numpy() - expected).max(1)
        if usage.bits is None:
            assert not error.any()
            continue
        steps = error / (np.ptp(expected, axis=1) / (2**usage.bits - 1))
        usage.largest_error_in_steps = max(usage.largest_error_in_steps, float(steps.max()))
    assert usage.largest_error_in_steps <= 1.001
    state_error = {None: 0.0, 16: 2**-8, 8: 0.045}[policy.quantize_state]
    for state, restored in zip(one.states, other.states, strict=True):
        assert torch.allclose(restored, state, rtol=state_error, atol=0)


def measure_slowdown(report: Report, *, rows: int, seconds: float, rounds: int) -> None:
    """How much slower steps get while a version is quantized behind their back, and the CPU that it takes.

    Everything runs on one core, so that what one side takes the other lacks. Steps are timed from when
    ``save`` has returned until the version is durable. Threads that take turns on a core lose something to
    that alone, so steps are also timed beside a thread that just computes, without the GIL, files or memory:
    what is lost there, no way to save could do without.
    """
    report.settings.update(slowdown_rows=rows, slowdown_rounds=rounds, slowdown_bits=4)
    with _one_core():
        trainer = Trainer(
            load(None, ["data.samples=1000000000", "data.max_rows=10000", "batch_size=256", "threads=1"])
        )
        trace = Trace(rows, 1)
        for name, share in (("background", 1.0), ("background.share25", 0.25)):
            with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
                one = Run(trace, "rowwise")
                policy = Policy(strategy=Full(), keep=1, quantize=4, background_share=share)
                with Checkpointer(folder, one.objects, policy) as checkpointer:
                    _slowdown(report, name, trainer, checkpointer, seconds, rounds)


def _slowdown(
    report: Report, name: str, trainer: Trainer, checkpointer: Checkpointer, seconds: float, rounds: int
) -> None:
    shares: dict[str, list[float]] = {"save": [], "other": []}
    idle: dict[str, list[float]] = {"save": [], "other": []}

    def alone() -> float:
        started = time.perf_counter()
        return _steps_per_second(trainer, lambda: time.perf_counter() - started < seconds)

    def beside(side: str, goes_on: Callable[[], bool]) -> float:
        started, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
        speed = _steps_per_second(trainer, goes_on)
        # Training computes in this thread alone: what the others took is theirs.
        both, own = time.process_time() - process, time.thread_time() - thread
        wall = time.perf_counter() - started
        shares[side].append((both - own) / wall)
        idle[side].append(1 - both / wall)
        return speed

    def beside_save() -> float:
        done = len(checkpointer.reports)
        checkpointer.save(done)
        speed = beside("save", lambda: len(checkpointer.reports) == done)
        checkpointer.wait()
        return speed

    def beside_other() -> float:
        with _computing():
            started = time.perf_counter()
            return beside("other", lambda: time.perf_counter() - started < seconds)

    sides = {"alone": alone, "save": beside_save, "other": beside_other}
    interleave(sides, 1)  # compiles and allocates
    for side in (*shares.values(), *idle.values()):
        side.clear()
    speeds = interleave(sides, rounds)
    report.raw[name] = {"steps_per_second": speeds, "cpu_shares": shares, "idle": idle}
    waited = [100 * s for s in idle["save"]]
    report.figure(f"{name}.idle_percent", Spread.of(waited), "of the core: nobody computes")
    _report_slowdown(report, name, speeds, shares)


def _report_slowdown(
    report: Report, name: str, speeds: dict[str, list[float]], shares: dict[str, list[float]]
) -> None:
    slowdowns = {
        side: [1 - b / a for a, b in zip(speeds["alone"], speeds[side], strict=True)] for side in shares
    }
    lost = [100 * s for s in slowdowns["save"]]
    report.figure(f"{name}.slowdown_percent", Spread.of(lost), "of steps/s, one core")
    taken = [100 * s for s in shares["save"]]
    report.figure(f"{name}.cpu_percent", Spread.of(taken), "of the core, by the save")
    over = {side: [s / c for s, c in zip(slowdowns[side], shares[side], strict=True)] for side in shares}
    report.figure(f"{name}.step_slowdown_over_cpu", Spread.of(over["save"]), "1: as much as it takes")
    report.figure(f"{name}.any_thread_over_cpu", Spread.of(over["other"]), "beside one that just computes")
    report.figure(
        f"{name}.over_any_thread",
        ratio(over["save"], over["other"]),
        "1: as much as any thread that takes it",
    )


@contextmanager
def _computing() -> Iterator[None]:
    """Beside what is done here, a thread computes: in a few registers, without the GIL."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            hashlib.pbkdf2_hmac("sha256", b"holdfast", b"bench", 50_000)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _steps_per_second(trainer: Trainer, goes_on: Callable[[], bool]) -> float:
    started, steps = time.perf_counter(), 0
    while goes_on() or not steps:
        trainer.advance(1)
        steps += 1
    return steps / (time.perf_counter() - started)


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core, where the system can."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
