"""Both ends of a lane (docs/protocol.md, "Lanes, sealing and undo"): in order, each message exactly once, and
not more traffic than needed."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import Instant, Peer
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.stripe_messages import Differences, StripePart, Values
from holdfast.cluster.redundancy.lanes import InLane, OutLane

OWNER, PARITY = Peer("server", 0, 1), Peer("server", 1, 1)
RETRY = 1.0
"""Seconds before the oldest message is sent again for the first time."""


def flush(number: int, flush: int = 0, *, more: bool = False, stable: int = 0) -> Differences:
    """A message of a flush; without a number, the flush has the message's."""
    return Differences(number, Instant(flush or number), stable, (), more=more)


def sent(lane: OutLane, count: int, now: float = 0.0) -> list[Envelope]:
    return [lane.send(flush(lane.next_number), (), now) for _ in range(count)]


def out_lane() -> OutLane:
    return OutLane(OWNER, PARITY, began=0, flush=0, since=0.0, retry=Retry(RETRY, factor=2))


def in_lane(*, known: bool = True, now: Instant | None = None) -> InLane:
    return InLane(OWNER, known, now or Instant(), now or Instant())


def times_of_resending(lane: OutLane, begin: float, end: float) -> list[float]:
    return [float(now) for now in np.arange(begin, end, 0.25) if lane.overdue(float(now)) is not None]


class TestOwner:
    """``OutLane``: it keeps what is not acknowledged."""

    def test_messages_are_numbered_from_1(self) -> None:
        lane = out_lane()
        envelopes = sent(lane, 3)
        assert [e.message for e in envelopes] == [flush(1), flush(2), flush(3)]
        assert {(e.source, e.target) for e in envelopes} == {(OWNER, PARITY)}
        assert lane.next_number == 4
        with pytest.raises(AssertionError):
            lane.send(flush(6), (), 0.0)

    def test_an_acknowledgement_is_for_everything_up_to_a_number(self) -> None:
        lane = out_lane()
        sent(lane, 5)
        lane.acknowledge(3, 0.5)
        assert (lane.waiting, lane.flush) == (2, 3)
        lane.acknowledge(2, 0.5)
        assert (lane.waiting, lane.flush) == (2, 3), "an old acknowledgement that comes late says nothing"
        lane.acknowledge(5, 0.5)
        assert (lane.waiting, lane.flush) == (0, 5)

    def test_a_flush_is_acknowledged_with_its_last_message(self) -> None:
        lane = out_lane()
        lane.send(flush(1, 1), (), 0.0)
        lane.send(flush(2, 2, more=True), (), 0.0)
        lane.send(flush(3, 2), (), 0.0)
        lane.acknowledge(2, 0.0)
        assert lane.flush == 1
        lane.acknowledge(3, 0.0)
        assert lane.flush == 2

    def test_only_differences_are_flushes(self) -> None:
        lane = out_lane()
        lane.send(Values(1, Instant(9), 0, 0, 0), (), 0.0)
        lane.acknowledge(1, 0.0)
        assert (lane.waiting, lane.flush) == (0, 0)

    def test_only_the_oldest_message_is_sent_again_and_ever_more_rarely(self) -> None:
        """Otherwise a slow parity server would get its whole backlog again every second."""
        lane = out_lane()
        envelopes = sent(lane, 50)
        again = [(float(now), lane.overdue(float(now))) for now in np.arange(0.0, 20.0, 0.25)]
        found = [(now, envelope) for now, envelope in again if envelope is not None]
        assert all(envelope is envelopes[0] for _, envelope in found)
        assert [now for now, _ in found] == [1.0, 3.0, 7.0, 15.0]
        lane.acknowledge(7, 20.0)
        assert lane.overdue(21.0) is None, "it is slow, so it gets its time"
        assert lane.overdue(29.0) is envelopes[7]

    def test_every_acknowledgement_halves_the_pause_down_to_the_first_one(self) -> None:
        lane = out_lane()
        sent(lane, 5)
        assert times_of_resending(lane, 0.0, 8.0) == [1.0, 3.0, 7.0], "the next pause is 8 seconds"
        for number, pause in enumerate([4.0, 2.0, 1.0, 1.0], start=1):
            lane.acknowledge(number, 8.0)
            assert lane.overdue(8.0 + pause - 0.25) is None
        assert lane.overdue(9.0) is not None

    def test_what_was_acknowledged_before_changes_no_pause(self) -> None:
        lane = out_lane()
        sent(lane, 2)
        lane.acknowledge(1, 0.0)
        lane.acknowledge(1, 0.75)
        assert lane.since == 0.0
        assert lane.overdue(1.0) is not None

    def test_a_lane_that_was_empty_begins_with_the_first_pause(self) -> None:
        lane = out_lane()
        sent(lane, 1)
        times_of_resending(lane, 0.0, 8.0)
        lane.acknowledge(1, 8.0)
        assert lane.overdue(100.0) is None, "nothing waits"
        sent(lane, 1, now=100.0)
        assert times_of_resending(lane, 100.0, 104.0) == [101.0, 103.0]

    def test_since_when_the_oldest_message_has_waited(self) -> None:
        lane = out_lane()
        sent(lane, 1, now=1.0)
        sent(lane, 1, now=2.0)
        assert lane.since == 1.0
        lane.acknowledge(1, 5.0)
        assert lane.since == 5.0, "it has moved"
        lane.acknowledge(2, 6.0)
        sent(lane, 1, now=9.0)
        assert lane.since == 9.0


