"""Views: numbered in order, and durable before anybody hears of an epoch."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Position, ServerInView, View, ViewNumber
from holdfast.cluster.supervisor.views import Durable, Views
from holdfast.sim.cluster import counting_plan
from holdfast.sim.storage import MemoryStorage

PLAN = counting_plan(servers=3, workers=2, atomic=False)


class Case:
    def __init__(self, storage: MemoryStorage | None = None) -> None:
        self.storage = storage or MemoryStorage()
        self.told: list[View] = []
        self.views = Views(PLAN, self.storage, self.tell)

    def tell(self, view: View) -> None:
        assert self.storage.state is not None
        assert self.storage.state.epoch == view.number.epoch, "durable before anybody hears of it"
        assert self.storage.state.servers == tuple(s.incarnation for s in view.servers)
        assert self.storage.state.workers == tuple(w.incarnation for w in view.workers)
        self.told.append(view)


@pytest.fixture
def case() -> Case:
    return Case()


def test_the_first_view(case: Case) -> None:
    now = case.views.now
    assert (now.number, now.phase) == (ViewNumber(1), "starting")
    assert [(s.slot, s.incarnation, s.starts) for s in now.servers] == [(n, 1, False) for n in range(3)]
    assert [(w.slot, w.incarnation, w.starts) for w in now.workers] == [(n, 1, False) for n in range(2)]
    assert not case.views.began
    assert case.told == []


def test_views_are_counted_within_an_epoch(case: Case) -> None:
    assert case.views.next_number() == ViewNumber(1, 1)
    case.views.change(phase="running")
    case.views.change(cut=3)
    assert [view.number for view in case.told] == [ViewNumber(1, 1), ViewNumber(1, 2)]
    assert (case.views.now.phase, case.views.now.cut) == ("running", 3)
    assert case.told[-1] is case.views.now


def test_one_server_or_worker_differs(case: Case) -> None:
    before = case.views.now
    case.views.change_server(1, endpoint="x")
    case.views.change_worker(0, settle=4)
    now = case.views.now
    assert now.servers == (before.servers[0], replace(before.servers[1], endpoint="x"), before.servers[2])
    assert now.workers == (replace(before.workers[0], settle=4), before.workers[1])


def test_beginning_is_durable_and_happens_once(case: Case) -> None:
    case.views.begin()
    assert case.views.began
    assert case.storage.state is not None
    assert (case.storage.state.began, case.storage.state.epoch) == (True, 2)
    case.views.begin()
    assert case.storage.state.epoch == 2
    assert case.views.next_number() == ViewNumber(2, 0)
    case.views.change(phase="running")
    assert case.views.now.number == ViewNumber(2, 0)


def test_a_server_is_replaced_and_its_successor_starts(case: Case) -> None:
    case.views.change_server(1, endpoint="old", starts=True)
    case.views.replace_server(1)
    assert case.views.now.servers[1] == ServerInView(1, 2)
    assert case.views.now.number == ViewNumber(2, 0)
    case.views.start_server(1, "new")
    entry = case.views.now.servers[1]
    assert entry == ServerInView(1, 2, "new", starts=True, since=ViewNumber(3))
    assert case.views.now.number == ViewNumber(3, 0)
    assert case.storage.state is not None
    assert case.storage.state.started == (entry,)


def test_a_worker_is_replaced_and_keeps_the_number_of_its_test(case: Case) -> None:
    case.views.change_worker(1, test=7, starts=True, sequence=4, batch=Position(0, 4))
    case.views.replace_worker(1)
    entry = case.views.now.workers[1]
    assert (entry.incarnation, entry.test, entry.starts, entry.sequence) == (2, 7, False, 0)
    assert case.views.now.number == ViewNumber(2, 0)


def test_a_supervisor_that_comes_back_says_the_same(case: Case) -> None:
    case.views.begin()
    for slot in (0, 1, 1):
        case.views.replace_server(slot)
        case.views.start_server(slot, f"at {slot}")
    case.views.replace_worker(0)
    case.views.replace_server(0)
    second = Case(case.storage)
    assert second.views.began
    assert second.views.now.number > case.views.now.number
    assert second.views.now.number.revision == 0
    assert second.views.now.servers == case.views.now.servers
    assert second.views.now.servers[1].starts
    assert not second.views.now.servers[0].starts, "another has been asked for since"
    assert [w.incarnation for w in second.views.now.workers] == [2, 1]
    assert case.storage.state is not None
    assert [entry.slot for entry in case.storage.state.started] == [0, 1], "one for each slot"


def test_what_is_kept_has_defaults() -> None:
    assert Durable() == Durable(epoch=0, servers=(), workers=(), endpoint="", began=False, started=())
