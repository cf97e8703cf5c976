"""Sums over stripes at their parity server (docs/protocol.md, "Recovery by syndromes"): syndromes for servers
that lost rows, parities that are rebuilt, and scrubbing, all compared with sums by the schoolbook.

Server 0 is the parity server in most tests; ``members`` names the owners of the members of its stripes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from holdfast.cluster.protocol.envelope import Envelope, as_array
from holdfast.cluster.protocol.messages import Instant, LaneState, Peer
from holdfast.cluster.protocol.stripe_messages import (
    Agreed,
    Compare,
    Differences,
    Lacking,
    ReadStripes,
    Recover,
    Syndromes,
    Taken,
    Values,
)
from holdfast.cluster.redundancy.parity import Records
from tests.cluster.redundancy.harness import (
    NETWORK,
    START,
    TABLES,
    Node,
    Servers,
    coefficient,
    lanes_of,
    message_of,
    plan_of,
)
from tests.coding.field import times

MOST_JOBS = 1024
READ_AGAIN = 0.25
FORGOTTEN = 5.0


def job(k: int = 2, r: int = 1, servers: int = 0, **options: Any) -> Servers:
    return Servers(plan_of(k=k, r=r, servers=servers, lanes=lanes_of(**options)))


def members(servers: Servers, parity: int = 0, group: int = TABLES) -> list[Node]:
    """The owners of the members of server 0's stripes."""
    placement = servers.plan.placements[group]
    return [servers[placement.member_server(0, parity, m)] for m in range(placement.k)]


def ask(
    servers: Servers,
    blocks: Sequence[int],
    without: tuple[int, ...] = (0,),
    *,
    parity: int = 0,
    request: int = 1,
    source: Peer | None = None,
) -> None:
    """A server asks server 0 for syndromes: the owner of the first missing member, or ``source``."""
    source = source or members(servers, parity)[without[0]].me
    message = Recover(request, TABLES, parity, without, len(blocks))
    servers.hand(Envelope(source, servers[0].me, message, [np.array(blocks, np.uint32)]))


class Answer:
    """``Syndromes``, taken apart."""

    def __init__(self, servers: Servers) -> None:
        (envelope,) = servers.take(Syndromes)
        self.message = message_of(envelope, Syndromes)
        self.target = envelope.target
        self.at: list[int] = as_array(envelope.frames[0], np.uint32, (self.message.rows,)).tolist()
        self.syndromes = as_array(envelope.frames[1], np.uint32, (self.message.rows, 3))
        self.lacking: dict[int, list[int]] = {
            part.member: as_array(frame, np.uint32, (part.rows,)).tolist()
            for part, frame in zip(self.message.lacking, envelope.frames[2:], strict=True)
        }


def records_of(servers: Servers, member: int, blocks: Sequence[int], parity: int = 0) -> Records:
    """A member of server 0's stripes, as it is now."""
    owner, k = members(servers, parity)[member], servers.plan.k
    found: Records = owner.shards[TABLES].records[np.array(blocks) * k + member]
    return found


class TestSyndromes:
    def test_the_syndrome_of_one_missing_member_is_that_member(self) -> None:
        servers = job()
        ask(servers, [0, 2, 5], (1,))
        servers.deliver(ReadStripes, Values)
        answer = Answer(servers)
        assert answer.target == members(servers)[1].me
        assert (answer.message.request, answer.message.parity) == (1, 0)
        assert (answer.at, answer.lacking) == ([0, 1, 2], {})
        assert (answer.syndromes == records_of(servers, 1, [0, 2, 5])).all()

    @pytest.mark.parametrize("parity", [0, 1])
    @pytest.mark.parametrize("without", [(0,), (2, 0), (1, 2)])
    def test_the_syndrome_of_several_is_the_sum_of_their_parts(
        self, parity: int, without: tuple[int, ...]
    ) -> None:
        servers = job(3, 2)
        blocks = [1, 2]
        ask(servers, blocks, without, parity=parity)
        servers.deliver(ReadStripes, Values)
        expected = np.zeros((2, 3), np.uint32)
        for m in without:
            expected ^= times(coefficient(parity, m), records_of(servers, m, blocks, parity))
        assert (Answer(servers).syndromes == expected).all()

    def test_only_members_that_are_there_are_read(self) -> None:
        servers = job(3, 2)
        ask(servers, [1, 2], (2, 0))
        (read,) = servers.take(ReadStripes)
        assert read.target == members(servers)[1].me
        message = message_of(read, ReadStripes)
        assert (message.group, message.member, message.rows) == (TABLES, 1, 2)
        assert as_array(read.frames[0], np.uint32, (2,)).tolist() == [1, 2]

    def test_an_answer_says_how_far_the_lanes_of_missing_members_came(self) -> None:
        """So that syndromes of two parity servers can be told to be of one instant."""
        servers = job(3, 2)
        owners = members(servers)
        owners[2].push([0])
        owners[2].flush()
        servers.deliver()
        ask(servers, [1], (2, 0))
        servers.deliver(ReadStripes, Values)
        assert Answer(servers).message.without == (
            LaneState(owners[2].me.slot, 1, Instant(1)),
            LaneState(owners[0].me.slot, 1, Instant(0)),
        )

    def test_a_code_without_other_members_is_answered_at_once(self) -> None:
        servers = Servers(plan_of(k=1, r=1, servers=2))
        ask(servers, [0, 1])
        assert (Answer(servers).syndromes == records_of(servers, 0, [0, 1])).all()

    def test_nothing_can_be_asked_for(self) -> None:
        servers = job()
        ask(servers, [])
        servers.deliver(ReadStripes)
        members(servers)[1].push([1])
        members(servers)[1].flush()
        servers.deliver(Values, Differences)
        assert Answer(servers).at == []


