"""Detours around broken links: messages that do not reach a server directly go through another server.

A link between two processes may fail, in one direction or in both, while each of them reaches everybody else.
Replacing one of them would not help if its replacement is behind the same link. So a node whose retries stay
unanswered sends through other servers, in turn, until an answer arrives. Messages that arrive on a detour
are answered on the same detour. From time to time the direct link is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Peer, Relay
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.wire import Header, decode, encode

_DOUBTS = 2
"""Unanswered requests before a detour is tried: the first may just be lost or late."""
_DETOUR_STUCKS = 6.0
"""Duration of a detour, in units of ``stuck_seconds``."""


@dataclass(slots=True)
class _Way:
    incarnation: int
    doubts: int = 0
    doubted: float = -math.inf
    turn: int = 0
    relay: int | None = None
    """The server that relays messages; None: they go directly."""
    until: float = 0.0
    chosen: bool = False
    """Whether this node chose the detour; otherwise it follows the detour of the messages it received."""
    proven: bool = False
    """Whether an answer has arrived on it; until then messages are sent both ways."""


class Routes:
    """The routes from one node to servers and workers.

    Args:
        me: the node.
        plan: the job's plan.
        servers: returns the servers in the current view.
    """

    def __init__(self, me: Peer, plan: JobPlan, servers: Callable[[], Sequence[Peer]]) -> None:
        self._me, self._plan, self._servers = me, plan, servers
        self._ways: dict[tuple[str, int], _Way] = {}
        self._heard: dict[tuple[str, int], float] = {}
        """When a message last arrived directly."""
        self._detours = 0
        """Number of current detours; usually 0."""

    def doubt(self, target: Peer, now: float) -> None:
        """Note a retry: the request, or its answer, may be lost."""
        way = self._way(target)
        if now < way.doubted + self._plan.timing.retry_seconds:
            return  # simultaneous retries count as one
        way.doubted = now
        way.doubts += 1
        if way.doubts < _DOUBTS:
            return
        choices = [*self._relays(target), None]
        # Replacements of this node must not begin with a relay that did not work for it.
        at = way.turn + self._me.slot + self._me.incarnation
        self._take(way, choices[at % len(choices)], now)
        way.chosen = True
        way.turn += 1
        way.doubts = _DOUBTS - 1  # if this one fails too, the next doubt tries another

    def _relays(self, target: Peer) -> list[int]:
        """Servers that can relay messages: they must be neighbours of both ends that are servers."""
        slots = [peer.slot for peer in self._servers() if peer not in (self._me, target)]
        for end in (self._me, target):
            if end.role == "server":
                slots = [slot for slot in slots if slot in self._plan.neighbours[end.slot]]
        return slots

    def trust(self, source: Peer, now: float) -> None:
        """Note an answer: the route works."""
        key = source.role, source.slot
        if self._ways and (way := self._ways.get(key)) is not None:
            way.doubts = 0
            if way.chosen and way.relay is not None and self._heard.get(key) == now:
                self._take(way, None, now)  # request and answer both went directly

    def came_directly(self, source: Peer, now: float) -> None:
        """Note a message that arrived directly."""
        self._heard[source.role, source.slot] = now

    def ways_to(self, envelope: Envelope, now: float) -> tuple[Envelope, ...]:
        """The envelopes to send for a message: direct, on the detour, or both."""
        direct = (envelope,)
        if not self._detours or isinstance(envelope.message, Relay):
            return direct
        target = envelope.target
        way = self._ways.get((target.role, target.slot))
        if way is None or way.relay is None or way.incarnation != target.incarnation:
            return direct
        if now > way.until:  # the link may work again; if not, the first doubt returns here
            way.turn = max(0, way.turn - way.chosen)
            doubts = (_DOUBTS - 1) * way.chosen
            self._take(way, None, now)
            way.doubts = doubts
            return direct
        relay = next((peer for peer in self._servers() if peer.slot == way.relay), None)
        if relay is None:
            return direct
        header = encode(Header(self._plan.job, envelope.source, target, envelope.message))
        detour = Envelope(self._me, relay, Relay(header), envelope.frames)
        return (detour,) if way.proven else (envelope, detour)

    def divert(self, outbox: list[Envelope], now: float) -> None:
        """Replace the messages of an outbox by those of ``ways_to``."""
        if self._detours:
            outbox[:] = [each for envelope in outbox for each in self.ways_to(envelope, now)]

    def unwrap(self, envelope: Envelope) -> Envelope | None:
        """Unwrap a relayed message for this node, or readdress one that this server should relay; None if it
        is neither."""
        relay = envelope.message
        assert isinstance(relay, Relay)
        header = decode(relay.header)
        if header.target == self._me and envelope.source.role == "server":
            return Envelope(header.source, header.target, header.message, envelope.frames)
        if header.source == envelope.source and self._me.role == "server" and header.target != self._me:
            return Envelope(self._me, header.target, relay, envelope.frames)
        return None

    def came_by(self, relay: Peer, source: Peer, now: float) -> None:
        """Note a message that arrived through a relay: it is answered on the same detour."""
        way = self._way(source)
        if way.relay != relay.slot or not way.chosen:
            self._take(way, relay.slot, now)
            way.until = now + self._plan.timing.stuck_seconds
        # A node heard directly as well may not hear this one: answer it both ways.
        heard = self._heard.get((source.role, source.slot), -math.inf)
        way.doubts, way.proven = 0, now - heard > self._plan.timing.stuck_seconds / 2

    def _way(self, peer: Peer) -> _Way:
        way = self._ways.get((peer.role, peer.slot))
        if way is None or way.incarnation < peer.incarnation:
            if way is not None:
                self._take(way, None, 0.0)
            way = self._ways[peer.role, peer.slot] = _Way(peer.incarnation)
        return way

    def _take(self, way: _Way, relay: int | None, now: float) -> None:
        self._detours += (relay is not None) - (way.relay is not None)
        way.relay, way.doubts, way.chosen, way.proven = relay, 0, False, False
        way.until = now + _DETOUR_STUCKS * self._plan.timing.stuck_seconds
