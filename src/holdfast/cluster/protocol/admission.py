"""Validate incoming messages: the sender may send them, their content matches the plan, and their arrays have
the right size.

Invalid messages are dropped and counted before anything has changed. Validation never raises: one malformed
message must not end a node. Checks here depend only on the message and the plan; whether a message matches
what a node waits for, the state machines decide themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np
from msgspec.structs import fields

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import (
    Figures,
    Install,
    Instant,
    Lacks,
    LaneState,
    LauncherBeat,
    Part,
    Peer,
    Pull,
    PulledRows,
    Push,
    Pushed,
    Redundancy,
    Relay,
    Saved,
    ServerBeat,
    ServerInView,
    Status,
    View,
    WorkerBeat,
    WorkerInView,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.stripe_messages import (
    Agreed,
    Compare,
    Differences,
    Forget,
    ReadStripes,
    Recover,
    StripePart,
    Syndromes,
    Values,
)
from holdfast.cluster.protocol.wire import ROUTES, Message, decode
from holdfast.coding.placement import Placement

log = logging.getLogger(__name__)

_WORD: Final = 4
"""Bytes of a place, a block or a record's number."""


class Admission:
    """Validates the messages that one node receives.

    Args:
        me: the node.
        plan: the job's plan.

    Attributes:
        dropped: number of messages dropped.
    """

    def __init__(self, me: Peer, plan: JobPlan) -> None:
        self.dropped = 0
        self._check = _Checks(me, plan)
        self._logged: set[type] = set()

    def admits(self, envelope: Envelope) -> bool:
        """Whether a message is valid. Invalid ones are counted, and the first of each type is logged."""
        try:
            self._check(envelope)
        except Exception as error:  # checks change nothing: any error means malformed
            self.dropped += 1
            kind = type(envelope.message)
            if kind not in self._logged:
                self._logged.add(kind)
                log.warning(
                    "dropped a %s from %s, incarnation %d: %s (further ones are only counted)",
                    kind.__name__, envelope.source, envelope.source.incarnation, error,
                )  # fmt: skip
            return False
        return True


