"""Whole jobs on virtual time whose servers die and come back (holes 7 to 11, 13, 15, 16, 18 to 20, 22)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import Peer, View
from holdfast.cluster.protocol.plan import LaneOptions, Resume
from holdfast.cluster.protocol.stripe_messages import Differences, LaneMessage
from holdfast.cluster.redundancy import lanes, parity
from holdfast.cluster.redundancy.lanes import OutLane
from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.cluster.redundancy.stripes import Stripes
from holdfast.cluster.runtime.transport.memory import Weather
from holdfast.cluster.server.ledger import PushLedger
from holdfast.cluster.server.machine import Server
from holdfast.cluster.supervisor import machine, members
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.cluster.supervisor.starts import Starts
from holdfast.cluster.worker import calls
from holdfast.kernels.memory import read_only
from holdfast.sim.cluster import Cluster, counting_plan
from holdfast.sim.schedule import SERVER_KINDS, protected_plan_of, simulate
from holdfast.tables import changes

SEEDS = range(64)
WEATHER = Weather(loss=0.02, duplication=0.05, delay_seconds=0.003)


def test_nothing_is_lost_whatever_fails() -> None:
    """Invariants 1 to 7 of the protocol: it also ends, with a typed error only if it may."""
    faults: Counter[str] = Counter()
    given_up = 0
    for seed in SEEDS:
        outcome = simulate(seed, protected=True)
        assert outcome.violations == [], seed
        faults += outcome.faults
        given_up += not outcome.finished
    assert all(faults[kind] > 5 for kind in SERVER_KINDS), faults
    assert faults["too_many_servers_kill"]
    assert 0 < given_up < len(SEEDS) / 4


def test_shapes_of_jobs_differ() -> None:
    plans = [protected_plan_of(seed) for seed in SEEDS]
    assert {(p.k, p.r) for p in plans} == {(2, 1), (4, 1), (1, 1), (2, 2), (3, 1), (3, 2), (1, 2), (2, 3)}
    assert {p.servers - p.k - p.r for p in plans} == {0, 1, 3}
    assert {p.atomic for p in plans} == {True, False}


def run_split(monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]) -> list[str]:
    """What goes wrong if messages to parity servers may have only a few bytes."""
    sent: list[int] = []
    send = lanes.OutLane.send

    def measured(self: Any, message: Any, frames: Any, *times: float) -> Any:
        if isinstance(message, Differences) and message.more:
            sent.append(sum(frame.nbytes for frame in frames))
        return send(self, message, frames, *times)

    monkeypatch.setattr(lanes.OutLane, "send", measured)
    wrong = []
    for seed in seeds:
        plan = protected_plan_of(seed)
        plan = replace(plan, lanes=replace(plan.lanes, most_bytes=24))
        outcome = simulate(seed, cluster=Cluster(plan, seed, 60, WEATHER), faults=16)
        wrong += outcome.violations
    assert len(sent) > 100
    assert max(sent) <= 24
    return wrong


def test_batches_that_are_too_large_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_split(monkeypatch, range(8)) == []


def test_parity_servers_are_told_when_many_bytes_have_changed() -> None:
    """However few pushes that takes, and however little time."""
    options = LaneOptions(pushes=1000, seconds=1000.0, idle_seconds=1000.0, window=1000, most_bytes=24)
    plan = counting_plan(servers=3, workers=1, atomic=False, k=2, r=1, lanes=options)
    cluster = Cluster(plan, 1, 100)
    assert cluster.network.run(lambda: cluster.supervisor.steps() >= 60, 60)
    told = [server.replicator for server in cluster.servers.values() if server.replicator is not None]
    assert len(told) == 3
    assert all(protection.stable > 5 for protection in told)


def test_parts_of_a_batch_must_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out: each message is a batch by itself."""

    def each(self: Any, source: Peer, message: Any, frames: Any) -> None:
        take(
            self,
            source,
            replace(message, more=False) if isinstance(message, Differences) else message,
            frames,
        )

    take = Replicator.take
    monkeypatch.setattr(Replicator, "take", each)
    assert run_split(monkeypatch, range(8)) != []


def first_caught(seeds: Sequence[int]) -> int | None:
    """The first seed that shows something wrong."""
    for seed in seeds:
        try:
            outcome = simulate(seed, protected=True, most_seconds=60.0)
        except (AssertionError, LookupError):
            return seed
        if outcome.violations:
            return seed
    return None


