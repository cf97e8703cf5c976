"""How every claim is measured.

The sides of a comparison run in one process, in turns, each round in the opposite order to the one
before, so that what else the machine does falls on all of them alike. What is reported is the median
of the rounds' ratios, with the middle half of them as the spread. Absolute times belong to the machine
that they were taken on; the JSON says which.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from holdfast.errors import ConfigError

BENCHES = {
    "bandwidth": "quantized increments against full checkpoints: bytes written and stored",
    "checkpoint": "checkpoints of each strategy, torch.save and DCP: stall, bytes, restores",
    "coding": "parities that follow their members: GB/s beside memcpy; how far sums of floats drift",
    "job": "parameter servers and workers against a plain PyTorch loop: samples/s, processor time, bytes",
    "kernels": "vector and OpenMP kernels against their plain fallbacks: rows/s of codecs, stall of a save",
    "overhead": "erasure codes, copies and checkpoints against no protection: time, memory, load",
    "partial": "partial recovery with emulated failures: overhead, AUC lost, what tracking costs",
    "quantize": "row codecs beside torch's, fbgemm's and k-means: loss, rows/s, bytes",
    "quantize-accuracy": "AUC lost by restores from quantized checkpoints, by bits and restores",
    "recovery": "a server is killed: how soon training goes on, what it costs, when all is back",
    "train": "the reference trainer against a plain PyTorch loop; the readers' rows/s",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the quartiles round it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median and the middle half of some values."""
        low, median, high = np.percentile(np.asarray(values, float), [25, 50, 75])
        return cls(float(median), float(low), float(high))


@dataclass
class Report:
    """Collects what a bench measures.

    ``figures`` are the numbers that are claimed, by dotted name; ``raw`` is all that they came from.
    """

    bench: str
    quick: bool
    console: Console
    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    json_path: Path | None = None

    def figure(self, name: str, value: float | Spread, note: str = "") -> None:
        """Record a figure and show it at once."""
        if isinstance(value, Spread):
            self.spreads[name] = value
            text = f"{_readable(value.median)}   ({_readable(value.low)} to {_readable(value.high)})"
            value = value.median
        else:
            text = _readable(value)
        self.figures[name] = value
        self.console.print(f"  {name:<44} {text:<36} {note}", highlight=False, markup=False, soft_wrap=True)

    def to_json(self) -> bytes:
        """Everything, as every bench writes it."""
        return msgspec.json.format(
            msgspec.json.encode(
                {
                    "bench": self.bench,
                    "machine": machine(),
                    "settings": {"quick": self.quick, **self.settings},
                    "figures": self.figures,
                    "raw": {"spreads": self.spreads, **self.raw},
                }
            )
        )

    def kept_runs(self) -> dict[str, Any]:
        """What an interrupted run of the same bench left as ``raw["runs"]``, if nothing has changed since.

        Such a run has ``raw["unfinished"]``.
        """
        path = self.json_path
        if path is None or not path.exists():
            return {}
        try:
            found: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            now = msgspec.to_builtins(
                {
                    "bench": self.bench,
                    "machine": machine(),
                    "settings": {"quick": self.quick, **self.settings},
                }
            )
            if not found["raw"].get("unfinished") or any(found[key] != value for key, value in now.items()):
                return {}
            runs: dict[str, Any] = found["raw"]["runs"]
            return runs
        except (msgspec.DecodeError, KeyError):
            return {}

    def save(self) -> None:
        """Write what there is so far to the file that was asked for, if one was."""
        if self.json_path is not None:
            written = _part_of(self.json_path)
            written.write_bytes(self.to_json() + b"\n")
            written.replace(self.json_path)


def check_json_path(path: Path | None) -> None:
    """ConfigError if figures could not be written there: said before they are measured, not after."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder: expected the name of a file to write figures to")
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
        _part_of(path).write_bytes(b"")
        _part_of(path).unlink()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be written: {why}") from None


def _part_of(path: Path) -> Path:
    """What is written first, so that the file itself is always whole."""
    return path.with_name(path.name + ".part")


def interleave(
    sides: Mapping[str, Callable[[], float]], rounds: int, on_round: Callable[[int], None] = lambda done: None
) -> dict[str, list[float]]:
    """Call each side once a round, turning the order round each time; what each returned, by round."""
    results: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(reversed(list(sides)))
        for name in names:
            results[name].append(sides[name]())
        on_round(number + 1)
    return results


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """The spread of the rounds' ratios: each round compares what ran side by side."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def stopwatch(work: Callable[[], Any]) -> float:
    """Seconds that the work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _readable(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def machine() -> dict[str, Any]:
    """On what a bench ran."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "numba")}
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **packages,
    }


def list_benches(console: Console) -> None:
    """Print the names and what each measures."""
    table = Table("bench", "measures", box=None)
    for name, text in BENCHES.items():
        table.add_row(name, text)
    console.print(table)


def run_bench(name: str, *, quick: bool, json_path: Path | None, console: Console) -> Report:
    """Run one bench; each of its figures is printed as soon as it stands."""
    if name not in BENCHES:
        raise ConfigError(f"there is no bench {name!r}: there are {', '.join(BENCHES)}")
    check_json_path(json_path)
    report = Report(name, quick, console, json_path=json_path)
    where = machine()
    console.print(
        f"bench {name}{' --quick' if quick else ''} on {where['cores']} cores of {where['cpu']}, "
        f"torch {where['torch']}: medians, with the middle half of the rounds in brackets",
        highlight=False,
        soft_wrap=True,
    )
    module = importlib.import_module(f"holdfast.bench.{name.replace('-', '_')}")
    seconds = stopwatch(lambda: module.run(report))
    console.print(f"  took {seconds:.0f} s", highlight=False)
    report.save()
    return report
