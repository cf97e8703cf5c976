"""The reference trainer. ``Trainer.run`` is the main path: steps, tests, events, a clean stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.data.reader import Batch, Reader
from holdfast.errors import ConfigError, TrainingDiverged
from holdfast.events import EventLog
from holdfast.models.recommender import Recommender, loss_function
from holdfast.training.config import Config
from holdfast.training.metrics import auc, digest, log_loss
from holdfast.training.networks import build_network
from holdfast.training.optimizers import build_optimizers
from holdfast.training.readers import build_readers, check_test_part


@dataclass(frozen=True, slots=True)
class Test:
    """How the model did on the test part after some step."""

    step: int
    auc: float
    log_loss: float
    samples: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; handed to the view every ``report_every`` steps and after each test."""

    step: int
    samples: int
    loss: float
    """Mean over the steps since the last report."""
    samples_per_second: float
    """Over the same steps; reading the data included, testing not."""
    fraction: float
    """Of the whole run, 0 to 1."""
    test: Test | None
    """The last test so far."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run ends with."""

    steps: int
    samples: int
    train_seconds: float
    """Without tests."""
    samples_per_second: float
    test: Test
    bad_lines: int
    """Lines of the data that were skipped, with the first few reasons; in each part, of its last pass."""
    first_bad_lines: list[str]
    weights: str
    """A checksum over all parameters' bits: equal for equal models."""
    interrupted: bool


def refuse_checkpoint(config: Config) -> None:
    """ConfigError if the configuration has a ``checkpoint`` section, which one process does not use."""
    if config.checkpoint is not None:
        raise ConfigError(
            "checkpoint is set, but only jobs are saved by it: set job.servers (--servers), or leave it out "
            "and use holdfast.Checkpointer in a program of your own"
        )


class Trainer:
    """Trains one model in one process.

    Args:
        config: what to train; ``load`` makes one.
        events: where figures go.
    """

    def __init__(self, config: Config, events: EventLog | None = None) -> None:
        refuse_checkpoint(config)
        self.config = config
        self.events = events or EventLog(None)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.train_reader, self.test_reader = build_readers(config)
        reader = self.train_reader
        network = build_network(config, reader)
        self.model = Recommender(network, reader.table_rows)
        self.optimizers = build_optimizers(config.optimizer, self.model)
        self.loss_function = loss_function(network)
        self.step = 0
        self.samples = 0
        self.train_seconds = 0.0
        self._epoch = 0
        self._skipped: dict[str, tuple[int, list[str]]] = {}
        self._batches = self._stream()

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Train to the end, or until ``stop_requested`` says so between two steps; then test.

        Raises TrainingDiverged when the loss is no longer a finite number, and DataError, before it begins,
        if there is nothing to test on.
        """
        config = self.config
        check_test_part(self.test_reader)
        test: Test | None = None
        interrupted = False
        self.events.emit("run_started", parameters=sum(p.numel() for p in self.model.parameters()))
        while not interrupted:
            report = self.advance(config.report_every, stop_requested)
            if report is None:
                break
            loss, speed = report
            if not math.isfinite(loss):
                raise TrainingDiverged(
                    f"the loss is {loss} at step {self.step}: "
                    f"lower optimizer.lr (it is {config.optimizer.rate})"
                )
            if config.test_every and self.step - (test.step if test else 0) >= config.test_every:
                test = self.test()
            progress = Progress(self.step, self.samples, loss, speed, self.fraction(), test)
            self.events.emit("progress", **asdict(progress))
            on_progress(progress)
            interrupted = stop_requested()
        if test is None or test.step != self.step:
            test = self.test(lambda: not interrupted and stop_requested())
        self._note_skipped("train", self.train_reader)
        result = Result(
            steps=self.step,
            samples=self.samples,
            train_seconds=self.train_seconds,
            samples_per_second=self.samples / self.train_seconds if self.train_seconds else 0.0,
            test=test,
            bad_lines=sum(count for count, _ in self._skipped.values()),
            first_bad_lines=[message for _, messages in self._skipped.values() for message in messages],
            weights=digest(self.model),
            interrupted=interrupted,
        )
        self.events.emit("run_finished", **asdict(result))
        return result

    def advance(
        self, steps: int, stop_requested: Callable[[], bool] = lambda: False
    ) -> tuple[float, float] | None:
        """Train up to this many steps; mean loss and samples/s over them, None at the end of the run."""
        started = time.perf_counter()
        first_sample = self.samples
        losses = torch.zeros(())
        done = 0
        while done < steps and self.step != self.config.max_steps:
            batch = next(self._batches, None)
            if batch is None:
                break
            losses += self.train_step(batch)
            done += 1
            self.step += 1
            self.samples += len(batch)
            if stop_requested():
                break
        seconds = time.perf_counter() - started
        self.train_seconds += seconds
        return (losses.item() / done, (self.samples - first_sample) / seconds) if done else None

    def train_step(self, batch: Batch) -> Tensor:
        """One update of every parameter that the batch touches; the loss before it."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss_function(self._logits(batch), torch.from_numpy(batch.labels))
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test(self, stop_requested: Callable[[], bool] = lambda: False) -> Test:
        """AUC and log loss over the whole test part; over what was read so far if asked to stop."""
        logits: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        reader = self.test_reader.split(0, 1)  # a pass of its own, whatever became of the last one
        self.model.eval()
        for batch in reader:
            logits.append(self._logits(batch).numpy())
            labels.append(batch.labels)
            if stop_requested():
                break
        self.model.train()
        self._note_skipped("test", reader)
        scores, truth = np.concatenate(logits), np.concatenate(labels)
        result = Test(self.step, auc(scores, truth), log_loss(scores, truth), len(truth))
        self.events.emit("test", **asdict(result))
        return result

    def fraction(self) -> float:
        """How much of the run is done, 0 to 1."""
        by_epochs = (self._epoch + self.train_reader.progress()) / self.config.epochs
        by_steps = self.step / self.config.max_steps if self.config.max_steps else 0.0
        return min(1.0, max(by_epochs, by_steps))

    def _note_skipped(self, part: str, reader: Reader) -> None:
        """Readers that can skip bad lines count them; others have none to report."""
        self._skipped[part] = getattr(reader, "bad_lines", 0), list(getattr(reader, "first_bad", []))

    def _logits(self, batch: Batch) -> Tensor:
        ids = [torch.from_numpy(i) for i in batch.ids]
        offsets = None if batch.offsets is None else [torch.from_numpy(o) for o in batch.offsets]
        logits: Tensor = self.model(torch.from_numpy(batch.dense), ids, offsets)
        return logits

    def _stream(self) -> Iterator[Batch]:
        for epoch in range(self.config.epochs):
            self._epoch = epoch
            yield from self.train_reader
        self._epoch = self.config.epochs
