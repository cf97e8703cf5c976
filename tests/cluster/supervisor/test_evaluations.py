"""When the model is tested while a job runs, and which results count."""

from __future__ import annotations

from holdfast.cluster.protocol.messages import Evaluation
from holdfast.cluster.supervisor.evaluations import Evaluations


def test_one_test_after_the_other() -> None:
    tests = Evaluations(epoch=1, every=10, steps=5)
    assert not tests.has_tested(5), "of this state no test was asked for"
    assert [tests.is_due(steps) for steps in (14, 15)] == [False, True]
    number = tests.begin(17)
    assert (tests.waiting, tests.has_tested(17), tests.is_due(26)) == (True, True, False)
    assert tests.take(None) is None
    said = tests.take(Evaluation(number, 0.7, 0.5, 100))
    assert said == Evaluation(number, 0.7, 0.5, 100, step=17)
    assert tests.take(Evaluation(number, 0.7, 0.5, 100)) is None, "beats say it again"
    assert not tests.waiting
    assert tests.results == [said]


def test_what_the_supervisor_before_asked_for_does_not_count() -> None:
    before, after = Evaluations(epoch=1, every=0, steps=0), Evaluations(epoch=2, every=0, steps=0)
    old, new = before.begin(3), after.begin(3)
    assert old < new
    assert after.take(Evaluation(old, 0.7, 0.5, 100)) is None
    assert not after.is_due(1000), "only at the end"
