"""The schedule of faults: kinds, targets, durations and pauses, all decided by a seed.

When a fault happens depends on the job as well: one that takes servers waits until the code covers it. So the
same seed gives the same faults in the same order, but not at the same step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from holdfast.cluster.protocol.plan import Timing
from holdfast.cluster.worker.faults import POINTS

Moment = Literal["coming", "recovering", "rebuilding"]
"""Of a server that takes over: its process starts, its rows come back, its parities come back."""

SERVER_KINDS: Final = {
    "server_kill": 3,
    "server_and_supervisor_kill": 1,
    "server_and_worker_kill": 1,
    "replacement_kill": 3,
    "server_pause": 1,
    "server_freeze": 2,
    "server_cut_off": 2,
    "servers_apart": 2,
    "server_delay": 1,
    "servers_apart_for_good": 1,
    "server_slow": 1,
}
"""Those that may take a server, and how often they are drawn. Pauses are shorter than the time-out, freezes
longer; one that is cut off from the supervisor goes on with its work when it has been replaced."""
TAKES_ANY: Final = ("servers_apart", "servers_apart_for_good", "server_delay", "server_slow")
"""Those of which nobody can say whom they take: whoever cannot be reached by somebody is replaced."""
TWO_KINDS: Final = {"two_servers_kill": 3}
"""If the code covers two."""
BEYOND_KINDS: Final = {"too_many_servers_kill": 3}
"""If more is asked for than the code covers."""
OTHER_KINDS: Final = {
    "worker_kill": 2,
    "worker_kill_in_push": 4,
    "worker_pause": 1,
    "worker_freeze": 2,
    "worker_cut_off": 1,
    "worker_apart": 2,
    "supervisor_kill": 2,
    "supervisor_pause": 1,
    "supervisor_freeze": 1,
    "worker_delay": 2,
    "worker_apart_for_good": 1,
}
DESCRIPTIONS: Final = {
    "server_kill": "kill -9",
    "server_and_supervisor_kill": "both at once",
    "server_and_worker_kill": "both at once",
    "two_servers_kill": "both at once",
    "too_many_servers_kill": "more at once than the code covers",
    "replacement_kill": "a server, and then whoever takes over:",
    "replacement_kill_coming": "… as it starts",
    "replacement_kill_recovering": "… while its rows come back",
    "replacement_kill_rebuilding": "… while its parities come back",
    "server_pause": "stopped, for less than the time-out",
    "server_freeze": "stopped, and woken up when it has been replaced",
    "server_cut_off": "does not reach the supervisor",
    "servers_apart": "do not reach each other",
    "server_delay": "its messages are late and out of order",
    "worker_kill": "kill -9",
    "worker_kill_in_push": "kill -9 at a named point of a push",
    "worker_pause": "stopped, for less than the time-out",
    "worker_freeze": "stopped, and woken up when it has been replaced",
    "worker_cut_off": "does not reach the supervisor",
    "worker_apart": "does not reach a server",
    "worker_delay": "its messages are late and out of order",
    "supervisor_kill": "kill -9",
    "supervisor_pause": "stopped, for less than the time-out",
    "supervisor_freeze": "stopped for good",
    "servers_apart_for_good": "one does not reach the other any more, or neither",
    "worker_apart_for_good": "likewise, of a worker and a server",
    "server_slow": "hears other servers late: a slow parity server",
}
"""In a few words, by the name under which they are counted."""

SERVER_GAP_SECONDS: Final = 1.0
OTHER_GAP_SECONDS: Final = 3.5
_LONGEST_GAP: Final = 3.0  # of means
_MOST_KILLS_OF_REPLACEMENTS: Final = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and how long after the one before it."""

    kind: str
    gap_seconds: float
    servers: tuple[int, ...] = ()
    worker: int = 0
    seconds: float = 0.0
    """That it lasts, or that messages are late at most."""
    one_way: bool = False
    """Whether only the first of two does not reach the other."""
    moments: tuple[Moment, ...] = ()
    """When replacements are killed, one after the other."""

    @property
    def takes_servers(self) -> bool:
        """Whether it may: the code must cover that."""
        return self.kind in SERVER_KINDS | TWO_KINDS | BEYOND_KINDS


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the job."""

    servers: int
    workers: int
    r: int
    timing: Timing
    beyond: bool = False


def server_faults(seed: int, shape: Shape) -> Iterator[Fault]:
    """An endless sequence of faults that may take down servers."""
    kinds = dict(SERVER_KINDS)
    kinds |= TWO_KINDS if shape.r >= 2 else {}
    kinds |= BEYOND_KINDS if shape.beyond else {}
    dice = random.Random(f"servers {seed}")
    for kind in draw(dice, kinds):
        slot = dice.randrange(shape.servers)
        gap = _gap(dice, SERVER_GAP_SECONDS)
        fault = Fault(kind, gap, (slot,), dice.randrange(shape.workers))
        yield _with_details(dice, fault, shape)


def other_faults(seed: int, shape: Shape) -> Iterator[Fault]:
    """An endless sequence of faults that take down no server."""
    dice = random.Random(f"others {seed}")
    for kind in draw(dice, OTHER_KINDS):
        gap = _gap(dice, OTHER_GAP_SECONDS)
        fault = Fault(kind, gap, (dice.randrange(shape.servers),), dice.randrange(shape.workers))
        yield _with_details(dice, fault, shape)


def points_of_pushes(seed: int, shape: Shape, worker: int, *, atomic: bool) -> Iterator[str]:
    """For each process in turn that fills a worker's slot: the point at which it dies when it is told to."""
    dice = random.Random(f"points {seed} {worker}")
    points = [point for point in POINTS if atomic or point != "commit"]
    while True:
        point = dice.choice(points)
        count = dice.randrange(shape.servers) if point in ("push", "commit") else 0
        yield f"kill@{point}:*:{count}"


