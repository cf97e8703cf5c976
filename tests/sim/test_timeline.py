"""Saves, recoveries and their hours, against CPR's own figures (section 6)."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.sim.draws import UniformFailures
from holdfast.sim.timeline import (
    WAYS,
    EmulatedCluster,
    RecoveryCosts,
    Save,
    Way,
    WayName,
    costs,
    parse_ways,
    timeline,
    way_of,
)
from holdfast.sim.traces import Failure

PAPER = EmulatedCluster()
SHORT = EmulatedCluster(
    hours=10.0, failures=1, servers=4, save_hours=0.1, load_hours=0.2, reschedule_hours=0.3, share=1.0,
    fraction=0.125,
)  # fmt: skip


def test_events_in_order() -> None:
    way = Way("partial", True, 3.0)
    failures = [Failure(7.5, (2,)), Failure(2.0, (0,))]
    assert list(timeline(way, failures, SHORT)) == [
        RecoveryCosts(2.0, (0,), 0.0), Save(3.0), Save(6.0), RecoveryCosts(7.5, (2,), 6.0), Save(9.0),
    ]  # fmt: skip


def test_a_fraction_is_saved_after_that_fraction_of_the_interval() -> None:
    way = Way("cpr-mfu", True, 8.0, "mfu")
    saves = [event.hours for event in timeline(way, (), SHORT)]
    assert saves == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert costs(way, (), SHORT).saving == pytest.approx(9 * 0.1 / 8)


def test_hours_and_the_portion_of_lost_samples() -> None:
    """Equations 1 to 3, by hand."""
    failures = [Failure(2.0, (0,)), Failure(7.5, (1, 3))]
    full = costs(Way("full", False, 3.0), failures, SHORT)
    assert full.saving == pytest.approx(0.3)
    assert full.loading == pytest.approx(0.4)
    assert full.rescheduling == pytest.approx(0.6)
    assert full.lost == pytest.approx(2.0 + 1.5)
    assert full.pls == 0
    partial = costs(Way("partial", True, 3.0), failures, SHORT)
    assert partial.lost == 0
    assert partial.hours == pytest.approx(full.hours - 3.5)
    assert partial.pls == pytest.approx(2 / 10 / 4 + 2 * 1.5 / 10 / 4)


@pytest.mark.parametrize(
    ("name", "percent"), [("full", 8.5), ("partial", 4.4), ("cpr", 0.53), ("cpr-mfu", 0.53)]
)
def test_overheads_of_section_6_1(name: WayName, percent: float) -> None:
    """Kaggle: 8.5, 4.4 and 0.53 % with 2 random failures in 56 hours and a target of 0.1."""
    rng = np.random.default_rng(0)
    way = way_of(name, PAPER)
    found = [costs(way, UniformFailures(2).draw(PAPER, rng), PAPER) for _ in range(2000)]
    overhead = 100 * float(np.mean([one.hours for one in found])) / PAPER.hours
    assert overhead == pytest.approx(percent, rel=0.15)
    if name != "full":
        # Close to the target: the last interval, which the training's end cuts short, loses less.
        assert float(np.mean([one.pls for one in found])) < 0.11


def test_cpr_falls_back_to_full_recovery_where_it_does_not_pay() -> None:
    """Section 6.4: many failures of many servers."""
    often = EmulatedCluster(failures=40, servers=2, target_pls=0.02)
    way = way_of("cpr-ssu", often)
    assert not way.partial
    assert way.prioritize is None
    assert way.interval_hours == way_of("full", often).interval_hours
    assert "full recovery" in way.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hours": 0.0}, "hours is 0: expected above 0"),
        ({"failures": -1.0}, "failures is -1: expected above 0"),
        ({"load_hours": float("nan")}, "load_hours is nan: expected 0 or more"),
        ({"servers": 10**20}, r"servers is 1e\+20: expected at most 100,000"),
        ({"failures": 1e9}, r"failures is 1e\+09: expected at most 100,000"),
        ({"fraction": 1.5}, "fraction is 1.5: it is a portion"),
        ({"servers": 4, "servers_per_failure": 5}, "takes 5 servers down but there are 4"),
    ],
)
def test_impossible_clusters_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmulatedCluster(**options)  # type: ignore[arg-type]


def test_ways_by_name() -> None:
    assert parse_ways("full, cpr-mfu,full") == ["full", "cpr-mfu"]
    with pytest.raises(ConfigError, match="no way 'mfu': there are full, partial, cpr"):
        parse_ways("full,mfu")
    assert [way_of(name, PAPER).prioritize for name in WAYS] == [None, None, None, "scar", "mfu", "ssu"]
