"""Every row lies in one place, and no server has two records of a stripe (hole 5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    k, r = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    if draw(st.booleans()):
        servers = draw(st.integers(k + r, 4 * (k + r) + 1))
        return Placement(servers, k, r, draw(st.integers(1, servers // (k + r))))
    least = k + r if r else 1
    return Placement(draw(st.integers(least, least + 7)), k, r)


def stripes_of_a_cycle(placement: Placement) -> list[list[int]]:
    """The servers of each of the first stripes, parities first: slow, dealt out as one would by hand."""
    rings = [
        [server for server in range(placement.servers) if server % placement.groups == j]
        for j in range(placement.groups)
    ]
    met = [0] * placement.groups
    stripes = []
    for stripe in range(placement.servers):
        j = stripe % placement.groups
        ring = rings[j]
        stripes.append([ring[(met[j] + i) % len(ring)] for i in range(placement.r + placement.k)])
        met[j] += 1
    return stripes


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_rows_and_records_are_inverse_to_each_other(placement: Placement, rows: int) -> None:
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
@given(placements(), st.integers(0, 5))
def test_stripes_lie_where_they_are_dealt(placement: Placement, cycle: int) -> None:
    n, k, r = placement.servers, placement.k, placement.r
    for stripe, servers in enumerate(stripes_of_a_cycle(placement), start=cycle * n):
        members = stripe * k + np.arange(k)
        parities = [int(placement.parity_owner(np.array([stripe]), t)[0]) for t in range(r)]
        assert [*parities, *placement.owner(members)] == servers
        assert list(placement.place(members)) == [cycle * k + m for m in range(k)]
        assert [int(placement.parity_place(np.array([stripe]), t)[0]) for t in range(r)] == [
            cycle * r + t for t in range(r)
        ]


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_a_stripe_has_its_records_on_different_servers_of_one_ring(placement: Placement, rows: int) -> None:
    k, r = placement.k, placement.r
    for stripe in range(placement.stripes(rows)):
        members = np.arange(stripe * k, (stripe + 1) * k)  # those beyond the last row count as zero bits
        parities = [int(placement.parity_owner(np.array([stripe]), t)[0]) for t in range(r)]
        holders = {*placement.owner(members).tolist(), *parities}
        if r or placement.groups > 1:
            assert len(holders) == k + r
        assert len({placement.ring(server) for server in holders}) == 1
    assert placement.stripes(rows) * k >= rows > (placement.stripes(rows) - 1) * k


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_parities_have_places_of_their_own_without_gaps(placement: Placement, rows: int) -> None:
    stripes = np.arange(placement.stripes(rows), dtype=np.int64)
    taken = [
        (int(server), int(place))
        for t in range(placement.r)
        for server, place in zip(
            placement.parity_owner(stripes, t), placement.parity_place(stripes, t), strict=True
        )
    ]
    assert len(set(taken)) == len(stripes) * placement.r
    room = placement.blocks(rows) * placement.r
    assert all(0 <= place < room for _, place in taken)


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_servers_hold_nearly_equally_many_rows(placement: Placement, rows: int) -> None:
    counts = np.bincount(placement.owner(np.arange(rows)), minlength=placement.servers)
    assert counts.max() - counts.min() <= placement.k
    assert placement.records(rows) == placement.blocks(rows) * placement.k
    assert placement.records(rows) - placement.k < counts.max() or not rows


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_owners_and_parity_servers_agree_block_for_block(placement: Placement, rows: int) -> None:
    """What a lane needs: its other end, and that both call the same stripes the same block."""
    k, r = placement.k, placement.r
    stripes = np.arange(placement.stripes(rows), dtype=np.int64)
    for m in range(k):
        ids = stripes * k + m
        owners, blocks = placement.owner(ids), placement.place(ids) // k
        for t in range(r):
            parities = placement.parity_owner(stripes, t)
            assert (placement.parity_place(stripes, t) // r == blocks).all()
            for owner, parity, row, block in zip(owners, parities, ids, blocks, strict=True):
                assert placement.parity_server(int(owner), m, t) == parity
                assert placement.member_server(int(parity), t, m) == owner
                assert placement.stripe_rows(int(parity), t, m, np.array([block])) == [row]


@settings(deadline=None)
@given(placements(), st.integers(0, 300))
def test_members_that_do_not_exist_are_rows_beyond_the_last(placement: Placement, rows: int) -> None:
    blocks = np.arange(placement.blocks(rows), dtype=np.int64)
    for t in range(placement.r):
        found = np.concatenate(
            [
                placement.stripe_rows(server, t, m, blocks)
                for server in range(placement.servers)
                for m in range(placement.k)
            ]
        )
        assert sorted(found[found < rows]) == list(range(rows))
        assert len(set(found)) == len(blocks) * placement.servers * placement.k


@settings(deadline=None)
@given(placements())
def test_neighbours_are_those_who_share_a_stripe(placement: Placement) -> None:
    near: list[set[int]] = [set() for _ in range(placement.servers)]
    for stripe in stripes_of_a_cycle(placement):
        for server in stripe:
            near[server] |= {*stripe} - {server}
    for server in range(placement.servers):
        assert placement.neighbours(server) == tuple(sorted(near[server]))


def test_without_protection_rows_go_round() -> None:
    ids = np.arange(7)
    for groups in (1, 2, 3):
        assert list(Placement(3, groups=groups).owner(ids)) == [0, 1, 2, 0, 1, 2, 0]
        assert list(Placement(3, groups=groups).place(ids)) == [0, 0, 0, 1, 1, 1, 2]


def test_too_few_servers_for_a_stripe_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 5 servers or more"):
        Placement(4, k=4, r=1)
    with pytest.raises(ConfigError):
        Placement(0)
    with pytest.raises(ConfigError):
        Placement.grouped(3, 0, 0)


def test_groups_that_cannot_hold_a_stripe_are_refused() -> None:
    assert Placement(14, 4, 1, groups=2).groups == 2
    for groups in (0, 3):
        with pytest.raises(ConfigError, match=f"in {groups} groups: expected 1 to 2, so that each has 5 or"):
            Placement(14, 4, 1, groups)
    with pytest.raises(ConfigError, match="expected 1 to 1,"):
        Placement(4, 5, 0, groups=2)


@pytest.mark.parametrize(("k", "r"), [(1, 1), (2, 1), (4, 1), (4, 2), (3, 3)])
def test_rings_share_no_stripe(k: int, r: int) -> None:
    """So failures in different rings are independent: at most r in each lose nothing."""
    for servers in range(k + r, 4 * (k + r) + 1):
        placement = Placement.grouped(servers, k, r)
        assert placement.groups == servers // (k + r)
        rings = [placement.ring(j) for j in range(placement.groups)]
        assert sorted(server for ring in rings for server in ring) == list(range(servers))
        assert all(
            len(ring) in (servers // placement.groups, servers // placement.groups + 1) for ring in rings
        )
        assert all(placement.ring(server) == ring for ring in rings for server in ring)
        stripes = np.arange(3 * servers)
        holders = np.stack(
            [placement.owner(stripes * k + m) for m in range(k)]
            + [placement.parity_owner(stripes, t) for t in range(r)]
        )
        for column in holders.T:
            assert len({placement.ring(int(server)) for server in column}) == 1
        for record in holders:  # each server is met once in each role in a cycle
            assert (np.bincount(record, minlength=servers) == 3).all()


def test_fewer_pairs_of_failures_are_fatal_in_rings() -> None:
    def fatal(placement: Placement) -> int:
        return sum(len(placement.neighbours(server)) for server in range(placement.servers)) // 2

    assert fatal(Placement(30, 4, 1)) == 2 * fatal(Placement.grouped(30, 4, 1)) == 30 * 4


def test_neighbouring_stripes_and_neighbouring_servers_are_in_different_rings() -> None:
    placement = Placement.grouped(17, 4, 1)
    owners = placement.parity_owner(np.arange(17), 0)
    assert [placement.ring(int(owner)).start for owner in owners] == [*[0, 1, 2] * 5, 0, 1]
    assert [placement.ring(server).start for server in range(17)] == [*[0, 1, 2] * 5, 0, 1]


def test_one_ring_is_the_formula_of_the_design() -> None:
    ids = np.arange(500)
    for servers in range(5, 10):
        placement = Placement.grouped(servers, 4, 1)
        assert placement == Placement(servers, 4, 1)
        assert (placement.owner(ids) == (ids // 4 + 1 + ids % 4) % servers).all()
        assert (placement.parity_owner(ids, 0) == ids % servers).all()
        assert placement.ring(2) == range(servers)
