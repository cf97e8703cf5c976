"""What a server asks of whoever saves its rows; it loads nothing that stores need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Frame
from holdfast.cluster.protocol.messages import Saved


class Saver(Protocol):
    """Saves a server's rows behind its back (see ``saving.ShardSaver``)."""

    def touched(self, group: int, places: NDArray[np.uint32]) -> None:
        """A push has updated these rows."""

    def cut(self, version: int, *, baseline: bool, whole: bool) -> None:
        """Copy what a version holds, all rows, those that changed, or of those the ones to save first.

        They may go on changing then.
        """

    def settle(self, committed: int, tidied: int) -> None:
        """The newest version that exists, and the newest behind which files were rearranged."""

    def saved(self) -> int:
        """The newest version whose files are durable, or could not be written."""

    def collect(self, version: int, *, tidy: bool) -> tuple[Saved, Sequence[Frame]] | None:
        """What the supervisor must know of a version; None: not yet."""
