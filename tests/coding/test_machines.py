"""Servers on machines: the code covers the loss of any machine, or the user is told what would do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coding.machines import (
    best_machine,
    check_spread,
    fewest_machines,
    lost_together,
    most_on_one,
    next_move,
    spread,
    survives,
)
from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError


@st.composite
def codes(draw: st.DrawFn, most: int = 30) -> Placement:
    k, r = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    servers = draw(st.integers(k + r, max(k + r, most)))
    return Placement(servers, k, r, draw(st.integers(1, servers // (k + r))))


def records_lost(placement: Placement, machine_of: Sequence[int]) -> int:
    """The most records of a stripe on one machine, stripe by stripe: slow, with no word of windows."""
    most = 0
    for stripe in np.arange(2 * placement.servers):
        servers = [int(placement.parity_owner(np.array([stripe]), t)[0]) for t in range(placement.r)]
        rows = stripe * placement.k + np.arange(placement.k)
        servers += [int(server) for server in placement.owner(rows)]
        machines = [machine_of[server] for server in servers]
        most = max(most, *(machines.count(machine) for machine in machines))
    return most


@settings(deadline=None)
@given(codes(), st.integers(1, 12))
def test_no_machine_has_more_records_of_a_stripe_than_the_code_covers(
    placement: Placement, machines: int
) -> None:
    found = spread(placement, machines)
    if found is None:
        with pytest.raises(ConfigError, match="machines"):
            check_spread(placement, machines)
        return
    assert len(found) == placement.servers
    assert set(found) <= set(range(machines))
    assert records_lost(placement, found) <= placement.r
    assert survives(placement, found)


@settings(deadline=None)
@given(codes(), st.data())
def test_windows_are_stripes(placement: Placement, data: st.DataObject) -> None:
    machine_of = data.draw(
        st.lists(st.integers(0, 4), min_size=placement.servers, max_size=placement.servers)
    )
    assert most_on_one(placement, machine_of) == records_lost(placement, machine_of)


@settings(deadline=None)
@given(codes(), st.data())
def test_servers_that_may_be_lost_together(placement: Placement, data: st.DataObject) -> None:
    """As many as the code covers: those left out would be too many, each of them."""
    servers = data.draw(st.lists(st.integers(0, placement.servers - 1), unique=True))
    found = lost_together(placement, servers)

    def lost_records(gone: Sequence[int]) -> int:
        return records_lost(placement, [-1 if s in gone else s for s in range(placement.servers)])

    assert list(found) == [server for server in servers if server in found]
    assert len(found) >= min(len(servers), placement.r)
    assert not found or lost_records(found) <= placement.r
    for server in set(servers) - set(found):
        assert lost_records([*found, server]) > placement.r


@settings(deadline=None, max_examples=60)
@given(codes(most=7), st.integers(1, 5))
def test_what_exists_is_found(placement: Placement, machines: int) -> None:
    exists = any(
        records_lost(placement, machine_of) <= placement.r
        for machine_of in itertools.product(range(machines), repeat=placement.servers)
        if machine_of[0] == 0
    )
    assert (spread(placement, machines) is not None) == exists


@settings(deadline=None)
@given(codes(), st.integers(1, 12))
def test_more_machines_never_hurt(placement: Placement, machines: int) -> None:
    if spread(placement, machines) is not None:
        assert spread(placement, machines + 1) is not None
        assert fewest_machines(placement) <= machines


def test_every_server_on_a_machine_of_its_own_always_works() -> None:
    for servers, k, r in itertools.product(range(2, 20), range(1, 6), range(1, 4)):
        if servers >= k + r:
            placement = Placement(servers, k, r)
            found = spread(placement, servers)
            assert found is not None
            assert sorted(found) == list(range(servers))


@pytest.mark.parametrize(
    ("servers", "k", "r", "machines", "cure"),
    [
        (4, 2, 1, 3, "use 4 machines or 6 servers"),
        (5, 4, 1, 3, "use 5 machines, or a code with more parities"),  # each stripe needs five
        (8, 2, 1, 3, "use 4 machines or 9 servers"),
        (6, 2, 1, 1, "use 3 machines, or"),
    ],
)
def test_the_remedy(servers: int, k: int, r: int, machines: int, cure: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_spread(Placement(servers, k, r), machines)
    assert cure in str(error.value)


@pytest.mark.parametrize(
    ("placement", "machines"),
    [
        (Placement(6, 4, 2), 3),
        (Placement(9, 2, 1, 3), 3),  # slot % machines would put a whole ring on one machine
        (Placement(13, 3, 1), 5),  # ring index % machines does not fit
        (Placement(5, 3, 2), 3),  # two neighbours on one machine
    ],
)
def test_some_that_a_plain_rule_misses(placement: Placement, machines: int) -> None:
    found = check_spread(placement, machines)
    assert records_lost(placement, found) <= placement.r
    loads = [found.count(machine) for machine in range(machines)]
    assert max(loads) - min(loads) <= 1


def test_without_a_code_machines_get_equally_many() -> None:
    assert spread(Placement(5), 2) == (0, 1, 0, 1, 0)
    with pytest.raises(ConfigError, match="choose a protection"):
        fewest_machines(Placement(5))


@settings(deadline=None)
@given(codes(), st.integers(2, 8), st.data())
def test_a_server_moves_to_where_most_redundancy_is_left(
    placement: Placement, machines: int, data: st.DataObject
) -> None:
    found = spread(placement, machines)
    if found is None:
        return
    lost = data.draw(st.integers(0, machines - 1))
    usable = [machine for machine in range(machines) if machine != lost]
    now: list[int | None] = [None if machine == lost else machine for machine in found]
    for server in [server for server, machine in enumerate(found) if machine == lost]:
        chosen = best_machine(placement, now, server, usable)

        def excess(machine: int, server: int = server) -> int:
            there = [machine if slot == server else at for slot, at in enumerate(now)]
            alone = [at if at is not None else -1 - slot for slot, at in enumerate(there)]
            return max(0, most_on_one(placement, alone) - placement.r)

        assert excess(chosen) == min(excess(machine) for machine in usable)
        now[server] = chosen


def test_of_two_that_are_as_safe_the_less_loaded_one() -> None:
    assert best_machine(Placement(6, 2, 1), [0, 1, 2, None, 1, 2], 3, [0, 3]) == 3
    assert best_machine(Placement(6, 2, 1), [0, 1, 2, None, 1, 2], 3, [1, 0]) == 0


@settings(deadline=None)
@given(codes(), st.integers(2, 8), st.data())
def test_servers_move_until_the_code_covers_any_machine_again(
    placement: Placement, machines: int, data: st.DataObject
) -> None:
    """When a lost machine is back. Each move leaves less uncovered, so there is an end."""
    found = spread(placement, machines)
    if found is None:
        return
    lost = data.draw(st.integers(0, machines - 1))
    others = [machine for machine in range(machines) if machine != lost]
    at = list(found)
    for server in [server for server, machine in enumerate(found) if machine == lost]:
        at[server] = best_machine(placement, at, server, others)
    moves = 0
    while (move := next_move(placement, at, found, range(machines))) is not None:
        server, machine = move
        at[server] = machine
        moves += 1
    assert moves <= found.count(lost)
    assert survives(placement, at)


def test_moves_help() -> None:
    three, four = Placement(3, 2, 1), Placement(4, 2, 1)
    assert next_move(three, [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]) is None, "nothing is wrong"
    assert next_move(four, [0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 2]) is None, "no machine is left for it"
    assert next_move(four, [0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 2, 3]) == (3, 3)
    assert next_move(four, [0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 2, 4]) == (2, 4), "a spare machine"
