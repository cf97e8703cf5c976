from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from rich.console import Console

from holdfast.errors import ConfigError
from holdfast.policy.increments import RowSize
from holdfast.policy.planner import configuration, plan
from holdfast.policy.printing import show_plan
from holdfast.policy.protections import KINDS, Estimate, Wishes, estimates
from holdfast.policy.situation import Situation
from holdfast.policy.units import show_percent

CLUSTER = Situation(table_bytes=400e9, row=RowSize(64, 256), servers=10, workers=30, hours=72, mtbf_hours=20)


@cache
def estimated(situation: Situation, wishes: Wishes | None) -> list[Estimate]:
    return estimates(situation, wishes)


def named(situation: Situation, kind: str, wishes: Wishes | None = None) -> Estimate:
    return next(one for one in estimated(situation, wishes) if one.kind == kind)


def test_all_kinds_are_there_and_the_cheapest_that_fits_comes_first() -> None:
    found = plan(CLUSTER)
    assert {one.kind for one in found.ranked} == set(KINDS)
    fits = [one.overhead for one in found.ranked if one.objection is None]
    assert fits == sorted(fits)
    assert found.best.overhead == fits[0]
    objections = [one.objection is not None for one in found.ranked]
    assert objections == sorted(objections)


def test_more_failures_cost_more() -> None:
    often = replace(CLUSTER, mtbf_hours=5.0)
    for kind in KINDS:
        assert named(often, kind).overhead > named(CLUSTER, kind).overhead


def test_faster_storage_makes_checkpoints_cheaper() -> None:
    fast = replace(CLUSTER, write_rate=10e9, read_rate=10e9)
    for kind in ("full-stop", "full", "differential", "chunked"):
        assert named(fast, kind).overhead < named(CLUSTER, kind).overhead


def test_what_costs_too_much_accuracy_is_refused() -> None:
    exact = replace(CLUSTER, tolerated_auc_loss=0.0)
    partial = named(exact, "partial")
    assert partial.objection is not None
    assert "more than the tolerated 0" in partial.objection
    assert plan(exact).best.auc_loss == 0
    assert not any("bits" in one.name for one in estimates(exact))


def test_the_target_pls_follows_from_the_tolerated_loss() -> None:
    """CPR, section 4.2: a user may give the accuracy in place of a PLS."""
    wished = named(replace(CLUSTER, tolerated_auc_loss=1e-4), "partial")
    assert wished.pls == pytest.approx(0.05, rel=0.01)
    measured = named(CLUSTER, "partial", Wishes(auc_loss_per_pls=0.01))
    assert measured.pls == pytest.approx(0.01, rel=0.01)
    assert named(CLUSTER, "partial", Wishes(target_pls=0.02)).pls == pytest.approx(0.02, rel=0.01)
    alone = named(replace(CLUSTER, servers=1), "partial")
    assert alone.objection == "of one server nothing would be left"
    assert alone.auc_loss <= 1e-4
    generous = named(replace(CLUSTER, tolerated_auc_loss=1.0, hours=5000.0), "partial")
    assert generous.pls == pytest.approx(0.1, rel=0.01)


def test_partial_recovery_that_does_not_pay_is_refused_with_the_figures() -> None:
    """CPR, section 4.2: it falls back to full recovery."""
    slow = replace(
        CLUSTER, mtbf_hours=1.4, servers_per_failure=5, stop_to_write=True, write_rate=400e9 / 340,
        tolerated_auc_loss=1.0,
    )  # fmt: skip
    partial = named(slow, "partial", Wishes(target_pls=0.02))
    assert partial.objection is not None
    assert partial.objection.startswith("does not pay: partial recovery costs")


