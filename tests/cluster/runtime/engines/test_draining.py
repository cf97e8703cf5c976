"""Processes leave a machine before it is taken away: never more servers at once than the code covers."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.protocol.messages import NodeStatus, Peer, Status
from holdfast.cluster.runtime.engines.base import Draining
from holdfast.cluster.runtime.engines.draining import Evacuation, Notices
from holdfast.coding.placement import Placement

SIX = Placement(6, 4, 2)
RECOVERY_SECONDS = 2.0


class Cluster:
    """Processes on machines; one that is killed is back after a while, on the last machine."""

    def __init__(self, placement: Placement, machine_of: list[int], workers: list[int]) -> None:
        self.now = 1000.0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.killed: list[tuple[float, Peer]] = []
        self.at = {Peer("server", slot, 1): machine for slot, machine in enumerate(machine_of)}
        self.at |= {Peer("worker", slot, 1): machine for slot, machine in enumerate(workers)}
        self.at[Peer("supervisor")] = 0
        self.until: dict[int, float | None] = {}
        self.elsewhere = True
        self._back: dict[Peer, float] = {}
        self._evacuation = Evacuation(placement, self._say)
        self._last = max(self.at.values()) + 1

    def _say(self, event: str, **figures: Any) -> None:
        self.said.append((event, figures))

    def events(self) -> list[str]:
        return [event for event, _ in self.said]

    @property
    def recovering(self) -> list[int]:
        """The servers that lack rows."""
        return [peer.slot for peer in self._back if peer.role == "server"]

    def machines(self) -> list[Draining]:
        return [
            Draining(
                f"m{machine}", until, tuple(p for p, at in self.at.items() if at == machine), self.elsewhere
            )
            for machine, until in self.until.items()
        ]

    def status(self) -> Status:
        nodes = tuple(NodeStatus(p, "starting" if p in self._back else "ready", 0.0) for p in self.at)
        return Status("running", 10, 100, nodes, degraded=bool(self.recovering))

    def pass_time(self, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self._back = {peer: at for peer, at in self._back.items() if at > self.now}
            for peer in self._evacuation.next(self.machines(), self.status(), self.now):
                self.killed.append((self.now, peer))
                del self.at[peer]
                new = peer if peer.role == "supervisor" else Peer(peer.role, peer.slot, peer.incarnation + 1)
                self.at[new] = self._last
                self._back[new] = self.now + RECOVERY_SECONDS
            look()

    def left(self, role: str) -> list[float]:
        return [at for at, peer in self.killed if peer.role == role]


def test_servers_then_workers_then_the_supervisor() -> None:
    cluster = Cluster(SIX, [0, 0, 1, 1, 2, 2], [0, 1, 0])
    cluster.pass_time(10.0)
    assert cluster.killed == []
    cluster.until = {0: None}
    cluster.pass_time(60.0)
    assert [peer for _, peer in cluster.killed] == [
        Peer("server", 0, 1), Peer("server", 1, 1), Peer("worker", 0, 1), Peer("worker", 2, 1),
        Peer("supervisor"),
    ]  # fmt: skip
    times = [at for at, _ in cluster.killed]
    apart = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(apart) > RECOVERY_SECONDS + 2.5, "one after the other, each when nothing was lacking"
    assert cluster.events() == [
        "machine_draining", "server_moved", "server_moved", "worker_moved", "worker_moved",
        "supervisor_moved", "machine_drained",
    ]  # fmt: skip
    assert cluster.said[0][1] == {"machine": "m0", "seconds_left": None}
    assert cluster.said[1][1] == {"slot": 0, "machine": "m0", "step": 10}


def test_in_a_hurry_servers_leave_at_once() -> None:
    cluster = Cluster(SIX, [0, 0, 1, 1, 2, 2], [0, 1, 0])
    cluster.pass_time(10.0)
    cluster.until = {0: cluster.now + 9.0}
    cluster.pass_time(9.0)
    assert len(set(cluster.left("server"))) == 1
    assert len(cluster.left("server")) == 2
    assert len(set(cluster.left("worker"))) == 1
    assert len(cluster.left("worker")) == 2
    assert cluster.left("supervisor")
    assert cluster.events()[-1] == "machine_drained"
    assert cluster.said[0][1] == {"machine": "m0", "seconds_left": 8.8}


def test_with_time_enough_there_is_no_hurry() -> None:
    cluster = Cluster(SIX, [0, 0, 1, 1, 2, 2], [0, 1, 0])
    cluster.pass_time(10.0)
    cluster.until = {0: cluster.now + 60.0}
    cluster.pass_time(50.0)
    assert len(set(cluster.left("server"))) == 2
    assert cluster.events()[-1] == "machine_drained"


def test_even_in_a_hurry_no_more_servers_than_the_code_covers() -> None:
    cluster = Cluster(Placement(6, 2, 1), [0] * 6, [0])
    cluster.pass_time(10.0)
    cluster.until = {0: cluster.now + 1.0}
    cluster.pass_time(1.5)
    assert [peer.slot for _, peer in cluster.killed] == [0, 3]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_lacking_is_always_covered(data: st.DataObject) -> None:
    """Whatever machines are taken away, and when."""
    k, r = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    servers = data.draw(st.integers(k + r, 10))
    placement = Placement(servers, k, r, data.draw(st.integers(1, servers // (k + r))))
    machine_of = data.draw(st.lists(st.integers(0, 3), min_size=servers, max_size=servers))
    cluster = Cluster(placement, machine_of, [0, 1, 2, 3])

    def check() -> None:
        for group in range(placement.groups):
            ring = placement.ring(group)
            gone = Counter(
                first
                for server in set(cluster.recovering)
                for first in range(len(ring))
                if server in [ring[(first + i) % len(ring)] for i in range(min(k + r, len(ring)))]
            )
            assert max(gone.values(), default=0) <= r

    cluster.pass_time(5.0, check)
    for machine in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)):
        seconds = data.draw(st.none() | st.floats(0.0, 60.0))
        cluster.until[machine] = None if seconds is None else cluster.now + seconds
        cluster.pass_time(data.draw(st.floats(0.0, 20.0)), check)
    cluster.pass_time(200.0, check)
    assert not [p for p, at in cluster.at.items() if at in cluster.until]


def test_without_a_code_servers_stay() -> None:
    cluster = Cluster(Placement(3), [0, 1, 2], [0])
    cluster.until = {0: None}
    cluster.pass_time(30.0)
    assert [peer.role for _, peer in cluster.killed] == ["worker", "supervisor"]
    assert "machine_drained" not in cluster.events()


def test_nobody_leaves_if_there_is_nowhere_to_go() -> None:
    cluster = Cluster(SIX, [0, 0, 1, 1, 2, 2], [0])
    cluster.until, cluster.elsewhere = {0: None}, False
    cluster.pass_time(30.0)
    assert cluster.killed == []
    cluster.elsewhere = True
    cluster.pass_time(60.0)
    assert len(cluster.killed) == 4


def test_a_machine_that_comes_back_is_announced_anew() -> None:
    cluster = Cluster(SIX, [1, 1, 1, 2, 2, 2], [])
    cluster.at = {peer: machine for peer, machine in cluster.at.items() if machine}
    cluster.until = {0: None}
    cluster.pass_time(5.0)
    cluster.until = {}
    cluster.pass_time(5.0)
    cluster.until = {0: None}
    cluster.pass_time(5.0)
    assert cluster.events() == ["machine_draining", "machine_drained"] * 2


def test_notices_survive_that_nobody_answers() -> None:
    answers: list[dict[str, float]] = [{}, {"a": time.time() + 10.0, "b": 0.0}]
    asked = threading.Semaphore(0)
    broken = threading.Event()

    def ask() -> dict[str, float]:
        asked.release()
        if broken.is_set():
            raise ConnectionError("the head is away")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    notices = Notices(ask, every_seconds=0.01)
    for _ in range(4):
        asked.acquire()
    said = notices()
    assert said["b"] is None
    assert said["a"] is not None
    assert 8.0 < said["a"] - time.monotonic() < 10.0
    broken.set()
    for _ in range(4):
        asked.acquire()
    assert notices().keys() == {"a", "b"}
    notices.close()
