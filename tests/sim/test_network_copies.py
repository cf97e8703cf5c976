"""Jobs on virtual time with no copies of the network but workers': a server that took over asks for it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.transport.memory import Weather
from holdfast.cluster.server.initial_values import Contents, Offer
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.sim.cluster import FIRST_VALUE, Cluster, SimWorker, counting_plan
from holdfast.sim.schedule import protected_plan_of, simulate

LAST = 1
"""The network's group."""


def plan_of(workers: int) -> JobPlan:
    return counting_plan(servers=3, workers=workers, atomic=False, k=2, r=1, dense="workers")


def at_work(cluster: Cluster) -> list[SimWorker]:
    """The workers that count."""
    current = {m.peer for m in cluster.supervisor.workers}
    return [n for n in cluster.network.nodes.values() if isinstance(n, SimWorker) and n.me in current]


def run_until_pushed(cluster: Cluster, pushes: int) -> None:
    assert cluster.network.run(lambda: cluster.supervisor.steps() >= pushes, 60.0)


def finish(cluster: Cluster) -> Cluster:
    assert cluster.network.run(lambda: cluster.supervisor.view.phase == "stopping", 60.0)
    cluster.network.run(lambda: False, 2.0)
    return cluster


@pytest.mark.parametrize("slot", range(3))
def test_a_server_gets_the_network_from_a_worker(slot: int) -> None:
    cluster = Cluster(plan_of(2), 1, 120)
    run_until_pushed(cluster, 60)
    cluster.kill("server", slot, noticed=True)
    assert finish(cluster).supervisor.finished
    assert cluster.violations() == []
    assert (cluster.values(LAST) == FIRST_VALUE + 120).all(), "each push counts once"


def test_it_goes_on_if_one_worker_of_two_has_it() -> None:
    cluster = Cluster(plan_of(2), 2, 120)
    run_until_pushed(cluster, 60)
    cluster.kill("worker", 0, noticed=True)
    cluster.kill("server", 1, noticed=True)
    assert finish(cluster).supervisor.finished
    assert cluster.violations() == []


def test_what_nobody_has_is_lost_and_does_not_begin_anew() -> None:
    cluster = Cluster(plan_of(1), 3, 120)
    run_until_pushed(cluster, 60)
    cluster.kill("worker", 0, noticed=True)
    cluster.kill("server", 1, noticed=True)
    failure = finish(cluster).supervisor.failure
    assert failure is not None
    assert (failure.kind, failure.peer.slot) == ("network", 1)
    assert "rows of the network" in failure.text


def test_first_values_are_right_while_nobody_has_pushed() -> None:
    cluster = Cluster(plan_of(1), 4, 40)
    assert cluster.network.run(lambda: cluster.supervisor.view.phase == "running", 60.0)
    cluster.kill("worker", 0, noticed=True)
    cluster.kill("server", 1, noticed=True)
    assert finish(cluster).supervisor.finished
    assert cluster.violations() == []
    assert (cluster.values(LAST) == FIRST_VALUE + 40).all()


