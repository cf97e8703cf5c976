"""Recovery of rows at the replacement of a dead server, which starts without rows.

Rows that are pulled or pushed are recovered first; a background scan recovers all others in chunks, from
several parity servers at once, as fast as the throttle allows (``throttle``). For each row it asks the
stripe's first parity server for the parity without this member (``stripes``), which is the row. If another
member is missing too, it asks as many parity servers as members are missing, and solves for them. A stripe
with fewer than k records left is lost, and reported as lost: nothing is guessed. If the job should continue
anyway, lost rows go back to their last saved values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import Peer, Redundancy
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.stripe_messages import Recover, Syndromes
from holdfast.cluster.redundancy.parity import Records
from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.cluster.redundancy.throttle import Throttle
from holdfast.tables.shard import GroupShard

_AGAIN_SECONDS = 0.5
_HOPELESS_SECONDS = 0.5
_MOST_ROUNDS = 3
_MOST_SCANS = 2
"""Chunks of the scan on their way to one parity server: rows that workers wait for queue behind them."""
_MOST_ASKS = 64
"""If so many requests are unanswered, the scan does not add to them."""
_FIRST_SECONDS = 0.1
"""The scan begins no chunk while rows that somebody waits for are on their way, for up to this long."""
_MOST_NAMED = 5


@dataclass
class _Ask:
    """Rows being recovered, with the requests to their parity servers."""

    group: int
    member: int
    blocks: NDArray[np.int64]
    without: tuple[int, ...]
    """Missing members, including the row itself."""
    unusable: frozenset[int]
    """Parities that are missing."""
    wave: int
    """Number of a set of rows that a request waits for together; 0: rows of the scan."""
    began: float
    burst: int = 0
    """Of the throttle; 0: rows that it does not hold up."""
    wanted: bool = False
    """Whether a request waits for them."""
    retry: Retry = field(default_factory=lambda: Retry(_AGAIN_SECONDS))
    request: int = 0
    parities: tuple[int, ...] = ()
    answers: dict[int, tuple[Syndromes, NDArray[np.int64], Records, dict[int, NDArray[np.int64]]]] = field(
        default_factory=dict
    )
    rounds: int = 0
    """How often they seemed lost."""
    asked: float = field(init=False)
    """When these parity servers were first asked."""
    slow: frozenset[int] = frozenset()
    """Parities whose servers did not answer in time: others are preferred."""


@dataclass
class _Cursor:
    """How far the scan of one member has come."""

    first: int = 0
    """The place of the next block's first record."""
    asks: int = 0
    """Chunks that are on their way."""


class SavedRecords(Protocol):
    """The last saved values of a server's rows."""

    def get(self) -> tuple[Sequence[Records], Redundancy] | None:
        """The records of each group, and their version; None: not read yet, call again."""


