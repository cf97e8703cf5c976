"""Changes on their way to parity servers (docs/protocol.md, "Kept pushes" and "Lanes, sealing and undo").

Server 0 is the owner in most tests. With a code of 2 + 1 on three servers its rows have parities at servers 1
and 2; with 2 + 2 on four, at servers 1, 2 and 3.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.envelope import Envelope, as_array
from holdfast.cluster.protocol.messages import Instant, LaneState, Peer, ServerInView
from holdfast.cluster.protocol.stripe_messages import (
    Differences,
    Forget,
    LaneMessage,
    ReadStripes,
    Recover,
    Syndromes,
    Taken,
    Values,
)
from holdfast.cluster.redundancy.parity import Records
from tests.cluster.redundancy.harness import NETWORK, TABLES, Node, Servers, lanes_of, message_of, plan_of


def small(**options: Any) -> Servers:
    return Servers(plan_of(k=2, r=1, lanes=lanes_of(**options)))


def differences(envelopes: list[Envelope]) -> list[Differences]:
    return [message_of(envelope, Differences) for envelope in envelopes]


def parities(node: Node, group: int = TABLES) -> Records:
    return node.replicator.parities[group].records.copy()


def begun(**options: Any) -> Servers:
    """The first flush is made: that one does not wait."""
    servers = small(**options)
    servers[0].push([0])
    servers.tick(10.0)
    assert servers[0].replicator.flushes == 1
    servers.deliver()
    return servers


class TestWhenAFlushIsMade:
    def test_no_push_no_flush(self) -> None:
        servers = small()
        servers[0].flush()
        servers.tick(1e9)
        assert servers.take() == []
        assert servers[0].replicator.flushes == 0

    def test_after_some_pushes_of_whichever_worker(self) -> None:
        servers = Servers(plan_of(k=2, r=1, workers=3, lanes=lanes_of(pushes=3)))
        for worker, flushes in ((0, 0), (1, 0), (2, 1), (0, 1), (0, 1), (0, 2)):
            servers[0].push([0], worker=worker)
            assert servers[0].replicator.flushes == flushes

    def test_after_half_a_window_of_one_worker(self) -> None:
        """Or the worker would wait for the flush with a full window."""
        servers = Servers(plan_of(k=2, r=1, workers=2, lanes=lanes_of(window=6)))
        for worker, flushes in ((0, 0), (1, 0), (0, 0), (1, 0), (0, 1), (1, 1), (1, 1), (1, 2)):
            servers[0].push([0], worker=worker)
            assert servers[0].replicator.flushes == flushes

    def test_a_window_of_one_flushes_every_push(self) -> None:
        servers = small(window=1)
        servers[0].push([0])
        assert servers[0].replicator.flushes == 1

    def test_when_changes_have_many_bytes(self) -> None:
        """A row that changes again takes no more room."""
        servers = small(most_bytes=3 * 12)
        for places, flushes in (([0, 1], 0), ([0, 1], 0), ([1, 2], 1), ([0, 1], 1)):
            servers[0].push(places)
            assert servers[0].replicator.flushes == flushes

    def test_after_some_seconds(self) -> None:
        servers = begun(seconds=4.0)
        servers[0].push([0])
        for seconds, flushes in ((3.9, 1), (0.05, 1), (0.1, 2), (100.0, 2)):
            servers.tick(seconds)
            assert servers[0].replicator.flushes == flushes

    def test_when_nothing_was_pushed_for_a_while(self) -> None:
        servers = begun(idle_seconds=0.5)
        for _ in range(5):
            servers[0].push([0])
            servers.tick(0.4)
            assert servers[0].replicator.flushes == 1
        servers.tick(0.2)
        assert servers[0].replicator.flushes == 2

    def test_before_the_first_view_nothing_is_in_a_hurry(self) -> None:
        node = Node(Peer("server", 0, 1), plan_of(k=2, r=1, lanes=lanes_of(seconds=4.0)))
        node.replicator.changed(1.0)
        node.tick(2.0)
        assert node.replicator.flushes == 0
        node.tick(5.0)
        assert node.replicator.flushes == 1

    def test_once_when_somebody_is_new(self) -> None:
        """The replacement of a worker waits until its predecessor's pushes are kept."""
        servers = begun()
        servers[0].push([0])
        servers[0].adopt(servers.view)
        servers.tick()
        assert servers[0].replicator.flushes == 2
        servers[0].push([0])
        servers.tick()
        assert servers[0].replicator.flushes == 2

    def test_at_every_tick_while_workers_hold(self) -> None:
        servers = small()
        servers[0].adopt(replace(servers.view, phase="holding"))
        for flushes in (1, 2, 3):
            servers[0].push([0])
            servers.tick()
            assert servers[0].replicator.flushes == flushes
        servers[0].adopt(replace(servers.view, phase="running"))
        for _ in range(2):
            servers[0].push([0])
            servers.tick()
        assert servers[0].replicator.flushes == 4

    def test_a_push_does_not_look_at_all_workers(self) -> None:
        """``changed`` is called at every push: it must not cost more with more workers."""
        servers = small()
        asked = 0
        node = servers[0]
        marks = node.marks

        def count() -> Any:
            nonlocal asked
            asked += 1
            return marks()

        replicator = type(node.replicator)(
            node.me, node.plan, node.shards, [], count, node.pushes.__getitem__, fresh=True,
            lacks=node.lacks, on_change=lambda *_: None, on_values=lambda *_: None,
        )  # fmt: skip
        replicator.start()
        assert asked == 1
        for _ in range(10):
            replicator.changed(0.0, 0)
        assert asked == 1
        replicator.flush(0.0)
        assert asked == 2


