"""What a store's history costs: the bytes and the time of a publication, and opening, by number of versions.

A `Checkpointer` saves a small table again and again, of which a few rows change each time: increments,
rounds, now and then a baseline. 10,000 versions take about a minute where syncing is quick.

- ``scale.publish.bytes_per_version.versionsN``: bytes of manifests and segments written for a version, the
  mean over the second half of the first *N* versions. A mean, because a manifest grows until its versions
  become a segment, about every thirty versions, and segments are merged now and then. It begins and ends with
  such a segment: otherwise that of few versions would say at which point of the cycle they happen to end.
- ``scale.publish.seconds.versionsN``: seconds that publishing a version takes, over the same versions: all
  time in the catalog, also for writing and syncing; ``cpu_seconds`` is the processor time of that.
- ``scale.publish.bytes_per_version``: that of the most versions over that of 100, or of the fewest.
- ``scale.open_seconds``: opening a `Checkpointer` in a new process on a store with that many versions,
  imports excluded; ``list_seconds`` is reading the newest manifest, as ``holdfast ckpt`` does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import nn

from holdfast.bench.harness import Report, Spread
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.format.manifest import FOLDER, read_newest
from holdfast.checkpoint.format.segments import FOLDER as SEGMENT_FOLDER
from holdfast.checkpoint.store.local import LocalStore
from holdfast.options import Policy

_ROWS, _WIDTH, _TOUCHED = 512, 4, 8


@dataclass
class _Costs:
    """What was published for each version."""

    bytes: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    """How many segments were written."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def begin_version(self) -> None:
        for values in (self.bytes, self.segments, self.seconds, self.cpu_seconds):
            values.append(0)

    def mean(self, name: str, versions: int) -> float:
        """Over the second half of the first ``versions``: over whole cycles, if there is one."""
        begin, end = versions // 2, versions
        cycles = [number + 1 for number in range(begin, end) if self.segments[number]]
        if len(cycles) > 1:
            begin, end = cycles[0], cycles[-1]
        values: list[float] = getattr(self, name)[begin:end]
        return sum(values) / len(values)


def measure_history(
    report: Report,
    *,
    versions: Sequence[int] = (10, 100, 1000, 10_000),
    folder: Path | None = None,
    openings: int = 3,
    policy: Policy | None = None,
) -> None:
    """Save versions, and report what publishing and opening cost at each of some numbers of them.

    Args:
        report: gets the figures.
        versions: at which numbers of versions, ascending.
        folder: where the store is made and removed again; by default in the folder for temporary files.
        openings: how often the store is opened at each number; each takes seconds to import torch.
        policy: of the store; by default all versions are kept.
    """
    counts = sorted(versions)
    policy = policy or Policy(verify=0)
    costs = _Costs()
    opened: dict[int, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as made:
        path = Path(made) / "store"
        for count in counts:
            _save_until(path, count, policy, costs)
            opened[count] = [_open_in_new_process(path) for _ in range(openings)]
            _report_one(report, count, costs, opened[count])
    few = 100 if 100 in counts else counts[0]
    most = counts[-1]
    growth = costs.mean("bytes", most) / costs.mean("bytes", few)
    report.figure("scale.publish.bytes_per_version", growth, f"{most:,} versions over {few:,}")
    report.figure(
        "scale.open_seconds", Spread.of([one["open"] for one in opened[most]]), f"{most:,} versions"
    )
    report.settings["scale.history"] = {
        "rows": _ROWS, "width": _WIDTH, "touched": _TOUCHED, "versions": counts, "openings": openings,
    }  # fmt: skip
    report.raw["scale.history"] = {"opened": {str(n): runs for n, runs in opened.items()}}


def _report_one(report: Report, count: int, costs: _Costs, opened: Sequence[dict[str, float]]) -> None:
    suffix = f"versions{count}"
    report.figure(f"scale.publish.bytes_per_version.{suffix}", costs.mean("bytes", count))
    report.figure(f"scale.publish.seconds.{suffix}", costs.mean("seconds", count))
    report.figure(f"scale.publish.cpu_seconds.{suffix}", costs.mean("cpu_seconds", count))
    report.figure(f"scale.open_seconds.{suffix}", Spread.of([one["open"] for one in opened]))
    report.figure(f"scale.list_seconds.{suffix}", Spread.of([one["list"] for one in opened]))
    report.figure(f"scale.stored_segments.{suffix}", opened[-1]["segments"], "objects, without copies")


def _objects() -> dict[str, Any]:
    table = nn.Embedding(_ROWS, _WIDTH)
    table.weight.requires_grad_(False)  # rows are changed by hand: no optimizer is needed
    return {"model": table}


def _save_until(path: Path, count: int, policy: Policy, costs: _Costs) -> None:
    """Save versions until there are so many, continuing a store that is there."""
    random = np.random.default_rng(count)
    objects = _objects()
    weight = objects["model"].weight.data.numpy()
    with Checkpointer(path, objects, policy) as checkpointer:
        checkpointer.restore()
        with _measured(checkpointer, costs):
            while len(costs.bytes) < count:
                costs.begin_version()
                rows = random.choice(_ROWS, _TOUCHED, replace=False)
                weight[rows] = len(costs.bytes)
                checkpointer.mark("model.weight", rows)
                checkpointer.save(len(costs.bytes))
                checkpointer.wait()


@contextmanager
def _measured(checkpointer: Checkpointer, costs: _Costs) -> Iterator[None]:
    """Count the bytes of manifests and segments, and the time that publishing takes."""
    store, catalog = checkpointer.store, checkpointer._writer.catalog
    put, publish = store.put, store.publish

    def counting_put(name: str, parts: Sequence[Any]) -> int:
        size = put(name, parts)
        if name.startswith(SEGMENT_FOLDER):
            costs.bytes[-1] += size
            costs.segments[-1] += 1
        return size

    def counting_publish(name: str, data: bytes) -> None:
        publish(name, data)
        costs.bytes[-1] += len(data) if name.startswith(FOLDER) else 0

    store.put, store.publish = counting_put, counting_publish  # type: ignore[method-assign]
    real = {name: getattr(catalog, name) for name in ("commit_version", "commit_round", "free_replaced")}
    for name, method in real.items():
        setattr(catalog, name, _timed(method, costs))
    try:
        yield
    finally:
        store.put, store.publish = put, publish  # type: ignore[method-assign]
        for name, method in real.items():
            setattr(catalog, name, method)


def _timed(method: Callable[..., None], costs: _Costs) -> Callable[..., None]:
    def timed(*arguments: Any, **options: Any) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        method(*arguments, **options)
        costs.seconds[-1] += time.perf_counter() - started
        costs.cpu_seconds[-1] += time.thread_time() - cpu

    return timed


def _open_in_new_process(path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.bench.scale_history", str(path)],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    found: dict[str, float] = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])
    return found


def _open(path: Path) -> dict[str, float]:
    """Open a store as a trainer does, and as a tool does that reads it; seconds of each."""
    objects, policy = _objects(), Policy(verify=0)
    started = time.perf_counter()
    checkpointer = Checkpointer(path, objects, policy)
    seconds = time.perf_counter() - started
    segments = len(checkpointer.manifest.segments)
    checkpointer.close()
    with LocalStore(path, create=False) as store:
        started = time.perf_counter()
        versions = len(read_newest(store).versions)
        listing = time.perf_counter() - started
    return {"open": seconds, "list": listing, "segments": segments, "versions": versions}


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_open(Path(sys.argv[1]))) + b"\n")