class Recovery:
    """The state machine of recovery.

    Args:
        plan: the job's plan.
        shards: the server's shards, without rows.
        replicator: this server's replicator.
        throttle: says when the scan may continue.
        on_rows: called when rows have been recovered.
        on_lost: called with rows of a group that are lost.
    """

    def __init__(
        self,
        plan: JobPlan,
        shards: Sequence[GroupShard],
        replicator: Replicator,
        throttle: Throttle,
        on_rows: Callable[[], None],
        on_lost: Callable[[int, NDArray[np.int64]], None],
    ) -> None:
        self.recovered = 0
        self.went_back = Redundancy()
        """How many rows of tables were lost and went back to saved values, and to which version."""
        self.saved: SavedRecords | None = None
        """The values that lost rows go back to; None: the job ends instead."""
        self.network_lost = False
        """Whether rows of the network are lost and in no version: only workers know its initial values."""
        self._lost: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        self._throttle = throttle
        self._on_rows, self._on_lost = on_rows, on_lost
        self._plan = plan
        self._shards = shards
        self._replicator = replicator
        self._missing: dict[int, NDArray[np.bool_]] = {}
        self._asked: dict[int, NDArray[np.bool_]] = {}
        for g in replicator.parities:
            self._missing[g] = real = shards[g].stands_for_row()
            self._asked[g] = np.zeros_like(real)
        self._left = {g: int(missing.sum()) for g, missing in self._missing.items()}
        self._asks: dict[int, _Ask] = {}
        self._later: list[_Ask] = []
        self._going_back: list[_Ask] = []
        self._requests = self._waves = 0
        self._slow: set[Peer] = set()
        """Parity servers that did not answer in time: only the first request should wait for them."""
        self._cursors = {
            (g, member): _Cursor() for g in self._missing for member in range(plan.placements[g].k)
        }
        self._wanted: dict[int, list[NDArray[np.int64]]] = defaultdict(list)

    def leave_out(self, group: int) -> None:
        """Exclude a group that had no values yet: a worker will send them."""
        if group in self._missing:
            self._missing[group][:] = False
            self._left[group] = 0

    @property
    def left(self) -> int:
        """The number of missing rows."""
        return sum(self._left.values())

    def lost(self) -> str:
        """Describe the rows that cannot be recovered; "" if there are none."""
        texts = []
        for group, found in self._lost.items():
            rows = np.sort(np.concatenate(found))
            some = ", ".join(str(row) for row in rows[:_MOST_NAMED])
            more = ", …" if len(rows) > _MOST_NAMED else ""
            texts.append(f"{len(rows):,} rows of {self._plan.groups[group].name} ({some}{more})")
        return "; ".join(texts)

    def lost_rows(self, group: int) -> Sequence[NDArray[np.int64]]:
        """The rows of one group that cannot be recovered."""
        return self._lost.get(group, ())

    def lacks(self, group: int, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these records are missing."""
        missing = self._missing.get(group)
        return (
            np.zeros(len(places), np.bool_) if missing is None or not self._left[group] else missing[places]
        )

    def want(self, group: int, places: NDArray[np.int64], now: float) -> None:
        """Recover these records first: a request waits for them. They are asked for by ``ask``."""
        asked = self._asked[group]
        wanted = places[self.lacks(group, places) & ~asked[places]]
        if len(wanted):
            asked[wanted] = True
            self._wanted[group].append(wanted)

    def ask(self, now: float) -> None:
        """Ask for all records that were wanted since the last call, each parity server once."""
        if not self._wanted:
            return
        self._waves += 1
        for group, several in self._wanted.items():
            k = self._plan.placements[group].k
            wanted = np.unique(np.concatenate(several))
            for member in range(k):
                mine = wanted[wanted % k == member]
                if len(mine):
                    ask = self._new(group, member, mine // k, now, wave=self._waves)
                    ask.wanted = True
                    self._ask(ask, now)
        self._wanted.clear()

    def receive(self, source: Peer, message: Syndromes, frames: Sequence[Frame], now: float) -> None:
        """Process a parity server's syndromes."""
        ask = self._asks.get(message.request)
        if ask is None or message.parity not in ask.parities or message.parity in ask.answers:
            return
        if self._replicator.peer(source.slot) != source:
            return
        self._slow.discard(source)
        placement = self._plan.placements[ask.group]
        if source.slot != placement.parity_server(self._replicator.me.slot, ask.member, message.parity):
            raise ValueError(f"unexpected syndromes of parity {message.parity} from server {source.slot}")
        good = as_array(frames[0], np.uint32, (message.rows,)).astype(np.int64)
        words = self._plan.groups[ask.group].words
        records = as_array(frames[1], np.uint32, (message.rows, words))
        lacking = {
            part.member: as_array(frame, np.uint32, (part.rows,)).astype(np.int64)
            for part, frame in zip(message.lacking, frames[2:], strict=True)
        }
        if any(len(at) and at.max() >= len(ask.blocks) for at in (good, *lacking.values())):
            raise ValueError("syndromes of stripes that were not requested")
        answered = np.zeros(len(ask.blocks), np.bool_)
        for at in (good, *lacking.values()):
            answered[at] = True
        known = len(lacking) == len(message.lacking) and max(lacking, default=-1) < placement.k
        if not answered.all() or not known or len(message.without) != len(ask.without):
            raise ValueError("syndromes do not match the request")
        ask.answers[message.parity] = message, good, records, lacking
        if len(ask.answers) == len(ask.parities):
            del self._asks[ask.request]
            self._solve(ask, now)

    def tick(self, now: float) -> None:
        """Retry overdue requests and rows that seemed lost, and continue the scan."""
        for ask in [ask for ask in self._asks.values() if ask.retry.is_due(now)]:
            late = [t for t in ask.parities if t not in ask.answers]
            if now - ask.asked > self._plan.timing.stuck_seconds / 2 and self._turn(ask, late, now):
                continue
            self._send(ask, now, again=True)
        later, self._later = self._later, []
        for ask in later:
            if ask.retry.is_due(now):
                self._ask(ask, now)
            else:
                self._later.append(ask)
        if self._going_back and self.saved is not None:
            self._go_back(self.saved, now)
        self._scan(now)

    def _scan(self, now: float) -> None:
        """Ask for the next chunks, members in turn: each has another parity server."""
        if not self.left or len(self._asks) >= _MOST_ASKS:
            return
        if any(ask.wanted and now - ask.began < _FIRST_SECONDS for ask in self._asks.values()):
            return
        for asks in range(1, _MOST_SCANS + 1):
            for (group, member), cursor in self._cursors.items():
                while cursor.asks < asks and cursor.first < len(self._missing[group]):
                    k = self._plan.placements[group].k
                    if not self._throttle.allows(now, k):  # a burst is one for each parity server
                        return
                    blocks = self._next_missing(group, member, cursor)
                    if len(blocks):
                        cursor.asks += 1
                        ask = self._new(group, member, blocks, now)
                        ask.burst = self._throttle.begin(now)
                        self._ask(ask, now)

    def _next_missing(self, group: int, member: int, cursor: _Cursor) -> NDArray[np.int64]:
        """The blocks of the next chunk that has any which is missing and not on its way; none at the end."""
        missing, asked, k = self._missing[group], self._asked[group], self._plan.placements[group].k
        count = self._plan.lanes.chunk(self._plan.groups[group].words)
        while cursor.first < len(missing):
            places = np.arange(cursor.first + member, min(cursor.first + count * k, len(missing)), k)
            cursor.first += count * k
            places = places[missing[places] & ~asked[places]]
            if len(places):
                return places // k
        return np.empty(0, np.int64)

    def _new(self, group: int, member: int, blocks: NDArray[np.int64], now: float, *, wave: int = 0) -> _Ask:
        self._asked[group][blocks * self._plan.placements[group].k + member] = True
        return _Ask(group, member, blocks, (member,), frozenset(), wave, now)

    def _ask(self, ask: _Ask, now: float) -> None:
        """Ask as many parity servers as members are missing."""
        r = self._plan.placements[ask.group].r
        usable = [t for t in range(r) if t not in ask.unusable]
        if len(usable) < len(ask.without):
            self._despair(ask, now)
            return
        usable.sort(key=lambda t: (t in ask.slow, self._server_of(ask, t) in {None, *self._slow}))
        self._requests += 1
        ask.asked = now
        ask.request, ask.parities, ask.answers = self._requests, tuple(usable[: len(ask.without)]), {}
        self._asks[ask.request] = ask
        self._send(ask, now)

    def _turn(self, ask: _Ask, late: Sequence[int], now: float) -> bool:
        """Ask other parity servers instead of those that do not answer; False: there are no others."""
        r = self._plan.placements[ask.group].r
        others = set(range(r)) - ask.unusable - set(ask.parities)
        if not others - ask.slow:
            ask.slow = frozenset()  # all are slow: start over with all of them
        if not others:
            return False
        ask.slow |= set(late)
        self._slow |= {peer for t in late if (peer := self._server_of(ask, t)) is not None}
        del self._asks[ask.request]
        self._ask(ask, now)
        return True

    def _send(self, ask: _Ask, now: float, *, again: bool = False) -> None:
        ask.retry.begin(now)
        me = self._replicator.me
        for t in ask.parities:
            target = self._server_of(ask, t)
            if t not in ask.answers and target is not None:
                if again:
                    self._replicator.doubt(target, now)
                message = Recover(ask.request, ask.group, t, ask.without, len(ask.blocks))
                frames = [ask.blocks.astype(np.uint32)]
                self._replicator.outbox.append(Envelope(me, target, message, frames))

    def _server_of(self, ask: _Ask, parity: int) -> Peer | None:
        """The server of one of the parities of these rows; None: it is not running."""
        placement = self._plan.placements[ask.group]
        return self._replicator.peer(placement.parity_server(self._replicator.me.slot, ask.member, parity))

    def _despair(self, ask: _Ask, now: float) -> None:
        """Retry rows that seem lost before declaring them lost: answers about records may differ in age."""
        ask.rounds += 1
        if ask.rounds < _MOST_ROUNDS:
            ask.without, ask.unusable = (ask.member,), frozenset()
            ask.retry.due = now + _HOPELESS_SECONDS
            self._later.append(ask)
        else:
            places = ask.blocks * self._plan.placements[ask.group].k + ask.member
            rows = self._shards[ask.group].rows_of(places)
            self._lost[ask.group].append(rows)
            self._going_back.append(ask)
            self._on_lost(ask.group, rows)

    def _go_back(self, saved: SavedRecords, now: float) -> None:
        """Set lost rows to their saved values, and invalidate the parities that contain their old values."""
        found = saved.get()
        if found is None:
            return
        records, version = found
        network = len(self._shards) - 1
        if version.version == 0 and any(ask.group == network for ask in self._going_back):
            self.network_lost = True
            return
        count = self.went_back.went_back
        for ask in self._going_back:
            shard = self._shards[ask.group]
            self._replicator.forget(ask.group, ask.member, ask.blocks, now)
            places = ask.blocks * self._plan.placements[ask.group].k + ask.member
            shard.write(places, records[ask.group][places])
            self._missing[ask.group][places] = False
            self._left[ask.group] -= len(places)
            count += len(places) if ask.group < len(self._shards) - 1 else 0
        self.went_back = replace(version, went_back=count)
        self._going_back.clear()
        if not self.left:
            self.saved = None  # free it: it is as large as the rows
        self._on_rows()

    def _solve(self, ask: _Ask, now: float) -> None:
        """Solve for the rows, once all parity servers have answered."""
        count = len(ask.blocks)
        unusable = {t: answer[3].get(-1, np.empty(0, np.int64)) for t, answer in ask.answers.items()}
        lacking = [(m, at) for *_, found in ask.answers.values() for m, at in found.items() if m >= 0]
        solvable = np.ones(count, np.bool_)
        for at in [*unusable.values(), *(at for _, at in lacking)]:
            solvable[at] = False
        if self._agree(ask):
            self._put(ask, np.flatnonzero(solvable))
        else:
            self._again(ask, np.flatnonzero(solvable), ask.without, ask.unusable, now)
        # Retry the others, grouped by what turned out to be missing.
        found = [*lacking, *((-1 - t, at) for t, at in unusable.items())]
        kinds = np.zeros(count, np.int64)
        for bit, (_, at) in enumerate(found):
            kinds[at] |= 1 << bit
        for kind in np.unique(kinds[~solvable]):
            what = {found[bit][0] for bit in range(len(found)) if kind >> bit & 1}
            members = sorted(m for m in what if m >= 0 and m not in ask.without)
            parities = {-1 - m for m in what if m < 0}
            without = (*ask.without, *members)
            self._again(ask, np.flatnonzero(kinds == kind), without, ask.unusable | parities, now)
        if ask.burst:
            self._cursors[ask.group, ask.member].asks -= 1
            self._throttle.end(ask.burst, now)
        if not ask.wave or all(other.wave != ask.wave for other in self._asks.values()):
            self._on_rows()
        self._scan(now)

    def _again(
        self,
        ask: _Ask,
        at: NDArray[np.int64],
        without: tuple[int, ...],
        unusable: frozenset[int],
        now: float,
    ) -> None:
        if len(at):
            blocks, wave = ask.blocks[at], ask.wave
            if not wave:  # the scan does not wait for its remaining rows
                wave = self._waves = self._waves + 1
            again = _Ask(ask.group, ask.member, blocks, without, unusable, wave, now, rounds=ask.rounds)
            again.wanted = ask.wanted
            self._ask(again, now)

    @staticmethod
    def _agree(ask: _Ask) -> bool:
        """Whether all syndromes are of one instant: another member may have been recovered and changed."""
        states = [
            [state for m, state in zip(ask.without, answer[0].without, strict=True) if m != ask.member]
            for answer in ask.answers.values()
        ]
        return all(state == states[0] for state in states)

    def _put(self, ask: _Ask, at: NDArray[np.int64]) -> None:
        if not len(at):
            return
        group, shard = ask.group, self._shards[ask.group]
        code = self._replicator.parities[group].code
        syndromes: dict[int, Records] = {}
        for t, (_, good, records, _) in ask.answers.items():
            # Both ascend and solvable is a subset of good, so equal lengths mean equal. Loops want a copy.
            same = code.r == 1 and len(good) == len(at)
            syndromes[t] = records if same else records[np.searchsorted(good, at)]
        found = code.solve(ask.without, syndromes)[ask.without.index(ask.member)]
        places = ask.blocks[at] * self._plan.placements[group].k + ask.member
        new = self._missing[group][places]  # a row that is already here may have changed since
        shard.write(*((places, found) if new.all() else (places[new], found[new])))
        self._missing[group][places] = False
        self._left[group] -= int(new.sum())
        self.recovered += int(new.sum())
