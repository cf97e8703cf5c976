"""The state of a training run as a save takes it: which tables there are, and everything else, copied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.dense import encode_tree
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.torch.fit import some
from holdfast.checkpoint.torch.sharded import without_parts
from holdfast.checkpoint.torch.state import TrainingObjects, Unseen
from holdfast.checkpoint.torch.watch import Watch
from holdfast.events import EventLog

log = logging.getLogger("holdfast.checkpoint")


@dataclass(frozen=True, slots=True)
class CapturedTree:
    """A copied state whose file is encoded when it is written."""

    tree: Callable[[], Any]

    def parts(self) -> Sequence[Any]:
        """The buffers of the dense file."""
        return encode_tree(self.tree())


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """A copied state that is encoded already."""

    encoded: Sequence[Any]

    def parts(self) -> Sequence[Any]:
        """The buffers of the dense file."""
        return self.encoded


class TrainingSource:
    """Objects and the watch over their tables; implements ``saving.writer.Source``.

    Args:
        objects: what is saved.
        watch: knows which rows training changes.
        compared: how tables are searched that the watch cannot follow: "digests" or "whole".
        events: hears how each table is tracked.
        only: names the objects to copy; by default all.
        finish: what to make of the copied tree before it is written, in the background.

    Attributes:
        on_capture: called at each capture.
    """

    def __init__(
        self,
        objects: TrainingObjects,
        watch: Watch,
        compared: str,
        events: EventLog,
        only: Collection[str] | None = None,
        finish: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.on_capture: Callable[[], None] = lambda: None
        self._only, self._finish = only, finish
        self._objects = objects
        self._watch = watch
        self._compared = compared
        self._events = events
        self._tracking: dict[str, str] = {}
        self._unseen: set[str] = set()
        self._captured_before = False

    def find_tables(self) -> None:
        """Look for tables that were added or replaced, and watch them."""
        if self._objects.find_again():
            self._watch.follow(self._objects.tables)

    def is_searched(self, table: str) -> bool:
        """Whether a save searches all of a table, as the last ``look`` has found that it must."""
        return table in self._unseen

    def look(self) -> tuple[LiveTables, Sequence[str]]:
        """Optimizers make their state when they first step, and their settings can change at any time."""
        self.find_tables()
        self._watch.saving()
        tables = self._objects.live_tables()
        unseen = self._objects.tables_with_unseen_changes()
        self._unseen = {name for name, found in unseen.items() if found.lasts}
        self._say_tracking(unseen)
        return tables, [*unseen, *self._watch.written()]

    def unannounced(self) -> Collection[str]:
        """Tables of which any row may change without the tracker hearing of it first."""
        return self._unseen.union(self._watch.unannounced())

    def capture(self) -> CapturedTree | EncodedTree:
        """Copy everything that is not rows."""
        tree = self._objects.capture(dict(self._tracking), self._only)
        self.on_capture()
        finish = self._finish
        if finish is not None:
            if not self._captured_before:
                encode_tree(without_parts(tree()))
                self._captured_before = True
            return CapturedTree(lambda: finish(tree()))
        if self._captured_before:
            return CapturedTree(tree)
        # A state that cannot be stored is the caller's to mend: raise here, not at the next call.
        encoded = encode_tree(tree())
        self._captured_before = True
        return EncodedTree(encoded)

    def _say_tracking(self, unseen: Mapping[str, Unseen]) -> None:
        """Say how changed rows of each table are found, once, and when that changes."""
        said: dict[str, list[str]] = {}
        for name in self._objects.tables:
            found = unseen.get(name)
            lasts = found is not None and found.lasts
            how, why = (self._compared, found.why) if found is not None and lasts else self._watch.how(name)
            text = f"{how}: {why}"
            if self._tracking.get(name) != text:
                self._tracking[name] = text
                said.setdefault(text, []).append(name)
        for text, names in said.items():
            log.info("changed rows of %s are found by %s", some(names), text)
            self._events.emit("checkpoint_tracking", tables=names, how=text)
