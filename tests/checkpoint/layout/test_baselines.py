"""When everything is written again, by arithmetic that can be done by hand, and in real stores."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.bench import bandwidth
from holdfast.checkpoint.layout.baselines import (
    Baselines,
    early_baseline_is_due,
    intermittent_baseline_is_due,
)
from holdfast.errors import ConfigError
from holdfast.options import Chunked, Differential, Policy


def heaps(first: float, power: float, count: int) -> list[float]:
    """Sizes of differential versions whose rows grow by a power."""
    return [first * i**power for i in range(1, count + 1)]


def average(sizes: list[float]) -> float:
    """What a round of a full version and these costs for each version."""
    return (1 + sum(sizes)) / (len(sizes) + 1)


def test_the_papers_rule_on_the_papers_trace() -> None:
    """Figure 8: 25 % at first, 52.5 % after ten; a full version takes the place of the eighth."""
    sizes = heaps(0.25, 0.3222, 10)
    assert sizes[-1] == pytest.approx(0.525, abs=0.001)
    due = [n for n in range(11) if intermittent_baseline_is_due(sizes[:n])]
    assert due == [7, 8, 9, 10]


@given(st.floats(0.01, 0.6), st.floats(0, 1), st.floats(0.01, 0.5), st.integers(2, 12))
def test_an_early_baseline_costs_no_more_than_it_may(
    first: float, power: float, extra: float, count: int
) -> None:
    """Against every later end of the round, one by one."""
    least = min(average(heaps(first, power, n)) for n in range(count, 200))
    over = average(heaps(first, power, count)) / least
    if over < 1 + 0.999 * extra:
        assert early_baseline_is_due(heaps(first, power, count), extra)
    if over > 1 + 1.001 * extra:
        assert not early_baseline_is_due(heaps(first, power, count), extra)


@pytest.mark.parametrize("sizes", [[], [0.3], [0.0, 0.3], [0.3, 0.2], [0.0, 0.0]])
def test_too_little_is_known_for_an_early_baseline(sizes: list[float]) -> None:
    assert not early_baseline_is_due(sizes, 10.0)


def chunked_era(*, write_speed: float, read_speed: float | None) -> Baselines:
    """Full versions of 100 MB, increments of 10 MB."""
    costs = Baselines(Policy(strategy=Chunked(extra_writes=0)))
    costs.note(100 << 20, 100 << 20, (100 << 20) / write_speed, baseline=True)
    costs.note(10 << 20, 100 << 20, (10 << 20) / write_speed, baseline=False)
    if read_speed is not None:
        costs.note_read(50 << 20, (50 << 20) / read_speed)
    return costs


def test_a_reset_weighs_reading_at_the_speed_at_which_it_was_read() -> None:
    """IncrCP, section 4.5: T_base < T_incre, with C at the speed of writing and R at that of reading."""
    for speed, least in ((None, 90), (200e6, 90), (800e6, 360), (50e6, 22.5)):
        costs = chunked_era(write_speed=200e6, read_speed=speed)
        assert not costs.due(100 << 20, int((least - 1) * (1 << 20)))
        assert costs.due(100 << 20, int((least + 1) * (1 << 20)))


def test_what_is_too_small_to_tell_the_speed_is_not_noted() -> None:
    costs = chunked_era(write_speed=200e6, read_speed=100e6)
    costs.note_read(1000, 1.0)
    costs.note_read(50 << 20, 0.0)
    assert costs.read_speed == pytest.approx(100e6)
    assert not costs.wants_measured(1000)
    assert costs.wants_measured(50 << 20)
    for strategy in (Chunked(reset="never"), Differential()):
        assert not Baselines(Policy(strategy=strategy)).wants_measured(50 << 20)


def test_options_are_checked() -> None:
    for make in (Differential, Chunked):
        with pytest.raises(ConfigError, match="extra_writes"):
            make(extra_writes=-0.1)
    assert Policy(keep=2).keeps_few
    for policy in (Policy(), Policy(keep=2, keep_every=5), Policy(keep=2, keep_seconds=1.0)):
        assert not policy.keeps_few


def play(strategy: Any, **policy: Any) -> tuple[int, list[float]]:
    """The bench's trace: how many of nine versions were full; what the newest needed after each."""
    usage = bandwidth._play(bandwidth.Trace(4000, 9), "rowwise", Policy(strategy=strategy, **policy))
    return usage.baselines, [needed / usage.needed[0] for needed in usage.needed]


def test_a_store_that_keeps_one_version_needs_less_space() -> None:
    paper, paper_needed = play(Differential(extra_writes=0), keep=1)
    early, early_needed = play(Differential(), keep=1)
    assert (paper, early) == (2, 3)
    assert max(paper_needed) == pytest.approx(1.47, abs=0.02)
    assert max(early_needed) == pytest.approx(1.32, abs=0.02)


def test_where_all_versions_are_kept_it_is_the_papers_rule() -> None:
    baselines, needed = play(Differential())
    assert baselines == 2
    assert needed == pytest.approx(play(Differential(extra_writes=0))[1], rel=1e-3)


def test_chunked_gives_back_at_once_what_no_kept_version_needs() -> None:
    """With one version kept, it needs about what a differential one does; with all kept, nothing is freed."""
    _, differential = play(Differential(baseline="one-shot"), keep=1)
    never = Chunked(round_versions=100, reset="never")
    _, freed = play(never, keep=1)
    assert freed == pytest.approx(differential, rel=0.1)
    _, kept = play(never)
    assert kept == pytest.approx([1 + 0.25 * i for i in range(9)], rel=0.05)


def test_chunked_takes_early_baselines_too() -> None:
    baselines, needed = play(Chunked(), keep=1)
    assert baselines == 3
    assert max(needed) == pytest.approx(1.33, abs=0.02)
