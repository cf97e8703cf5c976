"""One supervisor at a time, and what it stored is never lost: whatever the network and the machines do."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Ballot, Board, Claim, Claimed, Deposit, Peer, VaultAt
from holdfast.cluster.protocol.tenure import Tenure
from holdfast.cluster.protocol.vault import Vault

LEASE = 2.0
ME = Peer("supervisor")


@dataclass
class Holder:
    """A supervisor that counts: each state is the one before plus 1."""

    number: int
    tenure: Tenure
    machine: int
    paused_until: float = 0.0
    is_dead: bool = False
    storing: int = 0
    value: int | None = None


@dataclass
class World:
    """Vaults, holders and a network, on virtual time. A machine has one vault at a time; a machine that comes
    back has a new one, of which the newest holder hears sooner or later."""

    seed: int
    machines: int = 5
    kind: type[Vault] = Vault
    tenure: type[Tenure] = Tenure
    now: float = 0.0
    messages: list[tuple[float, int, Envelope, int]] = field(default_factory=list)
    acted: int = 0
    offices: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.vaults: dict[int, Vault] = {}
        self.home: list[int] = []
        """The machine of each vault that there ever was."""
        self.at: dict[int, VaultAt] = {}
        """The vault of each machine that is not dead."""
        self.lost: set[int] = set()
        """Machines that were given up. Some of them live on, and so do their vaults."""
        for machine in range(self.machines):
            self.open_vault(machine)
        self.board = tuple(self.at.values())
        """Where a new holder begins, as far as the launcher knows."""
        self.boards: list[Board] = [self.board]
        """All that were ever wanted."""
        self.replaced = 0
        self.side: dict[int, int] = {}
        """Machines that do not reach those on other sides."""
        self.holders: list[Holder] = []
        self.count = 0
        self.confirmed = 0

    def open_vault(self, machine: int) -> None:
        slot = len(self.home)
        self.home.append(machine)
        self.vaults[slot] = self.kind(Peer("vault", slot), LEASE)
        self.at[machine] = VaultAt(slot, f"machine {machine}")

    def add_holder(self) -> None:
        machine = self.random.choice([i for i in range(self.machines) if i not in self.lost])
        number = len(self.holders) + 1
        tenure = self.tenure(ME, self.board, self.random.getrandbits(40), LEASE)
        self.holders.append(Holder(number, tenure, machine))

    def reachable(self, a: int, b: int) -> bool:
        return a == b or self.side.get(a, 0) == self.side.get(b, 0)

    def send(self, envelope: Envelope, a: int, b: int, holder: int) -> None:
        if not self.reachable(a, b):
            return
        for _ in range(self.random.choices([0, 1, 2], [0.1, 0.8, 0.1])[0]):
            late = (
                self.random.expovariate(1 / 0.3)
                if self.random.random() < 0.1
                else self.random.random() * 0.01
            )
            self.count += 1
            heapq.heappush(self.messages, (self.now + late, self.count, envelope, holder))

    def step(self, seconds: float) -> None:
        self.now += seconds
        while self.messages and self.messages[0][0] <= self.now:
            _, _, envelope, number = heapq.heappop(self.messages)
            holder = self.holders[number - 1]
            slot = envelope.target.slot if envelope.target.role == "vault" else envelope.source.slot
            home = self.home[slot]
            if slot not in self.vaults or not self.reachable(home, holder.machine):
                continue
            if envelope.target.role == "vault":
                vault = self.vaults[slot]
                vault.receive(envelope, self.now)
                for answer in vault.outbox:
                    self.send(answer, home, holder.machine, number)
                vault.outbox.clear()
            elif not holder.is_dead and holder.paused_until <= self.now:
                holder.tenure.receive(envelope, self.now)
        for holder in self.holders:
            if not holder.is_dead and holder.paused_until <= self.now:
                self.run(holder)

    def run(self, holder: Holder) -> None:
        tenure = holder.tenure
        tenure.tick(self.now)
        if tenure.stage == "over":
            holder.is_dead = True
        elif tenure.stage == "holding":
            if holder.value is None:
                holder.value = int(tenure.found or b"0")
                self.offices += 1
            if holder.storing and tenure.is_stored(holder.storing) and tenure.may_act(self.now):
                assert holder.value > self.confirmed, "it did not know what was stored before"
                self.confirmed, holder.storing = holder.value, 0
            if not holder.storing and self.random.random() < 0.3:
                holder.value += 1
                holder.storing = tenure.deposit(b"%d" % holder.value, self.now)
            if self.random.random() < 0.1:  # the newest, or what was said earlier arrives late
                tenure.replace(self.random.choice(self.boards[-2:]))
            if holder is self.holders[-1] and self.random.random() < 0.05:
                self.replaced += tenure.board != self.board
                self.board = tenure.board
        for envelope in tenure.outbox:
            self.send(envelope, holder.machine, self.home[envelope.target.slot], holder.number)
        tenure.outbox.clear()
        acting = [h for h in self.holders if not h.is_dead and h.tenure.may_act(self.now)]
        assert len(acting) <= 1, "two may act"
        self.acted += len(acting)

    def disturb(self) -> None:
        alive = [holder for holder in self.holders if not holder.is_dead]
        kinds = {
            "kill": 2,
            "pause": 2,
            "cut": 2,
            "split": 1,
            "heal": 2,
            "new": 3,
            "machine": 2,
            "back": 2,
            "": 10,
        }
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        if kind == "kill" and alive:
            self.random.choice(alive).is_dead = True
        elif kind == "pause" and alive:
            self.random.choice(alive).paused_until = self.now + self.random.choice([0.5, 2.5, 6.0])
        elif kind == "cut":
            self.side[self.random.randrange(self.machines)] = len(self.holders) + 2
        elif kind == "split":
            self.side = {machine: self.random.randrange(2) for machine in range(self.machines)}
        elif kind == "heal":
            self.side.clear()
        elif kind == "machine":
            for _ in range(self.random.choice([1, 2])):
                self.lose_machine()
            self.boards.append(tuple(self.at.values()))
        elif kind == "back":
            for machine in self.lost:
                self.open_vault(machine)
            self.lost.clear()
            self.boards.append(tuple(self.at.values()))
        elif kind == "new" and len(alive) < 3:
            self.add_holder()

    def lose_machine(self) -> None:
        """Give up a machine, if a majority of the vaults that decide is left then."""
        left = sum(vault in self.at.values() for vault in self.board)
        if len(self.at) == 1 or 2 * (left - 1) <= len(self.board):
            return
        lost = self.random.choice(list(self.at))
        self.lost.add(lost)
        gone = self.at.pop(lost).slot
        if self.random.random() < 0.5:
            del self.vaults[gone]
            for holder in self.holders:
                holder.is_dead = holder.is_dead or holder.machine == lost


def play(world: World, seconds: float = 60.0) -> World:
    world.add_holder()
    while world.now < seconds:
        world.step(0.05)
        if world.random.random() < 0.05:
            world.disturb()
    return world


@pytest.mark.parametrize("machines", [1, 3, 4, 5])
def test_one_at_a_time_and_nothing_stored_is_lost(machines: int) -> None:
    acted = offices = confirmed = replaced = 0
    for seed in range(60):
        world = play(World(seed, machines))
        acted, offices, confirmed = acted + world.acted, offices + world.offices, confirmed + world.confirmed
        replaced += world.replaced
    assert acted > 1000
    assert replaced > 30 or machines < 3
    assert offices > 100
    assert confirmed > 1000


def test_the_office_is_taken_over_soon() -> None:
    """After the last holder's lease has expired."""
    world = World(1, 3)
    world.random.random = lambda: 0.5  # type: ignore[method-assign]  # a network without faults
    world.random.choices = lambda *_: [1]  # type: ignore[method-assign]
    world.add_holder()
    while not world.confirmed:
        world.holders[0].tenure.deposit(b"1", world.now) if world.holders[
            0
        ].tenure.stage == "holding" else None
        world.confirmed = int(world.holders[0].tenure.is_stored(1))
        world.step(0.05)
    world.holders[0].is_dead = True
    died = world.now
    world.add_holder()
    while world.holders[1].tenure.stage == "claiming":
        world.step(0.05)
    assert LEASE / 2 < world.now - died < LEASE + 1
    assert world.holders[1].tenure.found == b"1"


