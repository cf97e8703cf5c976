"""Sums over stripes, at their parity server: to recover rows, to rebuild lost parities, and to scrub.

All three read the members of stripes *through their owners' lanes*. So a value arrives exactly at the point
of the owner's changes up to which the parity contains them. Later changes go to the parity and, if the sum
already includes the member, to that sum too. When all members have arrived, parity and sum are of one
instant, although nothing was paused. Nothing here is durable: after a death, the work starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.stripe_messages import (
    Agreed,
    Compare,
    Lacking,
    ReadStripes,
    Recover,
    StripePart,
    Syndromes,
    Values,
)
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.redundancy.parity import Blocks, ParityShard, Records
from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.cluster.redundancy.throttle import Throttle
from holdfast.kernels.memory import Bytes, new_bytes, read_only

_READ_AGAIN_SECONDS = 0.25
_MOST_JOBS = 1024
_FORGOTTEN_SECONDS = 5.0
"""A node that has not asked for this long has asked another parity server instead."""
_VOTE_SECONDS = 10.0
_LACKED_A_PAUSE = 32
"""Owners that lack rows are asked again about this many chunks in each time of ``_READ_AGAIN_SECONDS``."""
_MOST_REBUILDS = 2
"""Chunks of one group's parities that are rebuilt at a time, or in a burst; half of them while rows are
missing."""

Purpose = Literal["recover", "vote", "rebuild", "scrub", "repair"]


@dataclass
class _Job:
    """A sum over some stripes, waiting for members."""

    purpose: Purpose
    number: int
    group: int
    parity: int
    blocks: NDArray[np.int64]
    waiting: set[int]
    """Members that have not arrived yet."""
    began: float
    retry: Retry
    sums: Records
    summed: set[int] = field(default_factory=set)
    """Members included in the sums."""
    lacking: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """By member: the stripes in which its owner lacks it."""
    source: Peer | None = None
    request: int = 0
    without: tuple[int, ...] = ()
    wanted: float = field(init=False)
    """When it was last requested."""
    burst: int = 0
    """Of the throttle."""


@dataclass
class _Vote:
    """A question to other parity servers about stripes whose members do not match one parity."""

    group: int
    parity: int
    blocks: NDArray[np.int64]
    own_is_wrong: NDArray[np.bool_]
    until: float
    """When the vote expires: servers without an answer by then may be dead. The next round asks again."""
    waiting: set[int] = field(default_factory=set)


@dataclass
class _Pass:
    """How far the rebuilding of one parity number of a group has come."""

    first: int = 0
    """The next block to look at."""
    at: float = 0.0
    """Not before this time."""
    jobs: int = 0
    """Sums under way."""
    lacked: int = 0
    """Sums in which an owner lacked rows."""


class Stripes:
    """The state machine of sums. Incoming messages have been validated, as for ``Replicator``.

    Args:
        plan: the job's plan.
        replicator: this server's replicator; its creator passes the values and changes that it receives here.
        throttle: says when the next parities may be rebuilt.
        allocate: returns memory for sums, which are sent to others.
    """

    def __init__(
        self,
        plan: JobPlan,
        replicator: Replicator,
        throttle: Throttle,
        allocate: Callable[[int], Bytes] = new_bytes,
    ) -> None:
        self._allocate = allocate
        self.rebuilt = 0
        """Lost parities rebuilt so far."""
        self.scrubbed = self.wrong = self.repaired = 0
        """Parities compared with their members, those that did not match, and those repaired."""
        self._plan = plan
        self._replicator = replicator
        self._parities = replicator.parities
        self._jobs: dict[int, _Job] = {}
        self._numbers = 0
        self._throttle = throttle
        self._passes = {(g, t): _Pass() for g, p in self._parities.items() for t in range(p.placement.r)}
        self._scrub_at = 0.0
        self._scrub_cursor = 0
        self._votes: dict[int, _Vote] = {}

    # Recovery of rows

    def recover(self, source: Peer, message: Recover, frames: Sequence[Frame], now: float) -> None:
        """Process a replacement's request for syndromes; the answer is sent when all members have arrived."""
        self._sum_up("recover", source, message, message.without, frames, now)

    def compare(self, source: Peer, message: Compare, frames: Sequence[Frame], now: float) -> None:
        """Process another parity server's question whether parities here match their members."""
        self._sum_up("vote", source, message, (), frames, now)

    def _sum_up(
        self,
        purpose: Literal["recover", "vote"],
        source: Peer,
        message: Recover | Compare,
        without: tuple[int, ...],
        frames: Sequence[Frame],
        now: float,
    ) -> None:
        """Start a sum for another server, unless it is already running."""
        if self._replicator.peer(source.slot) != source:
            return
        for job in self._jobs.values():
            if (job.purpose, job.source, job.request) == (purpose, source, message.request):
                job.wanted = now
                return
        if len(self._jobs) >= _MOST_JOBS:
            return
        parity = self._parities[message.group]
        members = set(range(parity.placement.k)) - set(without)
        blocks = as_array(frames[0], np.uint32, (message.rows,)).astype(np.int64)
        job = self._begin(purpose, message.group, message.parity, blocks, members, now)
        job.source, job.request, job.without = source, message.request, without
        job.wanted = now
        if not parity.whole(message.parity, blocks).any():
            job.waiting.clear()
        self._look_at(job, now)

    def _answer(self, job: _Job) -> None:
        assert job.source is not None
        parity = self._parities[job.group]
        placement = parity.placement
        whole = parity.whole(job.parity, job.blocks)
        good = whole.copy()
        for at in job.lacking.values():
            good[at] = False
        chosen = np.flatnonzero(good)
        some = len(chosen) < len(job.sums)
        syndromes = job.sums[chosen] if some else job.sums  # nobody else needs them any more
        parity.add_to(syndromes, job.parity, job.blocks[chosen] if some else job.blocks)
        if job.purpose == "vote":
            agree = chosen[(syndromes == 0).all(1)]
            self._post(job.source, Agreed(job.request, job.parity, len(agree)), [agree.astype(np.uint32)])
            return
        lacking = {-1: np.flatnonzero(~whole), **job.lacking}
        lacking = {member: at for member, at in lacking.items() if len(at)}
        owners = [placement.member_server(parity.server, job.parity, m) for m in job.without]
        answer = Syndromes(
            job.request,
            job.parity,
            len(chosen),
            tuple(self._replicator.progress(owner) for owner in owners),
            tuple(Lacking(member, len(at)) for member, at in lacking.items()),
        )
        frames = [chosen.astype(np.uint32), syndromes, *(at.astype(np.uint32) for at in lacking.values())]
        self._post(job.source, answer, frames)

    # Rebuilding of parities

    def rebuild(self, now: float, *, beside: bool = False) -> None:
        """Rebuild the next incomplete parities, if it is time; ``beside`` rows that are missing, fewer."""
        most = _MOST_REBUILDS // 2 if beside else _MOST_REBUILDS
        for (group, t), turn in self._passes.items():
            parity = self._parities[group]
            while parity.lacking and now >= turn.at and turn.jobs < most:
                if not self._throttle.allows(now, most):
                    return
                blocks = self._next_incomplete(parity, t, turn)
                if not len(blocks):
                    if not turn.jobs:  # start over: some owners may have lacked their rows
                        turn.at = now + _READ_AGAIN_SECONDS * max(1.0, turn.lacked / _LACKED_A_PAUSE)
                        turn.first = turn.lacked = 0
                    break
                members = {m for m in range(parity.placement.k) if not parity.contains(t, m, blocks).all()}
                turn.jobs += 1
                job = self._begin("rebuild", group, t, blocks, members, now)
                job.burst = self._throttle.begin(now)
                self._look_at(job, now)

    def _next_incomplete(self, parity: ParityShard, t: int, turn: _Pass) -> NDArray[np.int64]:
        """The blocks of the next chunk that has any whose parity is not whole; none at the end."""
        count = self._plan.lanes.chunk(parity.plan.words)
        while turn.first < parity.blocks:
            blocks = parity.incomplete(t, turn.first, count)
            turn.first += count
            if len(blocks):
                return blocks
        return np.empty(0, np.int64)

    def lacking(self) -> int:
        """The number of incomplete parities."""
        return sum(parity.lacking for parity in self._parities.values())

    # Scrubbing

    def scrub(self, now: float) -> None:
        """Check the next stripes, if it is time."""
        seconds = self._plan.lanes.scrub_seconds
        if not seconds or now < self._scrub_at or any(j.purpose == "scrub" for j in self._jobs.values()):
            return
        everything = [(g, t, p) for g, p in self._parities.items() for t in range(p.placement.r)]
        total = sum(parity.blocks for _, _, parity in everything)
        if not total or self.lacking():
            return
        at = self._scrub_cursor = self._scrub_cursor % total
        for group, t, parity in everything:
            count = self._plan.lanes.chunk(parity.plan.words)
            if at < parity.blocks:
                blocks = np.arange(at, min(at + count, parity.blocks))
                self._scrub_cursor += len(blocks)
                self._scrub_at = now + seconds * len(blocks) / total
                members = set(range(parity.placement.k))
                self._look_at(self._begin("scrub", group, t, blocks, members, now), now)
                return
            at -= parity.blocks

    def _compare(self, job: _Job, now: float) -> None:
        parity = self._parities[job.group]
        checked = parity.whole(job.parity, job.blocks)  # some may have been invalidated since it began
        for at in job.lacking.values():
            checked[at] = False
        wrong = checked & (parity.get(job.parity, job.blocks) != job.sums).any(1)
        self.scrubbed += int(checked.sum())
        self.wrong += int(wrong.sum())
        if wrong.any():
            self._ask_others(job, job.blocks[wrong], now)

    # On a mismatch, either the parity or a member is wrong. With one parity nobody can tell which. With more,
    # the others can: if they match the members, this parity is wrong, and is recomputed. A wrong member is
    # only counted: its row may have been trained on since.

    def _ask_others(self, job: _Job, blocks: NDArray[np.int64], now: float) -> None:
        placement = self._parities[job.group].placement
        owner = placement.member_server(self._replicator.me.slot, job.parity, 0)
        vote = _Vote(job.group, job.parity, blocks, np.ones(len(blocks), np.bool_), now + _VOTE_SECONDS)
        for t in range(placement.r):
            other = self._replicator.peer(placement.parity_server(owner, 0, t))
            if t != job.parity and other is not None:
                vote.waiting.add(t)
                message = Compare(job.number, job.group, t, len(blocks))
                self._post(other, message, [blocks.astype(np.uint32)])
        self._votes[job.number] = vote

    def take_vote(self, message: Agreed, frames: Sequence[Frame], now: float) -> None:
        """Process another parity server's answer whether its parities match the members."""
        vote = self._votes.get(message.request)
        if vote is None or message.parity not in vote.waiting:
            return
        at = as_array(frames[0], np.uint32, (message.rows,)).astype(np.int64)
        agrees = np.zeros(len(vote.blocks), np.bool_)
        if len(at) and at.max() >= len(vote.blocks):
            raise ValueError("stripes that were not requested")
        agrees[at] = True
        vote.own_is_wrong &= agrees
        vote.waiting.remove(message.parity)
        if not vote.waiting:
            del self._votes[message.request]
            members = set(range(self._parities[vote.group].placement.k))
            blocks = vote.blocks[vote.own_is_wrong]
            if len(blocks):
                self._look_at(self._begin("repair", vote.group, vote.parity, blocks, members, now), now)

    def _repair(self, job: _Job) -> None:
        parity = self._parities[job.group]
        good = parity.whole(job.parity, job.blocks)
        for at in job.lacking.values():
            good[at] = False
        parity.put(job.parity, job.blocks[good], job.sums[good])
        self.repaired += int(good.sum())

    # Common to all three

    def take_values(self, source: Peer, message: Values, frames: Sequence[Frame]) -> None:
        """Process members of a job's stripes, at their position in the lane."""
        job = self._jobs.get(message.job)
        if job is None or message.member not in job.waiting:
            return
        parity = self._parities[job.group]
        if source.slot != parity.placement.member_server(parity.server, job.parity, message.member):
            raise ValueError(f"values of member {message.member} from server {source.slot}, not its owner")
        if message.rows + message.absent != len(job.blocks):
            raise ValueError(f"values of {message.rows} records: expected {len(job.blocks)}")
        records = as_array(frames[0], np.uint32, (message.rows, parity.plan.words))
        absent = as_array(frames[1], np.uint32, (message.absent,)).astype(np.int64)
        if not len(absent):
            if job.purpose == "rebuild":
                parity.add(job.parity, message.member, job.blocks, records)
            else:
                parity.code.add(job.sums, job.parity, message.member, records)
        else:
            here = np.ones(len(job.blocks), np.bool_)
            here[absent] = False
            present = np.flatnonzero(here)
            if job.purpose == "rebuild":
                parity.add(job.parity, message.member, job.blocks[present], records)
            else:
                parity.code.update(job.sums, present, job.parity, message.member, records)
        job.waiting.remove(message.member)
        job.summed.add(message.member)
        if len(absent):
            job.lacking[message.member] = absent

    def note_change(self, part: StripePart, blocks: Blocks, differences: Records) -> None:
        """Apply a change of a member to the sums that include it."""
        for job in self._jobs.values():
            if (
                (job.group, job.parity) == (part.group, part.parity)
                and part.member in job.summed
                and job.purpose != "rebuild"
                and len(job.blocks)
            ):
                at = np.minimum(np.searchsorted(job.blocks, blocks), len(job.blocks) - 1)
                hit = np.flatnonzero(job.blocks[at] == blocks)
                code = self._parities[job.group].code
                code.update(job.sums, at[hit], job.parity, part.member, read_only(differences[hit]))

    def tick(self, now: float) -> None:
        """Finish complete sums, retry missing members, drop sums that nobody waits for."""
        if self._votes:
            self._votes = {number: vote for number, vote in self._votes.items() if now < vote.until}
        for job in list(self._jobs.values()):
            asker = job.source
            if asker is not None and (
                self._replicator.peer(asker.slot) != asker or now > job.wanted + _FORGOTTEN_SECONDS
            ):
                del self._jobs[job.number]
            else:
                self._look_at(job, now)

    def finish(self, now: float) -> None:
        """Finish complete sums."""
        if self._jobs:
            for job in [job for job in self._jobs.values() if not job.waiting]:
                self._look_at(job, now)

    def _begin(
        self,
        purpose: Purpose,
        group: int,
        parity: int,
        blocks: NDArray[np.int64],
        members: set[int],
        now: float,
    ) -> _Job:
        self._numbers += 1
        rows = 0 if purpose == "rebuild" else len(blocks)
        words = self._plan.groups[group].words
        sums: Records = self._allocate(rows * words * 4).view(np.uint32).reshape(rows, words)
        sums[:] = 0
        job = _Job(
            purpose, self._numbers, group, parity, blocks, members, now, Retry(_READ_AGAIN_SECONDS), sums
        )
        self._jobs[job.number] = job
        return job

    def _look_at(self, job: _Job, now: float) -> None:
        if job.waiting:
            if job.retry.is_due(now):
                job.retry.again(now)
                self._read(job, now, again=now > job.began)
            return
        del self._jobs[job.number]
        if job.purpose in ("recover", "vote"):
            self._answer(job)
        elif job.purpose == "scrub":
            self._compare(job, now)
        elif job.purpose == "repair":
            self._repair(job)
        else:
            self.rebuilt += int(self._parities[job.group].whole(job.parity, job.blocks).sum())
            turn = self._passes[job.group, job.parity]
            turn.jobs -= 1
            turn.lacked += bool(job.lacking)
            self._throttle.end(job.burst, now)

    def _read(self, job: _Job, now: float, *, again: bool) -> None:
        parity = self._parities[job.group]
        for member in sorted(job.waiting):
            owner = self._replicator.peer(parity.placement.member_server(parity.server, job.parity, member))
            if owner is not None:
                if again:
                    self._replicator.doubt(owner, now)
                message = ReadStripes(job.number, job.group, member, len(job.blocks))
                self._post(owner, message, [job.blocks.astype(np.uint32)])

    def _post(self, target: Peer, message: Message, frames: Sequence[Frame]) -> None:
        self._replicator.outbox.append(Envelope(self._replicator.me, target, message, frames))
