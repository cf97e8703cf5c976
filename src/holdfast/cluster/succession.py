"""What a launcher leaves to its successor, if it may be lost: on a cluster, the controller runs the launcher.

The processes of a job run on when the launcher is gone. Its successor finds them, and goes on from the
``Charter``, which an engine keeps where the launcher's end does not reach it, and from the run's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.cluster.protocol.messages import Board, Happening, Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.engines.base import Inheritance
from holdfast.cluster.runtime.files import Journal
from holdfast.cluster.runtime.keys import JobKeys, KeyPair
from holdfast.options import Kill


class Charter(Struct, frozen=True):
    """What every launcher of a running job must know. It holds the secret keys of all nodes."""

    plan: JobPlan
    bind: str
    supervisor: str
    """Where the supervisor listens, as far as the launcher knew."""
    vaults: Board = ()
    keys: tuple[KeyPair, ...] = ()


@dataclass
class Succession:
    """Which of a job's launchers one is.

    Args:
        launcher: its incarnation.
        journal: the run's log, which its successor must have.
        charter: what its predecessor left; None: it starts the job.
        inheritance: what the predecessor's engine left.
        again: whether the job starts anew from its checkpoint, after it has lost data.
    """

    launcher: int = 0
    journal: Journal | None = None
    charter: Charter | None = None
    inheritance: Inheritance | None = None
    again: bool = False

    @classmethod
    def after(
        cls, launcher: int, journal: Journal, left: Inheritance, charter: bytes, most_vaults: int
    ) -> Succession:
        """That of a launcher that takes over, from what was kept."""
        found = msgspec.msgpack.decode(charter, type=Charter)
        keys = JobKeys(0, 0, pairs=found.keys) if found.keys else None
        of_vaults = [keys.of(Peer("vault", slot)) for slot in range(most_vaults)] if keys else []
        inheritance = msgspec.structs.replace(
            left,
            job=found.plan.job,
            supervisor=found.supervisor,
            vaults=found.vaults,
            vault_keys=tuple(of_vaults),
        )
        return cls(launcher, journal, found, inheritance)

    def begin_again(self) -> Succession:
        """That of the same launcher, when the job starts anew from its checkpoint."""
        return Succession(self.launcher, self.journal, again=True)


def encode_charter(charter: Charter) -> bytes:
    """A charter as bytes."""
    return msgspec.msgpack.encode(charter)


@dataclass
class Past:
    """What the log of a run says of the time before this launcher."""

    happened: list[Happening] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    """Each time that data was lost, and the job restarted from its checkpoint."""
    kills: list[tuple[str, int]] = field(default_factory=list)
    """Kills that were executed: role and slot."""
    began: float | None = None
    """When the first progress was reported, Unix seconds."""
    is_spread: bool = True
    """Whether it was said last that the code covers the loss of any machine."""

    def left(self, kills: Iterable[Kill]) -> tuple[Kill, ...]:
        """The kills that are still to be executed."""
        done = list(self.kills)
        left = []
        for kill in kills:
            if (kill.role, kill.slot) in done:
                done.remove((kill.role, kill.slot))
            else:
                left.append(kill)
        return tuple(left)

    def without(self, happened: Iterable[Happening]) -> list[Happening]:
        """Those that the log does not have: a supervisor repeats the last ones in each report."""
        if not self.happened:
            return list(happened)
        known = {_key(one) for one in self.happened}
        return [one for one in happened if _key(one) not in known]


def _key(one: Happening) -> bytes:
    """What an event says, without when: the log has the time of another clock."""
    figures = {name: value for name, value in one.figures.items() if name != "host"}
    return msgspec.json.encode([one.event, figures], order="deterministic")


def past_of(events: Iterable[Mapping[str, Any]]) -> Past:
    """Read a run's log."""
    past = Past()
    for event in events:
        name, at = event["event"], event["time"]
        figures = {key: value for key, value in event.items() if key not in ("event", "time", "seconds")}
        if name == "progress":
            past.began = past.began or at
            continue
        past.happened.append(Happening(at, name, figures))
        if name == "data_lost":
            past.losses.append(figures["message"])
            past.began, past.is_spread = None, True
        elif name in ("spread_lost", "spread_restored"):
            past.is_spread = name == "spread_restored"
        elif name == "killed":
            past.kills.append((figures["role"], figures["slot"]))
    return past