class TestFlushes:
    @pytest.mark.parametrize(("k", "r", "servers"), [(1, 1, 2), (2, 1, 3), (3, 2, 6), (2, 3, 5)])
    def test_parities_are_the_code_of_their_members(self, k: int, r: int, servers: int) -> None:
        """Invariant 1."""
        job = Servers(plan_of(k=k, r=r, servers=servers))
        for node in job:
            node.install()
            node.push([0, 1], TABLES)
            node.push([0], TABLES)
            node.flush()
            node.push([1], TABLES)
            node.flush()
        job.deliver()
        assert job.wrong_parities() == []
        assert all(node.replicator.is_quiet for node in job)

    def test_many_updates_of_a_row_are_one_difference(self) -> None:
        servers = small()
        for _ in range(5):
            servers[0].push([0])
        servers[0].flush()
        parts = [part for message in differences(servers.take()) for part in message.parts]
        assert [(part.group, part.member, part.rows) for part in parts] == [(TABLES, 0, 1)]

    def test_every_parity_server_hears_of_every_flush(self) -> None:
        """Also of one in which nothing is for it: all lanes number flushes alike."""
        servers = small()
        servers[0].push([0])
        servers[0].flush()
        messages = {e.target.slot: message_of(e, Differences) for e in servers.take()}
        assert set(messages) == {1, 2}
        assert {message.instant for message in messages.values()} == {messages[1].instant}
        assert sorted(len(message.parts) for message in messages.values()) == [0, 1]

    def test_a_flush_says_which_pushes_and_first_values_it_contains(self) -> None:
        servers = Servers(plan_of(k=2, r=1, workers=2))
        servers[0].push([0], worker=1)
        servers[0].flush()
        instant = differences(servers.take())[0].instant
        assert (instant.flush, [mark.sequence for mark in instant.marks]) == (1, [0, 1])
        assert instant.installed == (TABLES,)
        servers[0].install()
        servers[0].flush()
        assert differences(servers.take())[0].instant.installed == (TABLES, NETWORK)


