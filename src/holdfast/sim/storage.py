"""What a simulated supervisor finds again after a crash."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.cluster.supervisor.views import Durable


@dataclass
class MemoryStorage:
    """Durable state that outlives a machine."""

    state: Durable | None = None
    saves: list[int] = field(default_factory=list)

    def load(self) -> Durable | None:
        """What was saved last."""
        return self.state

    def save(self, state: Durable) -> None:
        """Keep it."""
        assert self.state is None or state.epoch > self.state.epoch, "an epoch is never used twice"
        self.state = state
        self.saves.append(state.epoch)