@pytest.mark.parametrize("r", [1, 2, 3])
def test_scrubbing_finds_bits_that_flipped_while_training_runs(r: int) -> None:
    """Hole 20: wrong parities are found; with more than one a stripe, the others outvote it."""
    plan = counting_plan(servers=3 + r, workers=2, atomic=False, k=3, r=r)
    cluster = Cluster(plan, 5, 400)
    network = cluster.network
    flipped = []

    def flip() -> None:
        for slot in (0, 2):
            protection = cluster.servers[slot].replicator
            assert protection is not None
            protection.parities[0].records[1, 0] ^= 1 << 7
            flipped.append(slot)

    network.at(2.0, flip)
    assert network.run(lambda: cluster.supervisor.view.phase == "stopping", 60.0)
    network.run(lambda: False, 2.0)
    redundancy = [cluster.servers[slot].redundancy() for slot in range(plan.servers)]
    assert [slot for slot, said in enumerate(redundancy) if said.wrong] == flipped == [0, 2]
    assert sum(said.repaired for said in redundancy) == (0 if r == 1 else 2)
    assert len(cluster.violations()) == (2 if r == 1 else 0)
    assert [e for e, _ in cluster.supervisor.events].count("parities_wrong") >= 2


# Each takes one guard out. What it says is what then happens.


def nothing_is_undone(patch: pytest.MonkeyPatch) -> None:
    """Parity servers of a dead owner keep what the others have not got."""
    original = lanes.InLane.undo

    def undo(self: Any, until: Any) -> list[Any]:
        original(self, until)
        return []

    patch.setattr(lanes.InLane, "undo", undo)


def the_most_counts(patch: pytest.MonkeyPatch) -> None:
    """The furthest parity server decides how much of a dead owner's work counts."""
    original = machine.what_counts

    def most(plan: Any, dead: Any, servers: Any) -> Any:
        beats = [server.beat for server in servers if server is not dead and server.beat is not None]
        states = [state for beat in beats for state in beat.lanes if state.slot == dead.slot]
        furthest = max((s.now for s in states), key=lambda instant: instant.flush, default=None)
        return furthest or original(plan, dead, servers)

    patch.setattr(machine, "what_counts", most)


def kept_at_once(patch: pytest.MonkeyPatch) -> None:
    """A push is said to be kept before parity servers have it."""

    def kept(self: Any, worker: int) -> int:
        return int(self._marks()[worker].sequence)

    patch.setattr(Replicator, "kept", kept)


def lanes_repeat(patch: pytest.MonkeyPatch) -> None:
    """A change that arrives twice is applied twice."""
    original = Replicator.take

    def take(self: Any, source: Any, message: Any, frames: Any) -> None:
        lane = self._in.get(source.slot)
        if lane is not None and message.number == lane.number:
            lane.number -= 1
        original(self, source, message, frames)

    patch.setattr(Replicator, "take", take)


def lanes_have_gaps(patch: pytest.MonkeyPatch) -> None:
    """A change that was lost is not missed."""
    original = Replicator.take

    def take(self: Any, source: Any, message: Any, frames: Any) -> None:
        lane = self._in.get(source.slot)
        if lane is not None and message.number > lane.number:
            lane.number = message.number - 1
        original(self, source, message, frames)

    patch.setattr(Replicator, "take", take)


def values_run_ahead(patch: pytest.MonkeyPatch) -> None:
    """A record is read as it is, not as parity servers know it."""
    patch.setattr(changes.Changes, "told", lambda self, places: self._records[places])


def sums_stand_still(patch: pytest.MonkeyPatch) -> None:
    """Changes go to parities, but not to sums that contain the member."""
    patch.setattr(Stripes, "note_change", lambda self, part, blocks, differences: None)


def rows_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A row is used before it has come back."""
    patch.setattr(Server, "_waits", lambda self, *arguments: False)


def replacements_forget_pushes(patch: pytest.MonkeyPatch) -> None:
    """A replacement does not know what its predecessor had applied."""
    patch.setattr(PushLedger, "restore", lambda self, marks: None)


def workers_forget_pushes(patch: pytest.MonkeyPatch) -> None:
    """A worker does not push again to a replacement what was not kept."""
    original = calls.Calls.adopt

    def adopt(self: Any, servers: Any) -> None:
        kept, self._pushes = self._pushes, type(self._pushes)(c for c in self._pushes if not c.done)
        original(self, servers)
        self._pushes = kept

    patch.setattr(calls.Calls, "adopt", adopt)


def workers_start_too_early(patch: pytest.MonkeyPatch) -> None:
    """A dead worker's successor goes on behind pushes that are not kept."""
    original = Server.marks

    def marks(self: Any) -> Any:
        return tuple(replace(mark, kept=mark.sequence) for mark in original(self))

    patch.setattr(Server, "marks", marks)


