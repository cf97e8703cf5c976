"""When training goes on after a server's death, and when redundancy is back."""

from __future__ import annotations

from holdfast.cluster.protocol.messages import WorkerMark
from holdfast.cluster.supervisor.recovery_log import Recoveries


def marks(*sequences: int) -> tuple[WorkerMark, ...]:
    return tuple(WorkerMark(slot, sequence=sequence) for slot, sequence in enumerate(sequences))


def test_training_has_resumed_when_every_worker_at_work_pushes_something_new() -> None:
    recoveries = Recoveries()
    recoveries.lose(1, 10.0)
    assert not recoveries.has_resumed(1, marks(9, 9), [True, True])
    recoveries.start(1, [marks(5, 7), marks(6, 7)])
    assert not recoveries.has_resumed(1, marks(4, 7), [True, True])
    assert not recoveries.has_resumed(1, marks(6, 8), [True, True]), "others have 6 already"
    assert not recoveries.has_resumed(1, marks(6, 8), [False, False])
    assert recoveries.has_resumed(1, marks(6, 8), [False, True]), "the other one is done"
    assert not recoveries.has_resumed(1, marks(9, 9), [True, True]), "said once"


def test_redundancy_is_restored_when_all_is_there() -> None:
    recoveries = Recoveries()
    assert not recoveries.is_restored(sound=True, lacking=False)
    recoveries.lose(1, 10.0)
    recoveries.lose(2, 11.0)
    assert not recoveries.is_restored(sound=False, lacking=True)
    assert (recoveries.degraded, recoveries.since) == (True, 10.0)
    assert recoveries.is_restored(sound=True, lacking=False)
    assert not recoveries.degraded
    assert not recoveries.is_restored(sound=True, lacking=False), "said once"
    # A supervisor that came back, or a job from a checkpoint: since when, nobody knows.
    assert not recoveries.is_restored(sound=False, lacking=True)
    assert (recoveries.degraded, recoveries.since) == (True, None)
    assert recoveries.is_restored(sound=True, lacking=False)
