from __future__ import annotations

from itertools import combinations
from math import comb, exp

import numpy as np
import pytest

from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError
from holdfast.policy.erasure import CodeModel, at_least, fatal_sets, lie_close, sets_of_a_failure


def servers_of_stripes(servers: int, k: int, r: int) -> set[frozenset[int]]:
    placement = Placement.grouped(servers, k, r)
    stripes = np.arange(4 * servers, dtype=np.int64)
    records = [placement.parity_owner(stripes, t) for t in range(r)]
    records += [placement.owner(stripes * k + m) for m in range(k)]
    return {frozenset(column) for column in np.stack(records).T.tolist()}


@pytest.mark.parametrize(
    ("servers", "k", "r"),
    [(5, 4, 1), (6, 4, 1), (9, 4, 1), (10, 4, 1), (13, 4, 1), (9, 3, 1), (7, 4, 2), (13, 4, 2), (5, 1, 1)],
)
def test_which_servers_share_a_stripe_is_as_rows_are_placed(servers: int, k: int, r: int) -> None:
    stripes = servers_of_stripes(servers, k, r)
    fatal = sum(
        any(set(together) <= stripe for stripe in stripes) for together in combinations(range(servers), r + 1)
    )
    assert CodeModel(servers, k, r).fatal_share == pytest.approx(fatal / comb(servers, r + 1))


@pytest.mark.parametrize(
    ("ring", "width", "members"), [(9, 5, 2), (12, 5, 3), (5, 5, 2), (8, 6, 3), (30, 4, 3)]
)
def test_sets_of_neighbours_are_counted(ring: int, width: int, members: int) -> None:
    windows = [{(first + i) % ring for i in range(width)} for first in range(ring)]
    inside = [s for s in combinations(range(ring), members) if any(set(s) <= window for window in windows)]
    assert fatal_sets(ring, width, members) == len(inside)
    for servers in combinations(range(ring), members):
        assert lie_close(servers, ring, width, members) == (servers in inside)


def test_groups_are_even() -> None:
    code = CodeModel(23, 4, 1)
    assert [code.group_size(group) for group in range(code.groups)] == [6, 6, 6, 5]
    assert CodeModel(9, 4, 1).groups == 1


def test_memory_and_rebuilding() -> None:
    """ECRM, sections 3.6 and 4.1: less memory with a larger k, and longer rebuilds."""
    assert CodeModel(10, 4, 2).memory_share == 0.5
    assert CodeModel(10, 8, 1).rebuild_hours(44e9, 1e9) == 2 * CodeModel(10, 4, 1).rebuild_hours(44e9, 1e9)
    assert CodeModel(10, 4, 1).rebuild_hours(44e9, 1e9) * 3600 == pytest.approx(176)


def test_losses_grow_with_rates_and_shrink_with_parities() -> None:
    one, two = CodeModel(50, 4, 1), CodeModel(50, 4, 2)
    assert one.losses_per_hour(1e-3, 0.1) == pytest.approx(4 * one.losses_per_hour(5e-4, 0.1), rel=0.01)
    assert two.losses_per_hour(1e-3, 0.1) < 0.01 * one.losses_per_hour(1e-3, 0.1)


def test_the_chance_of_a_second_failure_in_time() -> None:
    """5 servers with one stripe of 4 + 1: any of the other 4 within an hour, each with a chance of 1 -
    exp(-0.01)."""
    chance = CodeModel(5, 4, 1).chance_while_rebuilding(0.01, 1.0)
    assert chance == pytest.approx(1 - exp(-0.04))


@pytest.mark.parametrize("mean", [1e-9, 0.3, 0.99, 1.01, 5.0])
def test_tails_of_a_poisson(mean: float) -> None:
    assert at_least(0, mean) == pytest.approx(1)
    assert at_least(1, mean) == pytest.approx(-np.expm1(-mean))
    assert at_least(2, mean) == pytest.approx(mean**2 / 2 if mean < 1e-6 else 1 - exp(-mean) * (1 + mean))


def test_sets_of_servers_that_go_down_together() -> None:
    assert sets_of_a_failure(1, 2) == 0
    assert sets_of_a_failure(4, 2) == 6
    mean = 0.7  # of a Poisson's; of those that are not zero it is more
    shown = mean / (1 - exp(-mean))
    assert sets_of_a_failure(shown, 2) == pytest.approx(mean**2 / 2 / (1 - exp(-mean)))


@pytest.mark.parametrize(("servers", "k", "r"), [(4, 4, 1), (5, 5, 1), (3, 2, 2)])
def test_a_code_that_needs_more_servers_is_refused(servers: int, k: int, r: int) -> None:
    with pytest.raises(ConfigError, match=f"k is {k} and r is {r} but there are {servers} servers"):
        CodeModel(servers, k, r)


def test_a_code_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a code of 0 \+ 1 records"):
        CodeModel(4, 0, 1)