def test_memory_decides_what_fits() -> None:
    """40 GB on each server: room for parities, and for a copy while a save is written, or not."""
    plenty = plan(replace(CLUSTER, server_memory_bytes=500e9))
    assert plenty.best.objection is None
    tight = replace(CLUSTER, server_memory_bytes=90e9)
    coded = named(tight, "ecrm")
    assert coded.objection is None
    assert coded.memory_share == pytest.approx(1 / 4)
    tighter = named(replace(tight, server_memory_bytes=86e9), "ecrm")
    assert tighter.memory_share == pytest.approx(1 / 7)
    nothing = named(replace(tight, server_memory_bytes=60e9), "ecrm")
    assert nothing.objection is not None
    assert "of memory on each server, which has 60 GB" in nothing.objection
    assert named(replace(tight, server_memory_bytes=60e9), "full-stop").objection is None


def test_a_store_that_cannot_keep_up_is_said() -> None:
    slow = replace(CLUSTER, write_rate=1e8, save_every_hours=0.5)
    full = named(slow, "full")
    assert full.objection == "the store cannot keep up: a save takes 1.11 h to write, and comes every 30 min"


def test_second_line_is_needed_less_with_more_parities() -> None:
    codes = [one for one in estimates(CLUSTER) if one.kind == "ecrec"]
    assert [one.name for one in codes] == ["code 4+1, atomic", "code 4+2, atomic"]
    assert codes[1].loss_chance < 0.01 * codes[0].loss_chance
    assert codes[1].memory_share == 2 * codes[0].memory_share


def test_a_wished_k_leaves_out_what_has_no_room() -> None:
    five = replace(CLUSTER, servers=5)
    codes = [one.name for one in estimates(five, Wishes(k=4)) if one.kind == "ecrec"]
    assert codes == ["code 4+1, atomic"]
    codes = [one.name for one in estimates(five, Wishes(r=2)) if one.kind in ("ecrm", "ecrec")]
    assert codes == ["code 3+2", "code 3+2, atomic"]


