"""How much of a dead server's work counts, by what the others say."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cluster.protocol.messages import Instant
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.supervisor.members import Failure, ServerMember


def what_counts(plan: JobPlan, dead: ServerMember, servers: Sequence[ServerMember]) -> Instant | Failure:
    """What all of its parity servers have; why the job cannot go on if nobody can say."""
    others = [server for server in servers if server is not dead]
    states = [
        state
        for other in others
        if other.beat is not None
        for state in other.beat.lanes
        if state.slot == dead.slot
    ]
    if not states:
        return _without_parities(plan, dead, others)
    newest = max(state.incarnation for state in states)
    last = [state for state in states if state.incarnation == newest]
    if len(last) < len(states):
        # Some have not even heard that the last one began: nothing of it can have been kept.
        return next(state.first for state in last if state.first.batch == 0)
    return min((state.now for state in last), key=lambda instant: instant.batch)


def _without_parities(plan: JobPlan, dead: ServerMember, others: Sequence[ServerMember]) -> Instant | Failure:
    """All rows of the server go back to what was saved; workers go on from where all others stand.

    A worker sends a push only when all servers have applied the one before. So what the others have in
    common is that push, which is new to the replacement, or the one before it.
    """
    known = [other.marks for other in others if other.marks]
    if not known:
        return Failure("lost", dead.peer, "and all other servers")
    if not (plan.partial or plan.beyond == "rows"):
        return Failure("lost", dead.peer, "and all servers that hold its parities")
    marks = tuple(min(of_one, key=lambda mark: mark.sequence) for of_one in zip(*known, strict=True))
    pushed = any(mark.sequence for mark in marks)  # which takes first values everywhere
    return Instant(0, marks, tuple(range(len(plan.groups))) if pushed else plan.first_installed)