def servers_start_too_early(patch: pytest.MonkeyPatch) -> None:
    """A replacement starts before the others refuse the old one."""
    patch.setattr(Supervisor, "_others_follow", lambda self, server: True)


def new_lanes_are_trusted(patch: pytest.MonkeyPatch) -> None:
    """A parity server that was replaced says that its owner had done nothing."""
    original = lanes.InLane.__init__

    def init(self: Any, source: Any, known: bool, *rest: Any, **more: Any) -> None:
        original(self, source, True, *rest, **more)

    patch.setattr(lanes.InLane, "__init__", init)


def first_values_come_late(patch: pytest.MonkeyPatch) -> None:
    """Rows are updated before they have their first values."""
    original = Server._push

    def push(self: Any, envelope: Any, message: Any) -> Any:
        for shard in self.shards:
            before, shard.installed = shard.installed, True
            shard.was_installed = before
        answer = original(self, envelope, message)
        for shard in self.shards:
            shard.installed = shard.was_installed
        return answer

    patch.setattr(Server, "_push", push)


def parities_change_too_early(patch: pytest.MonkeyPatch) -> None:
    """Changes go to parities that do not contain the member yet."""

    def change(self: Any, t: int, member: int, blocks: Any, differences: Any) -> None:
        places = self._places(t, blocks)
        self.code.update(self.records, places, t, member, read_only(differences))

    patch.setattr(parity.ParityShard, "change", change)


def the_dead_are_saved(patch: pytest.MonkeyPatch) -> None:
    """A cut goes on although a server that has copied its rows for it is gone."""
    patch.setattr(Supervisor, "_give_up_cut", lambda self: None)
    patch.setattr(members.ServerMember, "whole", True)


def memory_is_used_again_too_early(patch: pytest.MonkeyPatch) -> None:
    """Owners do not wait until what is in a lane has been acknowledged."""
    send = OutLane.send

    def forget(lane: OutLane, message: LaneMessage, frames: Sequence[Frame], now: float) -> Envelope:
        send(lane, message, [np.array(frame) for frame in frames], now)
        return Envelope(lane.source, lane.target, message, frames)

    patch.setattr(OutLane, "send", forget)


def flushes_are_forgotten_too_early(patch: pytest.MonkeyPatch) -> None:
    """Owners wait for each parity server's share alone, not until all of them have the flush."""
    advance = Replicator._advance

    def forget(replicator: Replicator) -> None:
        replicator._unstable = deque((instant, []) for instant, _ in replicator._unstable)
        advance(replicator)

    patch.setattr(Replicator, "_advance", forget)


def successors_start_what_others_started(patch: pytest.MonkeyPatch) -> None:
    """A launcher that takes over starts all that it sees."""
    take = Starts.take

    def start(starts: Starts, view: View) -> list[Peer]:
        starts.takes_over = False
        return take(starts, view)

    patch.setattr(Starts, "take", start)


def any_launcher_starts(patch: pytest.MonkeyPatch) -> None:
    """Launchers do not look for whom a view is."""
    take = Starts.take
    patch.setattr(Starts, "take", lambda starts, view: take(starts, replace(view, launcher=starts._launcher)))


GUARDS = {
    successors_start_what_others_started: 0,
    any_launcher_starts: 45,
    flushes_are_forgotten_too_early: 315,
    memory_is_used_again_too_early: 0,
    nothing_is_undone: 131,
    the_most_counts: 131,
    kept_at_once: 0,
    lanes_repeat: 0,
    lanes_have_gaps: 0,
    values_run_ahead: 1,
    sums_stand_still: 1,
    rows_do_not_wait: 0,
    replacements_forget_pushes: 0,
    servers_start_too_early: 1,
    new_lanes_are_trusted: 29,
    first_values_come_late: 269,
    parities_change_too_early: 0,
    the_dead_are_saved: 18,
}
"""Each with a seed that shows what becomes of a cluster without it; should a change of the schedules move it,
others are tried."""


def die_with_pushes_that_are_not_kept(slot: int, batches: int) -> Cluster:
    """A worker dies, another takes over, and then a server dies that could not tell anybody of the first
    one's pushes: it had not reached other servers for a while."""
    lanes = LaneOptions(window=1000, chunk_rows=3, share=0.5)
    plan = counting_plan(servers=3, workers=2, atomic=True, k=2, r=1, lanes=lanes)
    cluster = Cluster(plan, 1, batches)
    network = cluster.network

    def cut_off() -> None:
        for other in {0, 1, 2} - {slot}:
            network.break_link(Peer("server", slot), Peer("server", other), 1.0)

    network.at(0.5, cut_off)
    network.at(0.9, lambda: cluster.kill("worker", 0, noticed=True))
    network.at(1.4, lambda: cluster.kill("server", slot, noticed=True))
    assert network.run(lambda: cluster.supervisor.view.phase == "stopping", 60.0)
    network.run(lambda: False, 2.0)
    return cluster


