"""Shared code of all benchmarks.

The alternatives of a comparison run interleaved in one process, and each round reverses the order, so that
other load on the machine affects all of them alike. A figure is the median of the rounds' ratios, with the
interquartile range as its spread. Absolute times depend on the machine, which the JSON names.
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
    "coding": "updates of parities: GB/s compared with memcpy; drift of parities that are sums of floats",
    "job": "parameter servers and workers against a plain PyTorch loop: samples/s, processor time, bytes",
    "kernels": "vector and OpenMP kernels against their plain fallbacks: rows/s of codecs, stall of a save",
    "machines": "a job on Ray in a lab of five hosts: samples/s, seconds lost with a machine",
    "overhead": "erasure codes, copies and checkpoints against no protection: time, memory, load",
    "partial": "partial recovery with emulated failures: overhead, AUC lost, cost of tracking",
    "quantize": "row codecs against those of torch and fbgemm and against k-means: loss, rows/s, bytes",
    "quantize-accuracy": "AUC lost by restores from quantized checkpoints, by bits and restores",
    "recovery": "a killed server: time until training resumes, throughput, time until all is recovered",
    "scale": "how costs grow: baselines by size, restores and publishing by versions, servers by size",
    "server-bound": "servers alone, workers that do not compute: processor time of each protection",
    "train": "the reference trainer against a plain PyTorch loop; the readers' rows/s",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median and quartiles of some values."""
        low, median, high = np.percentile(np.asarray(values, float), [25, 50, 75])
        return cls(float(median), float(low), float(high))


@dataclass
class Report:
    """Collects what a bench measures.

    ``figures`` are the published numbers, by dotted name; ``raw`` has the measurements behind them.
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
        """Record a figure and print it."""
        if isinstance(value, Spread):
            self.spreads[name] = value
            text = f"{_readable(value.median)}   ({_readable(value.low)} to {_readable(value.high)})"
            value = value.median
        else:
            text = _readable(value)
        self.figures[name] = value
        self.console.print(f"  {name:<44} {text:<36} {note}", highlight=False, markup=False, soft_wrap=True)

    def to_json(self) -> bytes:
        """All figures, settings and raw measurements as JSON."""
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
        """``raw["runs"]`` of an interrupted run of the same bench with the same settings, else empty.

        An interrupted run has ``raw["unfinished"]``.
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
        """Write everything so far to the JSON file, if one was given."""
        if self.json_path is not None:
            written = _part_of(self.json_path)
            written.write_bytes(self.to_json() + b"\n")
            written.replace(self.json_path)


def check_json_path(path: Path | None) -> None:
    """Raise ConfigError before measuring if the JSON file could not be written."""
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
    """The temporary file that is renamed when it is complete."""
    return path.with_name(path.name + ".part")


def interleave(
    sides: Mapping[str, Callable[[], float]], rounds: int, on_round: Callable[[int], None] = lambda done: None
) -> dict[str, list[float]]:
    """Call each side once per round, in alternating order. Returns the results of each side by round."""
    results: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(reversed(list(sides)))
        for name in names:
            results[name].append(sides[name]())
        on_round(number + 1)
    return results


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """The spread of the ratios, round by round."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def stopwatch(work: Callable[[], Any]) -> float:
    """Seconds that the work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _readable(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of packages."""
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
    """Print the names and descriptions of all benches."""
    table = Table("bench", "measures", box=None)
    for name, text in BENCHES.items():
        table.add_row(name, text)
    console.print(table)


def run_bench(name: str, *, quick: bool, json_path: Path | None, console: Console) -> Report:
    """Run one bench, and print each figure as soon as it is known."""
    if name not in BENCHES:
        raise ConfigError(f"unknown bench {name!r}: expected one of {', '.join(BENCHES)}")
    check_json_path(json_path)
    report = Report(name, quick, console, json_path=json_path)
    where = machine()
    console.print(
        f"bench {name}{' --quick' if quick else ''} on {where['cores']} cores of {where['cpu']}, "
        f"torch {where['torch']}: medians, with the interquartile range in parentheses",
        highlight=False,
        soft_wrap=True,
    )
    module = importlib.import_module(f"holdfast.bench.{name.replace('-', '_')}")
    seconds = stopwatch(lambda: module.run(report))
    console.print(f"  took {seconds:.0f} s", highlight=False)
    report.save()
    return report
