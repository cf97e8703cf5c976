"""One supervisor at a time, and what it stored is never lost: whatever the network and the machines do."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Ballot, Claim, Claimed, Deposit, Peer
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
    """Vaults, holders and a network, on virtual time. Machine i has vault i."""

    seed: int
    machines: int = 5
    now: float = 0.0
    messages: list[tuple[float, int, Envelope, int]] = field(default_factory=list)
    acted: int = 0
    offices: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.vaults = {Peer("vault", i): Vault(Peer("vault", i), LEASE) for i in range(self.machines)}
        self.dead: set[int] = set()
        self.cut: dict[int, float] = {}
        self.holders: list[Holder] = []
        self.count = 0
        self.confirmed = 0

    def add_holder(self) -> None:
        machine = self.random.choice([i for i in range(self.machines) if i not in self.dead])
        number = len(self.holders) + 1
        tenure = Tenure(ME, tuple(self.vaults), self.random.getrandbits(40), LEASE)
        self.holders.append(Holder(number, tenure, machine))

    def reachable(self, a: int, b: int) -> bool:
        return a == b or all(self.cut.get(i, 0.0) <= self.now for i in (a, b))

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
            vault = envelope.target if envelope.target.role == "vault" else envelope.source
            if vault.slot in self.dead or not self.reachable(vault.slot, holder.machine):
                continue
            if envelope.target.role == "vault":
                machine = self.vaults[vault]
                machine.receive(envelope, self.now)
                for answer in machine.outbox:
                    self.send(answer, vault.slot, holder.machine, number)
                machine.outbox.clear()
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
        for envelope in tenure.outbox:
            self.send(envelope, holder.machine, envelope.target.slot, holder.number)
        tenure.outbox.clear()
        acting = [h for h in self.holders if not h.is_dead and h.tenure.may_act(self.now)]
        assert len(acting) <= 1, "two may act"
        self.acted += len(acting)

    def disturb(self) -> None:
        alive = [holder for holder in self.holders if not holder.is_dead]
        kind = self.random.choices(["kill", "pause", "cut", "new", "machine", ""], [2, 2, 2, 3, 0.3, 10])[0]
        if kind == "kill" and alive:
            self.random.choice(alive).is_dead = True
        elif kind == "pause" and alive:
            self.random.choice(alive).paused_until = self.now + self.random.choice([0.5, 2.5, 6.0])
        elif kind == "cut":
            self.cut[self.random.randrange(self.machines)] = self.now + self.random.choice([0.5, 3.0, 8.0])
        elif kind == "machine" and len(self.dead) < (self.machines - 1) // 2:
            lost = self.random.randrange(self.machines)
            self.dead.add(lost)
            for holder in self.holders:
                holder.is_dead = holder.is_dead or holder.machine == lost
        elif kind == "new" and len(alive) < 3:
            self.add_holder()


def play(world: World, seconds: float = 60.0) -> World:
    world.add_holder()
    while world.now < seconds:
        world.step(0.05)
        if world.random.random() < 0.05:
            world.disturb()
    return world


@pytest.mark.parametrize("machines", [1, 3, 4, 5])
def test_one_at_a_time_and_nothing_stored_is_lost(machines: int) -> None:
    acted = offices = confirmed = 0
    for seed in range(60):
        world = play(World(seed, machines))
        acted, offices, confirmed = acted + world.acted, offices + world.offices, confirmed + world.confirmed
    assert acted > 1000
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


def play_many(kind: type[Vault]) -> None:
    for seed in range(200):
        world = World(seed, 3)
        world.vaults = {peer: kind(peer, LEASE) for peer in world.vaults}
        play(world)


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


def test_a_holder_that_does_not_look_at_its_lease_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cluster.protocol.test_tenure.Tenure", _NoMargin)
    with pytest.raises(AssertionError, match="two may act"):
        play_many(Vault)


def test_one_majority_is_not_enough_for_another_ballot() -> None:
    """Answers to an earlier claim do not count for a later one."""
    vaults = [Peer("vault", i) for i in range(3)]
    tenure = Tenure(ME, vaults, 7, LEASE)
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