class LateDeath:
    """Whoever saves the job: when all is done and tested, a server dies, before its rows are saved."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked = 0

    def receive(self, *saved: object) -> None:
        """Nobody tells."""

    def advance(self, supervisor: Supervisor, now: float) -> None:
        """Nothing is saved before the end."""

    def may_stop(self, supervisor: Supervisor, now: float) -> bool:
        cluster = self._cluster
        self._asked += 1
        if self._asked == 1:
            cluster.kill("server", 2, noticed=True)
        elif cluster.servers[2].me.incarnation == 2 and not cluster.cuts and supervisor.may_cut():
            supervisor.request_cut(1)
        cluster.collect_cuts()
        return bool(cluster.cuts)


def test_workers_that_are_done_give_it_too_and_nothing_is_saved_without_it() -> None:
    """Nobody pulls any more: a job that only waited for the server's rows would wait for ever."""
    cluster = Cluster(plan_of(2), 5, 40)
    network = cluster.network
    cluster.supervisor._keeper = LateDeath(cluster)
    assert network.run(lambda: cluster.servers[2].me.incarnation == 2, 60.0)
    for worker in range(2):
        network.break_link(Peer("worker", worker), Peer("server", 2), 0.8)
    assert finish(cluster).supervisor.finished
    assert cluster.cuts
    assert cluster.violations() == []


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 2000), marks=pytest.mark.soak)], ids=len)
def test_whatever_fails(seeds: range) -> None:
    """What is given up for lost is nobody's; all else ends well, every push in the network once."""
    lost = short = 0
    for seed in seeds:
        plan = replace(protected_plan_of(seed), dense="workers", atomic=seed % 8 == 0)
        cluster = Cluster(plan, seed, 40, Weather(loss=0.02, duplication=0.05, delay_seconds=0.003))
        outcome = simulate(seed, cluster=cluster)
        failure = cluster.supervisor.failure
        if failure is not None and failure.kind == "network":
            lost += 1
            slot = failure.peer.slot
            assert all(w.machine.calls._copies.get(slot) is None for w in at_work(cluster)), seed
        else:
            assert outcome.violations == [], seed
            short += any(cluster.network_lost())
    assert 0 < lost < len(seeds) / 2
    assert short < lost, "pushes that went with a worker are rare"


@pytest.mark.parametrize("dense", ["workers", "replicate"])
def test_a_job_that_is_stopped_before_its_first_batch_ends(dense: Literal["workers", "replicate"]) -> None:
    """No worker has spoken to a server yet, which has to ask for the network's first values."""
    cluster = Cluster(counting_plan(servers=3, workers=2, atomic=False, k=2, r=1, dense=dense), 7, 40)
    assert cluster.network.run(lambda: cluster.supervisor.view.phase == "running", 60.0)
    cluster.supervisor.request_stop()
    assert finish(cluster).supervisor.finished
    assert cluster.supervisor.steps() < 5
    assert all(shard.installed for server in cluster.servers.values() for shard in server.shards)


@pytest.mark.parametrize("seed", [1991, 2243, 5127, 500797])
def test_no_job_ends_and_no_cut_is_made_before_it_is_known_what_is_lost(seed: int) -> None:
    """A worker died with a push that the network lacks, and its successor has nothing left to push; or with
    one that the network has, and nobody else yet."""
    assert simulate(seed, protected=True).violations == []


def copies_are_all_the_same(patch: pytest.MonkeyPatch) -> None:
    """A server takes whatever copy comes first."""
    patch.setattr(Offer, "contains", lambda self, marks: True)


def copies_have_no_marks(patch: pytest.MonkeyPatch) -> None:
    """A copy is taken for one that contains just what counts."""
    original = Contents.advance

    def advance(self: Any, view: Any) -> Any:
        chosen = original(self, view)
        if chosen is not None:
            self.marks = [mark.sequence for mark in self._ledger.marks()]
        return chosen

    patch.setattr(Contents, "advance", advance)


GUARDS = {copies_are_all_the_same: 158, copies_have_no_marks: 8}
"""Each with a seed that shows what becomes of the network without it."""


@pytest.mark.parametrize("take_out", GUARDS, ids=lambda guard: guard.__name__)
def test_every_guard_is_needed(monkeypatch: pytest.MonkeyPatch, take_out: Any) -> None:
    take_out(monkeypatch)

    def shows(seed: int) -> bool:
        plan = replace(protected_plan_of(seed), dense="workers")
        cluster = Cluster(plan, seed, 40, Weather(loss=0.02, duplication=0.05, delay_seconds=0.003))
        outcome = simulate(seed, cluster=cluster)
        return cluster.supervisor.finished and bool(outcome.violations)

    assert any(shows(seed) for seed in [GUARDS[take_out], *range(150)])
