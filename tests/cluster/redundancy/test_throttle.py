"""How fast recovery may be: what training leaves."""

from __future__ import annotations

import pytest

from holdfast.cluster.redundancy.throttle import Throttle

QUIET = 0.5
BURST = 0.25


def busy(throttle: Throttle, until: float, every: float = 0.1) -> None:
    """A worker's requests up to a time."""
    for turn in range(round(until / every) + 1):
        throttle.note_request(turn * every)


def test_workers_are_quiet_before_and_after_their_requests_and_while_training_is_paused() -> None:
    throttle = Throttle(1.0)
    assert throttle.is_quiet(0.0)
    busy(throttle, 2.0)
    assert not throttle.is_quiet(2.0 + QUIET - 0.01)
    assert throttle.is_quiet(2.0 + QUIET + 0.01)
    throttle.hurry = True
    assert throttle.is_quiet(2.0)


class TestShare:
    def test_before_any_request_it_is_everything(self) -> None:
        assert Throttle(0.2).share(0.0) == 1

    def test_while_requests_come_it_is_the_plans(self) -> None:
        throttle = Throttle(0.2)
        busy(throttle, 2.0)
        assert throttle.share(2.0) == 0.2
        assert Throttle(1.0).share(2.0) == 1

    def test_workers_that_send_nothing_leave_everything(self) -> None:
        throttle = Throttle(0.2)
        busy(throttle, 2.0)
        assert throttle.share(2.0 + QUIET - 0.01) == 0.2
        assert throttle.share(2.0 + QUIET + 0.01) == 1

    def test_they_are_idle_after_that_long_not_at_it(self) -> None:
        throttle = Throttle(0.25)
        busy(throttle, 2.0, every=0.25)
        assert throttle.share(2.0 + QUIET) == 0.25
        throttle.note_request(4.0)
        assert throttle.share(4.0 + 4.0) == 0.25, "twice the longest gap"

    def test_workers_with_long_batches_are_not_idle_between_them(self) -> None:
        throttle = Throttle(0.2)
        busy(throttle, 9.0, every=3.0)
        assert throttle.share(9.0 + 5.9) == 0.2
        assert throttle.share(9.0 + 6.1) == 1

    def test_where_nothing_is_throttled_nothing_is_measured(self) -> None:
        throttle = Throttle(1.0, lambda: pytest.fail("it measures"))
        busy(throttle, 2.0)
        assert throttle.share(2.0) == 1

    def test_a_long_pause_is_forgotten(self) -> None:
        throttle = Throttle(0.2)
        throttle.note_request(0.0)
        throttle.note_request(1000.0)
        assert throttle.share(1020.0) == 0.2
        assert throttle.share(1020.1) == 1, "as after one of ten seconds"
        for turn in range(100):
            throttle.note_request(1020.0 + 0.1 * turn)
        assert throttle.share(1029.9 + 2 * QUIET) == 1

    def test_a_pause_of_training_leaves_everything(self) -> None:
        throttle = Throttle(0.2)
        busy(throttle, 2.0)
        throttle.hurry = True
        assert throttle.share(2.0) == 1

    @pytest.mark.parametrize(("pressure", "share"), [(0.0, 1.0), (0.125, 0.6), (0.25, 0.2), (1.0, 0.2)])
    def test_where_processors_are_free_it_is_more(self, pressure: float, share: float) -> None:
        throttle = Throttle(0.2, lambda: pressure)
        busy(throttle, 2.0)
        assert throttle.share(2.0) == pytest.approx(share)


class TestBursts:
    def throttle(self) -> Throttle:
        throttle = Throttle(0.25)
        busy(throttle, 2.0)
        return throttle

    def test_without_pauses_chunks_may_always_begin(self) -> None:
        throttle = Throttle(1.0)
        for now in (0.0, 0.1, 0.1):
            assert throttle.allows(now, 1)
            throttle.begin(now)

    def test_a_burst_has_so_many_chunks(self) -> None:
        throttle = self.throttle()
        for _ in range(3):
            assert throttle.allows(2.0, 3)
            throttle.begin(2.0)
        assert not throttle.allows(2.0, 3)

    def test_a_pause_follows_the_last_chunk(self) -> None:
        throttle = self.throttle()
        bursts = [throttle.begin(2.0), throttle.begin(2.0)]
        throttle.end(bursts[0], 2.05)
        assert not throttle.allows(2.05, 2)
        throttle.end(bursts[1], 2.1)
        throttle.note_request(2.1)
        assert not throttle.allows(2.1 + 0.3 - 0.01, 2)
        assert throttle.allows(2.1 + 0.3 + 0.01, 2)

    def test_a_chunk_that_does_not_end_holds_up_nobody(self) -> None:
        throttle = self.throttle()
        lost, other = throttle.begin(2.0), throttle.begin(2.0)
        throttle.end(other, 2.1)
        assert not throttle.allows(2.0 + BURST, 2)
        assert not throttle.allows(2.0 + BURST + 0.01, 2), "the pause for the other one begins"
        throttle.note_request(2.5)
        assert not throttle.allows(2.0 + BURST + 0.3, 2)
        assert throttle.allows(2.0 + BURST + 0.32, 2)
        next_one = throttle.begin(2.6)
        assert not throttle.allows(2.65, 1)
        throttle.end(lost, 2.65)
        assert not throttle.allows(2.65, 1), "it was not one of this burst"
        throttle.end(next_one, 2.7)
        throttle.note_request(2.9)
        assert not throttle.allows(2.7 + 0.29, 1)
        assert throttle.allows(2.7 + 0.31, 1)

    def test_the_next_burst_may_begin_at_the_end_of_the_pause(self) -> None:
        throttle = self.throttle()
        throttle.end(throttle.begin(2.0), 2.0625)
        assert not throttle.allows(2.1875, 1)
        assert throttle.allows(2.0625 + 3 * 0.0625, 1)

    def test_a_burst_is_given_up_after_that_long_not_at_it(self) -> None:
        throttle = self.throttle()
        throttle.begin(2.0)
        assert not throttle.allows(2.0 + BURST, 1)
        assert throttle.allows(2.0 + BURST + 0.01, 1), "no pause: it has done nothing"

    def test_what_ends_after_its_burst_was_given_up_does_not_count(self) -> None:
        throttle = self.throttle()
        late = throttle.begin(2.0)
        assert throttle.allows(2.3, 1)
        throttle.end(late, 2.3)
        assert throttle.allows(2.3, 1)
        throttle.end(throttle.begin(2.3125), 2.375)
        assert not throttle.allows(2.5, 1), "and the next burst has its pause"
        assert throttle.allows(2.375 + 3 * 0.0625, 1)

    def test_a_pause_is_no_longer_than_that_of_the_longest_burst(self) -> None:
        throttle = self.throttle()
        burst = throttle.begin(2.0)
        throttle.note_request(4.0)
        throttle.end(burst, 4.0)
        assert not throttle.allows(4.0 + 3 * BURST - 0.01, 1)
        assert throttle.allows(4.0 + 3 * BURST, 1)