# Each guard is needed: without it, a seed finds two holders, or a lost state.


def play_many(
    kind: type[Vault] = Vault, tenure: type[Tenure] = Tenure, machines: int = 3, seeds: int = 200
) -> None:
    for seed in range(seeds):
        play(World(seed, machines, kind, tenure))


class _NoLease(Vault):
    def _claim(self, claim: Claim, now: float) -> object:  # type: ignore[override]
        self._until = float("-inf")
        return super()._claim(claim, now)


class _NoPromise(Vault):
    def _deposit(self, deposit: Deposit, now: float) -> object:  # type: ignore[override]
        self._highest = min(self._highest, deposit.ballot)
        return super()._deposit(deposit, now)


class _Forgets(Vault):
    def _claim(self, claim: Claim, now: float) -> object:  # type: ignore[override]
        answer = super()._claim(claim, now)
        return replace(answer, by=Ballot(), number=0, state=b"") if isinstance(answer, Claimed) else answer


@pytest.mark.parametrize("broken", [_NoLease, _NoPromise, _Forgets])
def test_a_guard_taken_away_is_noticed(broken: type[Vault]) -> None:
    with pytest.raises(AssertionError, match=r"two may act|did not know"):
        play_many(broken)


class _NoMargin(Tenure):
    def may_act(self, now: float) -> bool:
        return self.stage == "holding"