class _Checks:
    """Raises ValueError for an invalid message."""

    def __init__(self, me: Peer, plan: JobPlan) -> None:
        self._me, self._plan = me, plan
        self._slots: Mapping[str, int] = {
            "server": plan.servers, "worker": plan.workers, "supervisor": 1, "launcher": 1,
            "vault": 0,  # they talk to ``Tenure`` alone
        }  # fmt: skip
        self._senders = {
            (kind, source): self._slots[source]
            for kind, routes in ROUTES.items()
            for source, target in routes
            if target == me.role
        }
        """Slots of each role that may send a message of each type to this node."""
        self._checks: Mapping[type[Message], Callable[[Any, Sequence[Frame], Peer], None]] = {
            Pull: self._pull,
            PulledRows: self._rows,
            Install: self._install,
            Lacks: self._lacks,
            Push: self._push,
            Pushed: self._pushed,
            Relay: self._relay,
            Differences: self._change,
            Values: self._values,
            Forget: self._forget,
            ReadStripes: self._read,
            Recover: self._recover,
            Syndromes: self._syndromes,
            Compare: self._compare,
            Agreed: self._agreed,
            ServerBeat: self._server_beat,
            WorkerBeat: self._worker_beat,
            LauncherBeat: self._launcher_beat,
            View: self._view,
            Saved: self._saved,
            Status: self._status,
        }

    def __call__(self, envelope: Envelope) -> None:
        message, source = envelope.message, envelope.source
        kind = type(message)
        slots = self._senders.get((kind, source.role))
        if slots is None:
            raise ValueError(f"a {source.role} does not send it to a {self._me.role}")
        if not 0 <= source.slot < slots:
            self._slot(source.role, source.slot)
        check = self._checks.get(kind)
        if check is not None:
            check(message, envelope.frames, source)
        elif envelope.frames:
            raise ValueError(f"{len(envelope.frames)} arrays: expected none")

    # Between workers and servers

    def _pull(self, message: Pull, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, len(message.parts))
        for part, frame in zip(message.parts, frames, strict=True):
            self._group(part.group)
            _size(frame, part.rows, _WORD)

    def _rows(self, message: PulledRows, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, len(message.parts))
        for part, frame in zip(message.parts, frames, strict=True):
            self._group(part.group)
            _size(frame, part.rows, _WORD * self._plan.groups[part.group].dim)
        self._installable(message.not_installed)
        self._contained(message.marks)

    def _install(self, message: Install, frames: Sequence[Frame], source: Peer) -> None:
        self._valued(message.parts, frames)
        self._contained(message.marks)

    def _lacks(self, message: Lacks, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, 0)
        self._installable(message.groups)

    def _push(self, message: Push, frames: Sequence[Frame], source: Peer) -> None:
        self._valued(message.parts, frames)
        if message.returns != -1:
            self._group(message.returns)

    def _pushed(self, message: Pushed, frames: Sequence[Frame], source: Peer) -> None:
        if message.rows or frames:
            _count(frames, 1)
            _size(frames[0], message.rows, _WORD * self._plan.groups[-1].dim)
        self._contained(message.marks)

    def _relay(self, message: Relay, frames: Sequence[Frame], source: Peer) -> None:
        """The receiver validates the inner message; the first relay validates its sender."""
        header = decode(message.header)
        route = header.source.role, header.target.role
        if header.job != self._plan.job or type(header.message) is Relay:
            raise ValueError("the relayed message is of another job, or itself a relay")
        if "supervisor" in route or route not in ROUTES[type(header.message)]:
            raise ValueError(f"a {route[0]} does not send the relayed message to a {route[1]}")
        if source.role == "worker" and header.source != source:
            raise ValueError(f"a worker relays a message of {header.source}")
        for peer in (header.source, header.target):
            self._slot(peer.role, peer.slot)

    def _contained(self, marks: Sequence[int]) -> None:
        """Validate each worker's newest push; empty if servers know these themselves."""
        if marks and (len(marks) != self._plan.workers or min(marks) < 0):
            raise ValueError(f"marks {marks} of {self._plan.workers} workers")

    def _valued(self, parts: Sequence[Part], frames: Sequence[Frame]) -> None:
        """Validate places and values of each part."""
        _count(frames, 2 * len(parts))
        for number, part in enumerate(parts):
            self._group(part.group)
            _size(frames[2 * number], part.rows, _WORD)
            _size(frames[2 * number + 1], part.rows, _WORD * self._plan.groups[part.group].dim)

    def _installable(self, groups: Sequence[int]) -> None:
        """Validate groups whose values come from workers."""
        for group in groups:
            self._group(group)
            if self._plan.groups[group].initial != "installed":
                raise ValueError(f"group {group} draws its initial values")

    # Among servers

    def _change(self, message: Differences, frames: Sequence[Frame], source: Peer) -> None:
        self._instant(message.instant)
        _count(frames, 2 * len(message.parts))
        for number, part in enumerate(message.parts):
            self._part(part, frames[2 * number], source)
            _size(frames[2 * number + 1], part.rows, _WORD * self._plan.groups[part.group].words)

    def _forget(self, message: Forget, frames: Sequence[Frame], source: Peer) -> None:
        self._instant(message.instant)
        _count(frames, len(message.parts))
        for part, frame in zip(message.parts, frames, strict=True):
            self._part(part, frame, source)

    def _part(self, part: StripePart, frame: Frame, source: Peer) -> None:
        """Validate blocks whose parity is here."""
        placement = self._coded(part.group)
        _within(part.parity, placement.r, "parity")
        _within(part.member, placement.k, "member")
        if placement.parity_server(source.slot, part.member, part.parity) != self._me.slot:
            raise ValueError(f"server {source.slot} has no parity here")
        _numbers(frame, part.rows, placement.blocks(self._plan.groups[part.group].rows), ascending=False)

    def _values(self, message: Values, frames: Sequence[Frame], source: Peer) -> None:
        self._instant(message.instant)
        _count(frames, 2)
        _multiple(frames[0], message.rows)
        _numbers(frames[1], message.absent, message.rows + message.absent)

    def _read(self, message: ReadStripes, frames: Sequence[Frame], source: Peer) -> None:
        placement = self._coded(message.group)
        _within(message.member, placement.k, "member")
        _count(frames, 1)
        _numbers(frames[0], message.rows, placement.blocks(self._plan.groups[message.group].rows))

    def _recover(self, message: Recover, frames: Sequence[Frame], source: Peer) -> None:
        placement = self._coded(message.group)
        _within(message.parity, placement.r, "parity")
        for member in message.without:
            _within(member, placement.k, "member")
        if len(set(message.without)) != len(message.without):
            raise ValueError(f"members {message.without} contain duplicates")
        _count(frames, 1)
        _numbers(frames[0], message.rows, placement.blocks(self._plan.groups[message.group].rows))

    def _syndromes(self, message: Syndromes, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, 2 + len(message.lacking))
        _numbers(frames[0], message.rows)
        _multiple(frames[1], message.rows)
        for lacking, frame in zip(message.lacking, frames[2:], strict=True):
            _within(lacking.member + 1, self._plan.k + 1, "member")
            _numbers(frame, lacking.rows)
        for state in message.without:
            self._lane(state)

    def _compare(self, message: Compare, frames: Sequence[Frame], source: Peer) -> None:
        placement = self._coded(message.group)
        _within(message.parity, placement.r, "parity")
        _count(frames, 1)
        _numbers(frames[0], message.rows, placement.blocks(self._plan.groups[message.group].rows))

    def _agreed(self, message: Agreed, frames: Sequence[Frame], source: Peer) -> None:
        _within(message.parity, self._plan.r, "parity")
        _count(frames, 1)
        _numbers(frames[0], message.rows)

    # To and from the supervisor

    def _server_beat(self, message: ServerBeat, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, 0)
        self._marks(message.marks)
        for state in message.lanes:
            self._lane(state)
        for slot in message.stuck_on:
            self._slot("server", slot)
        _counts(message.redundancy)
        _counts(message.figures)

    def _worker_beat(self, message: WorkerBeat, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, 0)
        for slot in message.stuck_on:
            self._slot("server", slot)
        _counts(message.figures)

    def _launcher_beat(self, message: LauncherBeat, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, 0)
        for exited in message.exited:
            self._slot(exited.peer.role, exited.peer.slot)

    def _view(self, message: View, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, 0)
        entries: tuple[tuple[str, Sequence[ServerInView | WorkerInView]], ...] = (
            ("server", message.servers), ("worker", message.workers)
        )  # fmt: skip
        for role, found in entries:
            if [entry.slot for entry in found] != list(range(self._slots[role] if found else 0)):
                raise ValueError(f"{len(found)} {role}s: expected all {self._slots[role]}, in order")
        for server in message.servers:
            if server.counts_until is not None:
                self._instant(server.counts_until)

    def _saved(self, message: Saved, frames: Sequence[Frame], source: Peer) -> None:
        if frames:
            _count(frames, 1)
            _multiple(frames[0], 1)

    def _status(self, message: Status, frames: Sequence[Frame], source: Peer) -> None:
        _count(frames, 0)
        for node in message.nodes:
            self._slot(node.peer.role, node.peer.slot)
            _counts(node.redundancy)
            _counts(node.figures)
        if message.failure is not None:
            self._slot(message.failure[1].role, message.failure[1].slot)
        if message.finished and not message.tests:
            raise ValueError("the job has finished, but there is no test")

    # Parts of messages

    def _slot(self, role: str, slot: int) -> None:
        _within(slot, self._slots[role], f"slot of a {role}")

    def _group(self, group: int) -> None:
        _within(group, len(self._plan.groups), "group")

    def _coded(self, group: int) -> Placement:
        """The placement of a group; raises if the group has no parities."""
        self._group(group)
        placement = self._plan.placements[group]
        if not placement.r:
            raise ValueError(f"group {group} has no parities")
        return placement

    def _lane(self, state: LaneState) -> None:
        self._slot("server", state.slot)
        self._instant(state.now)
        self._instant(state.first)

    def _instant(self, instant: Instant) -> None:
        if instant.marks:
            self._marks(instant.marks)
        for group in instant.installed:
            self._group(group)

    def _marks(self, marks: Sequence[WorkerMark]) -> None:
        if [mark.slot for mark in marks] != list(range(self._plan.workers)):
            raise ValueError(f"marks of {len(marks)} workers: expected all {self._plan.workers}, in order")


