"""``bench checkpoint``: what checkpoints cost, stored and restored, strategy by strategy on one trace.

The trace: a DLRM with 26 tables, dim 16, Adagrad, batches of 1024, Zipf ids; a checkpoint every 10
iterations, 150 in all, none of them a second baseline unless the strategy is about that. Between two
checkpoints the rows of ten batches are looked up through the model, so that tracking is the real one, and
then changed in weights and optimizer state. Everything else of a training step costs the same whatever
the strategy is, and is left out, except where tracking is compared with it.

Bytes and counts are exact and the same on every machine. Times are ratios of what ran side by side. Restores
are compared with the differential ones from the same baseline as a user has them, and without the baseline,
which all strategies read alike; so are they with the floor, the least that any restore must do; with
incremental only without it. They come from the disk, as after a failure, and as IncrCP measures them: no file
is in the page cache. Figures that end in ``.cached`` are of files that all are there, as when a training that
goes on steps back to a version that it has just written.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.bench.checkpoint_trace import BATCH, DIM, ITERATIONS, StrategyRun, Trace, make_run, play
from holdfast.bench.checkpoint_tracking import measure_dense_adam, measure_tracking
from holdfast.bench.harness import Report, Spread, interleave, ratio, stopwatch
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.stretches import STRETCH_BYTES, run_all, thread_buffer
from holdfast.kernels.rows import scatter_rows
from holdfast.options import Chunked, Differential, Incremental, Strategy

RECORD_BYTES = 2 * DIM * 4
_FLOOR_ROWS = STRETCH_BYTES // RECORD_BYTES
_SETTLED_BYTES = 64 << 20
"""More than a restore takes at once for what it has read."""


def run(report: Report) -> None:
    """Measure the full trace, or a short one."""
    if report.quick:
        measure(report, versions=40, max_rows=100_000, rounds=3)
    else:
        measure(report, versions=150, max_rows=1_000_000, rounds=9)


def measure(report: Report, *, versions: int, max_rows: int, rounds: int) -> None:
    """Each strategy over the same trace; then restores, interleaved; then what a user would pick instead."""
    report.settings.update(
        versions=versions, batch_size=BATCH, iterations=ITERATIONS, dim=DIM, tables=26, max_rows=max_rows,
        zipf_exponent=1.05, optimizer="adagrad", rounds=rounds,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        trace = Trace(versions, max_rows)
        report.settings.update(rows=sum(trace.rows), live_rows=trace.live[-1], saved_rows=trace.saved)
        runs = _run_all(report, trace, Path(folder), versions)
        _sizes(report, trace, runs)
        _restores(report, trace, runs, rounds)
        _others(report, trace, runs["chunked"], Path(folder), (rounds + 1) // 2)
        for one in runs.values():
            one.close()
    measure_tracking(report, rounds)
    measure_dense_adam(report, versions=20, max_rows=max_rows // 10)


def _run_all(report: Report, trace: Trace, folder: Path, versions: int) -> dict[str, StrategyRun]:
    everything = range(versions)
    sampled = _sampled(versions)
    plans: list[tuple[str, Strategy, Sequence[int]]] = [
        ("incremental", Incremental(), everything),
        ("chunked", Chunked(reset="never"), everything),
        ("two_d", Chunked(layout="2d", reset="never"), everything),
        # One-shot versions do not depend on each other: only those that are restored below are made.
        ("differential", Differential(baseline="one-shot"), sampled),
        ("intermittent", Differential(), everything),
    ]
    runs: dict[str, StrategyRun] = {}
    for name, strategy, checkpoints in plans:
        one = runs[name] = make_run(name, strategy, trace, folder)
        seconds = stopwatch(lambda one=one, checkpoints=checkpoints: play(one, trace, checkpoints))  # type: ignore[misc]
        report.raw[f"{name}.reports"] = one.checkpointer.reports
        report.console.print(f"  ({name}: {seconds:.0f} s)", highlight=False)
        if name == "intermittent":  # ten gigabytes that nothing reads again
            report.raw["intermittent.stored"] = one.stored()
            runs.pop(name).close()
    return runs


def _sampled(versions: int) -> list[int]:
    """Ten checkpoints, evenly spaced, the last one among them."""
    return [versions * (i + 1) // 10 - 1 for i in range(10)]


def _sizes(report: Report, trace: Trace, runs: dict[str, StrategyRun]) -> None:
    stored = {name: one.stored() for name, one in runs.items()}
    beyond = {name: total - base for name, (total, base) in stored.items()}
    intermittent = report.raw["intermittent.stored"][0]
    for name in ("chunked", "two_d"):
        read, files = _read_over_live(trace, runs[name])
        report.figure(
            f"{name}.read_over_live", float(np.mean(read)), "bytes read / live, mean over all versions"
        )
        report.figure(f"{name}.read_over_live.last", read[-1], "at the last version")
        report.figure(
            f"{name}.files_read", float(np.mean(files)), "beyond the baseline, mean over all versions"
        )
        report.figure(
            f"{name}.stored_over_incremental", beyond[name] / beyond["incremental"], "without baselines"
        )
        report.figure(f"{name}.stored_over_differential", stored[name][0] / intermittent, "all bytes")
        reports = runs[name].checkpointer.reports[1:]
        rewritten = sum(r.tidied_bytes for r in reports) / sum(r.bytes for r in reports)
        report.figure(f"{name}.rewritten_per_saved", rewritten)
        cpu = float(np.mean([r.cpu_seconds for r in reports]))
        report.figure(f"{name}.background_cpu_seconds_per_checkpoint", cpu)
    read, _ = _read_over_live(trace, runs["incremental"])
    report.figure("incremental.read_over_live.last", read[-1])
    incremental_cpu = [r.cpu_seconds for r in runs["incremental"].checkpointer.reports[1:]]
    report.figure("incremental.background_cpu_seconds_per_checkpoint", float(np.mean(incremental_cpu)))
    for name in ("chunked", "incremental"):
        one = runs[name]
        report.figure(f"{name}.stall_over_gather", ratio(one.stalls, one.gathers), "per checkpoint")
        report.figure(f"{name}.stall_milliseconds", Spread.of([1e3 * s for s in one.stalls]))


def _read_over_live(trace: Trace, one: StrategyRun) -> tuple[list[float], list[int]]:
    over: list[float] = []
    files: list[int] = []
    for checkpoint in range(trace.versions):
        with one.open(checkpoint) as reader:
            pieces = reader.pieces(baseline=False)
            over.append(sum(p.length for _, p in pieces) / (trace.live[checkpoint] * RECORD_BYTES))
            files.append(len({f.entry.name for f, _ in pieces}))
    return over, files


class _Restores:
    """Restores of some strategies into the same live tables.

    Free memory is this machine's, see ``_settle_memory``.
    """

    def __init__(self, runs: dict[str, StrategyRun], rounds: int) -> None:
        self.fields = _fields(runs["chunked"])
        self._runs = runs
        self._rounds = rounds

    def seconds(self, name: str, checkpoint: int, *, baseline: bool, cold: bool = False) -> float:
        """Of one."""
        one = self._runs[name]
        with one.open(checkpoint) as reader:
            loader = RowLoader(reader.groups, self.fields.__getitem__)
            _settle_memory(reader.total_bytes())
            for file in reader.files if cold else ():
                with (one.folder / file.entry.name).open("rb") as opened:
                    _forget(opened.fileno())
            return stopwatch(lambda: reader.read_rows(loader, baseline=baseline))

    def side(self, name: str, checkpoint: int, *, baseline: bool, cold: bool = False) -> Callable[[], float]:
        """The same, to be interleaved with others."""
        return lambda: self.seconds(name, checkpoint, baseline=baseline, cold=cold)

    def at_all(
        self, checkpoints: Sequence[int], names: Sequence[str], *, baseline: bool, cold: bool
    ) -> dict[str, list[float]]:
        """By round, sums over all checkpoints. At each, strategies take turns: what disturbs disturbs all."""
        for name in names:  # files come to the page cache
            self.seconds(name, checkpoints[-1], baseline=baseline)
        by_checkpoint = [
            interleave(
                {name: self.side(name, c, baseline=baseline, cold=cold) for name in names},
                self._rounds_of(cold),
            )
            for c in checkpoints
        ]
        return {n: [sum(times) for times in zip(*(c[n] for c in by_checkpoint), strict=True)] for n in names}

    def at(
        self, checkpoint: int, names: Sequence[str], floor: _Floor, *, baseline: bool, cold: bool
    ) -> dict[str, list[float]]:
        """By round, of one checkpoint, with the floor."""
        sides = {name: self.side(name, checkpoint, baseline=baseline, cold=cold) for name in names}
        return interleave({**sides, "floor": lambda: floor.seconds(cold=cold)}, self._rounds_of(cold))

    def _rounds_of(self, cold: bool) -> int:
        """Reading from the disk takes several times as long."""
        return (self._rounds + 1) // 2 if cold else self._rounds


def _restores(report: Report, trace: Trace, runs: dict[str, StrategyRun], rounds: int) -> None:
    """From the disk, whose figures are the claimed ones, and from the page cache."""
    restores = _Restores(runs, rounds)
    samples, last = _sampled(trace.versions), trace.versions - 1
    names = ("differential", "chunked", "two_d", "incremental")
    touched = [
        np.unique(np.concatenate(ids)) for ids in zip(*map(trace.touched, range(last + 1)), strict=True)
    ]
    changed_floor = _Floor(trace, restores.fields, touched)
    floor = _Floor(trace, restores.fields, [np.arange(rows) for rows in trace.rows])
    for cold, where, files in ((True, "", "from the disk"), (False, ".cached", "from the page cache")):
        whole = restores.at_all(samples, names[:2], baseline=True, cold=cold)
        changes = restores.at_all(samples, names, baseline=False, cold=cold)
        last_whole = restores.at(last, names[1:2], floor, baseline=True, cold=cold)
        last_changes = restores.at(last, names, changed_floor, baseline=False, cold=cold)
        report.raw[f"restores{where}"] = {
            "samples": {"whole": whole, "changes": changes},
            "last": {"whole": last_whole, "changes": last_changes},
        }
        figure = partial(_compare, report, where)
        figure("chunked.restore_over_differential", whole, f"{files}, same baseline, mean of 10 versions")
        figure("floor.restore_over_chunked", last_whole, f"{files}, every row read once and written once")
        for name in ("chunked", "two_d"):
            figure(f"incremental.restore_over_{name}", last_changes, f"{files}, last version, no baseline")
            figure(f"{name}.restore_over_differential.beyond_baseline", changes, "without reading it")
        figure("floor.restore_over_chunked.beyond_baseline", last_changes, "without the baseline's rows")
    live = trace.live[-1] * RECORD_BYTES
    report.figure(
        "chunked.restore_megabytes_per_second", Spread.of([live / s / 1e6 for s in last_changes["chunked"]]),
        "of what changed, from the page cache",
    )  # fmt: skip


def _compare(report: Report, where: str, name: str, seconds: dict[str, list[float]], note: str) -> None:
    """The figure ``one.restore_over_other…``, of these."""
    one, other = name.partition(".")[0], name.partition("_over_")[2].partition(".")[0]
    report.figure(name + where, ratio(seconds[one], seconds[other]), note)


def _forget(file: int) -> None:
    """Take a file out of the page cache; it has been synced."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _settle_memory(bytes_read: int) -> None:
    """Touch as much memory as a restore of so many bytes may take, and free it.

    The host of a virtual machine may take back what has been free for a second or two, and gives it again
    page by page, tens of times slower than memory is cleared. Whom that meets would be chance, and more often
    the side that takes more memory.
    """
    np.empty(min(bytes_read, _SETTLED_BYTES), np.uint8)[:: mmap.PAGESIZE] = 1