def of_bytes(number: int, count: int) -> Envelope:
    return Envelope(OWNER, PARITY, flush(number), [np.zeros(count, np.uint8)])


class TestEarlyMessages:
    """A message that has overtaken another waits for it, within a limit."""

    def test_messages_that_come_early_count_when_their_turn_comes(self) -> None:
        """Hole 10."""
        lane = in_lane()
        first, second, third = sent(out_lane(), 3)
        for number, envelope in ((3, third), (2, second), (3, third)):
            lane.lay_aside(number, envelope, 1 << 20)
        assert lane.next_early() is None
        lane.take(flush(1), first.frames)
        assert lane.next_early() is second
        lane.take(flush(2), second.frames)
        assert lane.next_early() is third
        lane.take(flush(3), third.frames)
        assert lane.next_early() is None

    def test_what_is_laid_aside_is_bounded(self) -> None:
        lane = in_lane()
        for number in range(2, 100):
            lane.lay_aside(number, of_bytes(number, 100), 1000)
        kept = []
        for number in range(1, 100):
            lane.take(flush(number), ())
            if lane.next_early() is not None:
                kept.append(number + 1)
        assert kept == list(range(2, 12)), "ten messages of 100 bytes, the first that came"

    def test_a_message_that_comes_twice_takes_its_room_once(self) -> None:
        lane = in_lane()
        for _ in range(10):
            lane.lay_aside(2, of_bytes(2, 500), 1000)
        lane.lay_aside(3, of_bytes(3, 500), 1000)
        lane.take(flush(1), ())
        assert lane.next_early() is not None
        lane.take(flush(2), ())
        assert lane.next_early() is not None

    def test_a_message_whose_turn_has_come_leaves_its_room_to_others(self) -> None:
        lane = in_lane()
        lane.lay_aside(2, of_bytes(2, 1000), 1000)
        lane.take(flush(1), ())
        assert lane.next_early() is not None
        lane.take(flush(2), ())
        lane.lay_aside(4, of_bytes(4, 1000), 1000)
        lane.take(flush(3), ())
        assert lane.next_early() is not None


def part(rows: int) -> tuple[StripePart, list[Frame]]:
    return StripePart(0, 0, 0, rows), [np.arange(rows, dtype=np.uint32), np.ones((rows, 3), np.uint32)]