class TestRowsThatChangeMeanwhile:
    """A value counts at its place in the lane; changes behind it go to the parity and to the sum."""

    @pytest.mark.parametrize("when", ["before the read", "before the value", "after the value"])
    @pytest.mark.parametrize("who", ["the missing member", "a member in the sum"])
    def test_a_change_at_any_time_is_in_parity_and_sum_or_in_neither(self, when: str, who: str) -> None:
        servers = job(3, 1, servers=4)
        owners = members(servers)
        changed, blocks = (owners[0] if who == "the missing member" else owners[1]), [0, 1, 3]
        before = records_of(servers, 0, blocks).copy()

        def change() -> None:
            changed.push([place for place in range(9) if place % 3 == (changed is owners[1])])
            changed.flush()

        ask(servers, blocks)
        slow = servers.take(ReadStripes, target=owners[2].me.slot)
        if when == "before the read":
            change()
            servers.deliver(Differences, ReadStripes, Values)
        elif when == "before the value":
            servers.deliver(ReadStripes)
            change()
            servers.deliver(Values, Differences)
        else:
            servers.deliver(ReadStripes, Values)
            change()
            servers.deliver(Differences)
        servers.hand(*slow)
        servers.deliver(Values)
        expected = records_of(servers, 0, blocks)
        assert (Answer(servers).syndromes == expected).all()
        assert (expected != before).any() == (who == "the missing member")

    def test_changes_of_other_blocks_groups_and_parities_do_not_touch_a_sum(self) -> None:
        servers = job(2, 2)
        blocks = [1, 3]
        ask(servers, blocks, (0,), parity=1)
        other = members(servers, 1)[1]
        servers.deliver(ReadStripes, source=0, target=other.me.slot)
        (value,) = servers.take(Values)
        other.install()
        other.push([0, 1, 2, 3, 4, 5])
        other.push([0], NETWORK)
        other.flush()
        servers.hand(value)
        servers.deliver(Differences)
        answers = servers.take(Syndromes)
        assert len(answers) == 1
        found = as_array(answers[0].frames[1], np.uint32, (2, 3))
        assert (found == times(coefficient(1, 0), records_of(servers, 0, blocks, 1))).all()

    def test_what_is_undone_is_undone_in_sums_too(self) -> None:
        """A member's owner dies after its value was added: what does not count goes out of parity and sum."""
        servers = job(3, 1, servers=5)
        owners = members(servers)
        blocks = [0, 1]
        ask(servers, blocks, (0,))
        slow = servers.take(ReadStripes, target=owners[2].me.slot)
        servers.deliver(ReadStripes, Values)
        owners[1].push([1, 4])
        owners[1].flush()
        servers.deliver(Differences, target=0)
        servers.take(Differences)
        expected = records_of(servers, 0, blocks)
        servers.fence(owners[1].me.slot)
        assert servers.settle(owners[1].me.slot).flush == 0
        servers.hand(*slow)
        servers.deliver(Values)
        assert (Answer(servers).syndromes == expected).all()


