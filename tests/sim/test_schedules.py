"""Whole jobs on virtual time under failures (holes 7, 8, 10, 11, 14, 15, 18, 19, 21)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from holdfast.cluster.protocol.messages import WorkerInView
from holdfast.cluster.server.ledger import PushLedger
from holdfast.cluster.supervisor import members
from holdfast.cluster.worker.machine import Worker
from holdfast.sim import storage
from holdfast.sim.schedule import KINDS, plan_of, simulate

SEEDS = range(500)


def test_every_batch_counts_once_whatever_fails() -> None:
    """Invariants 3, 5 and 6 of the protocol; 4 where pushes are atomic, checked in every cut."""
    faults: Counter[str] = Counter()
    cuts = 0
    for seed in SEEDS:
        outcome = simulate(seed, batches=24, faults=6)
        assert outcome.finished, (seed, outcome.violations)
        assert outcome.violations == [], seed
        faults += outcome.faults
        cuts += outcome.cuts
    assert all(faults[kind] > 60 for kind in KINDS), faults
    assert cuts > 100


@pytest.mark.soak
def test_thousands_of_schedules() -> None:
    for seed in range(10_000):
        outcome = simulate(seed)
        assert outcome.finished, (seed, outcome.violations)
        assert outcome.violations == [], seed


def test_a_seed_replays_its_schedule_exactly() -> None:
    one, other = simulate(7), simulate(7)
    assert (one.virtual_seconds, one.messages, one.faults) == (
        other.virtual_seconds,
        other.messages,
        other.faults,
    )
    assert simulate(8).virtual_seconds != one.virtual_seconds


def test_shapes_of_jobs_differ() -> None:
    shapes = {(p.servers, p.workers, p.atomic, p.staleness) for p in map(plan_of, range(24))}
    assert len(shapes) >= 12


def first_caught(seeds: Sequence[int]) -> int | None:
    """The first seed that shows something wrong."""
    for seed in seeds:
        try:
            if simulate(seed).violations:
                return seed
        except AssertionError:
            return seed
    return None


def no_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that comes again is applied again."""
    original = PushLedger.push

    def push(self: Any, source: Any, sequence: int, batch: Any, gradients: Any, **options: Any) -> Any:
        account = self._accounts[source.slot]
        if sequence == account.sequence and not options["stage"]:
            account.sequence -= 1
        return original(self, source, sequence, batch, gradients, **options)

    monkeypatch.setattr(PushLedger, "push", push)


def zombies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes what a replaced worker sends."""
    original = PushLedger._account

    def account(self: Any, source: Any, sequence: int) -> Any:
        found = original(self, source, sequence)
        return found if found is not None and not hasattr(found, "reason") else self._accounts[source.slot]

    monkeypatch.setattr(PushLedger, "_account", account)


def _with_settle(worker: WorkerInView, settle: int) -> WorkerInView:
    return msgspec.structs.replace(worker, settle=settle)


def staged_pushes_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead worker had staged anywhere is applied there, though no server was told to commit."""
    original = PushLedger.adopt

    def adopt(self: Any, workers: Sequence[WorkerInView]) -> None:
        original(self, [_with_settle(w, w.settle + 1 if w.settle >= 0 else -1) for w in workers])

    monkeypatch.setattr(PushLedger, "adopt", adopt)


def workers_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new incarnation starts from what servers said before they refused the old one."""

    def follows(self: Any, number: Any) -> bool:
        return self.beat is not None

    monkeypatch.setattr(members.Member, "follows", follows)


def half_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker holds although its predecessor left a batch at some servers only."""
    monkeypatch.setattr(Worker, "_owes", lambda self: False)


def cuts_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers copy while workers are in the middle of a batch."""

    def holds(self: Any, since: Any) -> bool:
        return self.beat is not None

    monkeypatch.setattr(members.WorkerMember, "holds", holds)


def epochs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that comes back does not know which incarnations there have been."""

    def load(self: Any) -> None:
        self.state = None

    monkeypatch.setattr(storage.MemoryStorage, "load", load)


def the_next_push_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker pushes again before all servers have applied the last one."""
    original = Worker._go_on

    def go_on(self: Any, now: float) -> None:
        if self._push is not None and len(self._push.questions) <= 1:
            self.calls.send_commits()
            self._push.questions.clear()
        original(self, now)

    monkeypatch.setattr(Worker, "_go_on", go_on)


# Each with a seed that shows it, so that it need not be searched for as long as nothing changes.
MUTATIONS = {
    no_repetitions: 1,
    zombies_count: 458,
    staged_pushes_all_count: 158,
    workers_start_at_once: 3,
    half_batches_are_cut: 7,
    cuts_do_not_wait: 0,
    epochs_are_forgotten: 5,
    the_next_push_does_not_wait: 2,
}


@pytest.mark.parametrize("take_out", MUTATIONS, ids=lambda m: m.__name__)
def test_each_guard_is_needed(take_out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a guard taken out, some schedule goes wrong: the simulation can see it."""
    take_out(monkeypatch)
    assert first_caught([MUTATIONS[take_out], *range(400)]) is not None
