"""Ways round broken links."""

from __future__ import annotations

import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Commit as Message
from holdfast.cluster.protocol.messages import Peer, Relay
from holdfast.cluster.protocol.routes import Routes
from holdfast.sim.cluster import counting_plan

PLAN = counting_plan(servers=9, workers=2, atomic=True, k=1, r=1)
SERVERS = [Peer("server", slot, 1) for slot in range(9)]


def relays(me: Peer, target: Peer) -> set[int]:
    """The servers that a node tries one after the other while nothing is answered."""
    routes = Routes(me, PLAN, lambda: SERVERS)
    found = set()
    for now in range(1, 40):
        routes.doubt(target, float(now))
        sent = routes.ways_to(Envelope(me, target, Message(1)), float(now))
        found |= {envelope.target.slot for envelope in sent if isinstance(envelope.message, Relay)}
    return found


@pytest.mark.parametrize(
    ("me", "target", "near"),
    [
        (Peer("worker", 0, 1), SERVERS[4], {3, 5}),
        (SERVERS[4], Peer("worker", 0, 1), {3, 5}),
        (SERVERS[4], SERVERS[6], {5}),
        (SERVERS[4], SERVERS[5], set()),
    ],
)
def test_only_servers_that_are_connected_to_both_pass_messages_on(
    me: Peer, target: Peer, near: set[int]
) -> None:
    """With one parity for each row, a server is connected to those beside it alone."""
    assert relays(me, target) == near