def draw(dice: random.Random, kinds: Mapping[str, int]) -> Iterator[str]:
    """An endless sequence of kinds, by their weights; all in turn before any comes too often: short runs are
    to see many of them."""
    while True:
        pack = [kind for kind, weight in kinds.items() for _ in range(weight)]
        dice.shuffle(pack)
        yield from pack


def _gap(dice: random.Random, mean: float) -> float:
    return min(dice.expovariate(1 / mean), _LONGEST_GAP * mean)


def _with_details(dice: random.Random, fault: Fault, shape: Shape) -> Fault:
    silent, stuck = shape.timing.silent_seconds, shape.timing.stuck_seconds
    (slot,) = fault.servers
    kind = fault.kind
    if kind.endswith("_pause"):
        fault = replace(fault, seconds=dice.uniform(0.1, 0.5) * silent)
    elif kind.endswith(("_freeze", "_cut_off")):
        fault = replace(fault, seconds=dice.uniform(1.2, 2.5) * silent)
    elif kind.endswith("_for_good"):
        fault = replace(fault, one_way=dice.random() < 0.5)
    elif kind.endswith("_apart"):
        fault = replace(fault, seconds=dice.uniform(0.2, 2.5) * stuck)
    elif kind == "server_slow":
        fault = replace(fault, seconds=dice.uniform(0.1, 0.5) * stuck)
    elif kind.endswith("_delay"):
        fault = replace(fault, seconds=dice.uniform(0.02, 0.2) * silent)
    elif kind == "replacement_kill":
        moments: tuple[Moment, ...] = ("coming", "recovering", "rebuilding")
        count = dice.randint(1, _MOST_KILLS_OF_REPLACEMENTS)
        fault = replace(fault, moments=tuple(dice.choices(moments, k=count)))
    if kind in ("servers_apart", "servers_apart_for_good", "two_servers_kill"):
        fault = replace(fault, servers=(slot, (slot + dice.randrange(1, shape.servers)) % shape.servers))
    elif kind == "too_many_servers_kill":
        # Neighbours: they have stripes in common.
        fault = replace(fault, servers=tuple((slot + i) % shape.servers for i in range(shape.r + 1)))
    return fault
