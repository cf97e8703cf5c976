"""Messages that came too soon, and when their turn comes."""

from __future__ import annotations

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Commit, Peer
from holdfast.cluster.server.deferred import Waiting

A, B = Peer("worker", 0, 1), Peer("worker", 1, 1)


def envelope(source: Peer, number: int = 0) -> Envelope:
    return Envelope(source, Peer("server", 0, 1), Commit(number))


class TestStart:
    def test_what_came_before_comes_back_in_order_and_once(self) -> None:
        waiting = Waiting()
        early = [envelope(A, number) for number in range(3)]
        for each in early:
            waiting.until_start(each)
        assert waiting.at_start() == early
        assert waiting.at_start() == []

    def test_there_is_an_end_to_it(self) -> None:
        """Whoever sent one asks again."""
        waiting = Waiting()
        for number in range(300):
            waiting.until_start(envelope(A, number))
        assert len(waiting.at_start()) == 256


class TestRows:
    def test_by_number_and_commits_behind_their_pushes(self) -> None:
        waiting = Waiting()
        messages = {
            (kind, number): envelope(A, number) for number in (2, 1) for kind in ("commit", "push", "pull")
        }
        for (kind, number), each in messages.items():
            waiting.until_rows(each, kind, number)  # type: ignore[arg-type]
        order = [
            (kind, number)
            for each in waiting.at_rows()
            for (kind, number), m in messages.items()
            if m is each
        ]
        assert order == [("push", 1), ("pull", 1), ("commit", 1), ("push", 2), ("pull", 2), ("commit", 2)]
        assert list(waiting.at_rows()) == []

    def test_a_message_that_was_repeated_comes_back_once(self) -> None:
        waiting = Waiting()
        waiting.until_rows(envelope(A, 1), "pull", 1)
        again = envelope(A, 1)
        waiting.until_rows(again, "pull", 1)
        waiting.until_rows(envelope(B, 1), "pull", 1)
        found = list(waiting.at_rows())
        assert len(found) == 2
        assert found[0] is again

    def test_what_waits_again_waits_for_the_next_rows(self) -> None:
        waiting = Waiting()
        waiting.until_rows(envelope(A, 1), "pull", 1)
        for each in waiting.at_rows():
            waiting.until_rows(each, "pull", 1)
        assert len(list(waiting.at_rows())) == 1

    def test_whether_a_push_waits(self) -> None:
        waiting = Waiting()
        waiting.until_rows(envelope(A, 3), "push", 3)
        waiting.until_rows(envelope(B, 3), "pull", 3)
        assert waiting.push_waits(A)
        assert waiting.push_waits(A, 3)
        assert not waiting.push_waits(A, 4)
        assert not waiting.push_waits(B)
        assert not waiting.push_waits(B, 3)


class TestPushes:
    def test_pulls_of_a_worker_wait_for_its_push(self) -> None:
        waiting = Waiting()
        pulls = [envelope(A, 1), envelope(A, 2)]
        for number, pull in enumerate(pulls):
            waiting.until_push(pull, number)
        waiting.until_push(envelope(B), 7)
        assert waiting.at_push(A) == pulls
        assert waiting.at_push(A) == []
        assert len(waiting.at_push(B)) == 1
        assert waiting.at_push(B) == []

    def test_one_that_was_repeated_is_answered_once(self) -> None:
        waiting = Waiting()
        for _ in range(3):
            waiting.until_push(envelope(A), 1)
        assert len(waiting.at_push(A)) == 1

    def test_there_is_an_end_to_it(self) -> None:
        waiting = Waiting()
        for number in range(20):
            waiting.until_push(envelope(A, number), number)
        assert len(waiting.at_push(A)) == 8

    def test_those_of_workers_that_were_replaced_are_forgotten(self) -> None:
        waiting = Waiting()
        for source in (A, B):
            waiting.until_push(envelope(source), 1)
        waiting.forget_others({B, Peer("worker", 0, 2)})
        assert waiting.at_push(A) == []
        assert len(waiting.at_push(B)) == 1
