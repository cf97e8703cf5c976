"""Every job ends (invariant 7): well, as long as the code covers what fails and there is a path between the
servers that live; otherwise with an error that says so, within a bounded time."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cluster.protocol import routes
from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.redundancy.recover import Recovery
from holdfast.cluster.supervisor.machine import Stalls, Supervisor
from holdfast.cluster.supervisor.watch import SupervisorWatch
from holdfast.sim.cluster import ROWS, Cluster, counting_plan

BATCHES = 200


def plan_of(k: int, r: int, more: int = 0, rows: int = ROWS) -> JobPlan:
    return counting_plan(servers=k + r + more, workers=2, atomic=True, k=k, r=r, rows=rows)


def server(slot: int) -> Peer:
    return Peer("server", slot)


def ended(cluster: Cluster, most_seconds: float = 120.0) -> Cluster:
    network = cluster.network
    assert network.run(lambda: cluster.supervisor.view.phase == "stopping", most_seconds), "it hangs"
    network.run(lambda: False, 2.0)
    return cluster


def started(plan: JobPlan, seed: int = 1) -> Cluster:
    cluster = Cluster(plan, seed, BATCHES)
    assert cluster.network.run(lambda: cluster.supervisor.steps() >= 20, 60.0)
    return cluster


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize(("k", "r"), [(2, 1), (3, 1), (2, 2)])
def test_a_dead_server_and_a_broken_link_between_two_others(k: int, r: int, one_way: bool) -> None:
    """The replacement's rows come through a parity server that does not reach one of their stripe."""
    for one, other in ((1, 2), (2, 1)):
        cluster = started(plan_of(k, r, more=1))
        cluster.network.break_link(server(one), server(other), one_way=one_way)
        cluster.kill("server", 0, noticed=True)
        assert ended(cluster).supervisor.finished
        assert cluster.violations() == []


