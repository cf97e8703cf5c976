"""What a plan says of machines, against slow and obvious ways to find it."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from holdfast.coding.machines import spread
from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError
from holdfast.policy.erasure import CodeModel
from holdfast.policy.increments import RowSize
from holdfast.policy.machines import (
    all_failures,
    fatal_sets,
    losses_per_hour,
    most_at_once,
    on_machines,
)
from holdfast.policy.planner import plan
from holdfast.policy.printing import plan_json, show_plan
from holdfast.policy.protections import Wishes
from holdfast.policy.situation import Situation

CLUSTER = Situation(table_bytes=220e9, row=RowSize(64, 256), servers=6, workers=18, hours=72, mtbf_hours=20)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Placement, list[int]]:
    k, r = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    placement = Placement.grouped(draw(st.integers(k + r, 9)), k, r)
    machine = st.integers(0, draw(st.integers(0, 4)))
    return placement, draw(st.lists(machine, min_size=placement.servers, max_size=placement.servers))


def is_fatal(placement: Placement, gone: Collection[int]) -> bool:
    """Whether more than r servers of some stripe are gone, stripe by stripe."""
    for stripe in np.arange(placement.servers):
        servers = [int(placement.parity_owner(np.array([stripe]), t)[0]) for t in range(placement.r)]
        servers += [int(s) for s in placement.owner(stripe * placement.k + np.arange(placement.k))]
        if sum(server in gone for server in servers) > placement.r:
            return True
    return False


def on(machine_of: Sequence[int], machines: Collection[int]) -> set[int]:
    return {server for server, machine in enumerate(machine_of) if machine in machines}


@settings(deadline=None)
@given(placed())
def test_any_machines_may_be_lost_at_once(where: tuple[Placement, list[int]]) -> None:
    placement, machine_of = where
    used = sorted(set(machine_of))
    covered = most_at_once(placement, machine_of)

    def may_be_lost(count: int) -> bool:
        return not any(
            is_fatal(placement, on(machine_of, those)) for those in itertools.combinations(used, count)
        )

    assert may_be_lost(covered)
    if covered < len(used):
        assert covered + 1 == len(used) or not may_be_lost(covered + 1)


@settings(deadline=None, max_examples=60)
@given(placed())
def test_fatal_sets_are_counted(where: tuple[Placement, list[int]]) -> None:
    placement, machine_of = where
    found = fatal_sets(placement, machine_of)
    used = sorted(set(machine_of))
    for machines in range(1, max(found)[0] + 1):
        (processes,) = [p for m, p in found if m == machines]
        for fewer in range(processes + 1):
            sets = [
                (those, others)
                for those in itertools.combinations(used, machines)
                for others in itertools.combinations(
                    sorted(set(range(placement.servers)) - on(machine_of, those)), fewer
                )
                if is_fatal(placement, on(machine_of, those) | set(others))
            ]
            assert len(sets) == (found[machines, processes] if fewer == processes else 0)


def test_a_machine_for_each_server_is_what_independent_servers_are() -> None:
    for servers, k, r in [(5, 4, 1), (12, 4, 2), (30, 3, 2)]:
        code = CodeModel(servers, k, r)
        mtbf, together = all_failures(
            servers=servers, machines=servers, machine_mtbf_hours=1e4, process_mtbf_hours=None
        )
        assert together == 1
        assert mtbf == pytest.approx(1e4 / servers)
        cluster = replace(CLUSTER, servers=servers, machines=servers, mtbf_hours=mtbf, machine_mtbf_hours=1e4)
        expected = code.losses_per_hour(1e-4, 0.1)
        # of r failures within 0.1 h of the first, of n - 1 that remain
        assert losses_per_hour(cluster, code, 0.1) == pytest.approx(expected, rel=1e-3)


def simulated(
    placement: Placement,
    machine_of: Sequence[int],
    process: float,
    machine: float,
    rebuild: float,
    hours: float,
) -> float:
    """How often more is gone than the code covers, failure by failure."""
    random = np.random.default_rng(7)
    failures = []
    units = [frozenset({server}) for server in range(placement.servers)]
    rates = [process] * len(units)
    for each in sorted(set(machine_of)):
        units.append(frozenset(on(machine_of, {each})))
        rates.append(machine)
    for unit, rate in zip(units, rates, strict=True):
        times = random.uniform(0, hours, random.poisson(rate * hours))
        failures += [(time, unit) for time in times]
    losses = 0
    current: list[tuple[float, frozenset[int]]] = []
    known: dict[frozenset[int], bool] = {}
    for time, unit in sorted(failures, key=lambda failure: failure[0]):
        current = [(end, gone) for end, gone in current if end > time]
        current.append((time + rebuild, unit))
        gone = frozenset().union(*(servers for _, servers in current))
        if gone not in known:
            known[gone] = is_fatal(placement, gone)
        losses += known[gone]
    return losses / hours


@pytest.mark.parametrize(
    ("servers", "k", "r", "machines", "rebuild"),
    [(6, 4, 2, 3, 0.05), (5, 4, 1, 5, 0.05), (8, 2, 2, 8, 0.5), (9, 2, 1, 3, 0.05)],
)
def test_losses_are_as_often_as_in_a_simulation(
    servers: int, k: int, r: int, machines: int, rebuild: float
) -> None:
    code = CodeModel(servers, k, r)
    process, machine = 1 / 100, 1 / 200  # for each
    mtbf, together = all_failures(
        servers=servers,
        machines=machines,
        machine_mtbf_hours=1 / machine,
        process_mtbf_hours=1 / (servers * process),
    )
    cluster = replace(
        CLUSTER, servers=servers, machines=machines, mtbf_hours=mtbf, machine_mtbf_hours=1 / machine,
        servers_per_failure=together,
    )  # fmt: skip
    placement = Placement.grouped(servers, k, r)
    found = spread(placement, machines)
    assert found is not None
    expected = simulated(placement, found, process, machine, rebuild, 2e6)
    assert expected * 2e6 > 20, "too few to compare"
    error = 4 / math.sqrt(expected * 2e6)
    assert losses_per_hour(cluster, code, rebuild) == pytest.approx(expected, rel=max(error, 0.05))


def test_failures_of_machines_and_processes_add_up() -> None:
    mtbf, together = all_failures(servers=6, machines=3, machine_mtbf_hours=300, process_mtbf_hours=100)
    assert mtbf == pytest.approx(50)  # 3 machines every 100 h, processes every 100 h
    assert together == pytest.approx(1.5)
    cluster = replace(
        CLUSTER, machines=3, machine_mtbf_hours=300, mtbf_hours=mtbf, servers_per_failure=together
    )
    assert cluster.process_failures_per_hour == pytest.approx(1 / 100)
    assert CLUSTER.process_failures_per_hour == 1 / 20
    # of ten machines only six have a server
    assert all_failures(servers=6, machines=10, machine_mtbf_hours=600, process_mtbf_hours=None) == (100, 1)


def test_two_servers_on_each_of_three_machines() -> None:
    code = CodeModel(6, 4, 2)
    found = on_machines(CLUSTER, code)
    assert found is not None
    assert (found.needed, found.machines, found.servers_each) == (3, 3, (2, 2))
    assert found.lost_rows == pytest.approx(2 * 220e9 / 6 / 512)
    assert found.lost_bytes == found.memory_bytes == pytest.approx(2 * 220e9 / 6 * 1.5)
    assert found.read_bytes == pytest.approx(4 * 2 * 220e9 / 6)
    alone = code.rebuild_hours(CLUSTER.server_bytes, CLUSTER.network_rate / 6)
    assert found.recovery_hours == pytest.approx(CLUSTER.costs.pause_hours + alone), "side by side"
    assert (found.further_machines, found.further_servers) == (0, 0)
    assert (found.at_once, found.in_turn) == (1, 1)
    assert found.objection is None


def test_a_machine_for_each_of_six() -> None:
    found = on_machines(replace(CLUSTER, machines=6), CodeModel(6, 4, 2))
    assert found is not None
    assert (found.needed, found.machines, found.servers_each) == (3, 6, (1, 1))
    assert (found.further_machines, found.further_servers) == (1, 1)
    assert (found.at_once, found.in_turn) == (2, 4)


def test_a_majority_of_machines_must_be_left() -> None:
    """The code alone would cover two of four at once, and one of two."""
    found = on_machines(replace(CLUSTER, servers=4, machines=4), CodeModel(4, 1, 2))
    assert found is not None
    assert found.at_once == 1
    two = on_machines(replace(CLUSTER, servers=2, machines=2), CodeModel(2, 1, 1))
    assert two is not None
    assert (two.needed, two.at_once, two.in_turn) == (3, 0, 0)
    assert two.objection is not None
    assert "use 3 machines" in two.objection


def test_too_few_machines_are_refused_with_the_cure() -> None:
    found = plan(replace(CLUSTER, machines=3), Wishes(k=4, r=1))
    code = next(one for one in found.ranked if one.kind == "ecrm")
    assert code.objection is not None
    assert "use 6 machines" in code.objection
    assert code.machines is not None
    assert (code.machines.needed, code.machines.at_once, code.machines.in_turn) == (6, 0, 0)
    fits = plan(replace(CLUSTER, machines=3), Wishes(k=4, r=2))
    assert next(one for one in fits.ranked if one.kind == "ecrm").objection is None


def test_machines_that_fail_make_losses_more_frequent() -> None:
    def chance(machines: int, machine_mtbf_hours: float) -> float:
        mtbf, together = all_failures(
            servers=6, machines=machines, machine_mtbf_hours=machine_mtbf_hours, process_mtbf_hours=20
        )
        cluster = replace(
            CLUSTER, machines=machines, machine_mtbf_hours=machine_mtbf_hours, mtbf_hours=mtbf,
            servers_per_failure=together,
        )  # fmt: skip
        ranked = plan(cluster, Wishes(k=4, r=2), ["ecrm"]).ranked
        return ranked[0].loss_chance

    assert chance(3, 100) > chance(3, 1000) > chance(6, 1000)
    alone = plan(CLUSTER, Wishes(k=4, r=2), ["ecrm"]).ranked[0].loss_chance
    assert chance(6, 1e9) == pytest.approx(alone, rel=1e-4)


def test_what_is_missing_or_too_much() -> None:
    with pytest.raises(ConfigError, match="not how many machines"):
        replace(CLUSTER, machine_mtbf_hours=100)
    with pytest.raises(ConfigError, match=r"the number of machines is 0: expected above 0"):
        replace(CLUSTER, machines=0)
    huge = replace(CLUSTER, servers=20_000, machines=100, machine_mtbf_hours=1e4, mtbf_hours=10)
    assert on_machines(huge, CodeModel(20_000, 4, 1)) is None
    with pytest.raises(ConfigError, match=r"at most 10,000"):
        losses_per_hour(huge, CodeModel(20_000, 4, 1), 0.1)


def printed(situation: Situation, wishes: Wishes, *among: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    show_plan(plan(situation, wishes, among), console, explain=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_plan_in_words() -> None:
    text = printed(CLUSTER, Wishes(k=4, r=2), "ecrm", "ecrec")
    assert "The loss of a machine, with each code's servers on as few machines as it needs:" in text
    assert text.count("code 4+2  3 machines") == 1, "atomic or not, machines are the same"
    assert (
        "It needs 3 machines. On 3, with 2 servers each, the loss of a machine takes 2 servers, 110 GB of "
        "rows and parities, which are back in 5.19 min; until then, nothing more may be lost. At once, 1 "
        "may be lost; one after the other, 1 if none is replaced."
    ) in text
    six = replace(CLUSTER, machines=6, machine_mtbf_hours=720, mtbf_hours=120)
    text = printed(six, Wishes(k=4, r=2), "ecrm")
    assert "of these, 0.6 are of machines: there are 6, and each fails every 30 d" in text
    assert "with each code's servers on 6 machines:" in text
    assert "until then, 1 machine more may be lost" in text
    assert "machine" not in printed(CLUSTER, Wishes(), "chunked")


def test_a_plan_as_json() -> None:
    values = json.loads(plan_json(plan(replace(CLUSTER, machines=6)), (), ()))
    assert values["situation"]["machines"] == 6
    codes = Counter(one["kind"] for one in values["ranked"] if one["machines"] is not None)
    assert set(codes) == {"ecrm", "ecrec", "replication"}
    one = next(one for one in values["ranked"] if one["name"] == "code 4+2, atomic")["machines"]
    assert one["needed"] == 3
    assert one["machines"] == 6
    assert one["servers_each"] == [1, 1]
    assert one["objection"] is None