class TestKept:
    def test_a_push_is_kept_when_all_parity_servers_have_its_flush(self) -> None:
        servers = Servers(plan_of(k=2, r=2))
        owner = servers[0].replicator
        servers[0].push([0])
        servers[0].push([0])
        assert not owner.is_quiet
        servers[0].flush()
        servers.deliver(Differences)
        for acknowledgement in servers.take(Taken)[:-1]:
            servers.hand(acknowledgement)
            assert (owner.kept(0), owner.stable) == (0, 0)
            assert not owner.is_quiet

    def test_the_last_acknowledgement_makes_it_kept(self) -> None:
        servers = Servers(plan_of(k=2, r=2))
        for _ in range(2):
            servers[0].push([0])
            servers[0].flush()
        servers[0].push([0])
        owner = servers[0].replicator
        servers.deliver(Differences)
        acknowledgements = servers.take(Taken)
        servers.hand(*(e for e in acknowledgements if e.target.slot == 0))
        assert (owner.kept(0), owner.stable, owner.flushes) == (2, 2, 2)
        assert not owner.is_quiet, "the third push is not flushed"

    def test_flushes_are_kept_in_order(self) -> None:
        servers = small()
        for _ in range(3):
            servers[0].push([0])
            servers[0].flush()
        servers.deliver(Differences, target=1)
        servers.deliver(Taken)
        first, *others = servers.take(Differences, target=2)
        servers.hand(first)
        servers.deliver(Taken)
        assert servers[0].replicator.kept(0) == 1
        servers.hand(*others)
        servers.deliver(Taken)
        assert servers[0].replicator.kept(0) == 3

    def test_what_all_have_is_told_with_the_next_flush_and_no_longer_logged(self) -> None:
        servers = small()
        for _ in range(3):
            servers[0].push([0])
            servers[0].flush()
            servers.deliver()
        servers[0].push([0])
        servers[0].flush()
        assert {message.stable for message in differences(servers.take(Differences, target=1))} == {3}
        servers.fence(0)
        states = {node.me.slot: node.replicator.sealed() for node in servers}
        assert [(s.now.flush, s.first.flush) for s in states[1]] == [(3, 2)]

    def test_a_replacement_knows_what_its_predecessor_had_kept(self) -> None:
        servers = small()
        servers[1].push([0])
        servers[1].push([0])
        servers[1].flush()
        servers.deliver()
        assert servers.replace(1).replicator.kept(0) == 2

    def test_before_anything_is_known_nothing_is_kept(self) -> None:
        assert Node(Peer("server", 0, 1), plan_of(k=2, r=1)).replicator.kept(0) == 0