@pytest.mark.parametrize("slot", range(3))
@pytest.mark.parametrize("batches", [20, 200], ids=["the last ones", "some"])
def test_a_worker_waits_until_its_predecessors_pushes_are_kept(slot: int, batches: int) -> None:
    """Hole 11: nobody could push them again."""
    cluster = die_with_pushes_that_are_not_kept(slot, batches)
    assert cluster.supervisor.finished
    assert cluster.violations() == []
    lost = [said["slot"] for name, said in cluster.supervisor.events if name == "worker_lost"]
    assert lost.count(0) == 1, "its successor gets through, though servers stand at different pushes"


def test_a_worker_that_does_not_wait_loses_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing left to do, and nobody notices that a server lacks what its predecessor did."""
    workers_start_too_early(monkeypatch)
    assert die_with_pushes_that_are_not_kept(1, 20).violations()


def trained(slot: int | None, *, installed: bool = False) -> Cluster:
    """A job with tables whose first values servers draw; one of them may die before anybody has pushed, or
    when it alone has got the network's first values."""
    plan = counting_plan(servers=3, workers=2, atomic=True, k=2, r=1)
    drawn = replace(plan.groups[0], initial="uniform")
    cluster = Cluster(replace(plan, groups=(drawn, *plan.groups[1:])), 1, 20)
    network = cluster.network
    if slot is not None:
        network_of = cluster.servers[slot].shards[-1]
        assert network.run(
            lambda: network_of.installed if installed else cluster.supervisor.view.phase == "running", 60.0
        )
        mine = cluster.servers[slot].replicator
        assert mine is not None
        assert mine.flushes <= installed, "it may have told others of the network, but not all of them"
        cluster.kill("server", slot, noticed=True)
    assert network.run(lambda: cluster.supervisor.view.phase == "stopping", 60.0)
    network.run(lambda: False, 2.0)
    assert cluster.supervisor.finished
    return cluster


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("slot", range(3))
def test_a_server_that_dies_before_its_first_batch_has_its_first_values(slot: int, installed: bool) -> None:
    """What no lane has told of is known all the same: tables have values from the start, and the network's
    come from a worker. There is nothing in parities to bring them back from."""
    whole, died = trained(None), trained(slot, installed=installed)
    for slot_of in range(3):
        for mine, theirs in zip(whole.servers[slot_of].shards, died.servers[slot_of].shards, strict=True):
            assert theirs.installed
            assert (mine.records == theirs.records).all()
    assert died.servers[slot].me.incarnation == 2
    assert died._wrong_parities() == []


def test_what_has_values_from_the_start() -> None:
    plan = counting_plan(servers=3, workers=1, atomic=True, k=2, r=1)
    drawn = replace(plan, groups=(replace(plan.groups[0], initial="uniform"), plan.groups[1]))
    assert plan.first_installed == ()
    assert drawn.first_installed == (0,)
    assert replace(plan, resume=Resume(version=1, steps=0)).first_installed == (0, 1)


@pytest.mark.parametrize("take_out", GUARDS, ids=lambda guard: guard.__name__)
def test_every_guard_is_needed(monkeypatch: pytest.MonkeyPatch, take_out: Any) -> None:
    take_out(monkeypatch)
    with np.errstate(all="ignore"):
        assert first_caught([GUARDS[take_out], *range(120)]) is not None


@pytest.mark.parametrize("forgets", [False, True])
def test_workers_push_again_what_was_not_kept(monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    """Without that the job goes on all the same, but a worker gets stuck, and has to be replaced for it."""
    if forgets:
        workers_forget_pushes(monkeypatch)
    assert any(workers_lost_behind_a_server(seed) for seed in range(6)) == forgets


def workers_lost_behind_a_server(seed: int) -> int:
    """How many workers are replaced where nothing but a server has died."""
    cluster = Cluster(counting_plan(servers=3, workers=2, atomic=True, k=2, r=1), seed, 80)
    cluster.network.at(1.2, lambda: cluster.kill("server", 1, noticed=True))
    assert cluster.network.run(lambda: cluster.supervisor.finished, 60.0)
    assert cluster.violations() == []
    return [name for name, _ in cluster.supervisor.events].count("worker_lost")
