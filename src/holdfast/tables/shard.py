"""The rows of one group that one server holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.kernels import ids as id_loops
from holdfast.kernels import update
from holdfast.kernels.memory import Bytes, aligned_bits, aligned_zeros, new_bytes, read_only
from holdfast.kernels.teams import ALONE, Team
from holdfast.tables.changes import Changes
from holdfast.tables.first_values import drawing
from holdfast.tables.optimizers import updater
from holdfast.tables.plan import GroupPlan, RowPlacement

Places = NDArray[np.uint32] | NDArray[np.int64]
Floats = NDArray[np.float32]
Records = NDArray[np.uint32]

_NO_BITS: NDArray[np.uint64] = np.zeros(0, np.uint64)


class GroupShard:
    """The records of a group at one server, and all that is done to them.

    ``places`` are numbers of records at this server, uint32 or int64, as ``Placement.place`` gives them. What
    is wrong with places or shapes is a ``ValueError`` that says so, and nothing has changed then: places
    beyond the records, records that stand for no row, and, where records are written, places that are named
    twice. Values are bits: NaN and infinities are taken as they are. Not safe for use by two threads at once,
    except that ``pull`` may run beside ``pull`` without a team.

    Args:
        plan: the group.
        placement: where its rows lie.
        server: the one that this is at.
        seed: of first values.
        keep_changes: whether ``changes`` is to know what others must be told.
        empty: whether to leave out first values, of a shard whose records come from elsewhere.
        allocate: where copies and differences of records lie (see ``Changes``).
        team: the threads that read and update many records; one call at a time uses it.
    """

    plan: GroupPlan
    records: Records
    """[placement.records(plan.rows), plan.words]; those that stand for no row are zero."""
    marks: NDArray[np.uint64]
    """A bitmap of the records that changed since ``take_marks``; first values of "uniform" are no change."""
    installed: bool
    """Whether there are first values. Whoever restores all records by ``write`` sets it."""
    rows: int
    """How many rows lie here."""
    changes: Changes
    """What changed since others were last told; nothing is kept unless ``keep_changes``."""
    before_change: Callable[[Places], None] | None
    """Called with places right before their records change, while somebody reads them in the background."""

    def __init__(
        self,
        plan: GroupPlan,
        placement: RowPlacement,
        server: int,
        seed: int,
        *,
        keep_changes: bool = False,
        empty: bool = False,
        allocate: Callable[[int], Bytes] = new_bytes,
        team: Team = ALONE,
    ) -> None:
        if not 0 <= server < placement.servers:
            raise ValueError(f"server {server}: expected 0 to {placement.servers - 1}")
        self.plan = plan
        self.placement = placement
        self.before_change = None
        self.server = server
        count = placement.records(plan.rows)
        if count > 2**32:
            raise ValueError(
                f"group {plan.name}: {count:,} records on a server, but places are 32 bits: use more servers"
            )
        self.records = self.space(count, plan.words)
        self.marks = aligned_bits(count)
        self._team = team
        self.changes = Changes(self.records, placement.k, keep=keep_changes, allocate=allocate, team=team)
        self._seen = np.zeros_like(self.marks)
        self._layout = (server, placement.servers, placement.k, placement.r, placement.groups)
        self._update = updater(plan.optimizer)
        self._certain = plan.rows // (placement.k * placement.servers) * placement.k
        self.rows = int(self.stands_for_row().sum())
        self.installed = plan.initial == "uniform"
        self._seed = seed
        if not empty:
            self.fill()

    def fill(self) -> None:
        """Give all rows their first values, unless those come from elsewhere."""
        if self.plan.initial == "uniform":
            update.fill_uniform(self.records, self.plan.dim, *self._layout, *drawing(self.plan, self._seed))

    def space(self, count: int, words: int) -> Records:
        """Zeros for so many records."""
        return aligned_zeros(count, words)

    def rows_of(self, places: Places) -> NDArray[np.int64]:
        """The rows of the group that these records are; beyond the last for those that stand for none."""
        return self.placement.row(self.server, np.asarray(places, np.int64))

    def stands_for_row(self) -> NDArray[np.bool_]:
        """Whether each record stands for a row: only a few at the end do not."""
        real = np.ones(len(self.records), np.bool_)
        real[self._certain :] = self.rows_of(np.arange(self._certain, len(real))) < self.plan.rows
        return real

    def pull(self, places: Places) -> Floats:
        """The weights of these rows, [places, dim]."""
        places = self._checked(places, _NO_BITS)
        out = np.empty((len(places), self.plan.dim), np.float32)
        self._team.run_slices(
            lambda some: update.gather_weights(self.records, places[some], out[some]),
            len(places),
            2 * out.nbytes,
        )
        return out

    def check(self, places: Places, *, once: bool = True) -> None:
        """Raise ValueError unless these are places of rows of this server, and all different if ``once``."""
        self._checked(places, self._seen if once else _NO_BITS)

    def push(self, places: Places, gradients: Floats) -> None:
        """Update these rows, all different, by their gradients [places, dim]."""
        gradients = self._shaped(gradients, np.float32, len(places), self.plan.dim, "gradients")
        places = self._checked(places, self._seen)
        self._announce(places)
        changes = self.changes.for_update(len(places))
        parts = self._team.parts(len(places) * self.plan.words * 4 + gradients.nbytes)
        if parts == 1:
            self._update(self.records, places, gradients, self.marks, changes[0])
        else:
            self._team.run(
                lambda part: self._update(
                    self.records, places, gradients, self.marks, changes[part], part, parts
                ),
                parts,
            )

    def preview(self, places: Places, gradients: Floats) -> Floats:
        """The weights that ``push`` would leave, [places, dim]; nothing changes."""
        gradients = self._shaped(gradients, np.float32, len(places), self.plan.dim, "gradients")
        places = self._checked(places, self._seen)
        copies = self.records[places]
        numbers = np.arange(len(places), dtype=places.dtype)
        numbers.flags.writeable = False  # as those of messages are: the loop is compiled for these
        (nobody,) = Changes(copies, 1, keep=False).for_update(0)
        self._update(copies, numbers, gradients, np.zeros(-(-len(copies) // 64), np.uint64), nobody)
        return np.ascontiguousarray(copies[:, : self.plan.dim]).view(np.float32)

    def install(self, places: Places, weights: Floats) -> bool:
        """Give the rows their first weights, [places, dim]; their optimizer state is zero.

        Names each of the server's rows once. False, and nothing changes, if there are first values already.
        """
        weights = self._shaped(weights, np.float32, len(places), self.plan.dim, "weights")
        places = self._checked(places, self._seen)
        if len(places) != self.rows:
            raise ValueError(
                f"group {self.plan.name}: first values of {len(places):,} rows, "
                f"but server {self.server} has {self.rows:,}"
            )
        if self.installed:
            return False
        self._announce(places)
        self.changes.keep(places)
        self.records[:, : self.plan.dim].view(np.float32)[places] = weights
        id_loops.mark_rows(self.marks, places, 0, len(self.records))
        self.installed = True
        return True

    def read(self, places: Places) -> Records:
        """The whole records, [places, words]."""
        return self.records[self._checked(places, _NO_BITS)]

    def write(self, places: Places, records: Records) -> None:
        """Put whole records in place, [places, words], and mark them.

        ``changes`` does not hear of it: they are what others know already.
        """
        records = self._shaped(records, np.uint32, len(places), self.plan.words, "records")
        places = self._checked(places, self._seen)
        self._announce(places)
        update.put_records(self.records, places, read_only(records))
        id_loops.mark_rows(self.marks, places, 0, len(self.records))

    def field(self, name: str) -> NDArray[Any]:
        """A part of all records, [records, width], not a copy: float32, but uint32 for "step"."""
        for field in self.plan.fields:
            if field.name == name:
                words = self.records[:, field.first : field.first + field.width]
                return words if name == "step" else words.view(np.float32)
        raise ValueError(
            f"group {self.plan.name} has no field {name}: expected one of "
            + ", ".join(field.name for field in self.plan.fields)
        )

    def mark_all(self) -> None:
        """Mark every row: of a server that cannot know what its predecessor had marked."""
        id_loops.mark_rows(self.marks, np.flatnonzero(self.stands_for_row()), 0, len(self.records))

    def mark(self, rows: NDArray[np.int64]) -> None:
        """Mark rows of the group that lie here: those that ``take_marks`` gave and nobody has saved."""
        id_loops.mark_rows(self.marks, self.placement.place(rows), 0, len(self.records))

    def take_marks(self) -> NDArray[np.int64]:
        """The rows of the group that changed since the last call, in the order of their records."""
        places = np.empty(id_loops.count_marked(self.marks) + 64, np.int64)
        found, _ = id_loops.marked_rows(self.marks, places, True)
        return self.rows_of(places[:found])

    def _announce(self, places: Places) -> None:
        if self.before_change is not None:
            self.before_change(places)

    def _checked(self, places: Places, seen: NDArray[np.uint64]) -> Places:
        if places.ndim != 1 or places.dtype not in (np.uint32, np.int64):
            raise ValueError(
                f"group {self.plan.name}: places are {places.dtype} {list(places.shape)}, "
                "expected uint32 or int64 in one dimension"
            )
        places = _in_order(places)
        wrong, at = update.check_places(places, *self._layout, self.plan.rows, seen)
        if wrong != update.FINE:
            why = {
                update.BEYOND: f"is beyond the {len(self.records):,} records of server {self.server}",
                update.UNUSED: "is a record that stands for no row",
                update.TWICE: "is there twice: gradients of a row are to be added up before they are sent",
            }
            raise ValueError(f"group {self.plan.name}: place {places[at]} (entry {at}) {why[wrong]}")
        return places

    def _shaped(self, values: NDArray[Any], dtype: type, count: int, width: int, what: str) -> NDArray[Any]:
        if values.shape != (count, width) or values.dtype != dtype:
            raise ValueError(
                f"group {self.plan.name}: {what} are {values.dtype} {list(values.shape)}, "
                f"expected {np.dtype(dtype)} {[count, width]}"
            )
        return _in_order(values)


def _in_order(array: NDArray[Any]) -> NDArray[Any]:
    """The same, contiguous and aligned: what messages bring is so already, and ``np.require`` is slow."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=["C", "A"])


def digest(shards: Sequence[GroupShard]) -> str:
    """A checksum over all records, to the bit."""
    state = xxhash.xxh3_128()
    for shard in shards:
        state.update(np.ascontiguousarray(shard.records).reshape(-1).view(np.uint8).data)
    return state.hexdigest()
