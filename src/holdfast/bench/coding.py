"""``bench coding``: how fast parities follow their members, and how far a sum of floats would drift.

``xor_over_memcpy`` is the XOR of two arrays into a third against a copy of an array as long, both far beyond
the caches: bytes of the result per second. The other speeds are those of updates as a server does them:
differences of records to records anywhere in parities that are beyond the caches, a push's worth at a time,
checks included; bytes of differences per second until *all* r parities have them. Records are those of the
``criteo-kaggle`` preset with Adagrad, and, as ``words128``, of ``criteo-terabyte``.

The float sum is the papers' parity: parity += new - old, as float32, and a lost member is the parity less
the other members. It goes along with one XOR parity through the same Adagrad updates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from holdfast.bench.harness import Report, Spread, interleave, ratio, stopwatch
from holdfast.coding.codes import code_for
from holdfast.kernels import coding as loops
from holdfast.kernels.memory import aligned_zeros

K = 4
WORDS = (32, 128)
PUSH_RECORDS = 4096
TABLE_BYTES = 128 << 20

Floats = NDArray[np.float32]


def run(report: Report) -> None:
    """Measure XOR, updates and drift."""
    rounds, updates = (5, 50_000) if report.quick else (21, 1_000_000)
    report.settings.update(k=K, words=WORDS, push_records=PUSH_RECORDS, rounds=rounds, updates=updates)
    measure_xor(report, rounds)
    for words in WORDS:
        measure_updates(report, words, rounds)
    measure_drift(report, updates)


def measure_xor(report: Report, rounds: int, table_bytes: int = TABLE_BYTES) -> None:
    """XOR of arrays against a copy."""
    a, b, out = (np.full(table_bytes // 4, value, np.uint32) for value in (1, 2, 3))
    sides = {
        "memcpy": lambda: table_bytes / stopwatch(lambda: np.copyto(out, a)),
        "xor": lambda: table_bytes / stopwatch(lambda: loops.xor(a, b, out)),
    }
    interleave(sides, 1)  # compiles
    speeds = interleave(sides, rounds)
    report.raw["xor"] = speeds
    report.figure("coding.xor_over_memcpy", ratio(speeds["xor"], speeds["memcpy"]))
    report.figure("coding.memcpy_gigabytes_per_second", Spread.of([v / 1e9 for v in speeds["memcpy"]]))


def measure_updates(report: Report, words: int, rounds: int, table_bytes: int = TABLE_BYTES) -> None:
    """Pushes of differences to one, two and three parities."""
    rng = np.random.default_rng(0)
    records = table_bytes // (words * 4)
    parities = [aligned_zeros(records, words) for _ in range(3)]
    pushes = [rng.integers(0, records, PUSH_RECORDS).astype(np.uint32) for _ in range(16)]
    members = rng.integers(0, K, PUSH_RECORDS)
    differences = rng.integers(0, 2**32, (PUSH_RECORDS, words), dtype=np.uint32)

    def side(r: int) -> Callable[[], float]:
        code = code_for(K, r)

        def update() -> None:
            for places in pushes:
                for t in range(r):
                    code.update(parities[t], places, t, members, differences)

        return lambda: differences.nbytes * len(pushes) / stopwatch(update) / 1e9

    sides = {"xor": side(1), "rs2": side(2), "rs3": side(3)}
    interleave(sides, 1)
    speeds = interleave(sides, rounds)
    report.raw[f"updates.words{words}"] = speeds
    prefix = "coding." if words == WORDS[0] else f"coding.words{words}."
    for name, values in speeds.items():
        report.figure(
            f"{prefix}{name}_gigabytes_per_second", Spread.of(values), "differences, to all parities"
        )


def measure_drift(report: Report, updates: int, columns: int = 512) -> None:
    """One member of a stripe recovered from both parities after so many updates of random members."""
    rng = np.random.default_rng(0)
    gradients = (rng.standard_normal((997, columns)) * 0.01).astype(np.float32)
    members = rng.integers(0, K, updates).tolist()
    # Weights, then the sums of squares that Adagrad keeps: a record's two halves.
    stripe = np.zeros((K, 2, columns), np.float32)
    stripe[:, 0] = rng.uniform(-0.05, 0.05, (K, columns))
    floats = stripe.sum(axis=0, dtype=np.float32)
    bits: NDArray[np.uint32] = np.bitwise_xor.reduce(stripe.view(np.uint32), axis=0)
    for i, member in enumerate(members):
        record = stripe[member]
        old = record.copy()
        _adagrad(record, gradients[i % len(gradients)])
        floats += record - old
        bits ^= record.view(np.uint32) ^ old.view(np.uint32)

    lost = stripe[0]
    recovered = floats - stripe[1:].sum(axis=0, dtype=np.float32)
    errors = np.abs(recovered.astype(float) - lost) / np.abs(lost)
    exact = bits ^ np.bitwise_xor.reduce(stripe[1:].view(np.uint32), axis=0) == lost.view(np.uint32)
    note = f"after {updates:,} updates, k = {K}"
    report.figure("coding.float_sum.median_relative_error", float(np.median(errors)), note)
    report.figure("coding.float_sum.worst_relative_error", float(errors.max()), note)
    report.figure("coding.float_sum.bit_exact", float((recovered == lost).mean()), "share of the values")
    report.figure("coding.xor.bit_exact", float(exact.mean()), "share of the values")


def _adagrad(record: Floats, gradient: Floats, lr: float = 0.01, eps: float = 1e-10) -> None:
    """One step on weights, record[0], and their sums of squares, record[1]."""
    record[1] += gradient * gradient
    record[0] -= np.float32(lr) * gradient / (np.sqrt(record[1]) + np.float32(eps))
