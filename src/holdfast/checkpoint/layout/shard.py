"""One writer's rows of a store: which files hold them, what a save adds, what tidying replaces.

A trainer has one shard with all rows; each parameter server has its own. A shard writes files and says
what changed; only the catalog, which sees all shards, makes it count. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

from holdfast.checkpoint.format.chunk import OPEN, NewPiece
from holdfast.checkpoint.format.manifest import Era
from holdfast.checkpoint.format.records import Group, RowIds, Rows
from holdfast.checkpoint.layout.bundles import FileWriter, Puts, ShardChange, read_indexes
from holdfast.checkpoint.layout.rearrange_rounds import Rounds
from holdfast.checkpoint.layout.rearrange_two_d import TwoD
from holdfast.checkpoint.store import Store
from holdfast.options import Chunked, Differential, Full, Incremental

__all__ = ["Shard", "read_indexes"]


class Rearranger(Protocol):
    """Moves the records of an era about in the background, so that restores find less in their way.

    One for each layout of ``Chunked``, in ``rearrange_rounds`` and ``rearrange_two_d``. It knows files; what
    goes where is decided by its pure part, ``rounds`` and ``two_d``. Called by ``Shard`` only:

    1. ``begin`` at every baseline, or ``resume`` for an era that another process wrote.
    2. ``note_written`` for every change that a durable manifest holds, its own ones included.
    3. ``tidy`` after a version was committed and noted. What it returns may fail to be committed: until it
       is noted, nothing has changed.

    A restore waits for ``resume``, which therefore reads nothing. ``tidy``, in the background, reads what it
    has to know: which rows are in the files that a restore of the newest version reads, and no others, whose
    number grows with every version.
    """

    def begin(self, base: int) -> None:
        """Start an era: a baseline has been written."""

    def resume(self, store: Store, era: Era) -> None:
        """Continue an era that another process wrote. Reads nothing."""

    def note_written(self, change: ShardChange) -> None:
        """Record a change that a durable manifest contains."""

    def tidy(self, store: Store, version: int, kept_versions: Sequence[int]) -> ShardChange | None:
        """Write rearranged files; None if there is nothing to do.

        ``kept_versions`` are those that must stay restorable, ascending, this one included.
        """

    def live_bytes(self) -> int:
        """Bytes beyond the baseline that a restore of the newest version reads."""


class Shard:
    """Writes one shard's versions.

    The calls: ``write`` for a version; when a manifest that holds its change is durable, ``apply`` that
    change; then perhaps ``tidy``, whose change is committed and applied in turn. A change that could not
    be committed is dropped: nothing here remembers it. A "baseline" starts a new era.

    Args:
        number: which shard of the store it is.
        groups: its tables.
        strategy: what is written.
    """

    def __init__(
        self,
        number: int,
        groups: Sequence[Group],
        strategy: Full | Differential | Incremental | Chunked,
    ) -> None:
        self.number = number
        self.groups = tuple(groups)
        self.strategy = strategy
        self.base = 0
        """The version of the era's baseline; 0 if there is none yet."""
        self._files = FileWriter(number, groups)
        self._rearranger: Rearranger | None = None
        if isinstance(strategy, Chunked):
            layout: type[Rounds | TwoD] = TwoD if strategy.layout == "2d" else Rounds
            self._rearranger = layout(self.groups, strategy, self._files)

    @property
    def layout_name(self) -> str:
        """How files of an era lie: only a shard with the same name can go on with it."""
        name = type(self.strategy).__name__
        two_d = isinstance(self.strategy, Chunked) and self.strategy.layout == "2d"
        return f"{name}-2d" if two_d else name

    def write(
        self,
        store: Puts,
        version: int,
        blocks: Iterable[tuple[int, Rows]],
        *,
        baseline: bool,
        check: Callable[[], None] = lambda: None,
        file_bytes: int | None = None,
    ) -> ShardChange:
        """Write rows (of which group, which) as the files of a version; of a group in ascending order.

        ``check`` is called before each piece, at least once between two files: what it raises ends this.
        ``file_bytes`` is about the size of the largest file, in memory until it is written.
        """
        differential = isinstance(self.strategy, Differential) and not baseline

        def pieces() -> Iterator[NewPiece]:
            for group, rows in blocks:
                piece = NewPiece(
                    group=group,
                    rank=0 if baseline else version,
                    rows=rows,
                    born=version,
                    died=version + 1 if differential else OPEN,  # the next one repeats all of its rows
                )
                for part in self._files.split(piece):
                    check()
                    yield part

        kind: Literal["baseline", "increment"] = "baseline" if baseline else "increment"
        return ShardChange(version, kind, self._files.write(store, version, kind, pieces(), file_bytes))

    def apply(self, change: ShardChange) -> None:
        """A manifest with this change is durable: it is now part of the store."""
        if change.kind == "baseline":
            self.base = change.version
            if self._rearranger is not None:
                self._rearranger.begin(self.base)
        elif self._rearranger is not None:
            self._rearranger.note_written(change)

    def tidy(self, store: Store, version: int, kept_versions: Sequence[int]) -> ShardChange | None:
        """Write rearranged files after a version was committed; None if there is nothing to do.

        ``kept_versions`` are those that must stay restorable, ascending, this one included.
        """
        if self._rearranger is None or version == self.base:
            return None
        return self._rearranger.tidy(store, version, kept_versions)

    def resume(self, store: Store, era: Era) -> None:
        """Take up an era that another process wrote. It must have this shard's ``layout_name``.

        Reads nothing; the first ``tidy`` does.
        """
        self.base = era.number
        if self._rearranger is not None:
            self._rearranger.resume(store, era)

    def rows_of(self, store: Store, era: Era, version: int) -> Iterator[tuple[int, RowIds]]:
        """(group, ids) of the rows that a version holds beyond the era's baseline."""
        for entry in era.files_of(version):
            if entry.kind != "baseline":
                for group, index in read_indexes(store, entry, self.groups):
                    yield group, index.ids

    def live_bytes(self) -> int:
        """Bytes beyond the baseline that a restore of the newest version reads, where rows are followed."""
        return self._rearranger.live_bytes() if self._rearranger is not None else 0
