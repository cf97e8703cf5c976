"""``bench train``: what the reference trainer costs over a plain PyTorch loop, and how fast readers read."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.bench.harness import Report, Spread, interleave, ratio, stopwatch
from holdfast.data.criteo import Criteo
from holdfast.data.criteo_shape import capped_rows
from holdfast.data.reader import Batch, Reader
from holdfast.data.synthetic import Synthetic
from holdfast.models.presets import PRESETS
from holdfast.training.config import load
from holdfast.training.trainer import Trainer

BATCH = 2048
MAX_ROWS = 100_000


def run(report: Report) -> None:
    """Both presets, one and two threads; then the readers."""
    rounds, steps = (5, 4) if report.quick else (21, 8)
    report.settings.update(
        batch_size=BATCH, max_rows=MAX_ROWS, rounds=rounds, steps=steps, optimizer="adagrad"
    )
    for preset in ("kaggle", "terabyte"):
        for threads in (1, 2):
            _compare(report, preset, threads, rounds, steps)
    _readers(report)


def _compare(report: Report, preset: str, threads: int, rounds: int, steps: int) -> None:
    name = f"train.{preset}.{threads}thread{'s' if threads > 1 else ''}"
    torch.set_num_threads(threads)
    overrides = [
        f"model.preset=criteo-{preset}", f"data.max_rows={MAX_ROWS}", f"data.cardinalities={preset}",
        f"threads={threads}", f"batch_size={BATCH}", "data.samples=100000000",
    ]  # fmt: skip
    trainer = Trainer(load(None, overrides))
    plain = PlainLoop(f"criteo-{preset}", trainer.train_reader, lr=trainer.config.optimizer.rate)

    def ours() -> float:
        advanced = trainer.advance(steps)
        assert advanced is not None
        return advanced[1]

    sides = {"holdfast": ours, "plain": lambda: steps * BATCH / stopwatch(lambda: plain.train(steps))}
    interleave(sides, 1)  # warm caches, optimizer state and compiled kernels
    speeds = interleave(sides, rounds)
    report.raw[name] = speeds
    report.figure(f"{name}.ratio", ratio(speeds["holdfast"], speeds["plain"]), "holdfast / plain PyTorch")
    report.figure(f"{name}.samples_per_second", Spread.of(speeds["holdfast"]))


class PlainDLRM(nn.Module):
    """DLRM as its authors' reference writes it."""

    def __init__(self, preset: str, table_rows: list[int]) -> None:
        super().__init__()
        sizes = PRESETS[preset]
        self.emb = nn.ModuleList(
            nn.EmbeddingBag(rows, sizes.dim, mode="sum", sparse=True) for rows in table_rows
        )
        self.bot = self._mlp([13, *sizes.bottom], last_relu=True)
        fields = len(table_rows) + 1
        self.top = self._mlp([sizes.dim + fields * (fields - 1) // 2, *sizes.top], last_relu=False)
        self.li = torch.tensor([i for i in range(fields) for j in range(i)])
        self.lj = torch.tensor([j for i in range(fields) for j in range(i)])

    @staticmethod
    def _mlp(sizes: list[int], last_relu: bool) -> nn.Sequential:
        layers: list[nn.Module] = []
        for i in range(len(sizes) - 1):
            layers.append(nn.Linear(sizes[i], sizes[i + 1]))
            if last_relu or i < len(sizes) - 2:
                layers.append(nn.ReLU())
        return nn.Sequential(*layers)

    def forward(self, dense: Tensor, offsets: Tensor, ids: list[Tensor]) -> Tensor:
        """Logits [samples]."""
        x = self.bot(dense)
        ly = [bag(ids[t], offsets) for t, bag in enumerate(self.emb)]
        both = torch.cat([x, *ly], dim=1).view(len(dense), -1, x.shape[1])
        z = torch.bmm(both, torch.transpose(both, 1, 2))
        logits: Tensor = self.top(torch.cat([x, z[:, self.li, self.lj]], dim=1))
        return logits.squeeze(1)


class PlainLoop:
    """A training loop with nothing but PyTorch in it, on the same batches."""

    def __init__(self, preset: str, reader: Reader, lr: float) -> None:
        self.model = PlainDLRM(preset, list(reader.table_rows))
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=lr)
        self.loss = nn.BCEWithLogitsLoss()
        self.batches: Iterator[Batch] = iter(reader.split(0, 1))

    def train(self, steps: int) -> None:
        """As every tutorial does it."""
        for _ in range(steps):
            batch = next(self.batches)
            ids = [torch.from_numpy(i) for i in batch.ids]
            self.optimizer.zero_grad()
            logits = self.model(torch.from_numpy(batch.dense), torch.arange(len(batch)), ids)
            loss = self.loss(logits, torch.from_numpy(batch.labels))
            loss.backward()
            self.optimizer.step()


def _readers(report: Report) -> None:
    samples, rounds = (100_000, 3) if report.quick else (500_000, 7)
    rows = capped_rows("kaggle", MAX_ROWS)
    synthetic = Synthetic(samples=samples, batch_size=BATCH, table_rows=rows)
    with tempfile.TemporaryDirectory() as folder:
        plain, zipped = Path(folder) / "day.tsv", Path(folder) / "day.tsv.gz"
        text = criteo_text(synthetic, 20_000) * (samples // 20_000)
        plain.write_bytes(text)
        zipped.write_bytes(gzip.compress(text, compresslevel=6))

        def speed(reader: Reader) -> float:
            return samples / stopwatch(lambda: sum(len(batch) for batch in reader))

        def criteo(path: Path) -> Criteo:
            return Criteo(path, batch_size=BATCH, table_rows=rows, part="all")

        sides = {
            "synthetic": lambda: speed(synthetic),
            "criteo": lambda: speed(criteo(plain)),
            "criteo_gzip": lambda: speed(criteo(zipped)),
        }
        interleave(sides, 1)
        speeds = interleave(sides, rounds)
    report.raw["data"] = speeds
    for name, values in speeds.items():
        report.figure(f"data.{name}.rows_per_second", Spread.of(values))


def criteo_text(reader: Synthetic, samples: int) -> bytes:
    """The reader's first samples in Criteo's TSV format, about as long a line as the real ones."""
    lines: list[str] = []
    for batch in reader:
        counts = (batch.dense * 40).astype(int)
        for s in range(len(batch)):
            ids = "\t".join(f"{(int(column[s]) * 2654435761) & 0xFFFFFFFF:08x}" for column in batch.ids)
            lines.append(f"{int(batch.labels[s])}\t" + "\t".join(map(str, counts[s])) + "\t" + ids + "\n")
            if len(lines) == samples:
                return "".join(lines).encode()
    return "".join(lines).encode()
