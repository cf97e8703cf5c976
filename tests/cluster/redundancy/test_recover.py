"""How a replacement brings its rows back (docs/protocol.md, "Recovery by syndromes"). What comes back is
compared, bit for bit, with what the dead server held after its last flush that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Envelope, as_array
from holdfast.cluster.protocol.messages import Peer, Redundancy
from holdfast.cluster.protocol.stripe_messages import (
    Differences,
    Forget,
    Lacking,
    ReadStripes,
    Recover,
    Syndromes,
    Values,
)
from holdfast.cluster.redundancy.parity import Records
from holdfast.cluster.redundancy.recover import Recovery
from tests.cluster.redundancy.harness import (
    NETWORK,
    START,
    TABLES,
    Node,
    Servers,
    lanes_of,
    message_of,
    plan_of,
)

AGAIN = 0.5


@pytest.fixture(autouse=True)
def two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On their way to each parity server: tables here are small."""
    monkeypatch.setattr("holdfast.cluster.redundancy.recover._MOST_SCANS", 2)


FIRST = 0.1
STUCK = 10.0


def trained(k: int = 2, r: int = 1, servers: int = 0, rows: int = 80, **options: Any) -> Servers:
    """A job whose rows and networks have changed, and all parity servers know of it."""
    job = Servers(plan_of(k=k, r=r, servers=servers, rows=rows, lanes=lanes_of(**options)))
    for node in job:
        node.install()
        node.push([0, 1, 3])
        node.push([1, 2])
        node.push([0], NETWORK)
        node.flush()
    job.deliver()
    return job


def recovery_of(node: Node) -> Recovery:
    assert node.recovery is not None
    return node.recovery


def want(node: Node, places: Sequence[int], group: int = TABLES) -> None:
    recovery_of(node).want(group, np.array(places, np.int64), node.now)
    recovery_of(node).ask(node.now)


def questions(servers: Servers) -> list[tuple[Peer, Recover, list[int]]]:
    """Who is asked what about which blocks; the questions are lost."""
    found = []
    for envelope in servers.take(Recover):
        message = message_of(envelope, Recover)
        found.append(
            (envelope.target, message, as_array(envelope.frames[0], np.uint32, (message.rows,)).tolist())
        )
    return found


def blocks_of(envelope: Envelope) -> list[int]:
    """The blocks of tables that are asked for."""
    message = message_of(envelope, Recover)
    return (
        as_array(envelope.frames[0], np.uint32, (message.rows,)).tolist() if message.group == TABLES else []
    )


def about(servers: Servers, block: int) -> list[Envelope]:
    """Questions about member 0 in a block of tables; others, which a scan asks, are lost."""
    asked = servers.take(Recover)
    return [e for e in asked if block in blocks_of(e) and 0 in message_of(e, Recover).without]


def is_back(servers: Servers, node: Node, group: int = TABLES, *, flush: int = 1) -> NDArray[np.bool_]:
    """Which records are what the last incarnation had after a flush."""
    dead = servers.dead[Peer("server", node.me.slot, node.me.incarnation - 1)]
    same: NDArray[np.bool_] = (node.shards[group].records == dead.flushed[flush][group]).all(1)
    return same


