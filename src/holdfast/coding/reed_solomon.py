"""Reed-Solomon codes over GF(2^8) with up to three parities per stripe.

Member ``m`` counts ``2^(t m)`` for parity ``t``. The elements ``a = 2^m`` are all different for m < 255, and
any square part of the coefficients is invertible, which is what every pattern of losses needs: a single
coefficient is not 0; two rows and two columns have the determinant a + b, (a + b)² or a b (a + b) for
parities 0 and 1, 0 and 2, 1 and 2; three have Vandermonde's. (A fourth row would have no such luck.) The
first parity is the plain XOR, and a code with fewer parities has the first ones of a code with more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.coding.code import Code, Numbers, Records, check_sum, check_update
from holdfast.kernels import coding as loops

MOST_MEMBERS = 255
MOST_PARITIES = 3

_PRODUCTS = loops.PRODUCTS.tolist()


def _coefficients() -> NDArray[np.uint8]:
    """[parity, member]"""
    rows = np.ones((MOST_PARITIES, MOST_MEMBERS), np.uint8)
    for member in range(1, MOST_MEMBERS):
        rows[1, member] = loops.PRODUCTS[rows[1, member - 1], 2]
        rows[2, member] = loops.PRODUCTS[rows[1, member], rows[1, member]]
    return rows


COEFFICIENTS = _coefficients()
COEFFICIENTS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class ReedSolomon(Code):
    """r = 2 or 3."""

    def coefficient(self, parity: int, member: int) -> int:
        """2^(parity * member)"""
        return int(self._coefficients(parity, member)[0])

    def update(
        self, parity_records: Records, places: NDArray[np.integer], parity: Numbers, member: Numbers,
        differences: Records,
    ) -> None:  # fmt: skip
        """``parity_records[places[i]] ^= coefficient * differences[i]``"""
        check_update(parity_records, places, differences)
        coefficients = self._coefficients(parity, member)
        if len(coefficients) not in {1, len(places)}:
            raise ValueError(f"{len(coefficients)} coefficients: expected one, or {len(places)}")
        if isinstance(parity, int) and parity == 0:  # whose coefficients are all 1
            loops.xor_into(parity_records, places, differences)
        else:
            loops.multiply_add_into(parity_records, places, coefficients, differences)

    def solve(self, lost: Sequence[int], syndromes: Mapping[int, Records]) -> list[Records]:
        """By the inverse of the coefficients that the lost members have in these parities."""
        if len(set(lost)) != len(syndromes):
            raise ValueError(f"{len(lost)} lost members, {len(syndromes)} syndromes: expected as many")
        rows = [[self.coefficient(t, m) for m in lost] for t in syndromes]
        found: list[Records] = []
        for weights in inverted(rows):
            record = np.zeros_like(next(iter(syndromes.values())))
            for weight, syndrome in zip(weights, syndromes.values(), strict=True):
                _multiply_add(weight, syndrome, record)
            found.append(record)
        return found

    def add(self, target: Records, parity: int, member: int, records: Records) -> None:
        """target ^= coefficient * records"""
        _multiply_add(self.coefficient(parity, member), records, target)

    def _coefficients(self, parity: Numbers, member: Numbers) -> NDArray[np.uint8]:
        """One for each, or a single one."""
        parities, members = np.atleast_1d(parity), np.atleast_1d(member)
        counts = {len(parities), len(members)} - {1}
        if len(counts) > 1:
            raise ValueError(f"{len(parities)} parities, {len(members)} members: expected as many")
        found = np.empty(max(counts, default=1), np.uint8)
        if not loops.choose_coefficients(COEFFICIENTS[: self.r, : self.k], parities, members, found):
            raise ValueError(
                f"parities {parities.min()} to {parities.max()} and members {members.min()} to "
                f"{members.max()}: expected 0 to {self.r - 1} and 0 to {self.k - 1}"
            )
        return found


def _multiply_add(coefficient: int, source: Records, target: Records) -> None:
    check_sum(target, source)
    if coefficient == 1:
        loops.xor(target, source, target)
    else:
        loops.multiply_add(coefficient, source, target)


def inverted(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The inverse of a square matrix over the field, by Gauss and Jordan."""
    size = len(rows)
    work = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(rows)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if work[i][column]), None)
        if pivot is None:
            raise ValueError(f"a matrix without an inverse: {[list(row) for row in rows]}")
        work[column], work[pivot] = work[pivot], work[column]
        scale = _PRODUCTS[work[column][column]].index(1)
        work[column] = [_PRODUCTS[scale][value] for value in work[column]]
        for i in range(size):
            if i != column and work[i][column]:
                factor = work[i][column]
                work[i] = [a ^ _PRODUCTS[factor][b] for a, b in zip(work[i], work[column], strict=True)]
    return [row[size:] for row in work]