class TestParityServer:
    """``InLane``: how far the owner has come, and what may have to be undone."""

    def test_messages_of_one_flush_count_together(self) -> None:
        lane = in_lane()
        parts = [part(rows) for rows in (1, 2, 3)]
        messages = [
            Differences(number, Instant(7), 0, (parts[number - 1][0],), more=number < 3)
            for number in (1, 2, 3)
        ]
        for number in (1, 2):
            lane.begin(messages[number - 1], parts[number - 1][1])
            assert (lane.number, lane.now.flush, len(lane.log)) == (number, 0, 0)
        whole, frames = lane.whole(messages[2], parts[2][1])
        assert [p.rows for p in whole.parts] == [1, 2, 3]
        assert [len(frame) for frame in frames] == [1, 1, 2, 2, 3, 3]
        lane.take(whole, frames)
        assert (lane.number, lane.now.flush, len(lane.log)) == (3, 7, 1)
        alone, _ = lane.whole(flush(4, 8), ())
        assert alone.parts == (), "the next flush has nothing of this one"

    def test_flushes_that_others_may_lack_are_logged(self) -> None:
        lane = in_lane()
        for number in range(1, 5):
            lane.take(flush(number, stable=number - 3), ())
        assert lane.now.flush == 4
        assert [logged.instant.flush for logged in lane.log] == [2, 3, 4]
        assert lane.first.flush == 1, "all parity servers have flush 1: nobody will go back beyond it"

    def test_a_lane_that_began_later_knows_where_it_stands_from_its_first_message(self) -> None:
        changes, values = in_lane(known=False), in_lane(known=False)
        changes.take(flush(1, 30), ())
        assert changes.known
        assert (changes.first.flush, changes.now.flush) == (29, 30)
        values.take(Values(1, Instant(30), 0, 0, 0), ())
        assert values.known
        assert (values.first.flush, values.now.flush) == (30, 30)

    def test_a_lane_that_is_known_keeps_its_beginning(self) -> None:
        lane = in_lane(now=Instant(0, (), (0, 1)))
        lane.take(flush(1, 1), ())
        assert lane.first == Instant(0, (), (0, 1))

    def test_undo_goes_back_to_an_instant_the_newest_flush_first(self) -> None:
        lane = in_lane()
        for number in range(1, 6):
            lane.take(flush(number), ())
        until = Instant(3, (), (0,))
        assert [logged.instant.flush for logged in lane.undo(until)] == [5, 4]
        assert lane.now == lane.first == until, "with what is known of it elsewhere"
        assert lane.undo(Instant(0)) == [], "that is for good"
        assert lane.now.flush == 3

    def test_undo_to_where_it_is_undoes_nothing(self) -> None:
        lane = in_lane()
        lane.take(flush(1), ())
        assert lane.undo(Instant(1)) == []
        assert lane.now.flush == 1

    def test_undo_of_everything_leads_to_the_beginning(self) -> None:
        lane = in_lane(now=Instant(0, (), (1,)))
        lane.take(flush(1), ())
        assert [logged.instant.flush for logged in lane.undo(Instant(0))] == [1]
        assert (lane.now, lane.first) == (Instant(0), Instant(0))

    def test_undo_does_not_go_back_beyond_what_all_have(self) -> None:
        lane = in_lane()
        for number in (1, 2, 3):
            lane.take(flush(number, stable=2), ())
        assert [logged.instant.flush for logged in lane.undo(Instant(1))] == [3]
        assert lane.now == lane.first == Instant(2)

    def test_half_a_flush_and_early_messages_are_gone_after_undo(self) -> None:
        lane = in_lane()
        first, frames = part(2)
        lane.begin(Differences(1, Instant(1), 0, (first,), more=True), frames)
        lane.lay_aside(3, of_bytes(3, 1000), 1000)
        assert lane.undo(Instant(0)) == []
        assert lane.whole(flush(2, 1), ()) == (flush(2, 1), ())
        lane.take(flush(2, 1), ())
        assert lane.next_early() is None
        lane.lay_aside(4, of_bytes(4, 1000), 1000)
        lane.take(flush(3), ())
        assert lane.next_early() is not None, "there is room again"
