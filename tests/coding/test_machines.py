"""Servers on machines: the code covers the loss of any machine, or the user is told what would do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coding.machines import (
    best_spread,
    check_spread,
    check_spread_in_domains,
    evenly,
    fewest_machines,
    in_turn,
    lost_together,
    most_on_one,
    spread,
    spread_in_domains,
    survives,
    voters,
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


@st.composite
def racks(draw: st.DrawFn, most: int = 6) -> list[int]:
    """The domain of each machine."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most))
    return draw(st.permutations([domain for domain, size in enumerate(sizes) for _ in range(size)]))


def in_racks(machine_of: Sequence[int], domain_of: Sequence[int]) -> list[int]:
    return [domain_of[machine] for machine in machine_of]


@settings(deadline=None)
@given(codes(), racks())
def test_no_domain_has_more_records_of_a_stripe_than_the_code_covers(
    placement: Placement, domain_of: list[int]
) -> None:
    found = spread_in_domains(placement, domain_of)
    assert (found is None) == (spread(placement, len(set(domain_of))) is None)
    if found is None:
        with pytest.raises(
            ConfigError, match=r"domains? \(rack\): the loss of a domain would take more than"
        ):
            check_spread_in_domains(placement, domain_of, "rack")
        return
    assert len(found) == placement.servers
    assert set(found) <= set(range(len(domain_of)))
    assert records_lost(placement, in_racks(found, domain_of)) <= placement.r
    assert survives(placement, found, domain_of)
    assert survives(placement, found), "a machine is less than its domain"
    assert check_spread_in_domains(placement, domain_of, "rack") == found


@settings(deadline=None)
@given(codes(), racks())
def test_no_server_could_go_to_a_machine_with_two_servers_less(
    placement: Placement, domain_of: list[int]
) -> None:
    found = spread_in_domains(placement, domain_of)
    if found is None:
        return
    loads = [found.count(machine) for machine in range(len(domain_of))]
    for domain in set(domain_of):
        inside = [load for load, at in zip(loads, domain_of, strict=True) if at == domain]
        assert max(inside) - min(inside) <= 1
    for server, machine in itertools.product(range(placement.servers), range(len(domain_of))):
        if loads[found[server]] == max(loads) and loads[machine] < max(loads) - 1:
            moved = [machine if s == server else at for s, at in enumerate(found)]
            assert records_lost(placement, in_racks(moved, domain_of)) > placement.r


@settings(deadline=None)
@given(codes(), st.integers(1, 8))
def test_machines_that_are_their_own_domains_are_machines(placement: Placement, machines: int) -> None:
    alone = list(range(machines))
    found = spread(placement, machines)
    in_domains = spread_in_domains(placement, alone)
    assert (found is None) == (in_domains is None)
    if found is not None:
        assert survives(placement, found, alone) == survives(placement, found)
        loads = [found.count(machine) for machine in alone]
        if max(loads) - min(loads) <= 1:
            assert in_domains == found


@settings(deadline=None)
@given(codes(), racks())
def test_the_best_there_is(placement: Placement, domain_of: list[int]) -> None:
    found = best_spread(placement, domain_of)
    assert len(found) == placement.servers
    assert set(found) <= set(range(len(domain_of)))
    if spread_in_domains(placement, domain_of) is not None:
        assert survives(placement, found, domain_of)
    if spread(placement, len(domain_of)) is not None:
        assert survives(placement, found)


def test_what_is_best_in_two_racks() -> None:
    domain_of = [0, 0, 0, 1, 1, 1]
    found = best_spread(Placement(6, 4, 2), domain_of)
    assert sorted(found) == list(range(6)), "a rack takes three of six, but a machine only one"
    assert best_spread(Placement(4), domain_of) == (0, 3, 1, 4)
    assert best_spread(Placement(6, 4, 2), [0]) == (0,) * 6


def test_neighbours_are_in_different_domains() -> None:
    assert in_turn([0, 0, 0, 1, 2, 2]) == (0, 3, 4, 1, 5, 2)
    assert in_turn([5, 5]) == (0, 1)


@pytest.mark.parametrize(
    ("placement", "domain_of", "cure"),
    [
        (
            Placement(4, 2, 1),
            [0, 0, 1, 1, 2],
            r"4 servers with a code of 2 \+ 1 on 5 machines in 3 domains \(zone\): the loss of a domain "
            r"would take more than 1 of the 3 records of some stripes; use 4 domains or 6 servers, or a code",
        ),
        (Placement(5, 4, 1), [0, 0, 0, 0, 0], r"5 machines in 1 domain \(zone\).*use 5 domains, or a code"),
    ],
)
def test_the_remedy_in_domains(placement: Placement, domain_of: list[int], cure: str) -> None:
    assert spread(placement, len(domain_of)) is not None, "on machines without domains it would do"
    with pytest.raises(ConfigError, match=cure):
        check_spread_in_domains(placement, domain_of, "zone")


@settings(deadline=None)
@given(racks())
def test_a_majority_of_voters_is_left_after_the_loss_of_any_domain(domain_of: list[int]) -> None:
    chosen = voters(domain_of)
    assert list(chosen) == sorted(set(chosen))
    of_domain = [sum(domain_of[machine] == domain for machine in chosen) for domain in set(domain_of)]
    if len(of_domain) < 3:
        assert chosen == tuple(range(len(domain_of)))
        return
    assert 2 * (len(chosen) - max(of_domain)) > len(chosen)
    left_out = [machine for machine in range(len(domain_of)) if machine not in chosen]
    for machine in left_out:  # one more would be too many of its domain
        more = [domain_of[m] for m in (*chosen, machine)]
        assert 2 * (len(more) - more.count(domain_of[machine])) <= len(more) or more.count(
            domain_of[machine]
        ) > max(of_domain)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 5), min_size=1), st.integers(1, 12))
def test_machines_come_from_all_domains_in_turn(sizes: dict[str, int], machines: int) -> None:
    chosen = evenly(sizes, machines)
    assert len(chosen) == machines
    assert set(chosen) <= set(sizes)
    if machines <= sum(sizes.values()):
        counts = {domain: chosen.count(domain) for domain in sizes}
        assert all(counts[domain] <= size for domain, size in sizes.items())
        for one, other in itertools.permutations(sizes, 2):
            assert counts[one] <= counts[other] + 1 or counts[other] == sizes[other]
    assert evenly(sizes, machines + 1)[:machines] == chosen, "spares come last"


def test_the_largest_domains_come_first() -> None:
    assert evenly({"a": 1, "b": 3, "c": 3}, 3) == ["b", "c", "a"]
    assert evenly({"a": 1, "b": 3, "c": 3}, 2) == ["b", "c"]
    assert evenly({"a": 1, "b": 2}, 5) == ["b", "a", "b", "b", "a"], (
        "more than there are: Ray is to find them"
    )
