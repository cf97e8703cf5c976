"""Servers go where most redundancy is left, and move until the code covers everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coding.machines import fewest_machines, most_on_one, spread, spread_in_domains, survives
from holdfast.coding.moves import best_machine, next_move
from holdfast.coding.placement import Placement
from tests.coding.test_machines import codes, in_racks, racks, records_lost


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


@settings(deadline=None)
@given(codes(most=14), racks(), st.data())
def test_a_server_moves_to_where_most_redundancy_is_left_by_domain(
    placement: Placement, domain_of: list[int], data: st.DataObject
) -> None:
    found = spread_in_domains(placement, domain_of)
    lost = data.draw(st.sampled_from(domain_of))
    usable = [machine for machine, domain in enumerate(domain_of) if domain != lost]
    if found is None or not usable:
        return
    now: list[int | None] = [None if domain_of[machine] == lost else machine for machine in found]
    for server in [server for server, machine in enumerate(now) if machine is None]:
        chosen = best_machine(placement, now, server, usable, domain_of)

        def excess(machine: int, server: int = server) -> tuple[int, int]:
            there = [machine if slot == server else at for slot, at in enumerate(now)]
            alone = [at if at is not None else -1 - slot for slot, at in enumerate(there)]
            far = [domain_of[at] if at >= 0 else at for at in alone]
            return tuple(max(0, most_on_one(placement, each) - placement.r) for each in (far, alone))  # type: ignore[return-value]

        least = min(excess(machine)[0] for machine in usable)
        assert excess(chosen)[0] == least
        now[server] = chosen


def test_another_rack_rather_than_an_empty_machine_of_the_same() -> None:
    placement, domain_of = Placement(4, 2, 1), [0, 0, 1, 1, 2, 3]
    now = [0, 2, 4, None]
    assert best_machine(placement, now, 3, range(6), domain_of) == 5
    assert best_machine(placement, now, 3, range(6)) == 1, "without domains, the first empty machine"
    assert best_machine(placement, now, 3, [0, 1], domain_of) == 1, (
        "the rack is full, but one machine is empty"
    )


@settings(deadline=None)
@given(codes(most=12), racks(most=5), st.data())
def test_servers_move_until_the_code_covers_any_domain_again(
    placement: Placement, domain_of: list[int], data: st.DataObject
) -> None:
    """When a lost domain is back. No server moves that was not on it."""
    found = spread_in_domains(placement, domain_of)
    lost = data.draw(st.sampled_from(domain_of))
    others = [machine for machine, domain in enumerate(domain_of) if domain != lost]
    if found is None or not others:
        return
    at = list(found)
    away = [server for server, machine in enumerate(found) if domain_of[machine] == lost]
    for server in away:
        at[server] = best_machine(placement, at, server, others, domain_of)
    moved = []
    while (move := next_move(placement, at, found, range(len(domain_of)), domain_of)) is not None:
        server, machine = move
        at[server] = machine
        moved.append(server)
    assert len(moved) == len(set(moved))
    assert set(moved) <= set(away)
    assert survives(placement, at, domain_of)


@settings(deadline=None)
@given(codes(most=9), racks(most=4), st.data())
def test_moves_have_an_end(placement: Placement, domain_of: list[int], data: st.DataObject) -> None:
    """Wherever servers and their homes are, and whichever machines may be used."""
    machine = st.integers(0, len(domain_of) - 1)
    places = st.lists(machine, min_size=placement.servers, max_size=placement.servers)
    at, home = data.draw(places), data.draw(places)
    usable = sorted(data.draw(st.sets(machine, min_size=1)))
    before = most_on_one(placement, in_racks(at, domain_of))
    seen = set()
    while (move := next_move(placement, at, home, usable, domain_of)) is not None:
        assert tuple(at) not in seen, "round and round"
        seen.add(tuple(at))
        server, machine_to = move
        assert machine_to in usable
        at[server] = machine_to
    if before <= placement.r:
        assert survives(placement, at, domain_of)


@settings(deadline=None, max_examples=60)
@given(codes(most=12), st.integers(0, 4), st.data())
def test_machines_are_lost_one_after_the_other(
    placement: Placement, further: int, data: st.DataObject
) -> None:
    """As long as there is a spread over those that are left, servers get there."""
    fewest = fewest_machines(placement)
    machines = min(fewest + further, placement.servers)
    home = spread(placement, machines)
    assert home is not None
    at, left = list(home), list(range(machines))
    for lost in data.draw(st.permutations(left))[: machines - fewest]:
        left.remove(lost)
        for server in [server for server in range(placement.servers) if at[server] == lost]:
            now = [machine if machine in left else None for machine in at]
            at[server] = best_machine(placement, now, server, left)
        while (move := next_move(placement, at, home, left)) is not None:
            at[move[0]] = move[1]
        assert records_lost(placement, at) <= placement.r