class TestWhatCannotBeAnswered:
    def test_members_that_their_owners_lack_are_named_and_get_no_syndrome(self) -> None:
        servers = job(3, 1, servers=4)
        owners = members(servers)
        before = owners[0].flushed[0][TABLES]
        other = servers.replace(owners[1].me.slot)
        assert other.recovery is not None
        other.recovery.want(TABLES, np.array([4]), servers.now)
        other.recovery.ask(servers.now)
        servers.deliver(Recover, ReadStripes, Values)
        servers.hand(*servers.take(Syndromes))
        servers.take()
        ask(servers, [0, 1, 2], (0,))
        servers.deliver(ReadStripes, Values)
        answer = Answer(servers)
        assert (answer.at, answer.lacking) == ([1], {1: [0, 2]})
        assert (answer.syndromes == before[[3]]).all()

    def test_parities_that_are_not_there_are_named(self) -> None:
        servers = job()
        servers[0].replicator.parities[TABLES].forget(0, np.array([1, 4]))
        ask(servers, [0, 1, 3, 4], (0,))
        servers.deliver(ReadStripes, Values)
        answer = Answer(servers)
        assert (answer.at, answer.lacking) == ([0, 2], {-1: [1, 3]})
        assert (answer.syndromes == records_of(servers, 0, [0, 3])).all()
        assert answer.message.lacking == (Lacking(-1, 2),)

    def test_a_parity_server_without_any_of_them_says_so_at_once(self) -> None:
        servers = job()
        servers[0].replicator.parities[TABLES].forget(0, np.array([1, 4]))
        ask(servers, [1, 4], (0,))
        answer = Answer(servers)
        assert (answer.at, answer.lacking) == ([], {-1: [0, 1]})


class TestAskingAgain:
    def test_a_question_that_is_asked_again_is_answered_once(self) -> None:
        servers = job()
        ask(servers, [0])
        ask(servers, [0])
        servers.deliver(ReadStripes, Values)
        assert len(servers.take(Syndromes)) == 1
        ask(servers, [0])
        servers.deliver(ReadStripes, Values)
        assert len(servers.take(Syndromes)) == 1, "it was answered, but the answer may be lost"

    def test_other_questions_are_other_sums(self) -> None:
        servers = job(2, 1, servers=4)
        one, other = (node.me for node in members(servers))
        ask(servers, [0], request=1, source=one)
        ask(servers, [0], request=2, source=one)
        ask(servers, [0], request=1, source=other)
        message = Compare(1, TABLES, 0, 1)
        servers.hand(Envelope(one, servers[0].me, message, [np.array([0], np.uint32)]))
        servers.deliver(ReadStripes, Values)
        assert len(servers.take(Syndromes)) == 3
        assert len(servers.take(Agreed)) == 1

    def test_values_that_do_not_come_are_asked_for_again(self) -> None:
        servers = job()
        ask(servers, [0, 3])
        (lost,) = servers.take(ReadStripes)
        servers.tick(READ_AGAIN - 0.01)
        assert servers.take(ReadStripes) == []
        assert servers[0].doubted == []
        servers.tick(0.01)
        (again,) = servers.take(ReadStripes)
        assert again.message == lost.message
        assert servers[0].doubted == [lost.target]
        servers.tick(READ_AGAIN - 0.01)
        assert servers.take(ReadStripes) == []

    def test_values_that_come_twice_count_once(self) -> None:
        servers = job(3, 1, servers=4)
        ask(servers, [0, 3])
        owners = members(servers)
        fast = servers.take(ReadStripes, target=owners[1].me.slot)
        servers.hand(*fast, *fast)
        servers.deliver(Values)
        servers.deliver(ReadStripes, Values)
        assert (Answer(servers).syndromes == records_of(servers, 0, [0, 3])).all()

    def test_only_who_has_not_answered_is_asked_again(self) -> None:
        servers = job(3, 1, servers=4)
        ask(servers, [0])
        slow = members(servers)[2]
        servers.take(ReadStripes, target=slow.me.slot)
        servers.deliver(ReadStripes, Values)
        servers.tick(READ_AGAIN)
        assert [e.target for e in servers.take(ReadStripes)] == [slow.me]

    def test_the_replacement_of_an_owner_is_asked_in_its_place(self) -> None:
        servers = job(3, 1, servers=4)
        ask(servers, [0])
        slot = members(servers)[2].me.slot
        servers.fence(slot)
        servers.take()
        servers.tick(READ_AGAIN)
        assert slot not in {e.target.slot for e in servers.take(ReadStripes)}, "nobody is there"
        servers.settle(slot)
        servers.start(slot)
        servers.tick(READ_AGAIN)
        assert Peer("server", slot, 2) in {e.target for e in servers.take(ReadStripes)}

    def test_a_sum_that_nobody_asks_for_any_more_is_dropped(self) -> None:
        servers = job()
        ask(servers, [0])
        servers.take()
        for _ in range(4):
            servers.tick(FORGOTTEN / 4)
            assert len(servers.take(ReadStripes)) == 1
        servers.tick(0.01)
        assert servers.take(ReadStripes) == []

    def test_a_sum_that_is_asked_for_again_is_not_dropped(self) -> None:
        servers = job()
        ask(servers, [0])
        servers.tick(FORGOTTEN - 1)
        ask(servers, [0])
        servers.take()
        servers.tick(FORGOTTEN)
        assert len(servers.take(ReadStripes)) == 1

    def test_a_sum_for_somebody_who_was_replaced_is_dropped(self) -> None:
        servers = job(3, 1, servers=4)
        asker = members(servers)[0].me
        ask(servers, [0])
        servers.fence(asker.slot)
        servers.take()
        servers.tick(READ_AGAIN)
        assert servers.take(ReadStripes) == []

    def test_who_was_replaced_is_not_answered(self) -> None:
        servers = job()
        old = members(servers)[0].me
        servers.replace(old.slot)
        servers.take()
        ask(servers, [0], source=old)
        ask(servers, [0], source=Peer("server", old.slot, 3))
        assert servers.take(ReadStripes, source=0) == []

    def test_sums_are_bounded(self) -> None:
        """A server that asks and asks cannot fill another's memory."""
        servers = job()
        for request in range(MOST_JOBS):
            ask(servers, [0], request=request + 1)
        assert len(servers.take(ReadStripes)) == MOST_JOBS
        ask(servers, [0], request=MOST_JOBS + 1)
        assert servers.take(ReadStripes) == []

    def test_what_is_under_way_can_be_asked_for_again_though_there_is_no_room(self) -> None:
        servers = job()
        for request in range(MOST_JOBS):
            ask(servers, [0], request=request + 1)
        servers.tick(FORGOTTEN - 1)
        ask(servers, [0], request=7)
        servers.take()
        servers.tick(2.0)
        assert [message_of(e, ReadStripes).job for e in servers.take(ReadStripes)] == [7]


