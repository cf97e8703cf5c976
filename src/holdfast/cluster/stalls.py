"""When a job that waits for servers is to be given up: nothing comes back, and no batch counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.cluster.members import Failure, Member, ServerMember
from holdfast.cluster.plan import JobPlan

_QUIET = 0.25
"""Of the time after which a job is given up: if all was well for so long, it is well."""


class Stalls:
    """Tells how long a job has made no progress though some server is not as it should be.

    Progress is a batch that counts, or fewer rows and parities that are lacking. That a server is replaced
    is none by itself: it could be replaced for ever.

    Args:
        plan: the job's.
        servers: what is known of them.
        now: the time.
    """

    def __init__(self, plan: JobPlan, servers: Sequence[ServerMember], now: float) -> None:
        self._plan, self._servers = plan, servers
        self._since = now
        self._seen = -math.inf
        """When something was last not as it should be."""
        self._steps = -1
        self._lacking: int | None = None

    def forgive(self, seconds: float) -> None:
        """For so long nobody has looked."""
        self._since += seconds

    def note_loss(self, member: Member, how: str, now: float) -> Failure | None:
        """A node is lost; why another in its place would not help, if nothing has moved for too long."""
        self._seen = now
        if isinstance(member, ServerMember):
            self._lacking = None  # more is lacking from now on
        if self._is_patient(now):
            return None
        limit = self._plan.timing.hopeless_seconds
        return Failure("stalled", member.peer, f"{how}, and no batch has counted for {limit:g} s")

    def look(self, steps: int, members: Sequence[Member], now: float) -> Failure | None:
        """Why the job cannot go on, if nothing has moved for too long."""
        beats = [s.beat for s in self._servers if s.beat is not None]
        lacking = sum(beat.redundancy.rows + beat.redundancy.parities for beat in beats)
        moved = steps != self._steps or (self._lacking is not None and lacking < self._lacking)
        # What is read from a store may take long.
        reading = any(beat.state == "restoring" or beat.redundancy.lost for beat in beats)
        stuck = [m for m in members if m.beat is not None and m.beat.stuck_on]
        ill = [s for s in self._servers if not s.sound]
        if stuck or ill:
            self._seen = now
        # One that is replaced over and over is fine for a moment each time.
        if moved or reading or now - self._seen > self._plan.timing.hopeless_seconds * _QUIET:
            self._since = now
        self._steps = steps
        self._lacking = lacking if self._lacking is None else min(lacking, self._lacking)
        return None if self._is_patient(now) or not (ill or stuck) else self._describe(ill, stuck)

    def _is_patient(self, now: float) -> bool:
        return not self._plan.r or now - self._since <= self._plan.timing.hopeless_seconds

    def _describe(self, ill: Sequence[ServerMember], stuck: Sequence[Member]) -> Failure:
        limit = self._plan.timing.hopeless_seconds
        who = (*ill, *stuck)[0]
        said = who.beat.redundancy if who.beat is not None else None
        lacks = f"lacks {said.rows:,} rows and {said.parities:,} parities" if said and ill else "is not there"
        links = "; ".join(
            f"{m.peer} does not reach server {m.beat.stuck_on[0]}" for m in stuck if m.beat is not None
        )
        text = f"{lacks if ill else 'waits'}, and nothing has come back for {limit:g} s"
        return Failure("stalled", who.peer, f"{text} ({links})" if links else text)
