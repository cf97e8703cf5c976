"""A network in memory on virtual time, which loses, duplicates, delays and reorders messages by a seed.

One thread runs everything, in the order of virtual time; the same seed gives the same schedule, to the last
message.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.cluster.protocol.envelope import Envelope, Frame, Node
from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.stripe_messages import LaneMessage
from holdfast.cluster.protocol.wire import Header, decode, encode
from holdfast.cluster.runtime.transport.packing import pack, unpack
from holdfast.cluster.runtime.transport.shared import Arena

TICK_SECONDS = 0.08
_ENCODED = 8
"""One in this many messages is encoded and decoded, as on a real wire."""


@dataclass(frozen=True, slots=True)
class Weather:
    """The quality of the network."""

    loss: float = 0.0
    """Fraction of messages that are lost."""
    duplication: float = 0.0
    """Fraction that arrives twice."""
    delay_seconds: float = 0.001
    """Mean latency of a message; latencies vary, so messages overtake each other."""
    ordered: bool = False
    """Whether messages from one node to another keep their order."""
    damage: float = 0.0
    """Fraction of messages in which a bit is flipped in transit."""


CALM = Weather()


@dataclass
class Network:
    """Nodes, the messages between them, and the time.

    ``run`` is the main path: it executes the earliest pending event, until the condition holds.
    """

    seed: int
    weather: Weather = CALM
    now: float = 0.0
    nodes: dict[Peer, Node] = field(default_factory=dict)
    arenas: dict[Peer, Arena] = field(default_factory=dict)
    """Memory that nodes share: what goes through lanes is read there, as between processes (``shared``)."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of messages: sent, lost, repeated (duplicated), damaged, undeliverable, without a route, or
    broken (their link was)."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = 0
        self._paused: dict[Peer, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self._broken: dict[_Link, float] = {}
        self._slow: dict[_Link, tuple[float, float]] = {}
        self._last: dict[tuple[Peer, Peer], float] = {}
        self._routes: set[tuple[Peer, Peer]] = set()
        self.unconnected: set[tuple[int, int]] = set()
        """Slots of servers that have no connection to each other."""

    def add(self, node: Node) -> None:
        """Start a node."""
        self.nodes[node.me] = node
        self.at(self.now, self._tick, node)

    def kill(self, peer: Peer) -> None:
        """Kill a node at once; its unsent messages are lost."""
        self.nodes.pop(peer, None)
        self._paused.pop(peer, None)

    def pause(self, peer: Peer, seconds: float = math.inf) -> None:
        """Suspend a node, and deliver everything sent to it when it resumes, if ever."""
        if peer in self.nodes and peer not in self._paused:
            self._paused[peer] = []
            if seconds < math.inf:
                self.at(self.now + seconds, self._resume, peer)

    def break_link(self, a: Peer, b: Peer, seconds: float = math.inf, *, one_way: bool = False) -> None:
        """Lose all messages from one slot to another for a while, or forever; in both directions, unless
        ``one_way``."""
        for link in (_link(a, b),) if one_way else (_link(a, b), _link(b, a)):
            self._broken[link] = max(self.now + seconds, self._broken.get(link, 0.0))

    def is_broken(self, a: Peer, b: Peer) -> bool:
        """Whether the link between two slots is broken in either direction."""
        return any(self.now < self._broken.get(link, 0.0) for link in (_link(a, b), _link(b, a)))

    def slow_link(self, a: Peer, b: Peer, delay_seconds: float, seconds: float) -> None:
        """Delay messages between two slots for a while, each randomly up to ``delay_seconds``."""
        for link in (_link(a, b), _link(b, a)):
            self._slow[link] = self.now + seconds, delay_seconds

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action at a time."""
        self._numbers += 1
        heapq.heappush(self._queue, (time, self._numbers, action, arguments))

    def run(self, until: Callable[[], bool], most_seconds: float = 3600.0, *, every: int = 1) -> bool:
        """Let time pass until the condition holds; False if it does not within ``most_seconds``.

        The condition is checked after every ``every`` events.
        """
        end = self.now + most_seconds
        queue, pop = self._queue, heapq.heappop
        while not until():
            for _ in range(every):
                if not queue or queue[0][0] > end:
                    return False
                self.now, _, action, arguments = pop(queue)
                action(*arguments)
        return True

    def send_outbox(self, node: Node) -> None:
        """Send the messages in a node's outbox."""
        envelopes = node.outbox[:]
        node.outbox.clear()
        for envelope in envelopes:
            self._send(envelope)

    def _send(self, envelope: Envelope) -> None:
        counts, weather, chance = self.counts, self.weather, self.random.random
        source, target = envelope.source, envelope.target
        counts["sent"] += 1
        if source in self.arenas and isinstance(envelope.message, LaneMessage):
            envelope = _shared(envelope, self.arenas[source])
        if source.role == "worker":
            self._routes.add((target, source))  # sending connects them, even if the message is lost
        elif (
            source.role == target.role and self.unconnected and (source.slot, target.slot) in self.unconnected
        ):
            counts["without a route"] += 1
            return
        elif target.role == "worker" and source.role == "server" and (source, target) not in self._routes:
            counts["without a route"] += 1  # servers cannot reach workers that have not connected
            return
        late = 0.0
        if self._broken or self._slow:
            link = _link(source, target)
            if self.now < self._broken.get(link, 0.0):
                counts["broken"] += 1
                return
            until, delay = self._slow.get(link, (0.0, 0.0))
            late = chance() * delay if self.now < until else 0.0
        copies = 1
        if chance() < weather.loss:
            counts["lost"] += 1
            return
        if chance() < weather.duplication:
            copies = 2
            counts["repeated"] += 1
        if weather.damage and chance() < weather.damage:
            self._damage(envelope)
            return
        for _ in range(copies):
            time = self.now + late - math.log(1.0 - chance()) * weather.delay_seconds
            if weather.ordered:
                pair = source, target
                time = self._last[pair] = max(time, self._last.get(pair, 0.0))
            self._numbers += 1
            heapq.heappush(self._queue, (time, self._numbers, self._deliver, (envelope,)))

    def _damage(self, envelope: Envelope) -> None:
        """Flip a bit of an encoded message: the receiver must detect and drop it."""
        parts = [bytearray(part) for part in pack("", envelope)]
        part = self.random.choice([part for part in parts if part])
        part[self.random.randrange(len(part))] ^= 1 << self.random.randrange(8)
        try:
            unpack([bytes(part) for part in parts], 1 << 20)
        except ValueError:
            self.counts["damaged"] += 1
        else:
            raise AssertionError(f"a damaged {type(envelope.message).__name__} was accepted")

    def _deliver(self, envelope: Envelope) -> None:
        node = self.nodes.get(envelope.target)
        if node is None:
            self.counts["undeliverable"] += 1
            return
        if self._paused and envelope.target in self._paused:
            self._paused[envelope.target].append((self._deliver, (envelope,)))
            return
        if self._numbers % _ENCODED == 0:  # as on a real wire
            header = decode(encode(Header("", envelope.source, envelope.target, envelope.message)))
            envelope = Envelope(header.source, header.target, header.message, envelope.frames)
        node.receive(envelope, self.now)
        if node.outbox:
            self.send_outbox(node)

    def _tick(self, node: Node) -> None:
        if self.nodes.get(node.me) is not node:
            return
        if self._paused and node.me in self._paused:
            self._paused[node.me].append((self._tick, (node,)))
            return
        node.tick(self.now)
        if node.outbox:
            self.send_outbox(node)
        self.at(self.now + TICK_SECONDS, self._tick, node)

    def paused(self, peer: Peer) -> bool:
        """Whether a node is suspended."""
        return peer in self._paused

    def _resume(self, peer: Peer) -> None:
        for action, arguments in self._paused.pop(peer, []):
            self.at(self.now, action, *arguments)


def _shared(envelope: Envelope, arena: Arena) -> Envelope:
    """The same message, with arrays of an arena as others see them."""
    frames: list[Frame] = []
    for frame in envelope.frames:
        at = arena.find(frame) if isinstance(frame, np.ndarray) else -1
        frames.append(arena.frame(at, frame.nbytes) if isinstance(frame, np.ndarray) and at >= 0 else frame)
    return Envelope(envelope.source, envelope.target, envelope.message, frames)


_Link = tuple[str, int, str, int]


def _link(source: Peer, target: Peer) -> _Link:
    return source.role, source.slot, target.role, target.slot