def _fields(one: StrategyRun) -> dict[str, tuple[NDArray[np.uint8], ...]]:
    """The live fields of each table, as a restore writes to them."""
    fields: dict[str, tuple[NDArray[np.uint8], ...]] = {}
    for number, weight in enumerate(one.model.tables.parameters()):
        tensors = (weight.detach(), one.optimizer.state[weight]["sum"])
        fields[f"model.tables.{number}.weight"] = tuple(
            t.numpy().view(np.uint8).reshape(len(t), -1) for t in tensors
        )
    return fields


class _Floor:
    """What no restore beats: records that lie in order in one file are read once and written once.

    By as many threads as a restore has, without checksums, and without ids in the file.

    Args:
        trace: of which these are rows.
        fields: where to.
        ids: the rows of each table.
    """

    def __init__(
        self,
        trace: Trace,
        fields: dict[str, tuple[NDArray[np.uint8], ...]],
        ids: Sequence[NDArray[np.int64]],
    ) -> None:
        self._firsts = np.concatenate(([0], np.cumsum(trace.rows))).astype(np.int64)
        self._ids = np.concatenate(
            [first + of_table for first, of_table in zip(self._firsts, ids, strict=False)]
        )
        self._fields = list(fields.values())  # they own the memory that is written to
        self._addresses = np.array([[f[i].ctypes.data for f in self._fields] for i in range(2)], np.int64)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this does)
        self._file.write(np.random.default_rng(0).bytes(2 * len(self._ids) * DIM * 4))
        self._file.flush()
        os.fsync(self._file.fileno())  # else it cannot be taken out of the page cache

    def seconds(self, *, cold: bool) -> float:
        """Of one, from the disk or from the page cache."""
        begins = range(0, len(self._ids), _FLOOR_ROWS)
        _settle_memory(len(self._ids) * RECORD_BYTES)
        if cold:
            _forget(self._file.fileno())
        return stopwatch(lambda: run_all(self._load, begins))

    def _load(self, begin: int) -> None:
        ids = self._ids[begin : begin + _FLOOR_ROWS]
        read = thread_buffer(2 * len(ids) * DIM * 4)
        os.preadv(self._file.fileno(), [read.data], 2 * begin * DIM * 4)
        values = np.array([field.ctypes.data for field in read.reshape(2, -1)], np.int64)
        scatter_rows(self._addresses, self._firsts, ids, values, np.full(2, DIM * 4), ids[:0])


