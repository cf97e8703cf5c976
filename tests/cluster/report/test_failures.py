"""What a job's end says of servers that died, from events and reports made up here."""

from __future__ import annotations

from typing import Any

from holdfast.cluster.protocol.messages import Happening
from holdfast.cluster.report.failures import Failures, ServerFailure, SpeedMeter, Speeds


def happening(at: float, event: str, slot: int = 1, incarnation: int = 2, **figures: Any) -> Happening:
    return Happening(at, event, {"slot": slot, "incarnation": incarnation, **figures})


LOST = happening(100.0, "server_lost", incarnation=1, reason="was killed by signal 9", step=7)
RESTORED = Happening(104.0, "redundancy_restored", {"after_seconds": 4.0})


def test_what_became_of_a_server_that_died() -> None:
    failures = Failures()
    failures.note([LOST])
    assert failures() == (ServerFailure(1, "was killed by signal 9", 7),)
    later = [
        happening(100.3, "server_started"),
        happening(100.75, "training_resumed"),
        happening(102.0, "server_recovered", rows=50, compared=40, unequal=0),
        RESTORED,
    ]
    for told in ([LOST, *later[:2]], [*later[1:], LOST]):  # reports overlap, in any order
        failures.note(told)
    assert failures() == (ServerFailure(1, "was killed by signal 9", 7, 0.3, 0.75, 2.0, 50, 40, 0, 4.0),)


def test_deaths_are_told_apart() -> None:
    """Its replacement dies too, while it recovers; then the job begins anew from a checkpoint."""
    failures = Failures()
    failures.note([LOST, happening(100.5, "server_started")])
    failures.note([happening(101.0, "server_lost", incarnation=2, reason="was silent", step=8)])
    failures.note([happening(101.5, "server_started", incarnation=3)])
    failures.note([happening(102.0, "server_recovered", incarnation=3, rows=50)])
    failures.note([RESTORED])
    failures.note([happening(200.0, "server_lost", incarnation=1, reason="again", step=3)])
    failures.note([happening(200.25, "server_started")])
    first, second, third = failures()
    assert (first.started_seconds, first.recovered_seconds, first.whole_seconds) == (0.5, None, None)
    assert (second.reason, second.started_seconds, second.rows) == ("was silent", 0.5, 50)
    assert (second.recovered_seconds, second.whole_seconds) == (1.0, 3.0)
    assert (third.reason, third.started_seconds, third.whole_seconds) == ("again", 0.25, None)


def test_speeds_before_between_and_after() -> None:
    now = [0.0]
    meter = SpeedMeter(1000, lambda: now[0])
    # When, how many samples then, and whether redundancy is lacking since.
    for now[0], samples, degraded in [
        (0.0, 1000, False),
        (50.0, 1010, False),  # the first batch: what was before it is no training
        (52.0, 1210, False),
        (53.0, 1210, True),
        (54.0, 1190, True),  # a replacement says less than is known
        (55.0, 1290, True),
        (57.0, 1290, False),
        (59.0, 1490, False),
        (99.0, 1490, False),  # the test at the end
    ]:
        meter.note(samples, degraded=degraded)
    assert meter() == Speeds(before=200 / 3, degraded=80 / 4, after=200 / 2)
    assert SpeedMeter()() == Speeds(None, None, None)
