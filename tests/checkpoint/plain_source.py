"""What a writer saves, where there is no trainer: tables, and bytes that stand for everything else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.memory.live import LiveTables


@dataclass(frozen=True)
class PlainSource:
    tables: LiveTables
    dense: bytes = b"dense"

    def look(self) -> tuple[LiveTables, Collection[str]]:
        return self.tables, ()

    def unannounced(self) -> Collection[str]:
        return ()

    def capture(self) -> PlainSource:
        return self

    def parts(self) -> Sequence[bytes]:
        return [self.dense]