class TestValuesThatDoNotFit:
    def start(self) -> tuple[Servers, Envelope]:
        """A value that is about to arrive; the other one is in the mail."""
        servers = job(3, 1, servers=4)
        ask(servers, [0, 3])
        servers.deliver(ReadStripes)
        (value,) = servers.take(Values, source=members(servers)[1].me.slot)
        return servers, value

    def refuse(self, servers: Servers, source: Peer, message: Values, frames: Sequence[Any]) -> None:
        with pytest.raises(ValueError, match="values of"):
            servers[0].stripes.take_values(source, message, frames)

    def test_they_change_nothing(self) -> None:
        servers, value = self.start()
        message = message_of(value, Values)
        wrong_owner = members(servers)[0].me
        self.refuse(servers, wrong_owner, message, value.frames)
        short = Values(message.number, message.instant, message.job, message.member, 1)
        self.refuse(servers, value.source, short, [value.frames[0][:1], value.frames[1]])
        servers.hand(value)
        servers.deliver(Values)
        assert (Answer(servers).syndromes == records_of(servers, 0, [0, 3])).all()

    def test_those_of_a_sum_that_is_done_are_passed_over(self) -> None:
        servers, value = self.start()
        message = message_of(value, Values)
        unknown = Values(message.number, message.instant, 999, message.member, 2)
        servers[0].stripes.take_values(value.source, unknown, value.frames)