class TestLossAndRepetition:
    """Hole 10: XOR twice would undo a change."""

    def test_a_change_that_comes_twice_counts_once_and_is_acknowledged_again(self) -> None:
        servers = small()
        servers[0].push([0, 1])
        servers[0].flush()
        messages = servers.take(Differences)
        servers.hand(*messages, *messages)
        assert [message_of(e, Taken).number for e in servers.take(Taken)] == [1, 1, 1, 1]
        assert servers.wrong_parities() == []

    def test_changes_that_overtake_each_other_count_in_order(self) -> None:
        servers = small()
        for _ in range(3):
            servers[0].push([0, 1])
            servers[0].flush()
        for slot in (1, 2):
            first, second, third = servers.take(Differences, target=slot)
            servers.hand(third, second)
            assert servers.take(Taken) == [], "what waits for another is not acknowledged"
            servers.hand(first)
            assert [message_of(e, Taken).number for e in servers.take(Taken)] == [3]
        assert servers.wrong_parities() == []

    def test_the_oldest_message_is_sent_again_until_it_is_acknowledged(self) -> None:
        servers = small()
        for _ in range(3):
            servers[0].push([0])
            servers[0].flush()
        servers.deliver(Differences, target=2)
        lost = servers.take(Differences, target=1)[0]
        servers.deliver(Taken)
        servers.tick(1.0)
        (again,) = servers.take()
        assert again is lost
        assert servers[0].doubted == [lost.target], "the way to it may be broken"
        servers.hand(again)
        assert [message_of(e, Taken).number for e in servers.take(Taken)] == [1]

    def test_a_lane_that_loses_every_fifth_message_catches_up(self) -> None:
        servers = small(idle_seconds=0.1)
        chance = random.Random(1)
        for push in range(30):
            servers[push % 3].push([push % 5, 5 + push % 3])
            servers.run(0.2, drop=lambda envelope: chance.random() < 0.2)
        servers.run(300.0, step=0.5, drop=lambda envelope: chance.random() < 0.2)
        assert all(node.replicator.is_quiet for node in servers)
        assert servers.wrong_parities() == []
        assert servers[0].replicator.kept(0) == 10

    def test_early_messages_have_little_room_and_what_is_left_out_comes_again(self) -> None:
        servers = small(most_bytes=64)
        for _ in range(10):
            servers[0].push([0, 1, 2])
            servers[0].flush()
        lane = servers.take(Differences, target=1)
        servers.take()
        servers.hand(*lane[1:])
        servers.hand(lane[0])
        (acknowledgement,) = servers.take(Taken)
        fit = 2 * 64 // lane[1].nbytes()
        assert message_of(acknowledgement, Taken).number == 1 + fit
        assert 1 < 1 + fit < len(lane)
        servers.hand(acknowledgement)
        servers.run(100.0)
        assert servers.wrong_parities() == []

    def test_an_acknowledgement_of_a_server_that_was_replaced_is_not_for_the_new_lane(self) -> None:
        servers = small()
        servers[0].push([0])
        servers[0].flush()
        servers.deliver(Differences)
        old = servers.take(Taken, source=1)
        servers.take()
        servers.replace(1)
        servers[0].push([1])
        servers[0].flush()
        servers.take()
        servers.hand(*old)
        assert not servers[0].replicator.is_quiet
        assert servers[0].replicator.stable == 0


class TestWhoIsStuck:
    def test_a_parity_server_that_acknowledges_nothing_is_named(self) -> None:
        servers = small()
        servers.tick(4.0)
        sent = servers.now
        servers[0].push([0])
        servers[0].flush()
        servers.deliver(Differences, target=2)
        servers.deliver(Taken)
        owner = servers[0].replicator
        for _ in range(3):
            servers.tick(4.0)
        assert owner.stuck_on(sent + 10.0) == (), "ten seconds are not more than ten"
        assert owner.stuck_on(sent + 10.1) == (1,)

    def test_a_server_that_was_stopped_has_waited_for_nobody_meanwhile(self) -> None:
        servers = small()
        servers.tick(4.0)
        servers[0].push([0])
        servers[0].flush()
        servers.tick(4.0)
        servers.tick(100.0)
        assert servers[0].replicator.stuck_on(servers.now + 6.0) == ()
        assert servers[0].replicator.stuck_on(servers.now + 6.1) == (1, 2)

    def test_nobody_is_stuck_on_a_server_that_owes_nothing(self) -> None:
        servers = small()
        assert servers[0].replicator.stuck_on(1e9) == ()


