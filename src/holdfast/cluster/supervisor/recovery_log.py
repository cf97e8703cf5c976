"""Events about the recovery of servers: rows recovered, training resumed, redundancy restored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.cluster.protocol.messages import Redundancy, WorkerMark
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.supervisor.members import JobFailure, ServerMember, Tally, WorkerMember


class Recoveries:
    """Tracks recovery from the loss of a server until redundancy is restored.

    A restarted supervisor does not know when servers were lost: its events have no seconds.
    """

    def __init__(self) -> None:
        self.degraded = False
        """Whether any server lacks rows or parities."""
        self.since: float | None = None
        """Since when; None: unknown."""
        self._behind: dict[int, tuple[int, ...]] = {}

    def lose(self, slot: int, now: float) -> None:
        """Note that a server is lost and will be replaced."""
        self._behind.pop(slot, None)
        if not self.degraded:
            self.degraded, self.since = True, now

    def start(self, slot: int, marks: Iterable[Sequence[WorkerMark]]) -> None:
        """Note the start of a replacement, with the other servers' marks at that time."""
        newest = tuple(max(mark.sequence for mark in of_one) for of_one in zip(*marks, strict=True))
        if newest:
            self._behind[slot] = newest

    def has_resumed(self, slot: int, marks: Sequence[WorkerMark], at_work: Sequence[bool]) -> bool:
        """Whether every working worker has pushed something new to a replacement; True only once.

        Its first pushes may be ones that the predecessor had not kept, which other servers already have.
        """
        behind = self._behind.get(slot)
        if behind is None or not any(at_work):
            return False
        resumed = all(
            mark.sequence > before
            for mark, before, works in zip(marks, behind, at_work, strict=True)
            if works
        )
        if resumed:
            del self._behind[slot]
        return resumed

    def is_restored(self, *, sound: bool, lacking: bool) -> bool:
        """Whether redundancy has been restored; True only once.

        Args:
            sound: whether all servers have all rows and parities.
            lacking: whether a server reports missing ones, as after a start from a checkpoint.
        """
        if lacking and not self.degraded:
            self.degraded, self.since = True, None
        restored = self.degraded and sound
        self.degraded = self.degraded and not restored
        return restored


class RecoveryLog:
    """Emits events about recovery, from the servers' beats.

    Args:
        plan: the job's plan.
        servers: the servers' members.
        workers: the workers' members.
        tally: counts the job's samples.
        events: receives the events.
    """

    def __init__(
        self,
        plan: JobPlan,
        servers: Sequence[ServerMember],
        workers: Sequence[WorkerMember],
        tally: Tally,
        events: list[tuple[str, dict[str, Any]]],
    ) -> None:
        self._plan, self._servers, self._workers = plan, servers, workers
        self._tally, self._events = tally, events
        self._recoveries = Recoveries()
        self._samples_lost = 0.0

    @property
    def degraded(self) -> bool:
        """Whether any server lacks rows or parities."""
        return self._recoveries.degraded

    def note_loss(self, server: ServerMember, now: float) -> None:
        """Note that a server is lost and will be replaced."""
        server.lost_at = now
        server.recovering = server.recovered = False
        server.updates_lost = 0
        self._recoveries.lose(server.slot, now)

    def note_start(self, server: ServerMember, now: float) -> None:
        """Note that a replacement starts, without its rows."""
        server.recovering = True
        others = [s.marks for s in self._servers if s is not server and s.marks]
        self._recoveries.start(server.slot, others)
        self._events.append(server.event("server_started", after_seconds=_since(server.lost_at, now)))

    def note(self, server: ServerMember, now: float) -> JobFailure | None:
        """Process the beat of a started server. Returns why the job cannot continue with it, if so."""
        beat, failure = server.beat, None
        if beat is None or not beat.started.epoch:
            return None
        said = beat.redundancy
        if (said.wrong, said.repaired) != server.wrong:
            server.wrong = said.wrong, said.repaired
            self._events.append(server.event("parities_wrong", wrong=said.wrong, repaired=said.repaired))
        if said.updates_lost > server.updates_lost:
            lost = said.updates_lost - server.updates_lost
            server.updates_lost = said.updates_lost
            self._events.append(server.event("network_updates_lost", updates=lost))
        if said.network_lost and not said.lost:
            text = f"took over, but lacks {said.not_installed:,} rows of the network"
            failure = JobFailure("network", server.peer, text)
        elif said.lost and (self._plan.beyond != "rows" or said.network_lost):
            failure = JobFailure("lost", server.peer, f"took over, but could not recover {said.lost}")
        elif said.rows:
            server.recovering = not server.recovered
        elif not server.recovering:
            server.recovered = True
        else:
            self._note_rows(server, said, now)
            if self._plan.partial:
                return None
        at_work = [w.beat is not None and w.beat.state == "working" for w in self._workers]
        if self._recoveries.has_resumed(server.slot, server.marks, at_work):
            seconds = _since(server.lost_at, now)
            self._events.append(server.event("training_resumed", after_seconds=seconds))
        return failure

    def note_redundancy(self, now: float) -> None:
        """Emit an event when every server has all rows and parities again."""
        beats = [s.beat for s in self._servers if s.stage == "started" and s.beat is not None]
        lacking = any(beat.redundancy.rows or beat.redundancy.parities for beat in beats)
        sound = all(s.sound for s in self._servers)
        if self._recoveries.is_restored(sound=sound, lacking=lacking) and not self._plan.partial:
            seconds = _since(self._recoveries.since, now)
            self._events.append(("redundancy_restored", {"after_seconds": seconds}))

    def _note_rows(self, server: ServerMember, said: Redundancy, now: float) -> None:
        """Note that a server has recovered all rows."""
        server.recovering, server.recovered = False, True
        server.deaths = 0
        if said.version >= 0:
            self._note_rollback(server, said, now)
        if not self._plan.partial:
            found = {"compared": said.compared, "unequal": said.unequal}
            more = found if self._plan.compare_recovered else {}
            seconds = _since(server.lost_at, now)
            self._events.append(
                server.event("server_recovered", rows=said.recovered, after_seconds=seconds, **more)
            )

    def _note_rollback(self, server: ServerMember, back: Redundancy, now: float) -> None:
        """Emit an event about the samples lost when rows of a server went back to a version."""
        lost = max(0, server.samples_then - back.version_samples)
        share = back.went_back / max(1, sum(group.rows for group in self._plan.groups[:-1]))
        self._samples_lost += lost * share
        done = self._tally.done()
        pls = done and self._samples_lost * done / self._tally.samples()
        self._events.append(
            server.event(
                "server_rolled_back", version=back.version, rows=back.went_back, what=back.lost,
                samples_lost=lost, pls=pls, after_seconds=_since(server.lost_at, now),
            )
        )  # fmt: skip


def _since(before: float | None, now: float) -> float | None:
    return None if before is None else round(now - before, 3)