class TestRebuilding:
    """Parities of a replacement are rebuilt beside its rows, and faster once it has them all."""

    def replaced(self, r: int = 1, **options: Any) -> tuple[Servers, Node]:
        """Server 0 has its rows back, and has just asked for the members of its first parities."""
        servers = job(2, r, servers=r + 3, chunk_rows=2, **options)
        replacement = servers.replace(0)
        assert replacement.recovery is not None
        for turn in replacement.stripes._passes.values():
            turn.at = START + 1.0
        servers.tick()
        while replacement.recovery.left:
            servers.step()
        servers.take()
        if options:
            replacement.throttle.note_request(START + 1.0)
        servers.tick(1.0)
        servers.mail = servers.take(ReadStripes, source=0)
        return servers, replacement

    def finish(self, servers: Servers) -> None:
        for _ in range(100):
            if not servers[0].stripes.lacking():
                return
            servers.run(0.1)
        raise AssertionError("parities do not come back")

    def test_lost_parities_come_back(self) -> None:
        servers, node = self.replaced()
        count = len(node.replicator.parities[TABLES].records) + len(node.replicator.parities[NETWORK].records)
        assert node.stripes.lacking() == count
        self.finish(servers)
        assert node.stripes.rebuilt == count
        assert servers.wrong_parities() == []

    def test_rows_may_change_meanwhile(self) -> None:
        servers, _ = self.replaced()
        chance = Random(1)
        for turn in range(30):
            for slot in (1, 2, 3):
                servers[slot].push([turn % 5, 5 + turn % 4])
                servers[slot].flush()
                servers.jumble(chance)
            servers.tick(0.1)
        self.finish(servers)
        servers.run(10.0)
        assert servers.wrong_parities() == []

    def test_two_chunks_at_a_time(self) -> None:
        servers, _ = self.replaced()
        reads = [message_of(e, ReadStripes) for e in servers.take()]
        reads = [read for read in reads if read.group == TABLES]
        assert [(read.member, read.rows) for read in reads] == [(0, 2), (1, 2)] * 2
        assert len({read.job for read in reads}) == 2
        servers.tick(READ_AGAIN / 2)
        assert servers.take(ReadStripes, source=0) == []

    def test_the_next_chunk_follows_at_once_where_nobody_lacks_anything(self) -> None:
        servers, _ = self.replaced()
        servers.tick(0.1)
        first = servers.take(ReadStripes, source=0)
        servers.hand(*first)
        servers.hand(*servers.take(Values, target=0))
        second = servers.take(ReadStripes, source=0)
        found = [as_array(e.frames[0], np.uint32, (2,)).tolist() for e in second]
        assert found == [[4, 5], [4, 5], [6, 7], [6, 7]]

    def test_rebuilding_takes_a_share_of_the_time(self) -> None:
        servers, node = self.replaced(share=0.25)
        servers.tick(0.2)
        servers.deliver(ReadStripes, Values)
        node.throttle.note_request(servers.now + 0.5)
        assert servers.take(ReadStripes, source=0) == []
        servers.tick(3 * 0.2 - 0.01)
        assert servers.take(ReadStripes, source=0) == []
        servers.tick(0.02)
        assert servers.take(ReadStripes, source=0) != []

    def test_members_that_their_owner_lacks_are_added_later(self) -> None:
        servers, node = self.replaced(r=2)
        late = servers.replace(members(servers)[1].me.slot)
        assert late.recovery is not None
        servers.run(8.0, drop=lambda e: isinstance(e.message, Syndromes))
        assert late.recovery.left
        parity = node.replicator.parities[TABLES]
        blocks = np.arange(parity.blocks)
        assert parity.contains(0, 0, blocks).all()
        assert not parity.contains(0, 1, blocks).any()
        assert parity.whole(1, blocks).all()
        assert not parity.whole(0, blocks).any()
        self.finish(servers)
        servers.run(5.0)
        assert servers.wrong_parities() == []

    def test_parities_come_back_beside_rows(self) -> None:
        servers = job(2, 1, servers=4, chunk_rows=2)
        node = servers.replace(0)
        servers.tick()
        reads = [message_of(e, ReadStripes) for e in servers.take(ReadStripes, source=0)]
        assert [(read.member, read.rows) for read in reads if read.group == TABLES] == [(0, 2), (1, 2)]
        servers.run(5.0, drop=lambda e: isinstance(e.message, Syndromes))
        assert node.recovery is not None
        assert node.recovery.left
        assert node.stripes.lacking() == 0
        assert [wrong for wrong in servers.wrong_parities() if wrong.startswith("server 0:")] == []

    def test_parities_do_not_wait_for_each_other(self) -> None:
        """An owner lacks members of the first parities: the second ones need other servers."""
        servers, node = self.replaced(r=2)
        servers.fence(members(servers)[1].me.slot)
        servers.run(1.0)
        parity = node.replicator.parities[TABLES]
        assert parity.whole(1, np.arange(parity.blocks)).all()
        assert not parity.whole(0, np.arange(parity.blocks)).any()

    def test_who_lacks_members_is_not_asked_all_the_time(self) -> None:
        servers, _ = self.replaced(r=2)
        servers.replace(members(servers)[1].me.slot)
        reads: list[float] = []

        def note(envelope: Envelope) -> bool:
            if isinstance(envelope.message, ReadStripes) and envelope.source.slot == 0:
                reads.append(servers.now)
            return isinstance(envelope.message, Syndromes)

        servers.run(6.0, step=0.05, drop=note)
        late = [at for at in reads if at > START + 4.0]
        assert 4 < len(set(late)) <= 2.0 / READ_AGAIN * 2, "for each of two parities"

    def test_members_that_are_in_already_are_not_read_again(self) -> None:
        servers, node = self.replaced()
        self.finish(servers)
        parity = node.replicator.parities[TABLES]
        parity.forget(0, np.array([1]))
        parity.add(0, 0, np.array([1]), records_of(servers, 0, [1]))
        servers.tick(READ_AGAIN)
        servers.tick(READ_AGAIN)
        assert [message_of(e, ReadStripes).member for e in servers.take(ReadStripes, source=0)] == [1]
        self.finish(servers)
        assert servers.wrong_parities() == []

    def test_a_parity_that_is_lost_behind_the_last_one_rebuilt_comes_back_too(self) -> None:
        servers, node = self.replaced()
        self.finish(servers)
        for block in (5, 1, 3):
            node.replicator.parities[TABLES].forget(0, np.array([block]))
            self.finish(servers)
        assert servers.wrong_parities() == []


