"""A network in memory on virtual time: it loses, repeats, delays and reorders messages as a seed says.

One thread runs everything, in the order of virtual time; the same seed gives the same schedule, to the last
message.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.cluster.messages import Peer
from holdfast.cluster.transport.base import Envelope, Node
from holdfast.cluster.transport.packing import pack, unpack
from holdfast.cluster.wire import Header, decode, encode

TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is."""

    loss: float = 0.0
    """Share of the messages that are lost."""
    duplication: float = 0.0
    """Share that arrives twice."""
    delay_seconds: float = 0.001
    """How long a message takes on average; each takes its own time, so they overtake each other."""
    ordered: bool = False
    """Whether messages of one node to another keep their order."""
    damage: float = 0.0
    """Share of the messages of which a bit is flipped on the way."""


CALM = Weather()


@dataclass
class Network:
    """Nodes, the messages between them, and the time.

    ``run`` is the main path: the earliest thing that is to happen happens, until the condition holds.
    """

    seed: int
    weather: Weather = CALM
    now: float = 0.0
    nodes: dict[Peer, Node] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """What happened to messages: sent, lost, repeated, damaged, cut, undeliverable, without a route."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._paused: dict[Peer, list[Callable[[], None]]] = {}
        self._cut: dict[frozenset[tuple[str, int]], float] = {}
        self._last: dict[tuple[Peer, Peer], float] = {}
        self._routes: set[tuple[Peer, Peer]] = set()

    def add(self, node: Node) -> None:
        """A node comes to life."""
        self.nodes[node.me] = node
        self.at(self.now, lambda: self._tick(node))

    def kill(self, peer: Peer) -> None:
        """A node is gone at once, with all that it wanted to send."""
        self.nodes.pop(peer, None)
        self._paused.pop(peer, None)

    def pause(self, peer: Peer, seconds: float) -> None:
        """A node stops and goes on later, with everything that was sent to it meanwhile."""
        if peer in self.nodes and peer not in self._paused:
            self._paused[peer] = []
            self.at(self.now + seconds, lambda: self._resume(peer))

    def cut_link(self, a: Peer, b: Peer, seconds: float) -> None:
        """Nothing gets through between two slots for a while."""
        self._cut[_link(a, b)] = self.now + seconds

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._numbers += 1
        heapq.heappush(self._queue, (time, self._numbers, action))

    def run(self, until: Callable[[], bool], most_seconds: float = 3600.0) -> bool:
        """Let time pass until the condition holds; False if it does not within so many seconds."""
        end = self.now + most_seconds
        while not until():
            if not self._queue or self._queue[0][0] > end:
                return False
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return True

    def flush(self, node: Node) -> None:
        """Send what a node wants to send."""
        envelopes = node.outbox[:]
        node.outbox.clear()
        for envelope in envelopes:
            self._send(envelope)

    def _send(self, envelope: Envelope) -> None:
        self.counts["sent"] += 1
        self._routes.add((envelope.target, envelope.source))  # they connect, even if what is said is lost
        if _is_answer(envelope) and (envelope.source, envelope.target) not in self._routes:
            self.counts["without a route"] += 1
            return
        until = self._cut.get(_link(envelope.source, envelope.target))
        if until is not None and self.now < until:
            self.counts["cut"] += 1
            return
        copies = 1
        if self.random.random() < self.weather.loss:
            copies = 0
            self.counts["lost"] += 1
        elif self.random.random() < self.weather.duplication:
            copies = 2
            self.counts["repeated"] += 1
        if self.weather.damage and self.random.random() < self.weather.damage:
            copies = 0
            self._damage(envelope)
        for _ in range(copies):
            time = self.now + self.random.expovariate(1 / self.weather.delay_seconds)
            if self.weather.ordered:
                pair = envelope.source, envelope.target
                time = self._last[pair] = max(time, self._last.get(pair, 0.0))
            self.at(time, lambda: self._deliver(envelope))

    def _damage(self, envelope: Envelope) -> None:
        """Flip a bit of a message, as it is on a wire: whoever receives it must notice, and drop it."""
        parts = [bytearray(part) for part in pack("", envelope)]
        part = self.random.choice([part for part in parts if part])
        part[self.random.randrange(len(part))] ^= 1 << self.random.randrange(8)
        try:
            unpack([bytes(part) for part in parts], 1 << 20)
        except ValueError:
            self.counts["damaged"] += 1
        else:
            raise AssertionError(f"a damaged {type(envelope.message).__name__} was taken")

    def _deliver(self, envelope: Envelope) -> None:
        node = self.nodes.get(envelope.target)
        if node is None:
            self.counts["undeliverable"] += 1
            return
        if envelope.target in self._paused:
            self._paused[envelope.target].append(lambda: self._deliver(envelope))
            return
        # What a real wire does to a message is done here too.
        header = decode(encode(Header("", envelope.source, envelope.target, envelope.message)))
        node.receive(Envelope(header.source, header.target, header.message, envelope.frames), self.now)
        self.flush(node)

    def _tick(self, node: Node) -> None:
        if self.nodes.get(node.me) is not node:
            return
        if node.me in self._paused:
            self._paused[node.me].append(lambda: self._tick(node))
            return
        node.tick(self.now)
        self.flush(node)
        self.at(self.now + TICK_SECONDS, lambda: self._tick(node))

    def paused(self, peer: Peer) -> bool:
        """Whether a node stands still."""
        return peer in self._paused

    def _resume(self, peer: Peer) -> None:
        for action in self._paused.pop(peer, []):
            self.at(self.now, action)


def _is_answer(envelope: Envelope) -> bool:
    """Workers connect to servers, who have no way to them before that."""
    return envelope.source.role == "server" and envelope.target.role == "worker"


def _link(a: Peer, b: Peer) -> frozenset[tuple[str, int]]:
    return frozenset({(a.role, a.slot), (b.role, b.slot)})
