"""The supervisor's state in the vaults of several machines, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.cluster.protocol.messages import Board, Peer, VaultAt
from holdfast.cluster.runtime.engines.agent import Agent
from holdfast.cluster.runtime.keys import JobKeys
from holdfast.cluster.supervisor import process
from holdfast.cluster.supervisor.process import STATE_FILE, VaultStorage
from holdfast.cluster.supervisor.views import Durable
from tests.cluster.runtime.engines.test_local import assignment

ME = Peer("supervisor")
KEYS = JobKeys(1, 1, 5)


class Machines:
    """Agents with a vault each."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder, self._job = folder, job
        self.agents: dict[int, Agent] = {}

    def open(self, slot: int) -> VaultAt:
        """Open a vault on a new machine."""
        agent = self.agents[slot] = Agent("127.0.0.1", STATE_FILE)
        keys = msgspec.json.encode(KEYS.of(Peer("vault", slot)))
        return VaultAt(slot, agent.open_vault(self._job, slot, keys))

    def close(self, slot: int) -> None:
        """Lose a machine."""
        agent = self.agents.pop(slot)
        agent.close(0.0)
        agent.remove()

    def storage(self, board: Board, name: str) -> VaultStorage:
        """That of a supervisor on a machine with this name."""
        (self._folder / name).mkdir()
        mine = msgspec.structs.replace(
            assignment(ME), vaults=board, folder=str(self._folder / name), keys=KEYS.of(ME)
        )
        return VaultStorage(mine)

    def known(self, name: str) -> Durable:
        """What the launcher reads there."""
        return msgspec.json.decode((self._folder / name / STATE_FILE).read_bytes(), type=Durable)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path, assignment(ME).plan.job)
    yield made
    for slot in list(made.agents):
        made.close(slot)


def until(condition: Callable[[], bool], holding: VaultStorage) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        holding.hold()
        time.sleep(0.01)


def test_the_state_outlives_all_machines_of_the_beginning(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines are lost one after the other, and others come. Who takes over begins with the vaults that the
    launcher knows."""
    board = tuple(machines.open(slot) for slot in range(3))
    first = machines.storage(board, "first")
    assert first.load() is None
    first.save(Durable(epoch=7))
    assert machines.known("first").vaults == board
    for lost in (0, 1):
        machines.close(lost)
        board = (*board[1:], machines.open(lost + 3))
        monkeypatch.setattr(process, "announced_vaults", lambda board=board: board)
        until(lambda: machines.known("first").vaults == board, first)  # noqa: B023
    first.close()
    machines.close(2)
    monkeypatch.setattr(process, "announced_vaults", lambda: ())
    second = machines.storage(machines.known("first").vaults, "second")
    found = second.load()
    assert found is not None
    assert found.epoch == 7
    second.save(msgspec.structs.replace(found, epoch=8))
    assert machines.known("second").vaults == board
    second.close()