def test_a_holder_that_does_not_look_at_its_lease_is_noticed() -> None:
    with pytest.raises(AssertionError, match="two may act"):
        play_many(tenure=_NoMargin)


class _AtOnce(Tenure):
    """Without majorities of both boards in between."""

    def _change_boards(self, now: float) -> None:
        if self._number and self.is_stored(self._number):
            self.board = self._boards[0]
            if self._wanted != self.board:
                self._boards = (self._wanted,)
                self.deposit(self._state, now)


class _DoesNotFollow(Tenure):
    """Takes the office without asking the boards that replaced the one which it knew."""

    def _take_office(self, now: float) -> None:
        super()._take_office(now)
        if self.stage == "claiming" and self._has_majority_of_the_first():
            last = max(self._claims.values(), key=lambda claimed: (claimed.by, claimed.number))
            self.stage, self.found, self._due = "holding", last.state, now

    def _has_majority_of_the_first(self) -> bool:
        return 2 * sum(vault.slot in self._claims for vault in self._first) > len(self._first)


@pytest.mark.parametrize("broken", [_AtOnce, _DoesNotFollow])
def test_boards_that_are_replaced_without_care_are_noticed(broken: type[Tenure]) -> None:
    with pytest.raises(AssertionError, match=r"two may act|did not know"):
        play_many(tenure=broken, machines=5, seeds=1000)


def test_one_majority_is_not_enough_for_another_ballot() -> None:
    """Answers to an earlier claim do not count for a later one."""
    vaults = [Peer("vault", i) for i in range(3)]
    tenure = Tenure(ME, tuple(VaultAt(vault.slot, "") for vault in vaults), 7, LEASE)
    tenure.tick(0.0)
    first = tenure.outbox[0].message
    assert isinstance(first, Claim)
    tenure.receive(Envelope(vaults[0], ME, Claimed(first.ballot)), 0.1)
    strange = Ballot(first.ballot.number + 1, 7)
    tenure.receive(Envelope(vaults[1], ME, Claimed(strange)), 0.1)
    assert tenure.stage == "claiming"
    tenure.receive(Envelope(Peer("vault", 9), ME, Claimed(first.ballot)), 0.1)
    assert tenure.stage == "claiming"
    tenure.receive(Envelope(vaults[1], ME, Claimed(first.ballot)), 0.1)
    stage: str = tenure.stage
    assert stage == "holding"
