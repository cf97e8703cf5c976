"""Messages that are structurally sound and wrong all the same, made of those of a simulated job."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import Peer, Refused, Relay
from holdfast.cluster.protocol.wire import ROUTES, Header, Message, decode, encode
from holdfast.cluster.runtime.transport.packing import pack, unpack
from holdfast.cluster.server.machine import Server
from holdfast.sim.cluster import Cluster
from holdfast.tables.shard import digest

NUMBERS = (-1, 0, 1, 2, 3, 7, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**31), -(2**62))
TAGS = [kind.__struct_config__.tag for kind in ROUTES]
SHADOW_MESSAGES = 30
"""How many of a node's real messages a copy of it gets behind a wrong one."""


class Mutator:
    """Changes messages by chance."""

    def __init__(self, seed: int, others: Sequence[Envelope] = ()) -> None:
        self.random = random.Random(seed)
        self.others = others
        """Of another plan."""

    def __call__(self, envelope: Envelope) -> Envelope | None:
        """A wrong message; None if the wire would not take it."""
        if self.others and self.random.random() < 0.1:
            other = self.random.choice(self.others)
            envelope = Envelope(other.source, envelope.target, other.message, other.frames)
        message, source, frames = envelope.message, envelope.source, list(envelope.frames)
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            what = self.random.random()
            if what < 0.5:
                message = self._message(message) or message
            elif what < 0.85:
                frames = self._frames(frames)
            else:
                source = self._peer(source)
        changed = Envelope(source, envelope.target, message, frames)
        if self.random.random() < 0.1:
            changed = self._passed_on(changed)
        try:
            header, arrays = unpack([bytes(part) for part in pack("job", changed)], 1 << 20)
        except (ValueError, OverflowError):
            return None
        return Envelope(header.source, header.target, header.message, arrays)

    def _passed_on(self, envelope: Envelope) -> Envelope:
        """The same by way of a server, or what says so."""
        header = encode(Header("sim", envelope.source, envelope.target, envelope.message))
        if self.random.random() < 0.3:
            at = self.random.randrange(len(header))
            header = header[:at] + self.random.randbytes(1) + header[at + 1 :]
        relay = Peer("server", self.random.randrange(4), 1)
        return Envelope(relay, envelope.target, Relay(header), envelope.frames)

    def _message(self, message: Message) -> Message | None:
        tree = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        self._change(tree)
        try:
            return msgspec.convert(tree, Message)  # type: ignore[no-any-return]
        except (msgspec.ValidationError, OverflowError):
            return None

    def _change(self, tree: list[Any]) -> None:
        """Change one place in a tree of lists and numbers."""
        at = self.random.randrange(len(tree))
        value = tree[at]
        if isinstance(value, list) and value and self.random.random() < 0.8:
            self._change(value)
        elif isinstance(value, list):
            some = self.random.choice(value) if value else self.random.choice(NUMBERS)
            tree[at] = self.random.choice([[], [*value, some], value[1:], value[:-1], value[::-1]])
        elif isinstance(value, bool):
            tree[at] = not value
        elif isinstance(value, int):
            near = (value - 1, value + 1, -value, value * 2)
            tree[at] = self.random.choice((*NUMBERS, *near))
        elif isinstance(value, float):
            tree[at] = self.random.choice((0.0, -1.0, 1e300, float("nan"), float("inf")))
        elif isinstance(value, str) and at == 0 and value in TAGS:
            tree[at] = self.random.choice(TAGS)
        elif isinstance(value, str):
            tree[at] = self.random.choice(("", "x" * 1000, "tcp://", "ipc:///nowhere/x"))
        elif isinstance(value, dict) and value:
            key = self.random.choice(list(value))
            other: Any = self.random.choice(("x", None, -1, 1e300, [1], float("nan")))
            kept = {name: value[name] for name in value if name != key}
            tree[at] = self.random.choice([{}, kept, {**value, key: other}])
        elif value is None:
            tree[at] = [0, [], []]

    def _frames(self, frames: list[Frame]) -> list[Frame]:
        changed = [bytes(memoryview(frame).tobytes()) for frame in frames]  # type: ignore[arg-type]
        at = self.random.randrange(len(changed)) if changed else 0
        what = self.random.randrange(8)
        if what == 0 or not changed:
            changed.insert(at, self.random.randbytes(self.random.choice((0, 1, 4, 8, 40))))
        elif what == 1:
            del changed[at]
        elif what == 2:
            changed[at] = changed[at][: -self.random.choice((1, 4, 8))]
        elif what == 3:
            changed[at] += self.random.randbytes(self.random.choice((1, 4, 8)))
        elif what == 4:
            changed[at] = self.random.randbytes(len(changed[at]))
        elif what == 5:
            other = self.random.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
        elif what == 6:
            changed[at] = changed[at][::-1]
        else:
            changed[at] = b"\0" * len(changed[at])
        return list(changed)

    def _peer(self, peer: Peer) -> Peer:
        role: Any = self.random.choice(("server", "worker", "supervisor", "launcher"))
        return self.random.choice(
            (
                Peer(role, peer.slot, peer.incarnation),
                Peer(peer.role, self.random.choice(NUMBERS), peer.incarnation),
                Peer(peer.role, peer.slot, self.random.choice(NUMBERS)),
            )
        )


