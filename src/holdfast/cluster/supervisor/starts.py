"""Which processes a launcher starts: what a view asks for, each incarnation once, whatever launchers die.

A launcher that takes over from another cannot know which processes that one has started, or is just starting
on a machine that it cannot reach. So it starts only incarnations that are newer than those of the first view
that names it as the launcher. A view names one launcher, and the supervisor makes that durable: what is in a
view for the first time is started by the launcher of this view, or by nobody. What then does not run is
replaced by the next incarnation.
"""

from __future__ import annotations

from holdfast.cluster.protocol.messages import Peer, View, ViewNumber


class Starts:
    """What one launcher is to start, view after view.

    Args:
        launcher: its incarnation; 0 if nobody can take over from it.
        takes_over: whether it takes over from another launcher, instead of starting the job.
    """

    def __init__(self, launcher: int = 0, *, takes_over: bool = False) -> None:
        self.view = View(ViewNumber(), "starting")
        """The newest view that names this launcher."""
        self.superseded = False
        """Whether another launcher has taken over."""
        self.takes_over = takes_over
        """Whether it does not know yet what its predecessor was to start."""
        self.running: dict[tuple[str, int], Peer] = {}
        """The newest incarnation of each slot that was started, by this launcher or its predecessor."""
        self._launcher = launcher

    def take(self, view: View) -> list[Peer]:
        """Process a view. Returns what to start now."""
        self.superseded = self.superseded or view.launcher > self._launcher > 0
        if view.launcher != self._launcher or view.number <= self.view.number:
            return []
        self.view = view
        wanted = [
            *(Peer("worker", entry.slot, entry.incarnation) for entry in view.workers),
            *(Peer("server", entry.slot, entry.incarnation) for entry in view.servers),
        ]
        newer = [peer for peer in wanted if self.is_new(peer)]
        if self.takes_over:
            self.takes_over = False
            self.running.update({(peer.role, peer.slot): peer for peer in newer})
            return []
        return newer

    def is_new(self, peer: Peer) -> bool:
        """Whether nobody was to start this incarnation yet, nor a newer one."""
        known = self.running.get((peer.role, peer.slot))
        return known is None or known.incarnation < peer.incarnation
