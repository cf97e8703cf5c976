"""What is to be told of servers that come back: when training goes on, and when more of them may die."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.cluster.messages import WorkerMark


class Recoveries:
    """Follows the supervisor's knowledge from the loss of a server until all redundancy is back.

    Whoever takes over from a supervisor that died does not know when servers were lost: then what is told has
    no seconds.
    """

    def __init__(self) -> None:
        self.degraded = False
        """Whether some rows or parities have not come back yet."""
        self.since: float | None = None
        """When that began; None: unknown."""
        self._behind: dict[int, tuple[int, ...]] = {}

    def lose(self, slot: int, now: float) -> None:
        """A server is gone and will be replaced."""
        self._behind.pop(slot, None)
        if not self.degraded:
            self.degraded, self.since = True, now

    def start(self, slot: int, marks: Iterable[Sequence[WorkerMark]]) -> None:
        """A replacement starts while pushes have come so far at the other servers."""
        newest = tuple(max(mark.sequence for mark in of_one) for of_one in zip(*marks, strict=True))
        if newest:
            self._behind[slot] = newest

    def has_resumed(self, slot: int, marks: Sequence[WorkerMark], at_work: Sequence[bool]) -> bool:
        """Whether every worker that is at work has pushed something new to a replacement; said once.

        What it pushes first may be what its predecessor did not keep: that others have already.
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
        """Whether all redundancy has come back; said once.

        Args:
            sound: whether all servers have all rows and parities.
            lacking: whether one says that it has not, as after a start from a checkpoint.
        """
        if lacking and not self.degraded:
            self.degraded, self.since = True, None
        restored = self.degraded and sound
        self.degraded = self.degraded and not restored
        return restored