class TestRowsThatSomebodyWaitsFor:
    def test_a_replacement_lacks_all_rows(self) -> None:
        servers = trained()
        node = servers.replace(0)
        rows = sum(shard.rows for shard in node.shards)
        assert recovery_of(node).left == rows
        assert recovery_of(node).lacks(TABLES, np.array([3, 0])).tolist() == [True, True]

    def test_records_that_stand_for_no_row_are_not_lacking(self) -> None:
        servers = Servers(plan_of(k=2, r=1, rows=7))
        node = servers.replace(1)
        real = node.shards[TABLES].rows_of(np.arange(4)) < 7
        assert not real.all()
        assert recovery_of(node).lacks(TABLES, np.arange(4)).tolist() == real.tolist()

    def test_they_are_asked_for_at_once_and_once(self) -> None:
        servers = trained()
        node = servers.replace(0)
        servers.take()
        want(node, [6, 2, 6, 4])
        ((target, message, blocks),) = questions(servers)
        placement = servers.plan.placements[TABLES]
        assert target.slot == placement.parity_server(0, 0, 0)
        assert (message.group, message.parity, message.without) == (TABLES, 0, (0,))
        assert blocks == [1, 2, 3], "each once, ascending"
        want(node, [6, 2])
        assert questions(servers) == []
        want(node, [6, 8])
        assert [blocks for _, _, blocks in questions(servers)] == [[4]]

    def test_each_member_is_asked_of_its_own_parity_server(self) -> None:
        servers = trained(3, 1)
        node = servers.replace(0)
        servers.take()
        want(node, [0, 4, 5, 6])
        placement = servers.plan.placements[TABLES]
        assert {(t.slot, m.without, tuple(b)) for t, m, b in questions(servers)} == {
            (placement.parity_server(0, 0, 0), (0,), (0, 2)),
            (placement.parity_server(0, 1, 0), (1,), (1,)),
            (placement.parity_server(0, 2, 0), (2,), (1,)),
        }

    def test_they_are_back_before_all_others(self) -> None:
        servers = trained(chunk_rows=1)
        node = servers.replace(0)
        left = recovery_of(node).left
        want(node, [2, 6])
        servers.deliver(Recover, ReadStripes, Values)
        servers.hand(*servers.take(Syndromes))
        assert is_back(servers, node)[[2, 6]].all()
        assert not recovery_of(node).lacks(TABLES, np.array([2, 6])).any()
        assert recovery_of(node).lacks(TABLES, np.array([0, 4])).all()
        assert (recovery_of(node).left, recovery_of(node).recovered) == (left - 2, 2)

    def test_who_waits_for_several_is_served_when_all_are_back(self) -> None:
        servers = trained()
        node = servers.replace(0)
        want(node, [0, 1])
        servers.deliver(Recover, ReadStripes, Values)
        first, second = servers.take(Syndromes)
        servers.tick()  # a scan begins, and nobody waits for that
        servers.hand(first)
        assert node.served == 0
        servers.hand(second)
        assert node.served == 1

    def test_who_waits_for_rows_is_served_with_the_last_of_them(self) -> None:
        servers = Servers(plan_of(k=1, r=1, servers=2, rows=4))
        node = servers.replace(0)
        want(node, [0, 1])
        servers.deliver(Recover, ReadStripes, Values)
        servers.hand(*servers.take(Syndromes))
        assert recovery_of(node).left == 0
        assert node.served == 1

    def test_what_is_here_is_not_asked_for(self) -> None:
        servers = trained()
        node = servers.replace(0)
        servers.run(3.0)
        assert recovery_of(node).left == 0
        assert not recovery_of(node).lacks(TABLES, np.arange(4)).any()
        want(node, [0, 1])
        assert questions(servers) == []

    def test_a_group_without_parities_lacks_nothing(self) -> None:
        servers = trained()
        node = servers.replace(0)
        assert not recovery_of(node).lacks(7, np.arange(4)).any()

    def test_a_group_that_had_no_values_yet_is_left_out(self) -> None:
        """A worker will send them."""
        servers = Servers(plan_of(k=2, r=1))
        node = servers.replace(0)
        assert not node.shards[NETWORK].installed
        assert recovery_of(node).left == node.shards[TABLES].rows
        recovery_of(node).leave_out(7)
        assert recovery_of(node).left == node.shards[TABLES].rows, "a group without parities is not recovered"

    def test_rows_that_came_from_elsewhere_meanwhile_are_not_overwritten(self) -> None:
        servers = trained()
        node = servers.replace(0)
        want(node, [0, 2])
        servers.deliver(Recover, ReadStripes, Values)
        recovery_of(node).leave_out(TABLES)
        node.shards[TABLES].records[:] = 77
        servers.hand(*servers.take(Syndromes))
        assert (node.shards[TABLES].records == 77).all()
        assert recovery_of(node).recovered == 0
        assert recovery_of(node).left == node.shards[NETWORK].rows


