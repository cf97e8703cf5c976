"""``bench quantize``: what each way to quantize rows loses, how fast it is and what a row takes.

Rows of a model that is trained here, those that training has changed; and rows that are hard: with heavy
tails, with one outlier, skewed, and far from zero. Losses are means of the rows' l2 losses, as in
Check-N-Run, and on a given torch the same on every machine. Speeds are of rows of the trained model, tiled,
into memory that is there, sides in turns. The figures without a distribution's name are of trained rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rich.table import Table

from holdfast.bench.harness import Report, Spread, interleave, ratio, stopwatch
from holdfast.bench.quantize_rivals import (
    Floats,
    Rival,
    clusters_within,
    fbgemm,
    kmeans,
    kmeans_bytes,
    rivals,
)
from holdfast.checkpoint.codecs.quantize import METHODS, Method, UniformCodec, choose_grid_bits, l2_losses
from holdfast.checkpoint.codecs.quantized import encode_rows
from holdfast.training.config import load
from holdfast.training.trainer import Trainer

DIMS = (16, 64, 128)
BITS = (2, 3, 4, 8)
HARD: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {
    "heavy_tailed": lambda random, shape: random.standard_t(2, shape),
    "outlier": lambda random, shape: _with_outlier(random.normal(size=shape), random),
    "skewed": lambda random, shape: random.lognormal(size=shape),
    "offset": lambda random, shape: random.normal(size=shape) + 10,
}


def run(report: Report) -> None:
    """Measure all dims, bits and methods."""
    if report.quick:
        measure(report, dims=DIMS, steps=40, rows=300, timed_rows=8192, rounds=3)
    else:
        measure(report, dims=DIMS, steps=300, rows=4000, timed_rows=65_536, rounds=9)


def measure(
    report: Report, *, dims: Sequence[int], steps: int, rows: int, timed_rows: int, rounds: int,
    max_rows: int = 3000,
) -> None:  # fmt: skip
    """Measure losses on every distribution, then speeds, for each dim."""
    report.settings.update(
        dims=list(dims), steps=steps, rows=rows, timed_rows=timed_rows, rounds=rounds, max_rows=max_rows,
        optimizer="adagrad", kmeans_iterations=15,
    )  # fmt: skip
    if fbgemm(8) is None:
        report.console.print(
            "  fbgemm-gpu-cpu is not installed: its figures are left out (pip install 'holdfast[fbgemm]')",
            highlight=False, markup=False,
        )  # fmt: skip
    threads = torch.get_num_threads()
    report.raw["losses"], report.raw["speeds"] = {}, {}
    for dim in dims:
        trained = trained_rows(dim, steps, max_rows)
        random = np.random.default_rng(dim)
        trained = trained[random.permutation(len(trained))]
        sets = {"trained": trained[:rows]}
        sets |= {name: make(random, (rows, dim)).astype(np.float32) for name, make in HARD.items()}
        losses = {name: _losses(values, dim) for name, values in sets.items()}
        try:
            speeds = _speeds(np.resize(trained, (timed_rows, dim)), rounds, report)
        finally:
            torch.set_num_threads(threads)
        report.raw["losses"][f"dim{dim}"] = losses
        report.raw["speeds"][f"dim{dim}"] = speeds
        _show(report, dim, losses["trained"], speeds)
        _figures(report, dim, losses, speeds)


def trained_rows(dim: int, steps: int, max_rows: int) -> Floats:
    """The rows of a DLRM's tables that some steps of training have changed."""
    config = load(None, [
        f"model.dim={dim}", f"model.bottom=[64, {dim}]", "model.top=[64, 1]", f"data.max_rows={max_rows}",
        "batch_size=1024", "optimizer.name=adagrad", "data.samples=100000000",
    ])  # fmt: skip
    trainer = Trainer(config)
    tables = [parameter.detach() for parameter in trainer.model.tables.parameters()]
    before = torch.cat(tables)
    assert trainer.advance(steps) is not None
    after = torch.cat(tables)
    changed: Floats = after[(after != before).any(1)].numpy()
    return changed


def _with_outlier(rows: Any, random: np.random.Generator) -> Any:
    rows[np.arange(len(rows)), random.integers(0, rows.shape[1], len(rows))] *= 20
    return rows


def _codec(values: Floats, bits: int, method: Method) -> UniformCodec:
    return UniformCodec(bits, choose_grid_bits(values, bits, method), method)


def _mean_loss(values: Floats, back: Floats) -> float:
    return float(l2_losses(values, back).mean())


def _losses(values: Floats, dim: int) -> dict[str, dict[str, Any]]:
    """By "METHOD.BITS": the mean l2 loss, and bytes a row takes."""
    found: dict[str, dict[str, Any]] = {}
    for bits in BITS:
        for method in METHODS:
            ours = _codec_loss(_codec(values, bits, method), values)
            wide = _codec_loss(UniformCodec(bits, 32, method), values)
            found[f"{method}.{bits}"] = ours | {"loss_with_grid_of_32_bits": wide["loss"]}
        for rival in rivals(bits):
            loss = _mean_loss(values, rival.read_back(values))
            found[f"{rival.name}.{bits}"] = {"loss": loss, "bytes": rival.bytes_per_row(dim)}
        if bits < 8:
            equal = clusters_within(UniformCodec(bits).stored_bytes(dim), dim)
            sides = {"kmeans": (2**bits, False), "kmeans_plus_plus": (2**bits, True),
                     "kmeans_equal_bytes": (equal, True)}  # fmt: skip
            for name, (clusters, plus_plus) in sides.items():
                loss = _mean_loss(values, kmeans(values, clusters, plus_plus=plus_plus))
                size = kmeans_bytes(dim, clusters)
                found[f"{name}.{bits}"] = {"loss": loss, "bytes": size, "clusters": clusters}
    return found