def no_detours(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(routes.Routes, "doubt", lambda self, target, now: None)


def only_when_all_are_sound(patch: pytest.MonkeyPatch) -> None:
    """A server is replaced only while all others have their rows."""
    patch.setattr(Supervisor, "_can_lose", lambda self, victim: all(s.sound for s in self.servers))


def test_without_detours_one_of_two_is_replaced_if_the_code_covers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the next process is behind a link that works; what is broken here is so for a while."""
    no_detours(monkeypatch)
    cluster = started(plan_of(2, 2, more=1))
    cluster.network.break_link(server(1), server(2), 8.0)
    cluster.kill("server", 0, noticed=True)
    assert ended(cluster).supervisor.finished
    lost = {said["slot"] for name, said in cluster.supervisor.events if name == "server_lost"}
    assert lost - {0}, "a server was replaced though another had not come back"
    assert lost <= {0, 1, 2}
    assert cluster.violations() == []


def test_it_would_wait_for_ever_if_all_had_to_be_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out: the server that lacks rows waits for the link, and the link for the server."""
    no_detours(monkeypatch)
    only_when_all_are_sound(monkeypatch)
    monkeypatch.setattr(Recovery, "_turn", lambda self, ask, late, now: False)
    cluster = started(plan_of(2, 2, more=1))
    cluster.network.break_link(server(1), server(2))
    cluster.kill("server", 0, noticed=True)
    failure = ended(cluster).supervisor.failure
    assert failure is not None
    assert failure.kind == "stalled"


def test_a_slow_parity_server_is_not_waited_for() -> None:
    """Another parity brings the rows back before it is taken for dead. Only the first question waits for it,
    and not one for each chunk of rows."""
    assert comes_back_without_it()
    assert comes_back_without_it(rows=120)


def test_it_is_waited_for_if_no_other_parity_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out."""
    monkeypatch.setattr(Recovery, "_turn", lambda self, ask, late, now: False)
    assert not comes_back_without_it()


def comes_back_without_it(rows: int = ROWS) -> bool:
    """Whether the rows of a server come back though one of their parity servers stands still."""
    cluster = started(plan_of(2, 2, rows=rows))
    network = cluster.network
    slow = cluster.plan.placement.parity_server(0, 0, 0)
    cluster.kill("server", 0, noticed=True)
    assert network.run(
        lambda: cluster.servers[0].me.incarnation == 2 and bool(cluster.servers[0].started.epoch), 30.0
    )
    mine = cluster.servers[0].recovery
    assert mine is not None
    assert mine.left
    network.pause(cluster.servers[slow].me)
    assert network.run(lambda: not mine.left, 30.0)
    came_back = cluster.servers[slow].me.incarnation == 1
    assert ended(cluster).supervisor.finished
    assert cluster.violations() == []
    return came_back


@pytest.mark.parametrize(("k", "r"), [(1, 1), (2, 1), (2, 2)])
def test_where_there_is_no_path_the_job_says_so(k: int, r: int) -> None:
    """A server that reaches no other one, though the supervisor and all workers."""
    cluster = started(plan_of(k, r))
    for other in range(1, cluster.plan.servers):
        cluster.network.break_link(server(0), server(other))
    supervisor = ended(cluster).supervisor
    assert supervisor.failure is not None
    assert supervisor.failure.kind in ("stalled", "lost")


def alone_and_out_of_reach() -> Cluster:
    """A server that reaches no other one, and the only worker neither: it has nothing to say to others, so
    nobody but the worker notices, which is replaced over and over."""
    cluster = Cluster(counting_plan(servers=4, workers=1, atomic=True, k=3, r=1), 1, BATCHES)
    assert cluster.network.run(lambda: cluster.supervisor.steps() >= 20, 60.0)
    cluster.kill("worker", 0, noticed=True)
    cluster.network.run(lambda: False, 0.25)  # the next one has not started yet
    cluster.network.break_link(server(3), Peer("worker", 0))
    for other in range(3):
        cluster.network.break_link(server(3), server(other))
    return cluster


def test_a_worker_is_not_replaced_for_ever() -> None:
    supervisor = ended(alone_and_out_of_reach()).supervisor
    assert supervisor.failure is not None
    assert supervisor.failure.kind == "stalled"


def test_it_would_be_if_replacements_counted_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out."""
    monkeypatch.setattr(Stalls, "note_loss", lambda self, *what: None)
    cluster = alone_and_out_of_reach()
    with pytest.raises(AssertionError, match="it hangs"):
        ended(cluster)


def test_it_hangs_if_nobody_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out."""
    monkeypatch.setattr(Stalls, "look", lambda self, *what: None)
    monkeypatch.setattr(Stalls, "note_loss", lambda self, *what: None)
    cluster = started(plan_of(1, 1))
    cluster.network.break_link(server(0), server(1))
    with pytest.raises(AssertionError, match="it hangs"):
        ended(cluster)


def test_a_frozen_supervisor_is_replaced() -> None:
    cluster = started(plan_of(2, 1))
    cluster.network.pause(cluster.supervisor.me)
    cluster.kill("worker", 0, noticed=True)
    assert ended(cluster).supervisor.finished
    assert cluster.launcher.supervisors_killed == 1
    assert cluster.violations() == []


def test_nobody_else_notices_a_frozen_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out."""

    def silence(self: Any, now: float) -> float:
        return 0.0

    monkeypatch.setattr(SupervisorWatch, "silence", silence)
    cluster = started(plan_of(2, 1))
    cluster.network.pause(cluster.supervisor.me)
    with pytest.raises(AssertionError, match="it hangs"):
        ended(cluster)


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("from_worker", [False, True])
def test_a_worker_that_never_reaches_a_server_again(one_way: bool, from_worker: bool) -> None:
    cluster = started(plan_of(2, 1))
    ends = (Peer("worker", 0), server(1)) if from_worker else (server(1), Peer("worker", 0))
    cluster.network.break_link(*ends, one_way=one_way)
    assert ended(cluster).supervisor.finished
    assert [m.incarnation for m in cluster.supervisor.workers] == [1, 1], "nobody had to be replaced"
    assert cluster.violations() == []


def test_links_that_work_are_not_gone_round() -> None:
    cluster = ended(Cluster(plan_of(2, 1), 1, BATCHES))
    nodes = [cluster.servers[slot].routes for slot in range(3)]
    assert all(not node._detours for node in nodes)
