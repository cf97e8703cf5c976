"""One parity per stripe: the XOR of its members. A lost record is the XOR of all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.coding.code import Code, Numbers, Records, check_sum, check_update
from holdfast.kernels import coding as loops


@dataclass(frozen=True, slots=True)
class XorCode(Code):
    """r = 1: Reed-Solomon's first parity, whose coefficients are all 1."""

    r: int = field(default=1, init=False)

    def coefficient(self, parity: int, member: int) -> int:
        """1: every member counts as it is."""
        return 1

    def update(
        self, parity_records: Records, places: NDArray[np.integer], parity: Numbers, member: Numbers,
        differences: Records,
    ) -> None:  # fmt: skip
        """``parity_records[places[i]] ^= differences[i]``, whichever member it is of."""
        check_update(parity_records, places, differences)
        loops.xor_into(parity_records, places, differences)

    def solve(self, lost: Sequence[int], syndromes: Mapping[int, Records]) -> list[Records]:
        """The lost member is the syndrome."""
        if len(lost) != 1 or len(syndromes) != 1:
            raise ValueError(f"{len(lost)} lost members, {len(syndromes)} syndromes: expected one of each")
        return list(syndromes.values())

    def add(self, target: Records, parity: int, member: int, records: Records) -> None:
        """target ^= records"""
        check_sum(target, records)
        loops.xor(target, records, target)
