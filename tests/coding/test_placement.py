"""Every row lies in one place, and no server has two records of a stripe (hole 5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coding.placement import GroupedPlacement, Placement
from holdfast.errors import ConfigError


@st.composite
def placements(draw: st.DrawFn) -> Placement | GroupedPlacement:
    k, r = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    if draw(st.booleans()):
        return GroupedPlacement(draw(st.integers(k + r, 4 * (k + r) + 1)), k, r)
    least = k + r if r else 1
    return Placement(draw(st.integers(least, least + 7)), k, r)


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_rows_and_records_are_inverse_to_each_other(
    placement: Placement | GroupedPlacement, rows: int
) -> None:
    ids = np.arange(rows, dtype=np.int64)
    owners, places = placement.owner(ids), placement.place(ids)
    records = placement.records(rows)
    assert ((owners >= 0) & (owners < placement.servers)).all()
    assert ((places >= 0) & (places < records)).all()
    found: list[int] = []
    for server in range(placement.servers):
        there = placement.row(server, np.arange(records, dtype=np.int64))
        assert len(set(there)) == records
        real = there < rows
        found.extend(there[real])
        assert (placement.owner(there[real]) == server).all()
        assert (placement.place(there[real]) == np.flatnonzero(real)).all()
    assert sorted(found) == list(range(rows))


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_a_stripe_has_its_records_on_different_servers(
    placement: Placement | GroupedPlacement, rows: int
) -> None:
    k, r = placement.k, placement.r
    for stripe in range(placement.stripes(rows)):
        members = np.arange(stripe * k, (stripe + 1) * k)  # those beyond the last row count as zero bits
        parities = [int(placement.parity_owner(np.array([stripe]), t)[0]) for t in range(r)]
        if r:
            assert len({*placement.owner(members), *parities}) == k + r
    assert placement.stripes(rows) * k >= rows > (placement.stripes(rows) - 1) * k


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_parities_have_places_of_their_own_without_gaps(
    placement: Placement | GroupedPlacement, rows: int
) -> None:
    stripes = np.arange(placement.stripes(rows), dtype=np.int64)
    taken = [
        (int(server), int(place))
        for t in range(placement.r)
        for server, place in zip(
            placement.parity_owner(stripes, t), placement.parity_place(stripes, t), strict=True
        )
    ]
    assert len(set(taken)) == len(stripes) * placement.r
    room = placement.records(rows) // placement.k * placement.r
    assert all(0 <= place < room for _, place in taken)


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_servers_hold_nearly_equally_many_rows(placement: Placement | GroupedPlacement, rows: int) -> None:
    counts = np.bincount(placement.owner(np.arange(rows)), minlength=placement.servers)
    assert counts.max() - counts.min() <= placement.k


def test_without_protection_rows_go_round() -> None:
    ids = np.arange(7)
    assert list(Placement(3).owner(ids)) == [0, 1, 2, 0, 1, 2, 0]
    assert list(Placement(3).place(ids)) == [0, 0, 0, 1, 1, 1, 2]


def test_too_few_servers_for_a_stripe_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 5 servers or more"):
        Placement(4, k=4, r=1)
    with pytest.raises(ConfigError):
        Placement(0)


@pytest.mark.parametrize(("k", "r"), [(1, 1), (2, 1), (4, 1), (4, 2), (3, 3)])
def test_groups_share_no_stripe(k: int, r: int) -> None:
    """So failures in different groups are independent: at most r in each lose nothing."""
    for servers in range(k + r, 4 * (k + r) + 1):
        placement = GroupedPlacement(servers, k, r)
        groups = [placement.members(j) for j in range(placement.groups)]
        assert [server for group in groups for server in group] == list(range(servers))
        assert all(k + r <= len(group) < 2 * (k + r) for group in groups)
        assert all(placement.group_of(server) == j for j, group in enumerate(groups) for server in group)
        stripes = np.arange(3 * servers)
        holders = np.stack(
            [placement.owner(stripes * k + m) for m in range(k)]
            + [placement.parity_owner(stripes, t) for t in range(r)]
        )
        for column in holders.T:
            assert len({placement.group_of(int(server)) for server in column}) == 1
        for record in holders:  # each server is met once in each role in a cycle
            assert (np.bincount(record, minlength=servers) == 3).all()


def test_fewer_pairs_of_failures_are_fatal_in_groups() -> None:
    def fatal(placement: Placement | GroupedPlacement) -> int:
        stripes = np.arange(placement.servers)
        pairs = set()
        for stripe in stripes:
            members = placement.owner(stripe * placement.k + np.arange(placement.k))
            here = sorted({*members.tolist(), int(placement.parity_owner(stripes, 0)[stripe])})
            pairs |= {(a, b) for a in here for b in here if a < b}
        return len(pairs)

    assert fatal(Placement(30, 4, 1)) == 2 * fatal(GroupedPlacement(30, 4, 1)) == 30 * 4


def test_neighbouring_stripes_go_to_different_groups() -> None:
    placement = GroupedPlacement(17, 4, 1)
    owners = placement.parity_owner(np.arange(17), 0)
    assert [placement.group_of(int(o)) for o in owners] == [*[0, 1, 2] * 5, 2, 2]


def test_one_group_is_as_without_groups() -> None:
    ids = np.arange(500)
    for servers in range(5, 10):
        one, plain = GroupedPlacement(servers, 4, 1), Placement(servers, 4, 1)
        assert (one.owner(ids) == plain.owner(ids)).all()
        assert (one.parity_owner(ids, 0) == plain.parity_owner(ids, 0)).all()
        assert (one.row(2, ids) == plain.row(2, ids)).all()


def test_too_few_servers_for_a_group_are_refused() -> None:
    for k, r in ((4, 1), (5, 0)):
        with pytest.raises(ConfigError, match="5 "):
            GroupedPlacement(4, k, r)