def state_of(machine: Any) -> object:
    """What a dropped message must not change."""
    if not isinstance(machine, Server):
        return msgspec.to_builtins(machine.view), len(machine.outbox)
    protection = machine.replicator
    parities = () if protection is None else tuple(p.records.tobytes() for p in protection.parities.values())
    lanes = () if protection is None else tuple((s, lane.number) for s, lane in protection._in.items())
    missing = machine.recovery.left if machine.recovery is not None else 0
    jobs = len(machine.stripes._jobs) if machine.stripes is not None else 0
    return digest(machine.shards), parities, lanes, machine.marks(), machine.view, missing, jobs


def _is_refusal(message: Message) -> bool:
    if isinstance(message, Relay):
        message = decode(message.header).message
    return isinstance(message, Refused)


class Hostile:
    """Gives copies of a job's nodes wrong messages beside the real ones that the nodes themselves get."""

    def __init__(self, cluster: Cluster, mutate: Mutator, share: float) -> None:
        self._cluster, self._mutate, self._share = cluster, mutate, share
        self.seen: list[Envelope] = []
        self.tried: Counter[str] = Counter()
        """Wrong messages by the role that got them."""
        self.kinds: set[type] = set()
        self.also: Callable[[Envelope, float], None] = lambda envelope, now: None
        """Called with every message before it is delivered."""
        self.dropped = 0
        self._often: Counter[tuple[str, type]] = Counter()
        self._shadows: list[tuple[Peer, Any, int]] = []
        network = cluster.network
        deliver: Callable[[Envelope], None] = network._deliver

        def both(envelope: Envelope) -> None:
            if envelope.target in network.nodes and not network.paused(envelope.target):
                self._look(envelope)
            deliver(envelope)

        network._deliver = both  # type: ignore[method-assign]

    def _look(self, envelope: Envelope) -> None:
        self.seen.append(envelope)
        now = self._cluster.network.now
        for at, (peer, shadow, left) in enumerate(self._shadows):
            if peer == envelope.target and left:
                shadow.receive(envelope, now)
                shadow.tick(now)
                shadow.outbox.clear()
                self._shadows[at] = peer, shadow, left - 1
        self._shadows = [shadow for shadow in self._shadows if shadow[2]]
        kind = envelope.target.role, type(envelope.message)
        self._often[kind] += 1
        # Of what is rare all are tried: the end of a server brings messages that are seen once.
        rare = self._often[kind] <= 400 * self._share
        for _ in range(2 if rare else self._mutate.random.random() < self._share):
            wrong = self._mutate(envelope)
            if wrong is not None:
                self.give(envelope.target, wrong, now)
        self.also(envelope, now)

    def give(self, target: Peer, wrong: Envelope, now: float) -> Literal["", "taken", "dropped"]:
        """Give a copy of a node a message, and see what becomes of it."""
        node: Any = self._cluster.network.nodes[target]
        shadow = self._copy(getattr(node, "machine", node))
        if not hasattr(shadow, "admission"):  # the simulator's own launcher
            return ""
        before, dropped = state_of(shadow), shadow.admission.dropped
        said = len(shadow.outbox)
        try:
            shadow.receive(wrong, now)
        except Exception as error:
            error.add_note(f"{wrong.message} of {wrong.source} for {target}, arrays {wrong.frames}")
            raise
        self.tried[target.role] += 1
        self.kinds.add(type(wrong.message))
        if shadow.admission.dropped > dropped:
            self.dropped += 1
            assert state_of(shadow) == before, f"{wrong.message} was dropped, and has changed something"
            assert all(_is_refusal(sent.message) for sent in shadow.outbox[said:])
        shadow.outbox.clear()
        if len(self._shadows) < 8:
            self._shadows.append((target, shadow, SHADOW_MESSAGES))
        return "dropped" if shadow.admission.dropped > dropped else "taken"

    def _copy(self, machine: Any) -> Any:
        cluster = self._cluster
        kept = [cluster, cluster.network, cluster.plan, *cluster.savers.values(), *self.seen[-1:]]
        return copy.deepcopy(machine, {id(one): one for one in kept})