class TestScan:
    """Behind what somebody waits for, a scan brings back all other rows."""

    def begun(self, **options: Any) -> tuple[Servers, Node]:
        """A replacement that lacks rows of tables, member 0 and 1, of which a scan can begin."""
        servers = trained(chunk_rows=3, **options)
        node = servers.replace(0)
        recovery_of(node).leave_out(NETWORK)
        servers.take()
        return servers, node

    def asked(self, servers: Servers) -> list[tuple[int, list[int]]]:
        return [(message.without[0], blocks) for _, message, blocks in questions(servers)]

    def answer(self, servers: Servers, seconds: float = 0.0) -> None:
        """Let all answers arrive at once, after some time."""
        servers.deliver(Recover, ReadStripes, Values)
        servers.tick(seconds)
        servers.hand(*servers.take(Syndromes))

    def test_two_chunks_are_on_their_way_to_each_parity_server(self) -> None:
        servers, node = self.begun()
        servers.tick(1.0)
        assert self.asked(servers) == [(0, [0, 1, 2]), (1, [0, 1, 2]), (0, [3, 4, 5]), (1, [3, 4, 5])]
        servers.tick(0.1)
        assert self.asked(servers) == []
        want(node, [20])
        assert self.asked(servers) == [(0, [10])], "nobody waits for the scan"

    @pytest.mark.parametrize("chunks", [1, 3])
    def test_only_so_many_chunks_are_on_their_way(self, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
        """Rows that a worker waits for queue behind them."""
        monkeypatch.setattr("holdfast.cluster.redundancy.recover._MOST_SCANS", chunks)
        servers, _ = self.begun(share=1.0)
        servers.tick(0.1)
        assert len(self.asked(servers)) == 2 * chunks

    def test_the_next_chunk_follows_an_answer(self) -> None:
        servers, node = self.begun()
        servers.tick(1.0)
        servers.deliver(Recover, ReadStripes, Values)
        of_first = servers.plan.placements[TABLES].parity_server(0, 0, 0)
        servers.hand(servers.take(Syndromes, source=of_first)[0])
        assert self.asked(servers) == [(0, [6, 7, 8])]
        assert node.served == 1

    def test_rows_that_were_asked_for_already_are_left_out(self) -> None:
        servers, node = self.begun()
        want(node, [2, 6, 8, 10])
        servers.take()
        servers.tick(FIRST + 0.01)
        assert self.asked(servers) == [(0, [0, 2]), (1, [0, 1, 2]), (0, [6, 7, 8]), (1, [3, 4, 5])]

    def test_rows_that_somebody_waits_for_come_first(self) -> None:
        servers, node = self.begun()
        want(node, [2])
        (question,) = servers.take(Recover)
        servers.tick(FIRST - 0.01)
        assert self.asked(servers) == []
        servers.hand(question)
        servers.deliver(ReadStripes, Values)
        servers.hand(*servers.take(Syndromes))
        assert len(self.asked(servers)) == 4

    def test_a_scan_does_not_wait_for_them_forever(self) -> None:
        servers, node = self.begun()
        want(node, [2])
        servers.take(Recover)
        servers.tick(FIRST + 0.01)
        assert len(self.asked(servers)) == 4

    def test_what_several_requests_wait_for_is_asked_for_together(self) -> None:
        servers, node = self.begun()
        for places in ([2, 5], [7, 2], [6]):
            recovery_of(node).want(TABLES, np.array(places), node.now)
        assert self.asked(servers) == []
        recovery_of(node).ask(node.now)
        assert self.asked(servers) == [(0, [1, 3]), (1, [2, 3])]
        recovery_of(node).ask(node.now)
        assert self.asked(servers) == []

    def test_while_workers_are_busy_a_scan_takes_a_share_of_the_time(self) -> None:
        servers, node = self.begun(share=0.2)
        node.throttle.note_request(servers.now)
        servers.tick()
        assert [len(blocks) for _, blocks in self.asked(servers)] == [3, 3], "a chunk of each parity server"
        servers, node = self.begun(share=0.2)
        node.throttle.note_request(servers.now)
        servers.tick()
        self.answer(servers, 0.1)
        assert self.asked(servers) == []
        node.throttle.note_request(servers.now)
        servers.tick(0.4 - 0.01)
        assert self.asked(servers) == []
        servers.tick(0.02)
        assert len(self.asked(servers)) == 2

    def test_a_scan_takes_all_of_it_when_nobody_trains(self) -> None:
        servers, node = self.begun(share=0.2)
        node.throttle.note_request(servers.now)
        node.throttle.hurry = True
        servers.tick()
        self.answer(servers, 0.1)
        assert len(self.asked(servers)) == 4

    def test_rows_that_somebody_waits_for_do_not_slow_the_scan_down(self) -> None:
        servers, node = self.begun(share=0.2)
        node.throttle.note_request(servers.now)
        want(node, [20])
        self.answer(servers, FIRST - 0.01)
        assert recovery_of(node).recovered == 1
        assert self.asked(servers) != []

    def test_many_unanswered_requests_stop_a_scan(self) -> None:
        servers, node = self.begun()
        for place in range(2, 26, 2):
            for _ in range(6):
                recovery_of(node)._asked[TABLES][place] = False
                want(node, [place])
        servers.take()
        servers.tick(FIRST + 0.01)
        assert self.asked(servers) == []

    @pytest.mark.parametrize("chunk", [1, 4, 1000])
    def test_all_rows_of_all_groups_come_back(self, chunk: int) -> None:
        servers = trained(chunk_rows=chunk)
        node = servers.replace(0)
        rows = recovery_of(node).left
        servers.run(10.0)
        assert (recovery_of(node).left, recovery_of(node).recovered) == (0, rows)
        assert all(is_back(servers, node, group).all() for group in (TABLES, NETWORK))
        assert recovery_of(node).lost() == ""


class TestSolving:
    """Invariant 2: a recovered row is, bit for bit, what it was after the last acknowledged update."""

    @pytest.mark.parametrize(
        ("k", "r", "servers", "dead"),
        [
            (1, 1, 2, [0]),
            (2, 1, 3, [1]),
            (4, 1, 6, [5]),
            (2, 2, 4, [0, 1]),
            (2, 2, 4, [0, 2]),
            (3, 2, 5, [1, 2]),
            (3, 2, 7, [0, 6]),
            (1, 2, 3, [0, 1]),
            (3, 3, 6, [0, 2, 3]),
            (2, 3, 5, [0, 1, 2]),
        ],
    )
    def test_as_many_servers_as_there_are_parities_may_die_at_once(
        self, k: int, r: int, servers: int, dead: list[int]
    ) -> None:
        job = trained(k, r, servers=servers, chunk_rows=5)
        for slot in dead:
            job.fence(slot)
        for slot in dead:
            job.settle(slot)
        nodes = [job.start(slot) for slot in dead]
        job.run(20.0)
        for node in nodes:
            assert recovery_of(node).left == 0
            assert recovery_of(node).lost() == ""
            assert all(is_back(job, node, group).all() for group in (TABLES, NETWORK))
        assert job.wrong_parities() == []

    def test_rows_of_others_may_change_meanwhile(self) -> None:
        servers = trained(3, 2, servers=6, chunk_rows=1)
        servers.fence(0)
        servers.fence(2)
        for slot in (0, 2):
            servers.settle(slot)
        nodes = [servers.start(slot) for slot in (0, 2)]
        for turn in range(60):
            for slot in (1, 3, 4, 5):
                servers[slot].push([turn % 5, 5 + turn % 4])
                servers[slot].flush()
            servers.tick(0.05)
            for _ in range(turn % 3):
                servers.hand(*servers.take()[:40])
        servers.run(60.0)
        for node in nodes:
            assert recovery_of(node).left == 0
            assert all(is_back(servers, node, group).all() for group in (TABLES, NETWORK))
        assert servers.wrong_parities() == []

    def test_only_what_counts_comes_back(self) -> None:
        """Of a flush that one parity server lacks nothing is left."""
        servers = trained(2, 2)
        servers[0].push([0, 1, 2, 3])
        servers[0].flush()
        servers.deliver(Differences, target=1)
        servers.take(Differences)
        servers.fence(0)
        assert servers.settle(0).flush == 1
        node = servers.start(0)
        servers.run(5.0)
        assert is_back(servers, node, flush=1).all()
        assert not is_back(servers, node, flush=2).all()

    def two_gone(self, **options: Any) -> tuple[Servers, Node, Node]:
        """Server 0 of a code of 2 + 2 has died, and one that has members of the same stripes."""
        servers = trained(2, 2, servers=5, **options)
        placement = servers.plan.placements[TABLES]
        other = placement.member_server(placement.parity_server(0, 0, 0), 0, 1)
        for slot in (0, other):
            servers.fence(slot)
        for slot in (0, other):
            servers.settle(slot)
        return servers, servers.start(0), servers.start(other)

    def test_where_another_member_is_lacking_two_parities_are_asked(self) -> None:
        servers, node, _ = self.two_gone()
        servers.take()
        want(node, [0, 4])
        first = about(servers, 0)
        assert [message_of(e, Recover).without for e in first] == [(0,)]
        servers.hand(*first)
        servers.deliver(ReadStripes, Values, Syndromes)
        placement = servers.plan.placements[TABLES]
        for t, envelope in enumerate(about(servers, 0)):
            message = message_of(envelope, Recover)
            assert envelope.target.slot == placement.parity_server(0, 0, t)
            assert (message.parity, message.without, blocks_of(envelope)) == (t, (0, 1), [0, 2])

    def half_answered(self) -> tuple[Servers, Node, Node, list[Envelope], Envelope]:
        """Two parity servers are to answer about place 0: the first has, the second is about to be asked."""
        servers, node, other = self.two_gone()
        servers.take()
        want(node, [0])
        servers.hand(*about(servers, 0))
        servers.deliver(ReadStripes, Values, Syndromes)
        one, two = about(servers, 0)
        servers.hand(one)
        servers.deliver(ReadStripes, Values)
        return servers, node, other, servers.take(Syndromes), two

    def test_syndromes_of_two_instants_are_not_solved(self) -> None:
        """Between the two answers the other's replacement has changed rows: the sums do not fit together."""
        servers, node, other, first, two = self.half_answered()
        other.replicator.changed(servers.now)
        other.flush()
        servers.deliver(Differences)
        servers.hand(two)
        servers.deliver(ReadStripes, Values)
        servers.hand(*first, *servers.take(Syndromes))
        assert recovery_of(node).recovered == 0
        again = [message_of(e, Recover) for e in about(servers, 0)]
        assert [(m.parity, m.without) for m in again] == [(0, (0, 1)), (1, (0, 1))]
        servers.run(10.0)
        assert is_back(servers, node).all()

    def test_what_the_replacement_itself_has_changed_meanwhile_does_not_matter(self) -> None:
        """The row that it asks for is not among that."""
        servers, node, _, first, two = self.half_answered()
        node.replicator.changed(servers.now)
        node.flush()
        servers.deliver(Differences)
        servers.hand(two)
        servers.deliver(ReadStripes, Values)
        servers.hand(*first, *servers.take(Syndromes))
        assert is_back(servers, node)[0]

    def test_where_a_parity_is_not_there_another_is_asked(self) -> None:
        servers = trained(2, 2, servers=5)
        placement = servers.plan.placements[TABLES]
        parity = servers[placement.parity_server(0, 0, 0)].replicator.parities[TABLES]
        parity.forget(0, np.array([1]))
        node = servers.replace(0)
        servers.take()
        want(node, [0, 2, 4])
        servers.hand(*servers.take(Recover))
        servers.deliver(ReadStripes, Values, Syndromes)
        assert is_back(servers, node)[[0, 4]].all()
        (again,) = about(servers, 1)
        message = message_of(again, Recover)
        assert again.target.slot == placement.parity_server(0, 0, 1)
        assert (message.parity, message.without, blocks_of(again)) == (1, (0,), [1])

    def test_stripes_are_asked_for_again_by_what_turned_out_to_be_lacking(self) -> None:
        """An answer names, for each stripe, all that is missing; the next question leaves out just that."""
        servers = trained(3, 3, servers=6, rows=120)
        node = servers.replace(0)
        servers.take()
        recovery_of(node).leave_out(NETWORK)
        want(node, [0, 3, 6, 9, 12])
        (question,) = servers.take(Recover)
        servers.hand(question)
        servers.deliver(ReadStripes, Values)
        (answer,) = servers.take(Syndromes)
        message = message_of(answer, Syndromes)
        lacking = {1: [1, 3], 2: [2, 3], -1: [4]}
        parts = tuple(Lacking(member, len(at)) for member, at in lacking.items())
        frames = [
            np.zeros(1, np.uint32),
            answer.frames[1][:1],
            *(np.array(at, np.uint32) for at in lacking.values()),
        ]
        less = Syndromes(message.request, 0, 1, message.without, parts)
        servers.hand(Envelope(answer.source, answer.target, less, frames))
        assert is_back(servers, node)[[0, 3, 6]].tolist() == [True, False, False]
        asked = [(blocks_of(e), message_of(e, Recover)) for e in servers.take(Recover, source=0)]
        single = [(b[0], m.without, m.parity) for b, m in asked if b in ([1], [2], [3], [4])]
        assert sorted(single) == [
            (1, (0, 1), 0),
            (1, (0, 1), 1),
            (2, (0, 2), 0),
            (2, (0, 2), 1),
            (3, (0, 1, 2), 0),
            (3, (0, 1, 2), 1),
            (3, (0, 1, 2), 2),
            (4, (0,), 1),
        ]

    def test_a_scan_goes_on_while_what_was_lacking_is_asked_for_again(self) -> None:
        servers, node, _ = self.two_gone(chunk_rows=2)
        servers.take()
        want(node, [15])
        assert len(servers.take(Recover)) == 1, "its answer does not come"
        servers.now += FIRST + 0.01
        node.tick(servers.now)
        first = [e for e in servers.take(Recover, source=0) if message_of(e, Recover).without == (0,)]
        assert [blocks_of(e) for e in first if message_of(e, Recover).group == TABLES] == [[0, 1], [2, 3]]
        servers.hand(*first)
        servers.deliver(ReadStripes, Values)
        servers.hand(*servers.take(Syndromes))
        asked = [
            (blocks_of(e), message_of(e, Recover).without)
            for e in servers.take(Recover, source=0)
            if message_of(e, Recover).group == TABLES
        ]
        assert [blocks for blocks, without in asked if without == (0,)] == [[4, 5], [6, 7]]
        assert [blocks for blocks, without in asked if len(without) == 2] == [[0, 1]] * 2 + [[2, 3]] * 2


class TestWhoDoesNotAnswer:
    def asked(self, r: int = 2) -> tuple[Servers, Node, Envelope]:
        servers = trained(2, r, servers=5, chunk_rows=1)
        node = servers.replace(0)
        servers.take()
        want(node, [0])
        (question,) = servers.take(Recover)
        recovery_of(node).leave_out(NETWORK)
        return servers, node, question

    def asks(self, servers: Servers, request: int) -> list[Peer]:
        """Who is asked again; what a scan asks is passed over."""
        return [e.target for e in servers.take(Recover) if message_of(e, Recover).request == request]

    def test_a_q_is_asked_again(self) -> None:
        servers, node, question = self.asked(1)
        request = message_of(question, Recover).request
        servers.tick(AGAIN - 0.01)
        assert self.asks(servers, request) == []
        assert node.doubted == []
        servers.tick(0.01)
        assert self.asks(servers, request) == [question.target]
        assert question.target in node.doubted
        servers.tick(AGAIN - 0.01)
        assert self.asks(servers, request) == []
        for _ in range(40):
            servers.tick(AGAIN)
            assert self.asks(servers, request) == [question.target], "there is nobody else to ask"

    def test_another_parity_server_is_asked_in_its_place(self) -> None:
        servers, _, _ = self.asked()
        placement = servers.plan.placements[TABLES]
        second = placement.parity_server(0, 0, 1)
        targets = []
        for _ in range(round(STUCK / 2 / AGAIN) + 1):
            servers.tick(AGAIN)
            targets.append({e.target.slot for e in servers.take(Recover) if 0 in blocks_of(e)})
        assert all(second not in found for found in targets[:-1])
        assert second in targets[-1]

    def wait(self, servers: Servers) -> None:
        """Nobody answers for so long that others are asked."""
        for _ in range(round(STUCK / 2 / AGAIN) + 1):
            servers.take()
            servers.tick(AGAIN)

    def test_what_it_could_not_say_the_other_one_does(self) -> None:
        servers, node, _ = self.asked()
        self.wait(servers)
        servers.deliver(Recover, ReadStripes, Values, Syndromes)
        assert is_back(servers, node)[0]

    def test_the_next_q_does_not_wait_for_it_first(self) -> None:
        servers, node, question = self.asked()
        placement = servers.plan.placements[TABLES]
        self.wait(servers)
        servers.take()
        want(node, [14])
        assert [e.target.slot for e in about(servers, 7)] == [placement.parity_server(0, 0, 1)]
        assert question.target.slot == placement.parity_server(0, 0, 0)

    def test_others_are_asked_about_all_rows_that_it_says_nothing_about(self) -> None:
        servers, node, _ = self.asked()
        want(node, [12])
        want(node, [14])
        self.wait(servers)
        second = servers.plan.placements[TABLES].parity_server(0, 0, 1)
        questions = [e for e in servers.take(Recover) if message_of(e, Recover).without == (0,)]
        asked = {blocks_of(e)[0]: e.target.slot for e in questions}
        assert {block: asked[block] for block in (0, 6, 7)} == {0: second, 6: second, 7: second}

    def test_a_scan_does_not_pause_for_the_time_that_it_has_waited(self) -> None:
        """To wait takes nothing from anybody."""
        servers = trained(2, 2, servers=5, chunk_rows=1, share=0.2)
        node = servers.replace(0)
        recovery_of(node).leave_out(NETWORK)
        servers.take()
        node.throttle.note_request(servers.now)
        servers.tick()
        assert len(servers.take(Recover)) == 2
        node.throttle.note_request(servers.now + 0.3)
        servers.tick(0.3)
        assert len([e for e in servers.take(Recover) if blocks_of(e) == [1]]) == 2

    def test_where_nobody_answers_they_are_asked_by_turns(self) -> None:
        servers, _, question = self.asked()
        asked = []
        for _ in range(4):
            self.wait(servers)
            asked.append([e.target == question.target for e in about(servers, 0)])
        assert asked == [[False], [True], [False], [True]]

    def test_who_answers_again_is_asked_first_again(self) -> None:
        servers, node, question = self.asked()
        self.wait(servers)
        self.wait(servers)
        servers.deliver(Recover, ReadStripes, Values)
        servers.hand(*servers.take(Syndromes, source=question.target.slot))
        assert is_back(servers, node)[0]
        servers.take()
        want(node, [14])
        assert [e.target for e in about(servers, 7)] == [question.target]

    def test_a_parity_server_that_is_not_there_is_asked_last(self) -> None:
        servers, node, question = self.asked()
        servers.fence(question.target.slot)
        servers.take()
        want(node, [14])
        placement = servers.plan.placements[TABLES]
        assert [e.target.slot for e in about(servers, 7)] == [placement.parity_server(0, 0, 1)]


class TestLost:
    """A stripe with fewer than k records left is reported as lost, never guessed (hole 17)."""

    def two_gone(self, **options: Any) -> tuple[Servers, Node, Node]:
        servers = trained(2, 1, servers=6, **options)
        for slot in (0, 1):
            servers.fence(slot)
        for slot in (0, 1):
            servers.settle(slot)
        return servers, servers.start(0), servers.start(1)

    def expected(self, servers: Servers, slot: int) -> NDArray[np.int64]:
        """Places of a server whose stripes have another record at the other one."""
        placement, other = servers.plan.placements[TABLES], 1 - slot
        shard = servers[slot].shards[TABLES]
        places = np.arange(len(shard.records))
        rows = shard.rows_of(places)
        stripes = rows // placement.k
        gone = placement.parity_owner(stripes, 0) == other
        for m in range(placement.k):
            gone |= placement.owner(stripes * placement.k + m) == other
        found: NDArray[np.int64] = places[gone & (rows < shard.plan.rows)]
        return found

    def test_exactly_the_rows_that_cannot_be_recovered_are_named(self) -> None:
        servers, *nodes = self.two_gone()
        servers.run(10.0)
        assert recovery_of(nodes[0]).recovered > 0, "server 0 has stripes without server 1"
        for node in nodes:
            places = self.expected(servers, node.me.slot)
            rows = sorted(node.shards[TABLES].rows_of(places).tolist())
            assert len(places) > 0
            assert sorted(row for group, lost in node.lost if group == TABLES for row in lost) == rows
            found = np.sort(np.concatenate(recovery_of(node).lost_rows(TABLES)))
            assert found.tolist() == rows
            assert recovery_of(node).lacks(TABLES, places).all()
            others = np.setdiff1d(np.arange(len(node.shards[TABLES].records)), places)
            assert is_back(servers, node)[others].all()
            assert not node.shards[TABLES].records[places].any(), "nothing is guessed"

    def test_how_it_is_said(self) -> None:
        servers, node, _ = self.two_gone()
        servers.run(10.0)
        rows = sorted(node.shards[TABLES].rows_of(self.expected(servers, 0)).tolist())
        first = ", ".join(map(str, rows[:5]))
        assert f"{len(rows)} rows of tables ({first}, …)" in recovery_of(node).lost()
        assert recovery_of(node).lost_rows(5) == ()

    def test_few_rows_are_all_named(self) -> None:
        servers = Servers(plan_of(k=2, r=1, servers=4, rows=16))
        for slot in (0, 1):
            servers.fence(slot)
        for slot in (0, 1):
            servers.settle(slot)
        node = servers.start(0)
        servers.start(1)
        servers.run(10.0)
        (found,) = [sorted(np.concatenate(recovery_of(node).lost_rows(TABLES)).tolist())]
        assert recovery_of(node).lost() == f"{len(found)} rows of tables ({', '.join(map(str, found))})"
        assert len(found) <= 5

    def test_it_is_tried_three_times_before(self) -> None:
        """What one server said may be older than what another said."""
        servers, node, _ = self.two_gone()
        servers.take()
        place = int(self.expected(servers, 0)[0])
        tries = 0
        for _ in range(12):
            want(node, [place])
            asked = [e for e in servers.take(Recover) if e.source == node.me]
            tries += len(
                [e for e in asked if place // 2 in blocks_of(e) and message_of(e, Recover).rows == 1]
            )
            servers.hand(*asked)
            servers.deliver(ReadStripes, Values, Syndromes)
            if any(node.shards[TABLES].rows_of(np.array([place]))[0] in rows for _, rows in node.lost):
                break
            servers.tick(0.25)
        else:
            raise AssertionError("it is not reported")
        assert tries == 3
        assert servers.now == START + 2 * 0.5

    def test_a_row_that_went_back_is_there_while_others_are_still_lacking(self) -> None:
        servers, node, _ = self.two_gone(chunk_rows=1)
        place = int(self.expected(servers, 0)[0])
        saved = SavedCopy([shard.records + 5 for shard in node.shards], 1)
        saved.ready = True
        recovery_of(node).saved = saved
        want(node, [place])
        for _ in range(8):
            asked = [e for e in servers.take(Recover, source=0) if blocks_of(e) == [place // 2]]
            servers.hand(*asked)
            servers.deliver(ReadStripes, Values, Syndromes)
            node.tick(servers.now)
            servers.now += 0.25
        assert recovery_of(node).left > 5
        assert recovery_of(node).lacks(TABLES, np.array([place, place + 4])).tolist() == [False, True]
        assert (node.shards[TABLES].records[place] == 5).all()


class SavedCopy:
    """What was last saved of a server's rows."""

    def __init__(self, records: Sequence[Records], version: int) -> None:
        self.records, self.version = records, version
        self.ready = False
        self.asked = 0

    def get(self) -> tuple[Sequence[Records], Redundancy] | None:
        self.asked += 1
        return (self.records, Redundancy(version=self.version, version_samples=90)) if self.ready else None


class TestGoingBack:
    """``beyond="rows"``: lost rows get what was last saved of them."""

    def lost(self, *, version: int = 3, network: bool = False) -> tuple[Servers, Node, SavedCopy]:
        """Servers 0 and 1 have died, and 1 has lost rows; with ``network``, those of the network, too."""
        servers = trained(2, 1, servers=4)
        dead = (0, 1)
        saved: dict[int, SavedCopy] = {}
        for slot in dead:
            saved[slot] = SavedCopy([records + 1 for records in servers[slot].flushed[1]], version)
            servers.fence(slot)
        for slot in dead:
            servers.settle(slot)
        for slot in dead:
            node = servers.start(slot)
            recovery_of(node).saved = saved[slot]
            if not network:
                recovery_of(node).leave_out(NETWORK)
                node.shards[NETWORK].records[:] = (
                    servers.dead[Peer("server", slot, 1)].shards[NETWORK].records
                )
        servers.run(10.0)
        return servers, servers[1], saved[1]

    def test_rows_wait_until_what_was_saved_is_read(self) -> None:
        _, node, saved = self.lost()
        assert saved.asked > 5
        assert recovery_of(node).left == sum(len(rows) for group, rows in node.lost if group == TABLES)
        assert recovery_of(node).went_back == Redundancy()

    def test_lost_rows_get_what_was_saved(self) -> None:
        servers, node, saved = self.lost()
        rows = np.concatenate(recovery_of(node).lost_rows(TABLES))
        places = servers.plan.placements[TABLES].place(rows)
        served = node.served
        saved.ready = True
        node.shards[TABLES].take_marks()
        servers.tick()
        assert recovery_of(node).left == 0
        assert (node.shards[TABLES].records[places] == saved.records[TABLES][places]).all()
        others = np.setdiff1d(np.arange(len(saved.records[TABLES])), places)
        assert is_back(servers, node)[others].all()
        back = recovery_of(node).went_back
        assert (back.went_back, back.version, back.version_samples) == (len(rows), 3, 90)
        assert node.served == served + 1
        assert np.sort(node.shards[TABLES].take_marks()).tolist() == np.sort(rows).tolist(), (
            "to be saved again"
        )
        assert recovery_of(node).saved is None, "it takes as much memory as the rows"

    def test_parities_forget_what_the_rows_were(self) -> None:
        servers, _, saved = self.lost()
        saved.ready = True
        servers.tick()
        assert len(servers.take(Forget)) > 0

    def test_parities_are_rebuilt_from_what_was_saved(self) -> None:
        servers, _, saved = self.lost()
        saved.ready = True
        other = recovery_of(servers[0]).saved
        assert isinstance(other, SavedCopy)
        other.ready = True
        servers.run(20.0)
        assert servers.wrong_parities() == []
        assert {node.stripes.lacking() for node in servers} == {0}

    def test_a_network_that_no_version_has_is_lost(self) -> None:
        """Only workers know its first values."""
        servers, node, saved = self.lost(version=0, network=True)
        assert any(group == NETWORK for group, _ in node.lost)
        saved.ready = True
        left = recovery_of(node).left
        servers.tick()
        assert recovery_of(node).network_lost
        assert recovery_of(node).left == left

    def test_rows_of_the_network_are_not_counted(self) -> None:
        servers, node, saved = self.lost(network=True)
        saved.ready = True
        servers.tick()
        assert any(group == NETWORK for group, _ in node.lost)
        assert recovery_of(node).went_back.went_back == sum(
            len(rows) for group, rows in node.lost if group == TABLES
        )
        assert not recovery_of(node).network_lost
        assert recovery_of(node).left == 0

    def test_tables_go_back_to_their_first_values(self) -> None:
        servers, node, saved = self.lost(version=0)
        saved.ready = True
        servers.tick()
        assert recovery_of(node).left == 0
        assert recovery_of(node).went_back.version == 0


class TestAnswersThatDoNotFit:
    def answered(self) -> tuple[Servers, Node, Envelope]:
        """An answer about blocks 0, 1 and 2 that is about to arrive."""
        servers = trained(2, 2, servers=5)
        node = servers.replace(0)
        servers.take()
        want(node, [0, 2, 4])
        servers.deliver(Recover, ReadStripes, Values)
        (answer,) = servers.take(Syndromes)
        return servers, node, answer

    def refused(self, node: Node, source: Peer, message: Syndromes, frames: Sequence[Any]) -> None:
        with pytest.raises(ValueError, match="syndromes"):
            recovery_of(node).receive(source, message, frames, 0.0)
        assert recovery_of(node).recovered == 0

    def test_they_change_nothing(self) -> None:
        servers, node, answer = self.answered()
        _, records = answer.frames
        message = message_of(answer, Syndromes)
        number, without = message.request, message.without

        def syndromes(rows: int, *lacking: Lacking) -> Syndromes:
            return Syndromes(number, 0, rows, without, lacking)

        def blocks(*numbers: int) -> NDArray[np.uint32]:
            return np.array(numbers, np.uint32)

        stranger = Peer("server", (answer.source.slot + 1) % 5, 1)
        if stranger == node.me:
            stranger = Peer("server", 1, 1)
        self.refused(node, stranger, message, answer.frames)
        self.refused(node, answer.source, syndromes(2), [blocks(0, 1), records[:2]])
        self.refused(node, answer.source, syndromes(3), [blocks(0, 1, 3), records])
        one_more = [blocks(0, 1), records[:2], blocks(3)]
        self.refused(node, answer.source, syndromes(2, Lacking(1, 1)), one_more)
        unknown = [blocks(0, 1), records[:2], blocks(2)]
        self.refused(node, answer.source, syndromes(2, Lacking(2, 1)), unknown)
        twice = [blocks(0), records[:1], blocks(1), blocks(2)]
        self.refused(node, answer.source, syndromes(1, Lacking(1, 1), Lacking(1, 1)), twice)
        self.refused(node, answer.source, Syndromes(number, 0, 3, ()), answer.frames)
        servers.hand(answer)
        assert recovery_of(node).recovered == 3, "the right one still counts"
        assert is_back(servers, node)[[0, 2, 4]].all()

    def test_answers_that_nobody_waits_for_are_passed_over(self) -> None:
        servers, node, answer = self.answered()
        message = message_of(answer, Syndromes)
        recovery = recovery_of(node)
        old = Peer("server", answer.source.slot, 9)
        for source, request, parity in (
            (answer.source, 999, 0),
            (answer.source, message.request, 1),
            (old, message.request, 0),
        ):
            other = Syndromes(request, parity, 3, message.without)
            recovery.receive(source, other, answer.frames, 0.0)
        assert recovery.recovered == 0
        servers.hand(answer, answer)
        assert recovery.recovered == 3

    def test_one_answer_of_two_can_come_twice(self) -> None:
        servers = trained(2, 2, servers=5)
        placement = servers.plan.placements[TABLES]
        other = placement.member_server(placement.parity_server(0, 0, 0), 0, 1)
        for slot in (0, other):
            servers.fence(slot)
        for slot in (0, other):
            servers.settle(slot)
        node = servers.start(0)
        servers.start(other)
        servers.take()
        want(node, [0])
        servers.hand(*about(servers, 0))
        servers.deliver(ReadStripes, Values, Syndromes)
        servers.hand(*about(servers, 0))
        servers.deliver(ReadStripes, Values)
        one, two = servers.take(Syndromes)
        servers.hand(one, one)
        assert recovery_of(node).recovered == 0
        servers.hand(two)
        assert is_back(servers, node)[0]
