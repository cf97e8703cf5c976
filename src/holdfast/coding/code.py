"""The interface of erasure codes: compute parities, update them, and recover lost records.

A stripe has ``k`` data records, its members, and ``r`` parities. Parity ``t`` is the sum over the members
``m`` of ``coefficient(t, m) * member``, in a field of bit patterns in which a sum is an XOR. So a parity can
follow its members by their differences alone, old XOR new, in any order, and never drifts; and any ``r`` of
the ``k + r`` records, whatever bits they have, follow from the others. Members that a stripe lacks count as
zero bits.

Records of many stripes are handled at once: uint32 [stripes, words], C-contiguous. Arrays that are given are
checked for what would make a loop run astray, and anything else is a ``ValueError``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.kernels import coding as loops

Records = NDArray[np.uint32]
Numbers = int | NDArray[np.integer]

_BLOCK_BYTES = 1 << 17  # of a record array that is summed up at a time: its sum stays in the cache


@dataclass(frozen=True, slots=True)
class Code(ABC):
    """An erasure code with ``k`` data and ``r`` parity records per stripe. Created by ``code_for``."""

    k: int
    r: int

    @abstractmethod
    def coefficient(self, parity: int, member: int) -> int:
        """The coefficient of a member in a parity, 1 to 255."""

    @abstractmethod
    def update(
        self, parity_records: Records, places: NDArray[np.integer], parity: Numbers, member: Numbers,
        differences: Records,
    ) -> None:  # fmt: skip
        """Update parities: add ``differences[i]`` of a member to ``parity_records[places[i]]``.

        ``parity`` and ``member`` say which parity the record is and which member changed: one number for all
        or one each. A record may be named several times, with different members or the same: all count.
        """

    @abstractmethod
    def solve(self, lost: Sequence[int], syndromes: Mapping[int, Records]) -> list[Records]:
        """The lost members, in the order that they are named in, from what ``syndrome`` gave for parities.

        Takes as many syndromes as members are lost, all of them without just these members.
        """

    @abstractmethod
    def add(self, target: Records, parity: int, member: int, records: Records) -> None:
        """target += coefficient(parity, member) * records: one member's part of a parity or a syndrome."""

    def encode(self, members: Records) -> Records:
        """The parities, [r, stripes, words], of members [k, stripes, words]."""
        if members.ndim != 3 or len(members) != self.k:
            raise ValueError(f"members of shape {members.shape}: expected [{self.k}, stripes, words]")
        parities = np.zeros((self.r, *members.shape[1:]), np.uint32)
        for t in range(self.r):
            self._add_all(parities[t], t, dict(enumerate(members)))
        return parities

    def syndrome(self, parity: int, parity_records: Records, members: Mapping[int, Records]) -> Records:
        """A parity minus the given members: the contribution of all others."""
        left = parity_records.copy()
        self._add_all(left, parity, members)
        return left

    def decode(
        self, members: Mapping[int, Records], parities: Mapping[int, Records]
    ) -> tuple[dict[int, Records], dict[int, Records]]:
        """Recover the missing members and parities, by number, from the given ones.

        At least ``k`` of the ``k + r`` must be given. They are assumed to be correct.
        """
        wrong = [m for m in members if not 0 <= m < self.k] + [t for t in parities if not 0 <= t < self.r]
        if wrong:
            raise ValueError(
                f"record {wrong[0]}: a stripe has members 0 to {self.k - 1}, parities 0 to {self.r - 1}"
            )
        lost = [m for m in range(self.k) if m not in members]
        if len(lost) > len(parities):
            raise ValueError(
                f"{len(members)} members and {len(parities)} parities of {self.k} + {self.r} are left: "
                f"expected {self.k} records or more"
            )
        used = sorted(parities)[: len(lost)]
        syndromes = {t: self.syndrome(t, parities[t], members) for t in used}
        found = dict(zip(lost, self.solve(lost, syndromes), strict=True)) if lost else {}
        everything = {**members, **found}
        rebuilt: dict[int, Records] = {}
        for t in set(range(self.r)) - set(parities):
            rebuilt[t] = np.zeros_like(everything[0])
            self._add_all(rebuilt[t], t, everything)
        return found, rebuilt

    def _add_all(self, target: Records, parity: int, members: Mapping[int, Records]) -> None:
        """Add the contributions of all members, block by block."""
        rows = max(1, _BLOCK_BYTES // max(1, target.shape[1] * 4))
        for first in range(0, len(target), rows):
            for member, records in members.items():
                if records.shape != target.shape:
                    raise ValueError(f"member {member} of shape {records.shape}: expected {target.shape}")
                self.add(target[first : first + rows], parity, member, records[first : first + rows])


def check_update(parity_records: Records, places: NDArray[np.integer], differences: Records) -> None:
    """Raise ValueError for arguments that would make the loops access memory out of bounds."""
    check_records(parity_records, differences)
    if differences.shape != (len(places), parity_records.shape[1]) or places.ndim != 1:
        raise ValueError(
            f"differences of shape {differences.shape} for {len(places)} places: "
            f"expected [{len(places)}, {parity_records.shape[1]}]"
        )
    if not loops.within(places, len(parity_records)):
        raise ValueError(f"places {places.min()} to {places.max()}: expected 0 to {len(parity_records) - 1}")


def check_sum(target: Records, records: Records) -> None:
    """The same, if all of them are added."""
    check_records(target, records)
    if target.shape != records.shape:
        raise ValueError(f"records of shape {records.shape}: expected {target.shape}")


def check_records(target: Records, records: Records) -> None:
    """Refuse what are not arrays of records, and one to write to."""
    for array in (target, records):
        if array.dtype != np.uint32 or array.ndim != 2 or not array.flags.c_contiguous:
            raise ValueError(
                f"an array of {array.dtype} with shape {array.shape}: "
                "expected uint32 [stripes, words], C-contiguous"
            )
    if not target.flags.writeable:  # the loops go by addresses, and would write all the same
        raise ValueError("the array that is added to is read-only: expected one that can be written")