def flip(node: Node, block: int, parity: int = 0, group: int = TABLES) -> None:
    """Flip a bit of a parity."""
    shard = node.replicator.parities[group]
    shard.records[block * shard.placement.r + parity, 1] ^= 1 << 9


class TestScrubbing:
    """Hole 20: parities are compared with their members while training runs."""

    def test_nothing_is_scrubbed_unless_it_is_wanted(self) -> None:
        servers = job()
        servers.run(10.0)
        assert {node.stripes.scrubbed for node in servers} == {0}

    def test_all_stripes_are_checked_in_the_time_that_is_given(self) -> None:
        servers = job(scrub_seconds=8.0, chunk_rows=2)
        total = sum(len(parity.records) for parity in servers[0].replicator.parities.values())
        servers.run(7.9)
        assert total - 2 <= servers[0].stripes.scrubbed <= total
        servers.run(16.0)
        assert 2.5 * total < servers[0].stripes.scrubbed <= 3 * total + 2
        assert {node.stripes.wrong for node in servers} == {0}

    def test_every_stripe_has_its_turn(self) -> None:
        servers = job(2, 2, scrub_seconds=8.0, chunk_rows=3)
        read: set[tuple[int, int, int]] = set()
        for _ in range(80):
            servers.tick(0.1)
            for envelope in servers.take(ReadStripes, source=0):
                message = message_of(envelope, ReadStripes)
                blocks = as_array(envelope.frames[0], np.uint32, (message.rows,)).tolist()
                read |= {(message.group, message.member, block) for block in blocks}
                servers.hand(envelope)
            servers.deliver()
        plan = servers.plan
        assert read == {
            (group, member, block)
            for group, placement in enumerate(plan.placements)
            for member in range(placement.k)
            for block in range(placement.blocks(plan.groups[group].rows))
        }

    def test_a_flipped_bit_is_found(self) -> None:
        servers = job(scrub_seconds=4.0, chunk_rows=2)
        flip(servers[0], 3)
        servers.run(4.0)
        assert [node.stripes.wrong for node in servers] == [1, 0, 0]
        assert servers[0].stripes.repaired == 0, "with one parity nobody can tell which record is wrong"
        assert servers.take(Compare) == []

    def test_rows_that_change_meanwhile_are_not_wrong(self) -> None:
        servers = job(scrub_seconds=2.0, chunk_rows=4)
        chance = Random(2)
        for turn in range(40):
            for node in servers:
                node.push([turn % 6, 6 + turn % 5])
                if turn % 3:
                    node.flush()
            servers.tick(0.05)
            for _ in range(3):
                servers.jumble(chance)
        assert min(node.stripes.scrubbed for node in servers) > 10
        assert {node.stripes.wrong for node in servers} == {0}

    def test_scrubbing_waits_until_parities_are_rebuilt(self) -> None:
        servers = job(scrub_seconds=1.0)
        servers[0].replicator.parities[TABLES].forget(0, np.array([0]))
        for _ in range(10):
            servers.tick(1.0)
            servers.take(Values)
        assert servers[0].stripes.scrubbed == 0
        servers.run(2.0)
        assert servers[0].stripes.scrubbed > 0

    def test_one_check_at_a_time(self) -> None:
        servers = job(scrub_seconds=1.0, chunk_rows=2)
        servers.tick(1.0)
        first = servers.take(ReadStripes, source=0)
        servers.tick(0.2)
        assert servers.take(ReadStripes, source=0) == []
        servers.hand(*first)
        servers.deliver()
        servers.tick(0.2)
        assert servers.take(ReadStripes, source=0) != []

    def test_members_that_their_owner_lacks_are_not_compared(self) -> None:
        servers = job(2, 1, servers=4, scrub_seconds=2.0)
        flip(servers[0], 2)
        other = servers.replace(members(servers)[1].me.slot)
        assert other.recovery is not None
        servers.take()
        servers.run(6.0, drop=lambda e: isinstance(e.message, Syndromes))
        assert other.recovery.left
        parities = servers[0].replicator.parities
        assert 0 < servers[0].stripes.scrubbed <= 3 * parities[NETWORK].blocks
        assert servers[0].stripes.wrong == 0

    def test_parities_that_were_forgotten_meanwhile_are_not_compared(self) -> None:
        servers = job(scrub_seconds=1.0)
        servers.tick(1.0)
        servers[0].replicator.parities[TABLES].forget(0, np.array([1, 2]))
        blocks = servers[0].replicator.parities[TABLES].blocks
        servers.deliver(ReadStripes, Values)
        assert (servers[0].stripes.scrubbed, servers[0].stripes.wrong) == (blocks - 2, 0)


