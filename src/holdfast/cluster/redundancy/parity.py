"""The parities of one group that one server stores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.coding.code import check_records
from holdfast.coding.codes import code_for
from holdfast.coding.placement import Placement
from holdfast.kernels import coding as loops
from holdfast.kernels.memory import aligned_zeros, read_only
from holdfast.kernels.teams import ALONE, Team
from holdfast.tables.first_values import first_records
from holdfast.tables.plan import GroupPlan

Records = NDArray[np.uint32]
Blocks = NDArray[np.uint32] | NDArray[np.int64]

_FIRST_BLOCKS = 1 << 14


class ParityShard:
    """Parities, and which members each of them contains.

    A parity is whole once it contains all members of its stripe. During rebuilding, it contains a member from
    the moment its value was added. Changes of members that it does not contain yet are ignored, since the
    value that will be added includes them.

    Args:
        plan: the group.
        placement: the placement of its rows.
        server: the slot of this server.
        seed: of the rows' initial values, if all rows still have those; None if parities must be rebuilt.
        team: the threads that change many parities.
    """

    def __init__(
        self, plan: GroupPlan, placement: Placement, server: int, seed: int | None, team: Team = ALONE
    ) -> None:
        self._team = team
        self.plan = plan
        self.placement = placement
        self.server = server
        self.code = code_for(placement.k, placement.r)
        self.blocks = placement.blocks(plan.rows)
        self.records: Records = aligned_zeros(self.blocks * placement.r, plan.words)
        self._lacks: NDArray[np.bool_] | None = None
        """By member: which parities lack it; None: all are whole."""
        self._left = np.zeros(0, np.uint16)
        """How many members each parity lacks, unless all are whole."""
        self.lacking = 0
        """The number of parities that are not whole."""
        if seed is None:
            self.lacking = len(self.records)
            self._lacks = np.ones((placement.k, self.lacking), np.bool_) if self.lacking else None
            self._left = np.full(self.lacking, placement.k, np.uint16)
        elif plan.initial == "uniform":
            self._encode_first(seed)

    def _encode_first(self, seed: int) -> None:
        k, r = self.placement.k, self.placement.r
        for start in range(0, self.blocks, _FIRST_BLOCKS):
            blocks = np.arange(start, min(start + _FIRST_BLOCKS, self.blocks))
            for t in range(r):
                for m in range(k):
                    rows = self.placement.stripe_rows(self.server, t, m, blocks)
                    first = read_only(first_records(self.plan, seed, rows))
                    self.code.update(self.records, blocks * r + t, t, m, first)

    def whole(self, parity: int, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of these parities are whole."""
        if self._lacks is None:
            return np.ones(len(blocks), np.bool_)
        whole: NDArray[np.bool_] = self._left[self._places(parity, blocks)] == 0
        return whole

    def incomplete(self, parity: int, first: int, count: int) -> NDArray[np.int64]:
        """Blocks from ``first`` on, within the next ``count``, whose parity is not whole."""
        blocks = np.arange(first, min(first + count, self.blocks))
        return blocks[~self.whole(parity, blocks)]

    def get(self, parity: int, blocks: Blocks) -> Records:
        """Read these parities."""
        found: Records = self.records[self._places(parity, blocks)]
        return found

    def add_to(self, sums: Records, parity: int, blocks: Blocks) -> None:
        """Add these parities to sums of as many stripes."""
        places = self._places(parity, blocks)
        check_records(sums, self.records)
        if sums.shape != (len(places), self.records.shape[1]) or not loops.within(places, len(self.records)):
            raise ValueError(f"sums of shape {sums.shape} for {len(places)} parities")
        loops.xor_from(sums, self.records, places)

    def put(self, parity: int, blocks: Blocks, records: Records) -> None:
        """Overwrite these parities."""
        self.records[self._places(parity, blocks)] = records

    def contains(self, parity: int, member: int, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of these parities contain the member."""
        if self._lacks is None:
            return np.ones(len(blocks), np.bool_)
        contains: NDArray[np.bool_] = ~self._lacks[member, self._places(parity, blocks)]
        return contains

    def change(self, parity: int, member: int, blocks: Blocks, differences: Records) -> None:
        """Apply a change of a member's records, all different, or undo it: both are the same XOR."""
        places = self._places(parity, blocks)
        if self._lacks is not None:
            inside = ~self._lacks[member, places]
            if not inside.all():
                places, differences = places[inside], differences[inside]
        self._update(places, parity, member, read_only(differences))

    def add(self, parity: int, member: int, blocks: Blocks, values: Records) -> None:
        """Add a member's records to the parities that lack it."""
        if self._lacks is None:
            return
        places = self._places(parity, blocks)
        outside = self._lacks[member, places]
        if not outside.all():
            places, values = places[outside], values[outside]
        self._update(places, parity, member, read_only(values))
        self._lacks[member, places] = False
        left = self._left[places] - np.uint16(1)
        self._left[places] = left
        self.lacking -= len(places) - int(np.count_nonzero(left))
        if not self.lacking:
            self._lacks = None

    def _update(self, places: NDArray[np.int64], parity: int, member: int, values: Records) -> None:
        """Add a member's values to parities, all different: so slices of them share none."""
        self._team.run_slices(
            lambda some: self.code.update(self.records, places[some], parity, member, values[some]),
            len(places),
            2 * values.nbytes,
        )

    def forget(self, parity: int, blocks: Blocks) -> None:
        """Clear these parities: a member's value was lost, and it has got another."""
        places = self._places(parity, blocks)
        if self._lacks is None:
            self._lacks = np.zeros((self.placement.k, len(self.records)), np.bool_)
            self._left = np.zeros(len(self.records), np.uint16)
        places = np.unique(places)
        self.lacking += len(places) - int(np.count_nonzero(self._left[places]))
        self._lacks[:, places] = True
        self._left[places] = self.placement.k
        self.records[places] = 0

    def _places(self, parity: int, blocks: Blocks) -> NDArray[np.int64]:
        return blocks.astype(np.int64) * self.placement.r + parity