def _codec_loss(codec: UniformCodec, values: Floats) -> dict[str, Any]:
    stored, raw = encode_rows(codec, values)
    back = values.copy()
    codec.decode(stored, back)
    return {
        "loss": _mean_loss(values, back), "bytes": stored.shape[1], "grid_bits": codec.grid_bits,
        "raw_rows": int(raw.sum()),
    }  # fmt: skip


def _speeds(values: Floats, rounds: int, report: Report) -> dict[str, dict[str, list[float]]]:
    """Rows a second of each side in each round, by threads."""
    found = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with ThreadPoolExecutor(threads) as pool:
            sides: dict[str, Callable[[], float]] = {}
            for bits in BITS:
                for method in METHODS:
                    codec = _codec(values, bits, method)
                    sides[f"{method}.{bits}"] = _codec_side(codec, values, threads, pool)
                for rival in rivals(bits):
                    sides[f"{rival.name}.{bits}"] = _rival_side(rival, values, quick=report.quick)
            interleave(sides, 1)  # compiles what is to be compiled
            found[f"{threads}_threads"] = interleave(sides, rounds)
    return found


def _codec_side(
    codec: UniformCodec, values: Floats, threads: int, pool: ThreadPoolExecutor
) -> Callable[[], float]:
    if codec.method == "adaptive":
        values = values[: len(values) // 4]
    stored = np.zeros((len(values), codec.stored_bytes(values.shape[1])), np.uint8)
    bounds = np.linspace(0, len(values), threads + 1).astype(int)
    parts = [slice(a, b) for a, b in pairwise(bounds)]

    def work() -> None:
        if threads == 1:
            codec.encode(values, stored)
        else:
            list(pool.map(lambda part: codec.encode(values[part], stored[part]), parts))

    return lambda: len(values) / stopwatch(work)


def _rival_side(rival: Rival, values: Floats, *, quick: bool) -> Callable[[], float]:
    slow = rival.name in ("torch", "prepack_optimized")
    rows = torch.from_numpy(values[: (100 if quick else 500)] if slow else values)
    if rival.name == "fbgemm" and rival.bits == 8:  # into memory that is there, as ours
        out = rival.encode(rows)
        into = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantizedOut
        return lambda: len(rows) / stopwatch(lambda: into(out, rows))
    return lambda: len(rows) / stopwatch(lambda: rival.encode(rows))


def _show(
    report: Report, dim: int, losses: dict[str, Any], speeds: dict[str, dict[str, list[float]]]
) -> None:
    table = Table("trained rows", "bytes", "mean l2 loss", "rows/s, 1 thread", "2 threads", box=None)
    for name, found in losses.items():
        timed = [speeds[threads].get(name) for threads in ("1_threads", "2_threads")]
        texts = [f"{Spread.of(values).median:,.0f}" if values else "" for values in timed]
        table.add_row(f"{name}.dim{dim}", str(found["bytes"]), f"{found['loss']:.6f}", *texts)
    report.console.print(table, highlight=False)


def _figures(
    report: Report, dim: int, sets: dict[str, dict[str, Any]], speeds: dict[str, dict[str, list[float]]]
) -> None:
    losses = sets["trained"]
    one = speeds["1_threads"]

    def over(bits: int, rival: str, of: dict[str, Any], method: str = "adaptive") -> float:
        theirs: float = of[f"{rival}.{bits}"]["loss"]
        ours: float = of[f"{method}.{bits}"]["loss"]
        return ours / theirs if theirs else float("inf")

    for bits in (2, 3, 4):
        name = f"adaptive.{bits}.dim{dim}"
        report.figure(f"{name}.loss_over_torch", over(bits, "torch", losses))
        worst = max(over(bits, rival.name, of) for of in sets.values() for rival in rivals(bits))
        report.figure(f"{name}.worst_loss_over_any", worst, "torch and fbgemm, every distribution")
        report.figure(f"{name}.loss_over_asymmetric", over(bits, "asymmetric", losses))
        for rival in ("kmeans", "kmeans_plus_plus", "kmeans_equal_bytes"):
            theirs = losses[f"{rival}.{bits}"]
            note = f"{theirs['clusters']} clusters in {theirs['bytes']} bytes"
            report.figure(f"{name}.loss_over_{rival}", over(bits, rival, losses), note)
        grid = losses[f"adaptive.{bits}"]
        report.figure(f"{name}.loss_of_16_bit_grids", grid["loss"] / grid["loss_with_grid_of_32_bits"])
        report.figure(
            f"{name}.rows_per_second_over_torch", ratio(one[f"adaptive.{bits}"], one[f"torch.{bits}"])
        )
        for distribution in HARD:
            report.figure(
                f"{distribution}.{bits}.dim{dim}.loss_over_torch", over(bits, "torch", sets[distribution])
            )
    for rival in ("prepack", "fbgemm"):
        if f"{rival}.8" not in losses:
            continue
        report.figure(f"asymmetric.8.dim{dim}.loss_over_{rival}", over(8, rival, losses, "asymmetric"))
        report.figure(
            f"asymmetric.8.dim{dim}.rows_per_second_over_{rival}",
            ratio(one["asymmetric.8"], one[f"{rival}.8"]),
        )