class TestLargeFlushes:
    """A flush that is larger than a message goes in several, which count together."""

    ROW = 4 + 3 * 4
    """Bytes of a block number and a record."""

    @pytest.mark.parametrize("rows", [1, 2, 3])
    def test_no_message_is_larger_than_it_may_be(self, rows: int) -> None:
        servers = small(most_bytes=1 << 20)
        servers[0].push(list(range(8)))
        reference = {slot: parities(servers[slot]) for slot in (1, 2)}
        limited = Servers(replace(servers.plan, lanes=lanes_of(most_bytes=rows * self.ROW + self.ROW - 1)))
        limited[0].push(list(range(8)))
        limited[0].flush()
        for slot in (1, 2):
            messages = limited.take(Differences, target=slot)
            assert [message_of(e, Differences).more for e in messages] == [True] * (len(messages) - 1) + [
                False
            ]
            assert {e.nbytes() for e in messages[:-1]} == {rows * self.ROW}
            assert len(messages) == -(-4 // rows)
            limited.hand(*messages[:-1])
            assert (parities(limited[slot]) == reference[slot]).all(), "nothing counts before the last one"
            limited.hand(messages[-1])
        assert limited.wrong_parities() == []

    def test_a_record_that_is_larger_than_a_message_may_be_goes_alone(self) -> None:
        servers = small(most_bytes=1)
        servers[0].push([0, 1, 2])
        messages = differences(servers.take(Differences))
        assert all(sum(part.rows for part in message.parts) <= 1 for message in messages)
        assert sum(part.rows for message in messages for part in message.parts) == 3

    def test_half_a_flush_is_acknowledged_but_not_kept(self) -> None:
        servers = small(most_bytes=self.ROW)
        servers[0].push(list(range(4)))
        servers.deliver(Differences, target=2)
        *begun, last = servers.take(Differences, target=1)
        servers.hand(*begun)
        servers.deliver(Taken)
        assert servers[0].replicator.kept(0) == 0
        servers.hand(last)
        servers.deliver(Taken)
        assert servers[0].replicator.kept(0) == 1

    def test_half_a_flush_of_a_dead_owner_leaves_nothing(self) -> None:
        servers = small(most_bytes=self.ROW)
        servers[0].push(list(range(4)))
        before = {slot: parities(servers[slot]) for slot in (1, 2)}
        for slot in (1, 2):
            servers.hand(*servers.take(Differences, target=slot)[:-1])
        servers.fence(0)
        assert servers.settle(0).flush == 0
        assert all((parities(servers[slot]) == before[slot]).all() for slot in (1, 2))


class TestReplacementOfAnOwner:
    """Sealing and undo: all parity servers go back to what the least of them has."""

    def ahead(self) -> tuple[Servers, dict[int, list[Records]]]:
        """Server 0 dies when server 1 has three of its flushes, and server 2 has one."""
        servers = small()
        for places in ([0, 1], [1, 2], [0, 3]):
            servers[0].push(places)
            servers[0].flush()
        servers.deliver(Differences, target=1)
        servers.hand(servers.take(Differences, target=2)[0])
        return servers, servers[0].flushed

    def test_a_sealed_lane_takes_nothing_more_and_says_how_far_it_came(self) -> None:
        servers, _ = self.ahead()
        servers[0].push([0])
        servers[0].flush()
        late = servers.take(Differences)
        assert servers[1].replicator.sealed() == ()
        dead = servers.fence(0)
        before = parities(servers[1])
        servers.take()
        servers.hand(*late)
        assert servers.take(Taken) == []
        assert (parities(servers[1]) == before).all()
        (state,) = servers[1].replicator.sealed()
        assert (state.slot, state.incarnation) == (0, 1)
        assert (state.now.flush, state.now.marks[0].sequence, state.first.flush) == (3, 3, 0)
        assert servers[2].replicator.sealed()[0].now.flush == 1
        assert dead.replicator.flushes == 4

    def test_those_that_are_ahead_undo_what_does_not_count(self) -> None:
        servers, flushed = self.ahead()
        servers.fence(0)
        until = servers.settle(0)
        assert until.flush == 1
        replacement = servers.start(0)
        for group, records in enumerate(flushed[1]):
            replacement.shards[group].records[:] = records
        wrong = [line for line in servers.wrong_parities() if not line.startswith("server 0")]
        assert wrong == [], "parities are those of the dead server's rows as they were after flush 1"
        assert replacement.pushes == [1]

    def test_what_is_undone_is_undone_once(self) -> None:
        servers, _ = self.ahead()
        servers.fence(0)
        until = servers.settle(0)
        settled = parities(servers[1])
        servers.change_view(0, replace(servers.view.servers[0], counts_until=until))
        assert (parities(servers[1]) == settled).all()

    def test_a_lane_that_goes_on_is_not_undone(self) -> None:
        """A view may say how much of an incarnation counts to a server that follows its successor."""
        servers, _ = self.ahead()
        before = parities(servers[1])
        entry = replace(servers.view.servers[0], counts_until=Instant(0))
        servers.change_view(0, entry)
        assert (parities(servers[1]) == before).all()

    def test_a_replacement_has_new_lanes(self) -> None:
        servers, _ = self.ahead()
        replacement = servers.replace(0)
        servers.deliver()
        servers.run(2.0)
        replacement.push([0, 1, 2])
        replacement.flush()
        message = differences(servers.take(Differences, source=0))[0]
        assert message.instant.flush == 1, "flushes of an incarnation begin anew"
        servers.hand(*servers.take(Differences, source=0))
        assert servers[1].replicator.progress(0) == LaneState(0, 2, Instant(0))

    def test_a_lane_of_a_replacement_knows_where_it_stands_from_the_start(self) -> None:
        """So that a replacement that dies at once can be replaced."""
        servers, _ = self.ahead()
        servers.fence(0)
        until = servers.settle(0)
        servers.start(0)
        servers.fence(0)
        (state,) = servers[1].replicator.sealed()
        assert state == LaneState(0, 2, replace(until, flush=0), replace(until, flush=0))

    def test_a_replaced_parity_server_knows_nothing_before_the_first_message(self) -> None:
        """It must not say that its owner had done nothing."""
        servers = small()
        servers[0].push([0])
        servers[0].flush()
        servers.deliver()
        servers.replace(1)
        servers.take()
        servers.fence(0)
        assert servers[1].replicator.sealed() == ()
        assert [state.now.flush for state in servers[2].replicator.sealed()] == [1]

    def test_a_replaced_parity_server_stands_at_the_flush_before_its_first_message(self) -> None:
        servers = small()
        servers[0].push([0])
        servers[0].flush()
        servers.deliver()
        servers.replace(1)
        servers.take()
        servers[0].push([1])
        servers[0].flush()
        servers.hand(*servers.take(Differences, source=0))
        servers.fence(0)
        (state,) = servers[1].replicator.sealed()
        assert (state.now.flush, state.first.flush) == (2, 1)

    def test_a_server_is_known_as_a_peer_from_its_start_to_its_end(self) -> None:
        servers = small()
        one = servers[1].replicator
        assert one.peer(0) == Peer("server", 0, 1)
        assert one.peer(1) is None, "nobody talks to itself"
        servers.fence(0)
        assert one.peer(0) is None
        servers.settle(0)
        assert one.peer(0) is None
        servers.start(0)
        assert one.peer(0) == Peer("server", 0, 2)

    def test_progress_of_a_lane(self) -> None:
        servers, _ = self.ahead()
        assert servers[1].replicator.progress(0) == LaneState(0, 1, Instant(3))
        assert servers[1].replicator.progress(2) == LaneState(2, 1, Instant(0))
        far = Servers(plan_of(k=1, r=1, servers=5))
        assert far[0].replicator.progress(3) == LaneState(3, 0), "there is no lane between these two"

    def test_messages_of_servers_that_are_no_owners_here_do_not_count(self) -> None:
        servers = Servers(plan_of(k=1, r=1, servers=5))
        servers[0].replicator.take(Peer("server", 2, 1), Differences(1, Instant(1), 0, ()), ())
        assert servers.take() == []

    def test_a_parity_server_that_is_gone_is_not_waited_for(self) -> None:
        """A push counts as kept if those that are left have it: the code covers one failure less."""
        servers = small()
        servers[0].push([0])
        servers[0].flush()
        servers.deliver(Differences, target=2)
        servers.deliver(Taken)
        assert servers[0].replicator.kept(0) == 0
        servers.fence(1)
        assert servers[0].replicator.kept(0) == 1

    def test_flushes_go_to_those_that_are_left(self) -> None:
        servers = small()
        servers.fence(1)
        servers[0].push([0, 1, 2, 3])
        servers[0].flush()
        assert [e.target.slot for e in servers.take(Differences)] == [2]

    def test_a_lane_begins_behind_the_flushes_before_it(self) -> None:
        servers = small()
        for _ in range(3):
            servers[0].push([0])
            servers[0].flush()
        servers.deliver()
        servers.replace(1)
        owner = servers[0].replicator
        assert (owner.stable, owner.kept(0)) == (3, 3)
        assert owner.is_quiet


def read(
    blocks: list[int], member: int, *, group: int = TABLES, job: int = 5
) -> tuple[ReadStripes, list[Any]]:
    return ReadStripes(job, group, member, len(blocks)), [np.array(blocks, np.uint32)]


class TestReads:
    """``ReadStripes``: records go into the lane as its parity server knows them."""

    def ask(self, servers: Servers, blocks: list[int], member: int, source: Peer | None = None) -> None:
        message, frames = read(blocks, member)
        servers[0].replicator.read(source or Peer("server", 1, 1), message, frames, servers.now)

    def values(self, servers: Servers) -> tuple[Values, Records, list[int]]:
        (envelope,) = servers.take(Values)
        message = message_of(envelope, Values)
        records = as_array(envelope.frames[0], np.uint32, (message.rows, 3))
        return message, records, as_array(envelope.frames[1], np.uint32, (message.absent,)).tolist()

    def test_values_are_those_of_the_last_flush(self) -> None:
        servers = small()
        servers[0].push([0, 2])
        servers[0].flush()
        servers[0].push([0, 4])
        self.ask(servers, [0, 1, 2], 0)
        message, records, absent = self.values(servers)
        assert (records == servers[0].flushed[1][TABLES][[0, 2, 4]]).all()
        assert (message.number, message.instant.flush) == (2, 1)
        assert (message.job, message.member, message.rows, message.absent, absent) == (5, 0, 3, 0, [])

    def test_values_have_their_place_in_the_lane(self) -> None:
        servers = small()
        servers[0].push([0])
        servers[0].flush()
        self.ask(servers, [0], 0)
        servers[0].push([0])
        servers[0].flush()
        lane = [e.message for e in servers.take(Differences, Values, target=1)]
        assert [type(message) for message in lane] == [Differences, Values, Differences]
        assert [m.number for m in lane if isinstance(m, LaneMessage)] == [1, 2, 3]

    def test_records_that_the_owner_lacks_are_named(self) -> None:
        servers = small()
        kept = servers[0].flushed[0][TABLES]
        replacement = servers.replace(0)
        assert replacement.recovery is not None
        replacement.recovery.want(TABLES, np.array([0, 4]), servers.now)
        replacement.recovery.ask(servers.now)
        servers.deliver(Recover, ReadStripes, Values)
        servers.hand(*servers.take(Syndromes))
        servers.take()
        self.ask(servers, [0, 1, 2, 3], 0)
        message, records, absent = self.values(servers)
        assert (message.rows, message.absent, absent) == (2, 2, [1, 3])
        assert (records == kept[[0, 4]]).all()

    @pytest.mark.parametrize("source", [Peer("server", 4, 2), Peer("server", 1, 1)])
    def test_only_the_current_parity_server_is_answered(self, source: Peer) -> None:
        servers = Servers(plan_of(k=2, r=1, servers=5))
        self.ask(servers, [0], 0, source)
        assert servers.take() == []

    def test_a_new_lane_has_no_values_before_all_have_what_was_before_it(self) -> None:
        """Of flushes before the lane its parity server could undo nothing."""
        servers = small()
        servers[0].push([0])
        servers[0].flush()
        servers.deliver(Differences, target=1)
        servers.deliver(Taken)
        servers.replace(1)
        missing = servers.take(Differences, source=0, target=2)
        servers.take()
        self.ask(servers, [0], 0, Peer("server", 1, 2))
        assert servers.take() == []
        servers.hand(*missing)
        servers.deliver(Taken)
        self.ask(servers, [0], 0, Peer("server", 1, 2))
        assert len(servers.take(Values)) == 1

    def test_nothing_can_be_asked_for(self) -> None:
        servers = small()
        self.ask(servers, [], 1)
        message, _, _ = self.values(servers)
        assert (message.rows, message.absent) == (0, 0)


class TestForget:
    def test_parities_of_records_that_were_lost_contain_nothing(self) -> None:
        servers = Servers(plan_of(k=2, r=2))
        servers[0].push([0, 2])
        servers[0].flush()
        servers[0].replicator.forget(TABLES, 0, np.array([1, 3]), servers.now)
        lanes = [e for e in servers.take() if e.source.slot == 0]
        kinds = {e.target.slot: [type(o.message) for o in lanes if o.target == e.target] for e in lanes}
        placement = servers.plan.placements[TABLES]
        told = {placement.parity_server(0, 0, t): t for t in (0, 1)}
        assert {slot for slot, found in kinds.items() if found[-1] is Forget} == set(told)
        servers.hand(*lanes)
        for slot, t in told.items():
            parity = servers[slot].replicator.parities[TABLES]
            assert np.flatnonzero(~parity.whole(t, np.arange(parity.blocks))).tolist() == [1, 3]
            assert parity.lacking == 2

    def test_what_was_forgotten_is_rebuilt_from_the_new_values(self) -> None:
        servers = Servers(plan_of(k=2, r=2))
        servers[0].shards[TABLES].records[[2, 6]] = 99
        servers[0].replicator.forget(TABLES, 0, np.array([1, 3]), servers.now)
        servers.run(2.0)
        assert servers.wrong_parities() == []

    def test_a_server_without_a_lane_is_not_told(self) -> None:
        """It begins without any parity."""
        servers = small()
        gone = servers.plan.placements[TABLES].parity_server(0, 0, 0)
        servers.fence(gone)
        servers[0].replicator.forget(TABLES, 0, np.array([1]), servers.now)
        assert servers.take() == []


def test_a_view_of_an_older_incarnation_changes_nothing() -> None:
    servers = small()
    servers.replace(0)
    servers.take()
    one = servers[1].replicator
    servers[1].adopt(replace(servers.view, servers=(ServerInView(0, 1), *servers.view.servers[1:])))
    assert one.peer(0) == Peer("server", 0, 2)
    assert one.progress(0).incarnation == 2


class TestMemoryOfAFlush:
    """Parity servers of the same machine read it where the owner has it (``runtime.transport.shared``)."""

    def test_it_stays_until_all_parity_servers_have_the_flush(self) -> None:
        """Also those of which it changes nothing: as long as one lacks it, others may have to undo it."""
        servers = begun()
        servers[0].push([0])
        servers[0].flush()
        changes = servers.take(Differences)
        (changed,) = (e for e in changes if message_of(e, Differences).parts)
        (empty,) = (e for e in changes if e is not changed)
        array = np.asarray(changed.frames[1])
        place, content = array.ctypes.data, array.tobytes()
        servers.hand(changed)
        for lane in servers[changed.target.slot].replicator._in.values():
            lane.log.clear()  # in another process: what it remembers does not count here
        del changed, changes, array
        servers.deliver(Taken)
        self.push_on(servers)
        assert ctypes.string_at(place, len(content)) == content
        servers.hand(empty)
        servers.deliver()
        self.push_on(servers)
        assert ctypes.string_at(place, len(content)) != content, "it is used again"

    def push_on(self, servers: Servers) -> None:
        for _ in range(4):
            servers[0].push([0])
            servers[0].flush()
            late = servers.take(Differences)
            servers.hand(*(e for e in late if message_of(e, Differences).parts))
            servers.deliver(Taken)
