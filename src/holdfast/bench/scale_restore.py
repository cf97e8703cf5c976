"""What a restore costs as a user calls it: ``restore()`` in a new process, by number of versions.

A `Checkpointer` saves a table again and again, of which a few rows change each time, some of them often.
When the store has so many versions, the newest is restored in a new process, from the call of ``restore()``
until it returns. Beside it, also in a new process, the same pieces of the same files are read once with the
store's own reads, their checksums compared, their rows decoded and written once to the same tables, by as
many threads: what no restore can leave out. The compiled loops have been loaded by then, as they have when a
`Checkpointer` is made. The two take turns, and find the files in the same state: in the
page cache, or, with ``cold``, on the disk.

- ``scale.restore.newest_over_read.versionsN``: seconds of ``restore()`` over those of reading.
- ``scale.restore.newest_over_read``: the worst of them.
- ``scale.restore.growth``: that of the most versions over that of 150, or of the fewest.
- ``scale.restore.open_seconds.versionsN``: making the `Checkpointer`, which reads the manifest.
- ``scale.restore.first_save_seconds.versionsN``: how long training waits in the first save after that;
  ``first_save_over_later.versionsN`` compares it with the saves that follow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import nn

from holdfast.bench.harness import Report, Spread, interleave, ratio
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.format.chunk import decode_fields, decode_piece
from holdfast.checkpoint.format.manifest import Manifest, read_newest
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.reading.stretches import (
    Stretch,
    open_file,
    read_checked,
    run_all,
    stretches,
    thread_buffer,
)
from holdfast.checkpoint.store.local import LocalStore
from holdfast.options import Chunked, Policy, Strategy

COMPARED = 150
"""The growth is over that many versions, as few as a short run has."""
TABLE = "model.weight"
_DIM = 32
_LATER_SAVES = 4
_SEED = 7


class Timed(Struct):
    """What a process has measured."""

    seconds: float
    cpu_seconds: float
    bytes: int = 0
    files: int = 0
    open_seconds: float = 0.0
    saves: list[float] = []
    """How long each save stalled training."""


def measure_restore(
    report: Report,
    *,
    versions: Sequence[int] = (10, COMPARED, 1000, 5000),
    rows: int = 1_200_000,
    touched: int = 1000,
    rounds: int = 5,
    cold: bool = False,
    folder: Path | None = None,
    strategy: Strategy = Chunked(),  # noqa: B008 (frozen)
) -> None:
    """Save versions, and report what restoring the newest costs at each of some numbers of them.

    Args:
        report: gets the figures.
        versions: at which numbers of versions, ascending.
        rows: of the table, 256 bytes each with the optimizer's state.
        touched: rows that change before a save, about.
        rounds: restores at each number; each takes seconds to import torch.
        cold: drop files from the page cache before each.
        folder: where stores are made and removed again; by default in the folder for temporary files.
        strategy: of the store, which keeps all versions.
    """
    counts = sorted(versions)
    report.settings["restore"] = {
        "versions": counts, "rows": rows, "touched": touched, "rounds": rounds,
        "strategy": strategy, "files": "on the disk" if cold else "in the page cache",
    }  # fmt: skip
    ratios: dict[int, Spread] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as made:
        stores = _save_versions(Path(made), counts, rows, touched, strategy)
        for count, store in stores.items():
            ratios[count] = _compare(report, count, store, rows, rounds, cold, strategy)
            shutil.rmtree(store)
    worst = max(ratios.values(), key=lambda spread: spread.median)
    report.figure("scale.restore.newest_over_read", worst, "the worst of them")
    base = COMPARED if COMPARED in ratios else counts[0]
    growth = ratios[counts[-1]].median / ratios[base].median
    report.figure("scale.restore.growth", growth, f"{counts[-1]} versions over {base}")


def _save_versions(
    folder: Path, counts: Sequence[int], rows: int, touched: int, strategy: Strategy
) -> dict[int, Path]:
    """Save as many versions as the most, and keep the store as it was at each of the numbers."""
    stores: dict[int, Path] = {}
    objects = _objects(rows)
    random = np.random.default_rng(0)
    with Checkpointer(folder / "growing", objects, Policy(strategy=strategy)) as ckpt:
        for version in range(1, counts[-1] + 1):
            _change(ckpt, objects, _some_rows(random, rows, touched), version)
            ckpt.save(version)
            if version in counts:
                ckpt.wait()
                stores[version] = folder / f"versions{version}"
                _link_store(folder / "growing", stores[version])
    shutil.rmtree(folder / "growing")
    return stores


def _link_store(source: Path, target: Path) -> None:
    """A copy of a store without copies of its files, which never change."""
    shutil.copytree(
        source, target, copy_function=os.link, ignore=shutil.ignore_patterns("*lock*", "*reserve*")
    )


def _objects(rows: int) -> dict[str, Any]:
    # Memory that has been written to: pages are given here, not while it is restored.
    model = nn.EmbeddingBag(rows, _DIM, sparse=True, _weight=torch.ones(rows, _DIM))
    return {"model": model, "optim": torch.optim.Adagrad(model.parameters())}


def _tensors(objects: dict[str, Any]) -> list[torch.Tensor]:
    weight = objects["model"].weight
    return [weight.detach(), objects["optim"].state[weight]["sum"]]


def _some_rows(random: np.random.Generator, rows: int, touched: int) -> np.ndarray[Any, Any]:
    """A few rows often, most of them seldom."""
    return np.unique((rows * random.random(touched) ** 4).astype(np.int64))


def _change(ckpt: Checkpointer, objects: dict[str, Any], ids: np.ndarray[Any, Any], value: float) -> None:
    for tensor in _tensors(objects):
        tensor.numpy()[ids] = value
    ckpt.mark(TABLE, ids)


def _compare(
    report: Report, count: int, store: Path, rows: int, rounds: int, cold: bool, strategy: Strategy
) -> Spread:
    """The figures at one number of versions."""
    found: dict[str, list[Timed]] = {"restore": [], "read": []}

    def side(name: str) -> Callable[[], float]:
        def run() -> float:
            copy = store.with_name("used")
            _link_store(store, copy)
            _settle(copy, cold)
            found[name].append(_in_new_process(name, copy, rows, strategy))
            shutil.rmtree(copy)
            return found[name][-1].seconds

        return run

    sides = {name: side(name) for name in found}
    interleave(sides, 1)  # compiles kernels, and brings the machine to where it stays
    for timed in found.values():
        timed.clear()
    seconds = interleave(sides, rounds)
    restores, reads = found["restore"], found["read"]
    report.raw[f"restore.versions{count}"] = msgspec.to_builtins(found)
    name = f"versions{count}"
    over = ratio(seconds["restore"], seconds["read"])
    note = f"{reads[0].bytes / 1e6:.0f} MB in {reads[0].files} files"
    report.figure(f"scale.restore.newest_over_read.{name}", over, note)
    report.figure(f"scale.restore.open_seconds.{name}", Spread.of([timed.open_seconds for timed in restores]))
    first = [timed.saves[0] for timed in restores]
    later = [float(np.median(timed.saves[1:])) for timed in restores]
    report.figure(f"scale.restore.first_save_seconds.{name}", Spread.of(first))
    report.figure(f"scale.restore.first_save_over_later.{name}", ratio(first, later))
    return over


def _settle(store: Path, cold: bool) -> None:
    """Bring all files into the page cache, or out of it."""
    for path in store.rglob("*.*"):
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 22):
                    pass


def _in_new_process(side: str, store: Path, rows: int, strategy: Strategy) -> Timed:
    arguments = [side, str(store), str(rows), msgspec.json.encode(strategy).decode()]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.bench.scale_restore", *arguments], stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(done.stdout, type=Timed)


def time_restore(store: Path, objects: dict[str, Any], strategy: Strategy) -> Timed:
    """In the new process: ``restore()`` from call to return, then some saves."""
    random = np.random.default_rng(_SEED)
    began = time.perf_counter()
    with Checkpointer(store, objects, Policy(strategy=strategy), show_progress=False) as ckpt:
        cpu, started = time.process_time(), time.perf_counter()
        step = ckpt.restore()
        timed = Timed(time.perf_counter() - started, time.process_time() - cpu)
        timed.open_seconds = started - began
        for later in range(1 + _LATER_SAVES):
            _change(ckpt, objects, _some_rows(random, len(objects["model"].weight), 1000), -later)
            started = time.perf_counter()
            ckpt.save(step + later)
            timed.saves.append(time.perf_counter() - started)
            ckpt.wait()
    return timed


def time_reading(store: Path, objects: dict[str, Any]) -> Timed:
    """In the new process: the same pieces read once and written once to the same tables."""
    with LocalStore(store, create=False) as opened:
        manifest = read_newest(opened)
        _load_loops()
        cpu, started = time.process_time(), time.perf_counter()
        timed = read_once(opened, manifest, objects)
        timed.seconds = time.perf_counter() - started
        timed.cpu_seconds = time.process_time() - cpu
    return timed


def _load_loops() -> None:
    """Load all compiled loops, by a restore of a small store."""
    objects = _objects(64)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        with Checkpointer(folder, objects, show_progress=False) as ckpt:
            for version in (1, 2):
                _change(ckpt, objects, np.arange(0, 64, 3), version)
                ckpt.save(version)
        with Checkpointer(folder, objects, show_progress=False) as ckpt:
            ckpt.restore()


def read_once(store: LocalStore, manifest: Manifest, objects: dict[str, Any]) -> Timed:
    """Read every piece of the newest version, check it, and write its rows; ranks one after the other."""
    version = manifest.versions[-1]
    era = manifest.era(version.era)
    groups = era.decoded_groups()
    fields = [tensor.numpy().view(np.uint8).reshape(len(tensor), -1) for tensor in _tensors(objects)]
    tables = LiveTables(groups, lambda name: fields)
    files = [open_file(store, entry, groups) for entry in era.files_of(version.version)]
    needed = [(f, p) for f in files for p in f.pieces if p.first_born <= version.version < p.last_died]
    by_rank: dict[int, list[Stretch]] = {}
    for stretch in stretches(needed):
        by_rank.setdefault(stretch.rank, []).append(stretch)

    def load(stretch: Stretch) -> None:
        for piece, data in read_checked(stretch, thread_buffer(stretch.bytes)):
            own = groups[piece.group].fields
            if piece.is_run:
                tables.fill(piece.group, piece.first_id, decode_fields(piece, data, own))
            else:
                tables.scatter(piece.group, decode_piece(piece, data, own, stretch.file.where).rows)

    for rank in sorted(by_rank):
        run_all(load, by_rank[rank])
    for file in files:
        file.reader.close()
    with store.open(version.dense.name) as dense:
        dense.read()
    return Timed(0.0, 0.0, sum(piece.length for _, piece in needed), len(files))


def time_side(side: str, store: Path, rows: int, strategy: Strategy) -> Timed:
    """In the new process: either of the two."""
    objects = _objects(rows)
    return time_restore(store, objects, strategy) if side == "restore" else time_reading(store, objects)


def _main(side: str, store: str, rows: str, strategy: str) -> None:
    decoded = msgspec.json.decode(strategy, type=Strategy)
    sys.stdout.buffer.write(msgspec.json.encode(time_side(side, Path(store), int(rows), decoded)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
