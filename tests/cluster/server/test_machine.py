"""A server's process round its machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import (
    Commit,
    Install,
    Instant,
    Part,
    Peer,
    Position,
    Pull,
    PulledRows,
    Push,
    Pushed,
    ServerBeat,
    ServerInView,
    View,
    ViewNumber,
    WorkerInView,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.stripe_messages import ReadStripes, Recover
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.server.machine import Server
from holdfast.cluster.server.process import _warm_up
from holdfast.cluster.server.witness import Witness
from holdfast.kernels import coding, copies, update
from holdfast.kernels import rows as row_loops
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from tests.cluster.redundancy.harness import Servers, lanes_of, plan_of

PLACES = np.arange(5, dtype=np.uint32)
VALUES = np.ones((5, 12), np.float32)


def compiled() -> dict[str, int]:
    """For each loop of a server, for how many kinds of arguments it has been compiled."""
    loops = {**vars(update), **vars(row_loops), **vars(coding), **vars(copies)}
    return {name: len(loop.signatures) for name, loop in loops.items() if hasattr(loop, "signatures")}


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_nothing_is_compiled_once_the_job_runs(name: Any) -> None:
    """A server says nothing while it compiles: the supervisor would take it for dead."""
    optimizer = OptimizerPlan(name=name, lr=0.1)
    groups = tuple(
        GroupPlan(name=kind, dim=12, tables=(TablePlan("t", 5),), optimizer=optimizer, initial=kind)
        for kind in ("uniform", "installed")
    )
    plan = JobPlan(job="j", seed=1, groups=groups, servers=1, workers=1)
    _warm_up(plan.groups)
    server = Server(Peer("server", 0, 1), plan)
    servers = (ServerInView(0, 1, starts=True, since=ViewNumber(1)),)
    view = View(ViewNumber(1), "running", servers, (WorkerInView(0, 1, starts=True),))
    server.receive(Envelope(Peer("supervisor"), server.me, view), 0.0)
    server.outbox.clear()
    before = compiled()
    kinds: list[Callable[[Any], Any]] = [
        lambda a: a.tobytes(),
        lambda a: memoryview(bytearray(a.tobytes())),
        lambda a: a,
    ]
    worker = Peer("worker", 0, 1)
    parts = (Part(0, 5), Part(1, 5))
    for sequence, (places, values) in enumerate(itertools.product(kinds, kinds), 1):
        frames = [places(PLACES), values(VALUES)] * 2
        for message, sent in (
            (Install(parts), frames),
            (Pull(1, parts), frames[::2]),
            (Push(sequence, Position(0, sequence), 1, parts, stage=True, returns=1), frames),
            (Commit(sequence), []),
        ):
            server.receive(Envelope(worker, server.me, message, sent), 0.0)
    server.shards[0].write(np.arange(5), server.shards[0].read(np.arange(5)))  # as rows come back
    answers = [envelope.message for envelope in server.outbox]
    assert [type(answer) for answer in answers] == [PulledRows, Pushed, Pushed] * 9
    assert [answer.applied for answer in answers if isinstance(answer, Pushed)] == [False, True] * 9
    assert compiled() == before


def test_what_comes_before_the_start_is_answered_with_it() -> None:
    """A worker may hear sooner than a server that it starts; it would ask again only after a second."""
    group = GroupPlan(
        name="t", dim=12, tables=(TablePlan("t", 5),), optimizer=OptimizerPlan(name="sgd", lr=0.1)
    )
    plan = JobPlan(job="j", seed=1, groups=(group, group), servers=1, workers=1)
    server = Server(Peer("server", 0, 1), plan)
    worker = Peer("worker", 0, 1)
    parts = (Part(0, 5),)
    push = Push(1, Position(0, 0), 8, parts, stage=False)
    server.receive(Envelope(worker, server.me, Pull(7, parts), [PLACES]), 0.0)
    server.receive(Envelope(worker, server.me, push, [PLACES, VALUES]), 0.1)
    assert not [e for e in server.outbox if e.target == worker]
    servers = (ServerInView(0, 1, starts=True, since=ViewNumber(1)),)
    view = View(ViewNumber(1), "running", servers, (WorkerInView(0, 1, starts=True),))
    server.receive(Envelope(Peer("supervisor"), server.me, view), 0.2)
    assert [type(e.message) for e in server.outbox if e.target == worker] == [PulledRows, Pushed]
    assert server.pushes == 1


def test_a_pull_that_overtakes_a_commit_waits_for_it() -> None:
    """A worker asks for rows as soon as a push is certain: what it gets contains that push."""
    group = GroupPlan(
        name="t", dim=12, tables=(TablePlan("t", 5),), optimizer=OptimizerPlan(name="sgd", lr=1.0)
    )
    plan = JobPlan(job="j", seed=1, groups=(group,), servers=1, workers=1)
    server = Server(Peer("server", 0, 1), plan)
    servers = (ServerInView(0, 1, starts=True, since=ViewNumber(1)),)
    view = View(ViewNumber(1), "running", servers, (WorkerInView(0, 1, starts=True),))
    server.receive(Envelope(Peer("supervisor"), server.me, view), 0.0)
    worker, parts = Peer("worker", 0, 1), (Part(0, 5),)

    def answers(message: Message, *frames: Frame) -> list[tuple[Message, list[Any]]]:
        server.outbox.clear()
        server.receive(Envelope(worker, server.me, message, frames), 0.0)
        return [
            (e.message, [np.frombuffer(frame, np.float32) for frame in e.frames])
            for e in server.outbox
            if e.target == worker
        ]

    before = server.shards[0].pull(PLACES)
    push = Push(1, Position(0, 0), 8, parts, stage=True, returns=0)
    ((staged, (preview,)),) = answers(push, PLACES, VALUES)
    assert staged == Pushed(1, applied=False, rows=5)
    assert np.array_equal(server.shards[0].pull(PLACES), before), "staged only"
    for _ in range(2):  # asked again: answered once
        assert answers(Pull(7, parts, after=1), PLACES) == []
    assert len(answers(Pull(8, parts), PLACES)) == 1
    (rows, (pulled,)), (pushed, _) = answers(Commit(1))
    assert rows == PulledRows(7, parts)
    assert isinstance(pushed, Pushed)
    assert pushed.applied
    assert np.array_equal(pulled, (before - 1).ravel())
    assert np.array_equal(pulled, preview)
    assert [message for message, _ in answers(Commit(1))] == [pushed]
    assert answers(Pull(9, parts, after=2), PLACES) == []
    assert server._waiting._for_push
    replaced = View(ViewNumber(2), "running", servers, (WorkerInView(0, 2, starts=True, sequence=1),))
    server.receive(Envelope(Peer("supervisor"), server.me, replaced), 0.0)
    assert not server._waiting._for_push, "nobody waits any more"


@pytest.mark.parametrize(("k", "r"), [(2, 1), (2, 2), (3, 3)])
def test_nothing_is_compiled_while_servers_recover(k: int, r: int) -> None:
    plan = plan_of(k=k, r=r)
    _warm_up(plan.groups, (k, r), (1, r))
    servers = Servers(plan)
    servers[0].push([0])  # whose arrays are not those of messages
    before = compiled()
    for node in servers:
        node.push([0, 1, 3])
        node.flush()
        node.push([1, 2])
    servers.deliver()
    for slot in range(r):
        servers.fence(slot)
    for slot in range(r):
        servers.settle(slot)
    for slot in range(r):
        servers.start(slot)
    servers.run(10.0)
    assert not any(node.recovery is not None and node.recovery.left for node in servers)
    assert not any(node.stripes.lacking() for node in servers)
    assert compiled() == before


def replacement(*, rounds: bool) -> Server:
    """A server that has just taken over its slot, without rows."""
    plan = plan_of(k=2, r=1, workers=2)
    server = Server(Peer("server", 0, 2), plan, rounds=rounds)
    until = Instant(installed=plan.first_installed)
    servers = (
        ServerInView(0, 2, starts=True, since=ViewNumber(2), counts_until=until),
        *(ServerInView(slot, 1, starts=True, since=ViewNumber(1)) for slot in (1, 2)),
    )
    workers = tuple(WorkerInView(slot, 1, starts=True) for slot in range(2))
    server.receive(
        Envelope(Peer("supervisor"), server.me, View(ViewNumber(2), "running", servers, workers)), 0.0
    )
    server.outbox.clear()
    return server


def pull(server: Server, worker: int, places: list[int]) -> list[list[int]]:
    """The blocks that the server asks others for because a worker pulls rows."""
    message = Pull(1, (Part(0, len(places)),))
    server.receive(
        Envelope(Peer("worker", worker, 1), server.me, message, [np.array(places, np.uint32)]), 1.0
    )
    return asked(server)


def asked(server: Server) -> list[list[int]]:
    blocks = [np.asarray(e.frames[0]).tolist() for e in server.outbox if isinstance(e.message, Recover)]
    server.outbox.clear()
    return blocks


def test_what_messages_of_a_round_wait_for_is_asked_for_together() -> None:
    server = replacement(rounds=True)
    assert pull(server, 0, [0, 4]) == []
    assert pull(server, 1, [2, 4, 5]) == []
    server.end_round(1.0)
    assert asked(server) == [[0, 1, 2], [2]]
    server = replacement(rounds=False)
    assert pull(server, 0, [0, 4]) == [[0, 2]]
    assert pull(server, 1, [2, 4, 5]) == [[1], [2]]


def test_requests_of_workers_throttle_recovery() -> None:
    server = replacement(rounds=False)
    share = server.plan.lanes.share
    assert share == 1
    server._throttle._share = 0.2
    assert server._throttle.share(1.0) == 1
    pull(server, 0, [0])
    assert server._throttle.share(1.0) == 0.2
    assert server._throttle.share(2.0) == 1


def job(plan: JobPlan, replaced: int | None = None, **options: Any) -> dict[Peer, Server]:
    """All servers of a job that runs; the one that is replaced has no rows."""
    entries = []
    for slot in range(plan.servers):
        again = slot == replaced
        until = Instant(installed=plan.first_installed) if again else None
        number = ViewNumber(2 if again else 1)
        entries.append(ServerInView(slot, 2 if again else 1, starts=True, since=number, counts_until=until))
    workers = tuple(WorkerInView(slot, 1, starts=True) for slot in range(plan.workers))
    view = View(ViewNumber(2), "running", tuple(entries), workers)
    servers = {}
    for entry in entries:
        me = Peer("server", entry.slot, entry.incarnation)
        server = servers[me] = Server(me, plan, **options)
        server.receive(Envelope(Peer("supervisor"), me, view), 0.0)
    return servers


def run(servers: dict[Peer, Server], seconds: float) -> list[ServerBeat]:
    """Let time pass and messages between servers arrive; the beats of the replaced one."""
    beats = []
    now = 0.0
    while now < seconds:
        now += 0.1
        for server in servers.values():
            server.tick(now)
        while mail := [envelope for server in servers.values() for envelope in take(server)]:
            for envelope in mail:
                if envelope.target in servers:
                    servers[envelope.target].receive(envelope, now)
                elif isinstance(envelope.message, ServerBeat) and envelope.source.incarnation > 1:
                    beats.append(envelope.message)
    return beats


def take(server: Server) -> list[Envelope]:
    sent = list(server.outbox)
    server.outbox.clear()
    return sent


def test_beats_say_how_much_is_recovered() -> None:
    plan = plan_of(k=2, r=1, lanes=lanes_of(chunk_rows=4))
    servers = job(plan, replaced=0)
    beats = [beat.redundancy for beat in run(servers, 5.0)]
    table, network = (shard.rows for shard in servers[Peer("server", 0, 2)].shards)
    assert (beats[0].rows, beats[0].recovered) == (table + network, 0)
    assert (beats[-1].rows, beats[-1].recovered) == (network, table), "the network comes from a worker"
    assert all(beat.rows + beat.recovered == table + network for beat in beats)


def test_rows_are_asked_for_before_parities() -> None:
    """Workers wait for rows; while processors are scarce, there may be time for one of both only."""
    server = replacement(rounds=False)
    server.tick(0.1)
    kinds = [type(e.message) for e in server.outbox if isinstance(e.message, Recover | ReadStripes)]
    assert kinds.index(ReadStripes) > 0
    assert kinds == sorted(kinds, key=[Recover, ReadStripes].index)


def test_fewer_parities_are_rebuilt_at_once_while_rows_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = replacement(rounds=False)
    assert server.stripes is not None
    assert server.recovery is not None
    said: list[bool] = []
    monkeypatch.setattr(server.stripes, "rebuild", lambda now, *, beside: said.append(beside))
    server.tick(0.1)
    for group in list(server.recovery._missing):
        server.recovery.leave_out(group)
    assert server.recovery.left == 0
    server.tick(0.2)
    assert said == [True, False]


def test_parities_are_not_compared_before_all_rows_are_here() -> None:
    plan = plan_of(k=2, r=1, lanes=lanes_of(scrub_seconds=0.1))
    servers = job(plan, replaced=0)
    replaced = servers[Peer("server", 0, 2)]
    compared: list[int] = []
    assert replaced.stripes is not None
    assert replaced.recovery is not None
    scrub = replaced.stripes.scrub

    def note(now: float) -> None:
        assert replaced.recovery is not None
        compared.append(replaced.recovery.left)
        scrub(now)

    replaced.stripes.scrub = note  # type: ignore[method-assign]
    replaced.tick(0.05)
    assert replaced.recovery.left
    assert compared == []
    run(servers, 3.0)
    assert set(compared) == {0}
    assert replaced.stripes.scrubbed


def test_a_witness_knows_the_flush_of_each_change(tmp_path: Path) -> None:
    plan = plan_of(k=2, r=1)
    me = Peer("server", 0, 1)
    witness = Witness(tmp_path, me)
    server = Server(me, plan, witness=witness)
    assert witness.replicator is server.replicator
    view = View(
        ViewNumber(1),
        "running",
        tuple(ServerInView(slot, 1, starts=True, since=ViewNumber(1)) for slot in range(3)),
        (WorkerInView(0, 1, starts=True),),
    )
    server.receive(Envelope(Peer("supervisor"), me, view), 0.0)
    places, gradients = np.array([3, 1], np.uint32), np.ones((2, 2), np.float32)
    for sequence, row in enumerate(places, 1):
        push = Push(sequence, Position(0, sequence), 1, (Part(0, 1),))
        server.receive(Envelope(Peer("worker", 0, 1), me, push, [row.reshape(1), gradients[:1]]), 0.0)
        assert server.replicator is not None
        server.replicator.flush(0.0)
    ages = np.fromfile(tmp_path / "rows" / "server-0-1.group-0.ages", np.uint32)
    assert {int(at): int(ages[at]) for at in np.flatnonzero(ages)} == {3: 1, 1: 2}


def test_pushes_that_the_sender_of_a_copy_cannot_resend_are_lost() -> None:
    """A copy of the network says it itself: nobody asks for it again."""
    plan = msgspec.structs.replace(plan_of(k=2, r=1), dense="workers")
    server = Server(Peer("server", 0, 2), plan)
    until = Instant(marks=(WorkerMark(0, 1, sequence=5),), installed=plan.first_installed)
    servers = (
        ServerInView(0, 2, starts=True, since=ViewNumber(2), counts_until=until),
        *(ServerInView(slot, 1, starts=True, since=ViewNumber(1)) for slot in (1, 2)),
    )
    view = View(ViewNumber(2), "running", servers, (WorkerInView(0, 1, starts=True, sequence=5),))
    server.receive(Envelope(Peer("supervisor"), server.me, view), 0.0)
    rows = server.shards[-1].rows
    copy = Install((Part(1, rows),), marks=(2,), kept=4)
    frames = [np.arange(rows, dtype=np.uint32), np.ones((rows, 1), np.float32)]
    server.receive(Envelope(Peer("worker", 0, 1), server.me, copy, frames), 0.0)
    assert server.shards[-1].installed
    assert server.contents is not None
    assert (server.redundancy().updates_lost, server.contents.marks) == (2, [4]), "push 5 comes again"