def _within(number: int, count: int, what: str) -> None:
    if not 0 <= number < count:
        raise ValueError(f"{what} {number}: expected 0 to {count - 1}")


def _count(frames: Sequence[Frame], count: int) -> None:
    if len(frames) != count:
        raise ValueError(f"{len(frames)} arrays: expected {count}")


_COUNTS: Final[Mapping[type[Redundancy | Figures], Callable[[object], tuple[int, ...]]]] = {
    kind: attrgetter(*(field.name for field in fields(kind) if field.type is int and field.name != "version"))
    for kind in (Redundancy, Figures)
}


def _counts(counted: Redundancy | Figures) -> None:
    if min(_COUNTS[type(counted)](counted)) < 0:
        raise ValueError(f"{counted}: expected counts of 0 or more")


def _size(frame: Frame, rows: int, row_bytes: int) -> None:
    if rows < 0 or _bytes(frame) != rows * row_bytes:
        raise ValueError(f"an array of {_bytes(frame)} bytes: expected {rows} rows of {row_bytes}")


def _multiple(frame: Frame, rows: int) -> None:
    """Validate an array of ``rows`` rows; only the node that requested them knows their size in words."""
    found = _bytes(frame)
    if rows < 0 or found % (_WORD * max(1, rows)) or bool(found) > bool(rows):
        raise ValueError(f"an array of {found} bytes: expected {rows} rows")


def _numbers(frame: Frame, rows: int, below: int = 1 << 32, *, ascending: bool = True) -> None:
    """Validate an array of ``rows`` record numbers."""
    _size(frame, rows, _WORD)
    if rows:
        numbers = as_array(frame, np.uint32, (rows,))
        if ascending and rows > 1 and not (numbers[1:] > numbers[:-1]).all():
            raise ValueError("numbers are not ascending")
        largest = int(numbers[-1]) if ascending else int(numbers.max())
        _within(largest, below, "number")


def _bytes(frame: Frame) -> int:
    return len(frame) if isinstance(frame, bytes | bytearray) else frame.nbytes
