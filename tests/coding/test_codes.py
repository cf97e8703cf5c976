"""Every loss that a code is for is made good, bit for bit."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.coding.code import Code
from holdfast.coding.codes import code_for
from holdfast.coding.reed_solomon import COEFFICIENTS, ReedSolomon, inverted
from holdfast.coding.xor import XorCode
from holdfast.errors import ConfigError
from holdfast.kernels.coding import PRODUCTS
from tests.coding.field import Records, encoded, product, randoms, words


def check_loss(code: Code, members: Records, parities: Records, lost: tuple[int, ...]) -> None:
    """Records 0 to k - 1 are the members, those behind them the parities."""
    data = {m: members[m] for m in range(code.k) if m not in lost}
    checks = {t: parities[t] for t in range(code.r) if code.k + t not in lost}
    found, rebuilt = code.decode(data, checks)
    assert {*found, *(code.k + t for t in rebuilt)} == set(lost)
    for m, records in found.items():
        assert np.array_equal(records, members[m])
    for t, records in rebuilt.items():
        assert np.array_equal(records, parities[t])


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_every_pattern_of_losses(k: int, r: int) -> None:
    """Hole 3."""
    code = code_for(k, r)
    members = randoms(k, k, 3, 9)
    parities = code.encode(members)
    assert np.array_equal(parities, encoded(members, r, code.coefficient))
    for count in range(r + 1):
        for lost in combinations(range(k + r), count):
            check_loss(code, members, parities, lost)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_losses_of_long_stripes(data: st.DataObject) -> None:
    k, r = data.draw(st.integers(7, 255)), data.draw(st.integers(1, 3))
    lost = data.draw(st.sets(st.integers(0, k + r - 1), max_size=r))
    members = randoms(data.draw(st.integers(0, 99)), k, 2, data.draw(st.integers(1, 9)))
    code = code_for(k, r)
    check_loss(code, members, code.encode(members), tuple(lost))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.lists(words, min_size=8, max_size=8), st.data())
def test_any_bits_come_back(r: int, bits: list[int], data: st.DataObject) -> None:
    """Hole 2."""
    members = np.array(bits, np.uint32).reshape(4, 1, 2)
    code = code_for(4, r)
    lost = data.draw(st.sets(st.integers(0, 3 + r), min_size=r, max_size=r))
    check_loss(code, members, code.encode(members), tuple(lost))


def times_each(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """In the field, element by element."""
    return PRODUCTS[a, b].astype(np.int64)


def test_all_square_parts_of_the_coefficients_are_invertible() -> None:
    """All k up to 255 and r up to 3 at once: smaller codes have the first rows and columns of this one."""
    rows = COEFFICIENTS.astype(np.int64)
    assert rows.shape == (3, 255)
    assert rows.all()
    a, b = np.triu_indices(255, 1)
    minors = {}
    for s, t in combinations(range(3), 2):
        minors[s, t] = np.zeros((255, 255), np.int64)
        minors[s, t][a, b] = times_each(rows[s, a], rows[t, b]) ^ times_each(rows[s, b], rows[t, a])
        assert minors[s, t][a, b].all()
    for first in range(253):  # along the first row
        a, b = np.array(np.triu_indices(254 - first, 1)) + first + 1
        determinants = (
            times_each(rows[0, first], minors[1, 2][a, b])
            ^ times_each(rows[0, a], minors[1, 2][first, b])
            ^ times_each(rows[0, b], minors[1, 2][first, a])
        )
        assert determinants.all()


def test_coefficients_are_those_of_the_definition() -> None:
    power = [1]
    for _ in range(600):
        power.append(product(power[-1], 2))
    code = ReedSolomon(255, 3)
    for t in range(3):
        assert [code.coefficient(t, m) for m in range(255)] == [power[t * m] for m in range(255)]
    assert {XorCode(9).coefficient(0, m) for m in range(9)} == {1}


def test_one_parity_is_the_first_of_several() -> None:
    members = randoms(1, 5, 4, 7)
    assert np.array_equal(code_for(5, 1).encode(members)[0], np.bitwise_xor.reduce(members, axis=0))
    for r in (2, 3):
        assert np.array_equal(code_for(5, 3).encode(members)[:r], code_for(5, r).encode(members))


@pytest.mark.parametrize("r", [1, 2, 3])
def test_parities_follow_a_million_differences(r: int) -> None:
    """Hole 1: nothing drifts. Members of one stripe come together in one batch (hole 12)."""
    k, stripes, size, batch = 4, 50, 3, 50_000
    code, rng = code_for(k, r), np.random.default_rng(r)
    members = randoms(1, k, stripes, size)
    parities = code.encode(members)
    for _ in range(1_000_000 // batch):
        where, which = rng.integers(0, stripes, batch), rng.integers(0, k, batch)
        differences = rng.integers(0, 2**32, (batch, size), dtype=np.uint32)
        np.bitwise_xor.at(members, (which, where), differences)
        for t in range(r):
            code.update(parities[t], where, t, which, differences)
    assert np.array_equal(parities, code.encode(members))
    for lost in combinations(range(k + r), r):
        check_loss(code, members, parities, lost)


@pytest.mark.parametrize("r", [1, 2, 3])
def test_a_server_keeps_several_parities_in_one_array(r: int) -> None:
    """As placed by ``Placement``: record s * r + t, and a batch that has to do with all of them."""
    k, stripes, size = 5, 6, 17
    code, rng = code_for(k, r), np.random.default_rng(0)
    members = np.zeros((k, stripes, size), np.uint32)
    kept = np.zeros((stripes * r, size), np.uint32)
    where, which, parity = (rng.integers(0, top, 300) for top in (stripes, k, r))
    differences = randoms(2, 300, size)
    code.update(kept, where * r + parity, parity, which, differences)
    for t in range(r):
        mine = parity == t
        members[:] = 0
        np.bitwise_xor.at(members, (which[mine], where[mine]), differences[mine])
        assert np.array_equal(kept[t::r], code.encode(members)[t])


@pytest.mark.parametrize("r", [1, 2, 3])
def test_members_that_a_stripe_lacks_are_zero_bits(r: int) -> None:
    """Hole 5: the last stripe of 9 rows has one member of four."""
    code = code_for(4, r)
    rows = np.zeros((12, 6), np.uint32)
    rows[:9] = randoms(1, 9, 6)
    members = np.ascontiguousarray(rows.reshape(3, 4, 6).swapaxes(0, 1))
    parities = np.zeros((r, 3, 6), np.uint32)
    for t in range(r):  # rows that are there are added one by one; nobody ever sends the others
        code.update(parities[t], np.arange(9) // 4, t, np.arange(9) % 4, rows[:9])
    assert np.array_equal(parities, code.encode(members))
    for lost in combinations(range(4 + r), r):
        check_loss(code, members, parities, lost)


@pytest.mark.parametrize("r", [1, 2, 3])
def test_nothing_and_zeros(r: int) -> None:
    code = code_for(3, r)
    assert not code.encode(np.zeros((3, 4, 5), np.uint32)).any()
    for shape in ((3, 0, 5), (3, 4, 0)):
        members = np.zeros(shape, np.uint32)
        check_loss(code, members, code.encode(members), (0,))
    parity = randoms(1, 4, 5)
    before = parity.copy()
    code.update(parity, np.arange(4), 0, 1, np.zeros((4, 5), np.uint32))
    code.update(parity, np.zeros(0, np.int64), r - 1, 0, np.zeros((0, 5), np.uint32))
    assert np.array_equal(parity, before)


def test_many_stripes_are_done_in_blocks() -> None:
    members = randoms(1, 3, 9000, 33)
    for r in (1, 3):
        code = code_for(3, r)
        parities = code.encode(members)
        assert np.array_equal(parities, encoded(members, r, code.coefficient))
        check_loss(code, members, parities, (1,))


def test_a_member_from_its_syndromes() -> None:
    """As the protocol recovers it: each parity without the others; the replacement solves."""
    code, members = code_for(4, 3), randoms(1, 4, 5, 6)
    parities = code.encode(members)
    there = {0: members[0], 2: members[2]}
    for pair in combinations(range(3), 2):
        syndromes = {t: code.syndrome(t, parities[t], there) for t in pair}
        second, first = code.solve([3, 1], syndromes)
        assert np.array_equal(first, members[1])
        assert np.array_equal(second, members[3])


@pytest.mark.parametrize(("k", "r"), [(0, 1), (-1, 2), (4, 0), (4, 4), (4, -1), (256, 2), (256, 1)])
def test_what_is_no_code_is_refused(k: int, r: int) -> None:
    with pytest.raises(ConfigError, match=r"expected 1 to 255 data records and 1 to 3 parities"):
        code_for(k, r)


def test_codes_are_values() -> None:
    assert code_for(4, 1) == XorCode(4) != XorCode(5)
    assert code_for(4, 2) == ReedSolomon(4, 2) != code_for(4, 3)
    assert (code_for(4, 1).k, code_for(4, 1).r) == (4, 1)


@pytest.mark.parametrize("r", [1, 2])
def test_mistakes_are_refused(r: int) -> None:
    code = code_for(3, r)
    parity, differences, places = randoms(1, 4, 5), randoms(2, 2, 5), np.array([0, 3])
    for wrong in (np.array([0, 4]), np.array([-1, 0]), np.array([0, 1, 2])):
        with pytest.raises(ValueError, match="place"):
            code.update(parity, wrong, 0, 0, differences)
    with pytest.raises(ValueError, match="C-contiguous"):
        code.update(parity, places, 0, 0, np.asfortranarray(differences))
    with pytest.raises(ValueError, match="float32"):
        code.update(parity.view(np.float32), places, 0, 0, differences)
    with pytest.raises(ValueError, match="expected"):
        code.update(parity, places, 0, 0, randoms(2, 2, 4))
    constant = parity.copy()
    constant.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        code.update(constant, places, 0, 0, differences)
    with pytest.raises(ValueError, match="read-only"):
        code.add(constant, 0, 0, parity)
    with pytest.raises(ValueError, match=r"members of shape"):
        code.encode(randoms(1, 2, 4, 5))
    with pytest.raises(ValueError, match="expected 3 records or more"):
        code.decode({0: parity, 1: parity}, {})
    with pytest.raises(ValueError, match="record 3"):
        code.decode({0: parity, 3: parity}, {0: parity})
    with pytest.raises(ValueError, match="shape"):
        code.decode({0: parity, 1: differences}, {0: parity})
    with pytest.raises(ValueError, match="expected"):
        code.solve([0, 1], {0: parity})
    with pytest.raises(ValueError, match="shape"):
        code.add(parity, 0, 0, differences)


def test_records_of_no_member_or_parity_are_refused() -> None:
    code, parity, places = code_for(3, 2), randoms(1, 4, 5), np.array([0, 3])
    for t, m in ((2, 0), (0, 3), (-1, 0), (0, -1), (0, np.array([0, 3]))):
        with pytest.raises(ValueError, match="expected 0 to"):
            code.update(parity, places, t, m, randoms(2, 2, 5))
    with pytest.raises(ValueError, match="coefficients"):
        code.update(parity, places, 0, np.array([0, 1, 2]), randoms(2, 2, 5))
    with pytest.raises(ValueError, match="without an inverse"):
        inverted([[1, 2], [2, 4]])