class TestVotes:
    """With several parities the others tell whether this one is wrong or a member is."""

    @pytest.mark.parametrize("r", [2, 3])
    @pytest.mark.parametrize("parity", [0, 1])
    def test_a_parity_that_the_others_do_not_bear_out_is_made_anew(self, r: int, parity: int) -> None:
        servers = job(3, r, scrub_seconds=4.0, chunk_rows=2)
        flip(servers[0], 1, parity)
        assert len(servers.wrong_parities()) == 1
        servers.run(6.0)
        assert (servers[0].stripes.wrong, servers[0].stripes.repaired) == (1, 1)
        assert servers.wrong_parities() == []

    def test_a_copy_of_the_network_is_repaired_in_the_same_way(self) -> None:
        servers = job(2, 2, scrub_seconds=2.0)
        for node in servers:
            node.install()
            node.flush()
        servers.deliver()
        servers[0].replicator.parities[NETWORK].records[0, 0] ^= 1
        servers.run(4.0)
        assert servers[0].stripes.repaired == 1
        assert servers.wrong_parities() == []

    def test_a_member_that_is_wrong_is_counted_and_left_alone(self) -> None:
        """Its row may have been trained on since."""
        servers = job(2, 2, scrub_seconds=2.0)
        servers[0].shards[TABLES].records[2, 1] ^= 1 << 3
        servers.run(6.0)
        assert sum(node.stripes.wrong for node in servers) >= 2
        assert sum(node.stripes.repaired for node in servers) == 0
        assert len(servers.wrong_parities()) == 2

    def test_all_others_have_to_agree_with_the_members(self) -> None:
        servers = job(2, 3, scrub_seconds=2.0)
        placement = servers.plan.placements[TABLES]
        owner = placement.member_server(0, 0, 0)
        flip(servers[0], 1, 0)
        flip(servers[placement.parity_server(owner, 0, 1)], 1, 1)
        servers.run(6.0)
        assert sum(node.stripes.repaired for node in servers) == 0
        assert len(servers.wrong_parities()) == 2

    def found(self, r: int = 2) -> tuple[Servers, list[Envelope]]:
        """Server 0 has found a wrong parity, in blocks 1 and 4, and asks the others."""
        servers = job(2, r, scrub_seconds=1000.0, servers=5)
        flip(servers[0], 1)
        flip(servers[0], 4)
        servers.tick(1.0)
        servers.deliver(ReadStripes, Values, Taken)
        assert servers[0].stripes.wrong == 2
        return servers, servers.take(Compare)

    def test_who_is_asked_what(self) -> None:
        servers, questions = self.found(3)
        placement = servers.plan.placements[TABLES]
        owner = placement.member_server(0, 0, 0)
        assert [e.target.slot for e in questions] == [placement.parity_server(owner, 0, t) for t in (1, 2)]
        for t, envelope in zip((1, 2), questions, strict=True):
            message = message_of(envelope, Compare)
            assert (message.group, message.parity, message.rows) == (TABLES, t, 2)
            assert as_array(envelope.frames[0], np.uint32, (2,)).tolist() == [1, 4]

    def answers(self, servers: Servers, questions: list[Envelope]) -> list[Envelope]:
        servers.hand(*questions)
        servers.deliver(ReadStripes, Values, Taken)
        return servers.take(Agreed)

    def test_an_answer_names_the_stripes_that_agree(self) -> None:
        servers, questions = self.found()
        flip(servers[questions[0].target.slot], 4, 1)
        (answer,) = self.answers(servers, questions)
        assert message_of(answer, Agreed).rows == 1
        assert as_array(answer.frames[0], np.uint32, (1,)).tolist() == [0]
        servers.hand(answer)
        servers.deliver(ReadStripes, Values)
        assert servers[0].stripes.repaired == 1, "of block 4 nobody can tell"

    def test_where_no_other_agrees_nothing_is_read(self) -> None:
        servers, questions = self.found()
        other = servers[questions[0].target.slot]
        for block in (1, 4):
            flip(other, block, 1)
        (answer,) = self.answers(servers, questions)
        servers.hand(answer)
        assert servers.take(ReadStripes, source=0) == []

    def test_a_parity_is_repaired_once(self) -> None:
        servers, questions = self.found()
        (answer,) = self.answers(servers, questions)
        servers.hand(answer, answer)
        servers.deliver(ReadStripes, Values)
        servers.hand(answer)
        servers.deliver(ReadStripes, Values)
        assert servers[0].stripes.repaired == 2
        assert servers.wrong_parities() == []

    def test_answers_of_parities_that_were_not_asked_do_not_count(self) -> None:
        servers, questions = self.found(3)
        first, second = self.answers(servers, questions)
        message = message_of(first, Agreed)
        own = Agreed(message.request, 0, 2)
        servers.hand(first, first, Envelope(first.source, first.target, own, first.frames))
        assert servers.take(ReadStripes, source=0) == [], "one of the two is missing"
        servers.hand(second)
        assert servers.take(ReadStripes, source=0) != []

    def test_an_answer_about_other_stripes_is_refused(self) -> None:
        servers, questions = self.found()
        request = message_of(questions[0], Compare).request
        with pytest.raises(ValueError, match="were not requested"):
            servers[0].stripes.take_vote(Agreed(request, 1, 1), [np.array([2], np.uint32)], servers.now)
        servers.hand(*self.answers(servers, questions))
        servers.deliver(ReadStripes, Values)
        assert servers[0].stripes.repaired == 2, "the right one still counts"

    def test_who_does_not_answer_in_time_is_not_waited_for(self) -> None:
        servers, questions = self.found()
        (answer,) = self.answers(servers, questions)
        servers.tick(10.0)
        servers.hand(answer)
        assert servers.take(ReadStripes, source=0) == []
        servers, questions = self.found()
        (answer,) = self.answers(servers, questions)
        servers.tick(9.9)
        servers.hand(answer)
        assert servers.take(ReadStripes, source=0) != []

    def test_without_anybody_to_ask_nothing_is_repaired(self) -> None:
        servers, questions = self.found()
        servers.fence(questions[0].target.slot)
        servers.take()
        servers.run(5.0)
        assert servers[0].stripes.repaired == 0

    def test_stripes_of_which_a_member_is_lacking_are_not_repaired(self) -> None:
        """A sum without it would be a wrong parity."""
        servers, questions = self.found()
        answers = self.answers(servers, questions)
        owner = servers.replace(members(servers)[1].me.slot)
        assert owner.recovery is not None
        owner.recovery.want(TABLES, np.array([2 * 4 + 1]), servers.now)
        owner.recovery.ask(servers.now)
        servers.deliver(Recover, ReadStripes, Values)
        servers.hand(*servers.take(Syndromes))
        servers.take()
        before = servers[0].replicator.parities[TABLES].get(0, np.array([1]))
        servers.hand(*answers)
        servers.deliver(ReadStripes, Values)
        assert servers[0].stripes.repaired == 1
        assert (servers[0].replicator.parities[TABLES].get(0, np.array([1])) == before).all()

    def test_stripes_of_which_a_member_is_lacking_do_not_agree(self) -> None:
        servers, questions = self.found()
        placement = servers.plan.placements[TABLES]
        other = questions[0].target.slot
        slot = next(s for s in range(5) if s == placement.member_server(other, 1, 1))
        servers.replace(slot)
        servers.take()
        (answer,) = self.answers(servers, questions)
        assert message_of(answer, Agreed).rows == 0

    def test_parities_that_were_forgotten_meanwhile_are_not_repaired(self) -> None:
        servers, questions = self.found()
        answers = self.answers(servers, questions)
        parity = servers[0].replicator.parities[TABLES]
        servers.hand(*answers)
        reads = servers.take(ReadStripes, source=0)
        parity.forget(0, np.array([1]))
        servers.hand(*reads)
        servers.deliver(Values)
        assert servers[0].stripes.repaired == 1
        assert not parity.whole(0, np.array([1]))[0]
