"""When a supervisor counts as silent."""

from __future__ import annotations

import pytest

from holdfast.cluster.protocol.plan import Timing
from holdfast.cluster.supervisor.watch import SupervisorWatch

SILENT, START = 10.0, 60.0


@pytest.fixture
def watch() -> SupervisorWatch:
    return SupervisorWatch(Timing(silent_seconds=SILENT, start_seconds=START))


def silence(watch: SupervisorWatch, now: float, until: float) -> float:
    """Asked once a second from one moment to another; what was said at the end."""
    while now < until:
        watch.silence(now)
        now += 1.0
    return watch.silence(until)


def test_a_new_process_has_longer_for_its_first_report(watch: SupervisorWatch) -> None:
    watch.start(100.0)
    assert silence(watch, 100.0, 100.0 + START) == 0.0
    assert watch.silence(101.0 + START) == START + 1.0


def test_reports_that_end(watch: SupervisorWatch) -> None:
    watch.start(100.0)
    silence(watch, 100.0, 105.0)
    watch.hear(105.0)
    assert silence(watch, 105.0, 105.0 + SILENT) == 0.0
    assert watch.silence(106.0 + SILENT) == SILENT + 1.0
    watch.hear(106.0 + SILENT)
    assert watch.silence(107.0 + SILENT) == 0.0


def test_another_process_begins_anew(watch: SupervisorWatch) -> None:
    watch.start(0.0)
    watch.hear(0.0)
    assert silence(watch, 0.0, 20.0) == 20.0
    watch.start(20.0)
    assert silence(watch, 21.0, 20.0 + START) == 0.0
    assert watch.silence(20.5 + START) == START + 0.5


def test_before_any_was_started_time_begins_with_the_first_question(watch: SupervisorWatch) -> None:
    assert silence(watch, 1000.0, 1000.0 + START) == 0.0
    assert watch.silence(1001.0 + START) == START + 1.0


def test_who_stood_still_cannot_tell_who_was_silent(watch: SupervisorWatch) -> None:
    watch.start(0.0)
    watch.hear(0.0)
    assert watch.silence(1.0) == 0.0
    assert watch.silence(1.0 + SILENT / 2) == 0.0
    stood_still = 1.25 + SILENT  # more than half as long as a silence
    assert watch.silence(stood_still) == 0.0
    assert silence(watch, stood_still + 1, stood_still + SILENT) == 0.0
    assert watch.silence(stood_still + SILENT + 0.5) == SILENT + 0.5


def test_half_of_a_silence_is_not_standing_still(watch: SupervisorWatch) -> None:
    watch.start(0.0)
    watch.hear(0.0)
    for now in (1.0, 6.0, 10.0):
        assert watch.silence(now) == 0.0
    assert watch.silence(15.0) == 15.0
