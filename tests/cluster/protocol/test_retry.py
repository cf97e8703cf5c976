"""When unanswered questions are asked again."""

from __future__ import annotations

from holdfast.cluster.protocol.retry import Retry


def test_it_is_due_at_once_and_then_after_each_wait() -> None:
    retry = Retry(2.0)
    assert retry.is_due(0.0)
    retry.again(10.0)
    assert not retry.is_due(11.9)
    assert retry.is_due(12.0)
    retry.again(12.0)
    assert (retry.is_due(13.9), retry.is_due(14.0)) == (False, True)


def test_waits_grow_and_begin_anew() -> None:
    retry = Retry(1.0, factor=2)
    retry.begin(0.0)
    assert retry.due == 1.0
    retry.again(1.0)
    retry.again(3.0)
    assert retry.due == 7.0
    retry.begin(7.0)
    assert retry.due == 8.0


def test_an_answer_halves_the_wait_and_not_below_the_first_one() -> None:
    retry = Retry(1.0, factor=2)
    retry.begin(0.0)
    retry.again(1.0)
    retry.again(3.0)  # waits 4 s
    waits = []
    for now in (4.0, 5.0, 6.0):
        retry.ease(now)
        waits.append(retry.due - now)
    assert waits == [2.0, 1.0, 1.0]


def test_waits_grow_up_to_a_limit() -> None:
    retry = Retry(1.0, factor=2, longest=2.5)
    retry.begin(0.0)
    waits = []
    for now in (1.0, 3.0, 6.0):
        retry.again(now)
        waits.append(retry.due - now)
    assert waits == [2.0, 2.5, 2.5]
    retry = Retry(1.0, factor=2, longest=0.5)
    retry.again(0.0)
    assert retry.due == 1.0, "not below the first one"