def _others(report: Report, trace: Trace, chunked: StrategyRun, folder: Path, repeats: int) -> None:
    """``torch.save`` and PyTorch's distributed checkpoint, every time everything."""
    from torch.distributed.checkpoint.state_dict_saver import async_save, save  # noqa: PLC0415 (slow)

    state = {"model": chunked.model.state_dict(), "optim": chunked.optimizer.state_dict()}
    sizes: dict[str, int] = {}

    def torch_save() -> float:
        path = folder / "torch.pt"
        seconds = stopwatch(lambda: torch.save(state, path))
        sizes["torch_save"] = path.stat().st_size
        path.unlink()
        return seconds

    def dcp_save() -> float:
        path = folder / "dcp"
        seconds = stopwatch(lambda: save(state, checkpoint_id=path, no_dist=True))
        sizes["dcp"] = sum(f.stat().st_size for f in path.iterdir())
        shutil.rmtree(path)
        return seconds

    def dcp_async() -> float:
        path = folder / "dcp_async"
        started = time.perf_counter()
        future = async_save(state, checkpoint_id=path, no_dist=True)
        seconds = time.perf_counter() - started
        future.result()  # type: ignore[union-attr]
        shutil.rmtree(path)
        return seconds

    stalls = interleave({"torch_save": torch_save, "dcp": dcp_save, "dcp_async": dcp_async}, repeats)
    report.raw["others.stall_seconds"] = stalls
    ours = Spread.of(chunked.stalls).median
    for name, seconds in stalls.items():
        report.figure(f"{name}.stall_over_chunked", Spread.of([s / ours for s in seconds]))
    checkpoints = trace.versions + 1
    report.figure(
        "full.written_over_chunked",
        sizes["torch_save"] * checkpoints / chunked.written,
        "all bytes, rewriting included",
    )
    report.figure("chunked.written_bytes_per_checkpoint", chunked.written / checkpoints)
