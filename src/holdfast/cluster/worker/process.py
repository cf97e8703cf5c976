"""The process of a worker: it reads batches, computes with pulled rows, and pushes gradients.

``WorkerProcess.run`` is the main path. One thread computes; meanwhile another communicates with servers and
supervisor: it processes answers, pulls rows of the next batch, and sends beats.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from holdfast.cluster.protocol.batches import Stream
from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Evaluation, Figures, Position, PulledRows, View, WorkerInView
from holdfast.cluster.runtime.loop import (
    TICK_SECONDS,
    connect_servers,
    follow_supervisor,
    memory_bytes,
    open_transport,
)
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.cluster.worker.calls import Floats, RowSpread, empty_spread, spread_by
from holdfast.cluster.worker.faults import Acknowledged, Faults
from holdfast.cluster.worker.machine import Item, Worker
from holdfast.cluster.worker.model import WorkerModel
from holdfast.coding.placement import Placement
from holdfast.data.reader import Batch
from holdfast.errors import DataError, HoldfastError, TrainingDiverged
from holdfast.models.recommender import table_dims
from holdfast.tables.lookup import Placed, Placer
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.training.config import Config
from holdfast.training.metrics import auc, log_loss
from holdfast.training.networks import build_network
from holdfast.training.readers import build_readers

_SMOOTHING = 0.1


def run(assignment: Assignment) -> None:
    """Run a worker until the job ends or another process replaces it."""
    with open_transport(assignment, listens=False) as transport:
        WorkerProcess(assignment, transport).run()


def prepare() -> None:
    """Compile the loops of a lookup."""
    table = GroupPlan(
        name="few", dim=1, tables=(TablePlan("few", 3),), optimizer=OptimizerPlan(name="sgd", lr=0.0)
    )
    placed = Placer(table, Placement(1)).place([np.arange(3)])
    placed.sum_gradients(placed.gather(np.zeros((3, 1), np.float32)))


class _Talk(threading.Thread):
    """The communication thread. Hold ``lock`` to access the machine."""

    def __init__(
        self, machine: Worker, transport: ZmqTransport, faults: Faults, acknowledged: Acknowledged
    ) -> None:
        super().__init__(name="talk", daemon=True)
        self.lock = threading.Condition()
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self._machine = machine
        self._transport = transport
        self._faults = faults
        self._acknowledged = acknowledged
        self._stopping = False

    def run(self) -> None:
        """Run until ``stop``. An error ends the process, as it would otherwise go unnoticed."""
        try:
            self._run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _run(self) -> None:
        next_tick = 0.0
        connected_by: View | None = None
        while not self._stopping:
            envelopes = self._transport.poll(max(0.0, next_tick - time.monotonic()))
            now = time.monotonic()
            with self.lock:
                self._machine.figures = self._measured()
                for envelope in envelopes:
                    self._receive(envelope, now)
                if now >= next_tick:
                    next_tick = now + TICK_SECONDS
                    self._machine.tick(now)
                outgoing = self._machine.outbox[:]
                self._machine.outbox.clear()
                view = self._machine.view
                if envelopes:
                    self.lock.notify_all()
            follow_supervisor(self._transport)
            if view is not connected_by:
                connected_by = view
                connect_servers(self._transport, view, range(self._machine.plan.servers))
            for envelope in outgoing:
                self._faults.before(envelope.message)
                self._transport.send(envelope)
                self._faults.after(envelope.message)

    def _receive(self, envelope: Envelope, now: float) -> None:
        started, before = time.thread_time(), self._machine.applied
        self._machine.receive(envelope, now)
        part = "pull" if isinstance(envelope.message, PulledRows) else "push"
        self.cpu[part] += time.thread_time() - started
        if self._machine.applied != before:
            self._faults.reach("pushed", self._machine.applied)
        self._acknowledged.note(self._machine.sequence, self._machine.batch)

    def _measured(self) -> Figures:
        """The machine's figures plus the transport's counters."""
        counters = self._transport.counters
        return replace(
            self._machine.figures,
            bytes_in=counters.received_bytes,
            bytes_out=counters.sent_bytes,
            dropped=self._machine.admission.dropped + counters.dropped,
        )

    def wake(self) -> None:
        """Wake the thread: there is something to send."""
        self._transport.wake()

    def stop(self) -> None:
        """Send all messages, and end the thread."""
        with self.lock:
            self._stopping = True
        self.wake()
        self.join()


class WorkerProcess:
    """Runs one worker: its threads, readers and model."""

    def __init__(self, assignment: Assignment, transport: ZmqTransport) -> None:
        self._plan = plan = assignment.plan
        self._me = assignment.me
        self._config = config = msgspec.convert(plan.training, Config)
        self._faults = Faults(assignment.faults)
        torch.set_num_threads(config.threads or 1)
        torch.manual_seed(config.seed)
        self._reader, self._test_reader = build_readers(config)
        network = build_network(config, self._reader)
        rows = self._reader.table_rows
        self._model = WorkerModel(network, rows, table_dims(network, len(rows)))
        self._initial = self._model.initial_network()
        *tables, placement = plan.placements
        self._placers = [Placer(group, at) for group, at in zip(plan.groups[:-1], tables, strict=True)]
        of_network = np.arange(plan.groups[-1].rows)
        self._network_spread, self._network_order = spread_by(
            placement.owner(of_network), placement.place(of_network), plan.servers
        )
        self._machine = Worker(assignment.me, plan, self._first_values)
        self._stream: Stream | None = None
        acknowledged = Acknowledged(assignment.chaos, assignment.me.slot)
        self._talk = _Talk(self._machine, transport, self._faults, acknowledged)
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._loss = float("nan")
        self._samples = self._steps = self._bad_test_lines = 0

    def run(self) -> None:
        """Train until all batches are done, then wait for the end of the job."""
        self._talk.start()
        try:
            self._train()
        except HoldfastError as error:
            self._fail(str(error))
        except Exception as error:
            traceback.print_exc()
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._talk.stop()

    def _train(self) -> None:
        machine, lock = self._machine, self._talk.lock
        batches: Iterator[tuple[Position, Batch]] | None = None
        while True:
            with lock:
                if machine.over:
                    return
                started, wants, test = machine.started, machine.wants_batch(), machine.test_due
            if started is not None and batches is None:
                batches = self._batches(started)
            if wants and batches is not None:
                self._feed(next(batches, None))
                continue
            if test:
                self._test(test)
                continue
            with lock:
                item = machine.take()
                if item is None:
                    lock.wait(TICK_SECONDS)
            if item is not None:
                self._step(item)

    def _batches(self, start: WorkerInView) -> Iterator[tuple[Position, Batch]]:
        """This worker's batches, after the last one that counts."""
        config, plan = self._config, self._plan
        resume = plan.resume
        done = resume.layouts if resume else ()
        self._stream = Stream(self._reader, self._me.slot, plan.workers, config.epochs, start.batch, done)
        if config.max_steps is None:
            return iter(self._stream)
        left = max(0, config.max_steps - (resume.steps if resume else 0))
        mine = len(range(self._me.slot, left, plan.workers))
        return itertools.islice(self._stream, max(0, mine - start.sequence))

    def _feed(self, found: tuple[Position, Batch] | None) -> None:
        started = time.thread_time()
        item = None
        if found is None:
            self._print_bad_lines()
        else:
            position, batch = found
            placed = self._place(batch)
            item = Item(position, self._spreads(placed), (batch, placed), len(batch))
        with self._talk.lock:
            self._machine.feed(item, time.monotonic())
        self._talk.wake()
        self._cpu["pull"] += time.thread_time() - started

    def _step(self, item: Item) -> None:
        started = time.thread_time()
        self._faults.reach("pulled", item.sequence)
        batch, placed = item.payload
        if len(batch) == 0:
            self._finish(item, None)
            return
        *pulled, network = item.rows
        self._load_network(network)
        loss, gradients, network_gradient = self._model.train(batch, placed, pulled)
        computed = time.thread_time()
        if not np.isfinite(loss):
            raise TrainingDiverged(
                f"the loss is {loss} at batch {item.position.index} of epoch {item.position.epoch}: "
                f"lower optimizer.lr (it is {self._config.optimizer.rate})"
            )
        self._faults.reach("computed", item.sequence)
        self._note(loss, len(batch))
        self._finish(item, [*gradients, network_gradient[self._network_order]])
        self._cpu["compute"] += computed - started
        self._cpu["push"] += time.thread_time() - computed

    def _finish(self, item: Item, gradients: list[Floats] | None) -> None:
        """Pass gradients on; None: the batch has no samples, so it counts and changes nothing."""
        if gradients is None:
            item.spreads = [empty_spread(self._plan.servers)] * len(self._plan.groups)
            gradients = [np.empty((0, group.dim), np.float32) for group in self._plan.groups]
        with self._talk.lock:
            self._machine.finish(gradients, time.monotonic())
            self._machine.figures = self._figures(self._machine.figures)
        self._talk.wake()

    def _test(self, number: int) -> None:
        """Compute AUC and log loss over the whole test part, while other workers may change rows."""
        logits: list[Floats] = []
        labels: list[Floats] = []
        reader = self._test_reader.split(0, 1)
        with torch.no_grad():
            for batch in reader:
                placed = self._place(batch)
                *pulled, network = self._pull(self._spreads(placed))
                self._load_network(network)
                logits.append(self._model.predict(batch, placed, pulled))
                labels.append(batch.labels)
        scores, truth = np.concatenate(logits), np.concatenate(labels)
        result = Evaluation(number, auc(scores, truth), log_loss(scores, truth), len(truth))
        self._bad_test_lines = int(getattr(reader, "bad_lines", 0))
        with self._talk.lock:
            self._machine.tested = result
            self._machine.figures = self._figures(self._machine.figures)
            self._machine.beat(time.monotonic())
        self._talk.wake()

    def _pull(self, spreads: list[RowSpread]) -> list[Floats]:
        with self._talk.lock:
            call = self._machine.calls.pull(spreads, time.monotonic())
            self._talk.wake()
            while not call.done:
                self._talk.lock.wait(TICK_SECONDS)
        return call.rows

    def _place(self, batch: Batch) -> list[Placed]:
        placed = []
        for placer, tables in zip(self._placers, self._model.groups, strict=True):
            offsets = None if batch.offsets is None else [batch.offsets[t] for t in tables]
            try:
                placed.append(placer.place([batch.ids[t] for t in tables], offsets))
            except ValueError as error:
                raise DataError(f"batch {batch.index}: {error}") from None
        return placed

    def _spreads(self, placed: list[Placed]) -> list[RowSpread]:
        return [*(RowSpread(p.places, p.starts) for p in placed), self._network_spread]

    def _load_network(self, values: Floats) -> None:
        ordered = np.empty_like(values)
        ordered[self._network_order] = values
        self._model.load_network(ordered)

    def _first_values(self, group: int) -> tuple[RowSpread, Floats]:
        assert group == len(self._plan.groups) - 1
        return self._network_spread, self._initial[self._network_order]

    def _note(self, loss: float, samples: int) -> None:
        smoothed = self._loss + _SMOOTHING * (loss - self._loss)
        self._loss = smoothed if np.isfinite(self._loss) else loss
        self._steps += 1
        self._samples += samples

    def _figures(self, before: Figures) -> Figures:
        cpu = {part: self._cpu[part] + self._talk.cpu[part] for part in ("pull", "compute", "push")}
        cpu["process"] = time.process_time()
        return replace(
            before,
            samples=self._samples,
            steps=self._steps,
            loss=self._loss,
            progress=self._stream.progress() if self._stream else 0.0,
            memory_bytes=memory_bytes(),
            cpu_seconds=tuple(sorted(cpu.items())),
            bad_lines=self._bad_test_lines + (self._stream.bad_lines if self._stream else 0),
        )

    def _print_bad_lines(self) -> None:
        """Print them to the worker's log: the job's result only counts them."""
        if self._stream is not None and self._stream.bad_lines:
            print(f"{self._stream.bad_lines:,} bad lines were skipped, the first of them:")
            print(*self._stream.first_bad, sep="\n")

    def _fail(self, error: str) -> None:
        with self._talk.lock:
            self._machine.error = error
            self._machine.beat(time.monotonic())
        self._talk.wake()
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            with self._talk.lock:
                if self._machine.over:
                    return
                self._talk.lock.wait(TICK_SECONDS)