def test_small_clusters_have_what_they_can_have() -> None:
    assert {one.kind for one in estimates(replace(CLUSTER, servers=1))} == set(KINDS) - {
        "ecrm", "ecrec", "replication",
    }  # fmt: skip
    two = [one.name for one in estimates(replace(CLUSTER, servers=2)) if one.kind == "ecrec"]
    assert two == ["code 1+1, atomic"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtbf_hours": -5.0}, "the mean time between failures in hours is -5: expected above 0"),
        ({"mtbf_hours": 0.0}, "the mean time between failures in hours is 0: expected above 0"),
        ({"mtbf_hours": float("nan")}, "the mean time between failures in hours is nan"),
        (
            {"mtbf_hours": 1e300},
            r"the mean time between failures in hours is 1e\+300: expected at most 1e\+12",
        ),
        ({"mtbf_hours": 1e-9}, "the mean time between failures in hours is 1e-09: expected at least 0.0002"),
        ({"servers": 10**20}, r"the number of servers is 1e\+20: expected at most 1e\+06"),
        ({"write_rate": 1e-300}, "the speed of writing to the store is 1e-300: expected at least 1"),
        ({"table_bytes": 0.0}, "the size of the tables is 0"),
        ({"servers": 0}, "the number of servers is 0"),
        ({"reschedule_hours": -1.0}, "the time to replace a machine in hours is -1: expected 0 or more"),
        ({"tolerated_auc_loss": -1e-4}, "the tolerated loss of AUC is -0.0001: expected 0 or more"),
        ({"write_rate": -1.0}, "the speed of writing to the store is -1"),
        ({"save_every_hours": 0.0}, "the time between saves in hours is 0"),
        ({"servers_per_failure": 11.0}, "a failure takes 11 servers down but there are 10"),
        ({"server_memory_bytes": 1e9}, "the tables take 40 GB of each of 10 servers, which have 1 GB"),
    ],
)
def test_impossible_situations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CLUSTER, **change)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"k": 10}, r"k is 10 and r is 1 but there are 10 servers: .* k \+ r must be at most 10"),
        ({"k": 4, "r": 7}, "k is 4 and r is 7"),
        ({"r": 10}, "k is 1 and r is 10"),
        ({"k": 0}, "k is 0: expected above 0"),
        ({"target_pls": -0.1}, r"target_pls is -0\.1: expected above 0"),
        ({"target_pls": 2.0}, "the target PLS is 2: it is a portion"),
    ],
)
def test_impossible_wishes_are_refused(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(CLUSTER, Wishes(**wishes))


def test_unknown_protections_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no protection 'magic': there are none, full-stop"):
        plan(CLUSTER, among=["full", "magic"])
    with pytest.raises(ConfigError, match="ecrm need more than 1 servers"):
        plan(replace(CLUSTER, servers=1), among=["ecrm"])


def test_when_nothing_fits_it_says_why() -> None:
    with pytest.raises(ConfigError, match="nothing fits: full needs 80 GB of memory"):
        _ = plan(replace(CLUSTER, server_memory_bytes=50e9), among=["full"]).best


def test_the_configuration_has_the_keys_of_a_job() -> None:
    settings = {
        kind: configuration(named(CLUSTER, kind), servers=10, workers=30, path="s3://b/run") for kind in KINDS
    }
    assert settings["none"]["job"] == {"servers": 10, "workers": 30, "protection": {"kind": "none"}}
    assert settings["ecrm"]["job"]["protection"] == {
        "kind": "erasure-code", "k": 4, "r": 1, "atomic": False, "dense": "workers", "rings": True,
    }  # fmt: skip
    assert settings["ecrec"]["job"]["protection"] == {
        "kind": "erasure-code", "k": 4, "r": 1, "atomic": True, "dense": "replicate", "rings": True,
    }  # fmt: skip
    assert settings["replication"]["job"]["protection"] == {"kind": "replication", "copies": 2, "rings": True}
    assert settings["partial"]["job"]["protection"] == {
        "kind": "partial",
        "target_pls": 0.05,
        "prioritize": "mfu",
    }
    assert settings["chunked"]["checkpoint"]["path"] == "s3://b/run"
    assert "protection" not in settings["chunked"]["job"]
    for kind in KINDS:
        assert ("checkpoint" in settings[kind]) == (kind != "none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_keeps_nothing_that_was_planned_anew(kind: str) -> None:
    base = {
        "job": {"protection": {"kind": "erasure-code", "k": 7}},
        "checkpoint": {"every_steps": 20, "quantize": 4, "prioritize": "mfu", "options": {"a": 1}},
    }
    found = configuration(named(CLUSTER, kind), servers=10, workers=3, path="p", base=base)
    fresh = configuration(named(CLUSTER, kind), servers=10, workers=3, path="p")
    assert found["job"] == fresh["job"]
    if kind == "none":
        assert "checkpoint" not in found
    else:
        assert found["checkpoint"] == {"options": {"a": 1}, **fresh["checkpoint"]}


def test_one_server_has_nothing_to_go_back_by_itself() -> None:
    alone = plan(replace(CLUSTER, servers=1))
    assert alone.best.kind != "partial"


def test_a_configuration_keeps_what_it_is_based_on() -> None:
    base = {"batch_size": 4096, "job": {"servers": 2, "staleness": 0}, "checkpoint": None}
    made = configuration(named(CLUSTER, "chunked"), servers=10, workers=30, path="x", base=base)
    assert made["batch_size"] == 4096
    assert made["job"] == {"servers": 10, "workers": 30, "staleness": 0}
    assert base["job"] == {"servers": 2, "staleness": 0}


def test_a_narrow_screen_cuts_no_number() -> None:
    shown = {}
    for width in (60, 200):
        console = Console(file=io.StringIO(), width=width)
        found = plan(CLUSTER)
        show_plan(found, console, explain=False)
        assert isinstance(console.file, io.StringIO)
        shown[width] = console.file.getvalue()
    assert "too narrow for: " in shown[60]
    assert "too narrow" not in shown[200]
    for text in shown.values():
        assert "…" not in text
        for one in found.ranked:
            assert show_percent(one.overhead) in text
