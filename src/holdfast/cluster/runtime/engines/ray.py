"""An engine that runs the processes of a job on the machines of a Ray cluster. Only this module imports Ray.

Ray places and starts one actor on each machine, an *agent*, and says when it is gone. All else is the job's
own: agents start the processes, ZeroMQ carries the data, and beats tell who is alive. An agent that Ray
cannot reach at the moment has not died, and neither have its processes. But new processes start elsewhere
meanwhile.

Agents outlive the controller, whose engine calls them. When it has been silent for ``_SUCCESSION_SECONDS``,
one of them starts another controller, beside itself. Controllers are numbered. Ray's store gives each number
to one of them only, and an agent that has heard of a newer one refuses the older.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import signal as signals
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray._private.state import state as ray_state
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError
from ray.experimental import internal_kv as kv
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from holdfast.cluster.protocol.messages import Board, Exit, Peer, VaultAt
from holdfast.cluster.runtime.engines.agent import NEWS, Agent, News
from holdfast.cluster.runtime.engines.base import Draining, Inheritance
from holdfast.cluster.runtime.engines.collected import Collected
from holdfast.cluster.runtime.engines.draining import Notices
from holdfast.cluster.runtime.engines.room import room_for, room_in_words
from holdfast.cluster.runtime.files import Journal, JournalCopy
from holdfast.cluster.runtime.keys import Keys
from holdfast.cluster.runtime.node import Announcement, Assignment
from holdfast.coding.machines import (
    best_spread,
    check_spread,
    check_spread_in_domains,
    evenly,
    spread_in_domains,
    survives,
    voters,
)
from holdfast.coding.moves import best_machine, next_move
from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError, JobFailed
from holdfast.events import EventLog
from holdfast.options import NODE_DOMAIN, Ray

NAMESPACE = "holdfast"
_AGENTS = "holdfast-agents"
"""The namespace of agents' names: the placement group's name, the machine's number and a random token."""
_LOOK_SECONDS = 0.25
_PATIENCE_SECONDS = 0.5
_PLACE_SECONDS = 60.0
_START_SECONDS = 60.0
_COMPILE_SECONDS = 300.0
_AGAIN_SECONDS = 0.2
_CALLS_AT_ONCE = 8
_CALL_SECONDS = 5.0
_SUCCESSION_SECONDS = 5.0
"""After so long without a sign of life of the controller, an agent starts another one."""
_TO_START_SECONDS = 10.0
"""How long it may take to start a process in which a controller is to run."""
_ORPHAN_SECONDS = 900.0
"""After so long without any controller, an agent ends itself and all processes of its machine."""
_ALIVE_SECONDS = 1.0


class _Replaced(Exception):
    """An agent refuses a controller: it knows a newer one."""


class _Records:
    """A few values by name that Ray's own store keeps for a job, as long as Ray's head is there.

    Args:
        job: the name of the job.
    """

    def __init__(self, job: str) -> None:
        self._job = job

    def put(self, name: str, value: bytes) -> None:
        """Store a value."""
        kv._internal_kv_put(self._key(name), value, overwrite=True, namespace=NAMESPACE)

    def get(self, name: str) -> bytes | None:
        """A value; None if there is none."""
        found: bytes | None = kv._internal_kv_get(self._key(name), namespace=NAMESPACE)
        return found

    def claim(self, controller: int) -> bool:
        """Take the number of a controller; False if somebody else has it."""
        key = self._key(f"controller/{controller}")
        return not kv._internal_kv_put(key, b"1", overwrite=False, namespace=NAMESPACE)

    def delete(self, name: str = "") -> None:
        """Remove a value; without a name, all of the job."""
        kv._internal_kv_del(self._key(name), del_by_prefix=not name, namespace=NAMESPACE)

    def _key(self, name: str) -> str:
        return f"{self._job}/{name}"


class _AgentActor(Agent):
    """An agent that knows where it is, and which controller it works for.

    Args:
        state_file: that of ``Agent``.
        job: the name of the job.
        number: of its machine.
        controller: the number of the controller that starts it.
    """

    def __init__(self, state_file: str, job: str, number: int, controller: int) -> None:
        self._where = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        super().__init__(self._where, state_file)
        self._job, self._number, self._controller = job, number, controller
        self._records = _Records(job)
        self._heard = time.monotonic()
        threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def where(self) -> tuple[str, str]:
        """Address and Ray's id of this machine."""
        return self._where, ray.get_runtime_context().get_node_id()

    def do(self, controller: int, method: str, *arguments: Any) -> Any:
        """Call a method for a controller. Raises ``_Replaced`` if there is a newer one."""
        if controller < self._controller:
            raise _Replaced(f"controller {controller} was replaced by {self._controller}")
        self._controller = controller
        self._heard = time.monotonic()
        return getattr(self, method)(*arguments)

    def _guard(self) -> None:
        """Start another controller when this one gives no sign of life, neither here nor to Ray."""
        patience = _SUCCESSION_SECONDS + self._number * _ALIVE_SECONDS  # not all agents at the same time
        heard, beat, due, now = self._heard, b"", self._heard + patience, self._heard
        while not self._ending:
            time.sleep(_ALIVE_SECONDS / 2)
            before, now = now, time.monotonic()
            if now > before + 2 * _ALIVE_SECONDS:
                due = now + patience  # this machine stood still itself, so it cannot tell who was silent
            elif self._heard != heard:
                heard = self._heard
            elif now > heard + _ORPHAN_SECONDS:
                self._end()
            elif now > heard + 2 * _ALIVE_SECONDS:
                with contextlib.suppress(Exception):  # Ray's head may be away for a while
                    seen = f"{heard} {self._records.get('alive')!r}".encode()
                    if seen != beat:
                        beat, due = seen, now + patience
                    elif now > due and not self._ending:
                        due = now + _TO_START_SECONDS
                        self._succeed()

    def _succeed(self) -> None:
        """Start another controller on this machine, unless another agent has done so."""
        hosted = self._records.get("hosted")
        if hosted is None:
            return  # the job is being removed
        self._controller += 1  # the one before may still live: it is refused from now on
        if self._records.claim(self._controller):
            path, arguments = msgspec.msgpack.decode(hosted)
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(self._job, namespace=NAMESPACE))
            _host(self._job, path, {**arguments, "number": self._controller}, _TO_START_SECONDS)

    def _end(self) -> None:
        self.close(1.0)
        self.remove()
        group = ray.util.get_current_placement_group()
        if group is not None:
            remove_placement_group(group)
        ray.kill(ray.get_runtime_context().current_actor)


@dataclass(eq=False)
class _Machine:
    """One bundle of the placement group, and the agent that runs in it now."""

    number: int
    name: str = ""
    """Its address; "" while no agent is up."""
    actor: Any = None
    heard: float = 0.0
    acknowledged: int = 0
    files: Collected | None = None
    """What its processes have written; None: nothing yet."""
    pids: dict[Peer, int] = field(default_factory=dict)
    state: bytes | None = None
    """The state file of a supervisor that runs there."""
    vault: VaultAt | None = None
    compiling: float | None = None
    """Since when it compiles what processes need."""
    starting: dict[Peer, tuple[Any, float]] = field(default_factory=dict)
    """Calls that start a process, and when they were made."""
    known: bool = False
    """Whether its agent has said what runs there."""


class RayEngine:
    """Starts and watches the processes of a job on a Ray cluster.

    Each machine has a vault. After the loss of a machine, the others decide about the supervisor's state, and
    so does that of a machine which is found in its place.

    Args:
        folder: the run's folder, to which what processes write is copied while they write it.
        options: the cluster, and what to use of it.
        placement: where rows lie: no machine gets so many servers that its loss would lose rows.
        workers: number of workers.
        state_file: the name of the file in which a supervisor tells where it listens.
        controller: the number of the controller that uses it.
        journal: the run's log, of which agents keep copies.
        inheritance: what the engine of an earlier controller has left, whose agents this one takes over.
        again: whether the job starts anew after a loss: then fewer machines may do.
    """

    most_vaults = 256

    def __init__(
        self,
        folder: Path,
        options: Ray,
        placement: Placement,
        workers: int,
        state_file: str,
        *,
        controller: int = 1,
        journal: Journal | None = None,
        inheritance: Inheritance | None = None,
        again: bool = False,
    ) -> None:
        self._folder = folder
        self._state_file = state_file
        self.launcher = controller
        self._journal = journal or Journal(folder / "events.jsonl")
        self._records = _Records(options.name or "")
        self._announced = Announcement()
        self._job = ""
        self._vault_keys: Sequence[Keys] = ()
        self._vaults_opened = 0
        self._ended: set[Peer] = set()
        """Processes that have ended under this controller."""
        self._superseded = False
        self._began = time.monotonic()
        self._targets: dict[int, int] = {}
        """Of a server that is to start anew: the machine."""
        self._options = options
        self._placement = placement
        self._lock = threading.Lock()
        self._peers: dict[Peer, _Machine] = {}
        self._exits: list[Exit] = []
        self._pending: list[Assignment] = []
        self._closing = threading.Event()
        self._group: PlacementGroup | None = None
        self._group_name = ""
        self._threads: list[threading.Thread] = []
        _connect(options)
        self._notices = Notices(_draining_addresses)
        count, domains = _machines_to_use(placement, options, inheritance, again=again)
        self._domain_of = _numbered(domains)
        """The failure domain of each machine. Whatever Ray finds in a machine's place is in the same one."""
        self.home = _spread(placement, self._domain_of[:count], options)
        """The machine of each server, as planned."""
        self._voters = frozenset(voters(self._domain_of))
        """The machines that have vaults."""
        self._machines = [_Machine(number) for number in range(len(domains))]
        self._inherits = inheritance is not None
        try:
            if inheritance is not None:
                self._inherit(inheritance)
            else:
                self._group_name = f"{options.name}/{secrets.token_hex(3)}"
                self._group = _place(self._group_name, domains, self._bundles(count, workers), options)
                self._come_up()
                record = Inheritance(self._group_name, count, len(domains) - count, domains)
                self._records.put("engine", msgspec.msgpack.encode(record))
        except BaseException:
            self.close(0.0)
            raise

    def _bundles(self, count: int, workers: int) -> list[dict[str, float]]:
        """What each machine must have free: enough for its processes and those of a lost domain."""
        servers = max(self.home.count(machine) for machine in range(count))
        workers_here = -(-workers // count)
        # The machines of the other domains share what ran in a lost one.
        domains = len(set(self._domain_of[:count]))
        room = room_for(self._options, servers=servers, workers=workers_here, machines=domains)
        return [room] * len(self._machines)

    def _inherit(self, left: Inheritance) -> None:
        """Take over the agents of an earlier controller."""
        self._group_name = left.group
        self._group = ray.util.get_placement_group(left.group)
        self._announced = Announcement(left.supervisor, left.vaults)
        self._job, self._vault_keys = left.job, left.vault_keys
        # The earlier one may have opened a further one on each machine, and told nobody.
        self._vaults_opened = max((v.slot for v in left.vaults), default=0) + 1 + len(self._machines)
        for machine in self._machines:
            machine.known = True  # if it has no agent, nothing runs there
        for number, actor in _agents(left.group):
            self._machines[number].actor, self._machines[number].known = actor, False
        self._start_threads()

    def _start_threads(self) -> None:
        for machine in self._machines:
            thread = threading.Thread(target=self._follow, args=(machine,), name="machine", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _come_up(self) -> None:
        self._start_threads()
        end = time.monotonic() + _START_SECONDS
        while any(not machine.name for machine in self._machines):
            if time.monotonic() > end:
                raise JobFailed(
                    f"no agent of Holdfast came up on a machine within {_START_SECONDS:.0f} s: see Ray's logs"
                )
            time.sleep(_LOOK_SECONDS / 10)
        end = time.monotonic() + _COMPILE_SECONDS  # then, each process compiles what it lacks
        while any(machine.compiling for machine in self._machines) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 10)

    # The interface of an engine

    def keep(self, charter: bytes) -> None:
        """Keep the charter in Ray's store."""
        self._records.put("charter", charter)

    def processes(self) -> frozenset[Peer] | None:
        """The processes that run or are to start; None while agents of an earlier controller have not said
        what runs, unless they are silent for long."""
        with self._lock:
            return frozenset(self._peers) | {each.me for each in self._pending} if self._knows_all() else None

    def _knows_all(self) -> bool:
        late = time.monotonic() > self._began + self._options.silent_seconds
        return not self._inherits or late or all(machine.known for machine in self._machines)

    def warm(self, role: str, slot: int | None = None) -> None:
        """Start a spare process of this role where this slot will run; without a slot, one on each
        machine."""
        with self._lock:
            up = [m for m in self._machines if m.actor is not None and m.name not in self._notices()]
            if slot is not None and up:
                up = [up[self._home_of(role, slot) % len(up)]]
            for machine in up:
                self._ask(machine, "warm", role)

    def start(self, assignment: Assignment) -> None:
        """Start a process on the machine that suits it best; if there is none now, as soon as there is."""
        with self._lock:
            self._start(assignment)

    def signal(self, peer: Peer, number: int) -> None:
        """Send a signal to a process. If its machine does not answer, one that is to be killed counts as
        ended."""
        with self._lock:
            self._pending = [each for each in self._pending if each.me != peer]
            machine = self._peers.get(peer)
            if machine is None:
                return
            if machine.actor is not None:
                self._ask(machine, "signal", peer, number)
            if number == signals.SIGKILL and not self._is_usable(machine):
                self._end(peer, Exit(peer, -number, "is on a machine that does not answer"))

    def pids(self) -> dict[Peer, int]:
        """The pids of the processes, as far as they are known."""
        with self._lock:
            return {peer: machine.pids[peer] for peer, machine in self._peers.items() if peer in machine.pids}

    def machine(self, peer: Peer) -> str:
        """The address of the machine on which a process runs; "" if it does not run."""
        if peer.role == "launcher":
            return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with self._lock:
            machine = self._peers.get(peer)
            return machine.name if machine is not None else ""

    def is_spread(self) -> bool | None:
        """Whether the code covers the loss of any machine as servers run now."""
        with self._lock:
            at = self._servers_at()
        if at is None or not self._placement.r:
            return None
        return survives(self._placement, at, self._domain_of)

    def misplaced(self) -> Peer | None:
        """A server that should start anew on another machine, so that the code covers more. Its next process
        starts there."""
        with self._lock:
            at = self._servers_at()
            usable = [machine.number for machine in self._usable()]
            if at is None or not usable or not self._placement.r:
                return None
            move = next_move(self._placement, at, self.home, usable, self._domain_of)
            if move is None:
                return None
            slot, self._targets[slot] = move
            return next(p for p in self._peers if (p.role, p.slot) == ("server", slot))

    def draining(self) -> Sequence[Draining]:
        """The machines that Ray says will be taken away."""
        until = self._notices()
        if not until:
            return ()
        with self._lock:
            elsewhere = any(machine.name not in until for machine in self._usable())
            return [
                Draining(machine.name, until[machine.name], tuple(self._peers_on(machine)), elsewhere)
                for machine in self._machines
                if machine.actor is not None and machine.name in until
            ]

    def _servers_at(self) -> list[int] | None:
        """The machine of each server; None if not all run."""
        at = {peer.slot: m.number for peer, m in self._peers.items() if peer.role == "server"}
        slots = range(self._placement.servers)
        return [at[slot] for slot in slots] if all(slot in at for slot in slots) else None

    def exited(self) -> list[Exit]:
        """The processes that have ended since the last call."""
        with self._lock:
            if self._superseded:
                raise JobFailed("another controller has taken over the job")
            self._check_starts()
            if self._vault_keys and self._knows_all():
                self._announce_vaults()
            pending, self._pending = self._pending, []
            for assignment in pending:
                self._start(assignment)
            exits, self._exits = self._exits, []
            return exits

    def read(self, name: str) -> bytes | None:
        """The supervisor's state file; None if it has not written it yet."""
        assert name == self._state_file
        with self._lock:
            at = next((m for peer, m in self._peers.items() if peer.role == "supervisor"), None)
            return at.state if at is not None else None

    def announce(self, supervisor: str) -> None:
        """Tell all processes, with the next look at each machine, that the supervisor has another address."""
        with self._lock:
            self._announced = msgspec.structs.replace(self._announced, supervisor=supervisor)

    def open_vaults(self, job: str, keys: Sequence[Keys]) -> Board:
        """Open a vault on each machine. A machine that is found later gets one, too."""
        for machine in self._machines:
            self._open_vault(machine, job, keys)
        self._job, self._vault_keys = job, keys
        return self._board()

    def _open_vault(self, machine: _Machine, job: str, keys: Sequence[Keys]) -> None:
        """Open a vault on a machine that has an agent, unless there are no keys for another one."""
        with self._lock:
            slot = self._vaults_opened
            if slot >= len(keys) or machine.actor is None or machine.number not in self._voters:
                return
            self._vaults_opened += 1
            call = self._ask(machine, "open_vault", job, slot, msgspec.json.encode(keys[slot]))
        endpoint = ray.get(call, timeout=_START_SECONDS)
        with self._lock:
            machine.vault = VaultAt(slot, endpoint)

    def _board(self, silent_seconds: float = float("inf")) -> Board:
        """The vaults on machines that have been heard of within so long."""
        since = time.monotonic() - silent_seconds
        return tuple(m.vault for m in self._machines if m.vault is not None and m.heard > since)

    def _announce_vaults(self) -> None:
        """Tell the supervisor which vaults there are. Those of silent machines are left out, long before Ray
        gives such a machine up; not if most are silent: then it is probably this one that is cut off.

        The lock is held.
        """
        board, heard = self._board(), self._board(self._options.silent_seconds)
        if 2 * len(heard) > len(board):
            leaving = {m.vault for m in self._machines if m.name in self._notices()}
            stay = tuple(vault for vault in heard if vault not in leaving)
            self._announced = msgspec.structs.replace(self._announced, vaults=stay or heard)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all processes and agents, and copy what they wrote last. Closing twice does no harm."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._notices.close()
        for thread in self._threads:
            thread.join(_PLACE_SECONDS)
        if self._superseded:
            return
        for name in ("charter", "engine"):  # from here on, nobody can take over
            self._records.delete(name)
        up = [machine for machine in self._machines if machine.actor is not None]
        calls = [self._ask(machine, "close", timeout_seconds) for machine in up]
        patience = timeout_seconds + 4 * _PATIENCE_SECONDS
        closed = set(ray.wait(calls, num_returns=len(calls), timeout=patience)[0]) if calls else set()
        for machine, call in zip(up, calls, strict=True):
            with contextlib.suppress(RayError):
                while call in closed and self._look(
                    machine, self._ask(machine, "look", *_known(machine), 0.0)
                ):
                    pass  # last words
                ray.get(self._ask(machine, "remove"), timeout=_PATIENCE_SECONDS)
            ray.kill(machine.actor)
            machine.actor = None
            self._journal.forget(machine.number)
        if self._group is not None:
            remove_placement_group(self._group)

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, machine: _Machine, method: str, *arguments: Any) -> Any:
        """Call a method of an agent; what it returns comes later."""
        return machine.actor.do.remote(self.launcher, method, *arguments)

    # Where processes run. The lock is held.

    def _home_of(self, role: str, slot: int) -> int:
        """Where a process is planned to run; the supervisor where there are fewest servers."""
        if role == "supervisor":
            return min(reversed(range(len(self._machines))), key=self.home.count)
        return self.home[slot] if role == "server" else slot

    def _is_usable(self, machine: _Machine) -> bool:
        """Whether a process may start there: the agent was heard of a moment ago."""
        silent = time.monotonic() - machine.heard
        return machine.actor is not None and bool(machine.name) and silent < self._options.silent_seconds / 2

    def _usable(self) -> list[_Machine]:
        """The machines on which processes may start: those that will be taken away only if there is no
        other."""
        usable = [machine for machine in self._machines if self._is_usable(machine)]
        return [machine for machine in usable if machine.name not in self._notices()] or usable

    def _peers_on(self, machine: _Machine) -> list[Peer]:
        return [peer for peer, at in self._peers.items() if at is machine]

    def _start(self, assignment: Assignment) -> None:
        machine = self._choose(assignment.me)
        if machine is None:
            self._pending.append(assignment)
            return
        self._peers[assignment.me] = machine
        call = self._ask(machine, "start", msgspec.json.encode(assignment))
        machine.starting[assignment.me] = call, time.monotonic()

    def _choose(self, peer: Peer) -> _Machine | None:
        usable = {machine.number: machine for machine in self._usable()}
        if not usable:
            return None
        target = self._targets.pop(peer.slot, None) if peer.role == "server" else None
        if target in usable:
            return usable[target]
        if peer.role == "server":
            at: list[int | None] = [None] * self._placement.servers
            for other, machine in self._peers.items():
                if other.role == "server" and other.slot != peer.slot:
                    at[other.slot] = machine.number
            home = self.home[peer.slot]
            # At the beginning the others are not there yet, but will be where they are planned.
            at = [self.home[slot] if machine is None else machine for slot, machine in enumerate(at)]
            ordered = sorted(usable, key=lambda number: (number != home, number))
            return usable[best_machine(self._placement, at, peer.slot, ordered, self._domain_of)]
        running = [machine.number for other, machine in self._peers.items() if other.role == peer.role]
        home = self._home_of(peer.role, peer.slot) % len(self._machines)
        return usable[min(usable, key=lambda number: (running.count(number), number != home, number))]

    def _check_starts(self) -> None:
        """A process whose machine does not answer the call to start it counts as ended: it starts
        elsewhere."""
        now = time.monotonic()
        for machine in self._machines:
            for peer, (call, since) in list(machine.starting.items()):
                if ray.wait([call], timeout=0)[0]:
                    del machine.starting[peer]
                elif now - since > self._options.silent_seconds:
                    self._end(peer, Exit(peer, 1, "could not be started: its machine does not answer"))

    def _end(self, peer: Peer, exited: Exit) -> None:
        machine = self._peers.pop(peer, None)
        self._ended.add(peer)
        if machine is not None:
            machine.starting.pop(peer, None)
            machine.pids.pop(peer, None)
            self._exits.append(exited)

    # What agents say. One thread for each machine.

    def _follow(self, machine: _Machine) -> None:
        call = None
        while not self._closing.is_set():
            try:
                if machine.actor is None:
                    self._bring_up(machine)
                call = call or self._ask(
                    machine, "look", *_known(machine), _LOOK_SECONDS, msgspec.json.encode(self._announced),
                    self._journal.missing(machine.number),
                )  # fmt: skip
                self._look(machine, call)
                call = None
            except _Replaced:
                self._superseded = True
                return
            except GetTimeoutError:
                continue  # the call goes on
            except ActorUnavailableError:  # not dead
                call = None
                self._closing.wait(_AGAIN_SECONDS)
            except (ActorDiedError, RayError) as error:
                call = None
                self._lose(machine, error)
                self._closing.wait(_AGAIN_SECONDS)

    def _bring_up(self, machine: _Machine) -> None:
        """Start an agent in this machine's bundle; after the loss of a machine, on the one that Ray found
        for it."""
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine.number)
        actor: Any = (
            ray.remote(_AgentActor)
            .options(
                name=f"{self._group_name}/{machine.number}/{secrets.token_hex(3)}",
                namespace=_AGENTS,
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=_CALLS_AT_ONCE,
                scheduling_strategy=strategy,
            )
            .remote(self._state_file, self._options.name, machine.number, self.launcher)
        )
        where = actor.where.remote()
        try:
            while not ray.wait([where], timeout=_PATIENCE_SECONDS)[0]:
                if self._closing.is_set():
                    ray.kill(actor)
                    raise GetTimeoutError
            name, _ = ray.get(where)
            is_compiling = ray.get(actor.compile.remote(), timeout=_START_SECONDS)
        except BaseException:
            ray.kill(actor)
            raise
        with self._lock:
            machine.actor, machine.heard, machine.compiling = actor, time.monotonic(), None
            machine.acknowledged, machine.files = 0, Collected(self._folder, name)
            machine.name, machine.known = name, True
            self._note_compiling(machine, machine.heard, is_compiling=is_compiling)
        if self._vault_keys:  # one that is found later
            self._open_vault(machine, self._job, self._vault_keys)
            self._say("machine_found", name)

    def _look(self, machine: _Machine, call: Any) -> bool:
        """Process the answer to a call of ``look``; whether there was anything written in it."""
        answer = ray.get(call, timeout=_PATIENCE_SECONDS)
        news = NEWS.decode(answer)
        now = time.monotonic()
        self._journal.note(machine.number, news.journal)
        with self._lock:
            if not machine.known:
                self._get_to_know(machine, news)
            machine.heard = now
            machine.pids, machine.state = dict(news.running), news.state
            self._note_compiling(machine, now, is_compiling=news.compiling)
            for number, exited in news.exits:
                if number > machine.acknowledged and self._peers.get(exited.peer) is machine:
                    self._end(exited.peer, exited)
                machine.acknowledged = max(machine.acknowledged, number)
            for peer, _ in news.running:
                if self._peers.get(peer) is not machine:  # replaced while the machine could not be reached
                    self._ask(machine, "signal", peer, int(signals.SIGKILL))
        assert machine.files is not None
        for file in news.files:
            machine.files.write(file, time.time() - news.time)
        return bool(news.files)

    def _note_compiling(self, machine: _Machine, now: float, *, is_compiling: bool) -> None:
        if is_compiling and machine.compiling is None:
            machine.compiling = now
            self._say("machine_compiling", machine.name)
        elif not is_compiling and machine.compiling is not None:
            took, machine.compiling = now - machine.compiling, None
            self._say("machine_compiled", machine.name, after_seconds=round(took, 1))

    def _get_to_know(self, machine: _Machine, news: News) -> None:
        """Hear of an agent for the first time that an earlier controller has started. The lock is held."""
        machine.known, machine.vault = True, news.vault
        machine.name = news.address
        machine.files = Collected(self._folder, machine.name, again=True)
        if news.vault is not None:
            self._vaults_opened = max(self._vaults_opened, news.vault.slot + 1)
        for peer, _ in news.running:
            same_slot = [other for other in self._peers if (other.role, other.slot) == (peer.role, peer.slot)]
            newest = all(other.incarnation < peer.incarnation for other in same_slot)
            if newest and peer not in self._ended:
                for other in same_slot:
                    self._end(other, Exit(other, -int(signals.SIGKILL), "was replaced"))
                self._peers[peer] = machine

    def _lose(self, machine: _Machine, error: BaseException) -> None:
        """The agent has died, and all of its processes with it."""
        self._journal.forget(machine.number)
        with self._lock:
            if machine.name and not self._closing.is_set():
                self._say("machine_lost", machine.name)
            lost = self._peers_on(machine)
            if machine.actor is not None:
                ray.kill(machine.actor)  # it may have raised an error, and live
            for peer in lost:
                self._end(peer, Exit(peer, -int(signals.SIGKILL), f"was lost with machine {machine.name}"))
            machine.actor, machine.name, machine.pids, machine.state = None, "", {}, None
            machine.known = True
            machine.vault = None
            machine.starting.clear()

    def _say(self, event: str, machine: str, **figures: Any) -> None:
        with contextlib.suppress(OSError), EventLog(self._folder) as events:
            events.emit(event, machine=machine, **figures)


def _known(machine: _Machine) -> tuple[int, dict[str, int]]:
    return machine.acknowledged, dict(machine.files.offsets) if machine.files is not None else {}


def _connect(options: Ray) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=options.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=dict(options.runtime_env) or None,
        )
    except (ConnectionError, RayError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {options.address!r} ({error}): start one with `ray start --head`, or set "
            "job.engine.address"
        ) from None


def _nodes_alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _draining_addresses() -> dict[str, float]:
    """When machines go of which Ray says that they will be taken away, in Unix seconds; 0: at any time."""
    said: dict[str, int] = ray_state.get_draining_nodes()
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes_alive()} if said else {}
    return {alive[node]: deadline_ms / 1000 for node, deadline_ms in said.items() if node in alive}


def _usable_nodes() -> list[dict[str, Any]]:
    leaving = _draining_addresses()  # Ray places nothing there
    return [
        node
        for node in _nodes_alive()
        if node["Resources"].get("CPU") and node["NodeManagerAddress"] not in leaving
    ]


def _machines_to_use(
    placement: Placement, options: Ray, inheritance: Inheritance | None, *, again: bool
) -> tuple[int, tuple[str, ...]]:
    """How many machines to use, and the failure domain of each of them and of the spares."""
    if inheritance is not None:
        return inheritance.machines, inheritance.domains
    count, spares = options.machines or len(_usable_nodes()), options.spares
    if again:
        there = len(_usable_nodes())
        count = _enough(placement, count, there, options)
        spares = min(spares, max(0, there - count))
    return count, _domains(count + spares, options)


def _domains(machines: int, options: Ray) -> tuple[str, ...]:
    """The failure domain of each machine: a value of the label, as evenly as the cluster has them."""
    label = options.domain
    if label == NODE_DOMAIN:
        return tuple(str(machine) for machine in range(machines))
    nodes = _usable_nodes()
    if not nodes:
        raise ConfigError("the Ray cluster has no machine with processors: start Ray on some")
    without = sorted(node["NodeManagerAddress"] for node in nodes if not node["Labels"].get(label))
    if without:
        raise ConfigError(
            f"{len(without)} of {len(nodes)} machines of the Ray cluster have no label {label!r}, which is "
            f"job.engine.domain: {', '.join(without)}; start Ray there with `ray start --labels "
            f"{label}=VALUE`, or set job.engine.domain={NODE_DOMAIN}"
        )
    return tuple(evenly(Counter(node["Labels"][label] for node in nodes), machines))


def _numbered(domains: Sequence[str]) -> list[int]:
    return [domains.index(domain) for domain in domains]


def _enough(placement: Placement, wanted: int, there: int, options: Ray) -> int:
    """How many machines to use where fewer may be there than wanted: those, if the code covers the loss of
    any of their domains."""
    if not 0 < there < wanted:
        return wanted
    domain_of = _numbered(_domains(there, options))
    return there if not placement.r or spread_in_domains(placement, domain_of) is not None else wanted


def _spread(placement: Placement, domain_of: Sequence[int], options: Ray) -> tuple[int, ...]:
    if not placement.r or options.spread == "prefer":
        return best_spread(placement, domain_of)
    if options.domain == NODE_DOMAIN:
        return check_spread(placement, len(domain_of))
    return check_spread_in_domains(placement, domain_of, options.domain)


def _place(
    name: str, domains: Sequence[str], bundles: list[dict[str, float]], options: Ray
) -> PlacementGroup:
    label = None if options.domain == NODE_DOMAIN else options.domain
    group: PlacementGroup = placement_group(
        bundles,
        strategy="STRICT_SPREAD",
        name=name,
        lifetime="detached",
        bundle_label_selector=[{label: value} for value in domains] if label is not None else None,
    )
    if not group.wait(_PLACE_SECONDS):
        remove_placement_group(group)
        have = ", ".join(
            f"{node['NodeManagerAddress']} ({room_in_words(node['Resources'])}"
            + (f", {label}={node['Labels'][label]}" if label in node["Labels"] else "")
            + ")"
            for node in _nodes_alive()
        )
        where = ", ".join(f"{count} with {label}={value}" for value, count in Counter(domains).items())
        wanted = room_in_words(bundles[0])
        raise ConfigError(
            f"the Ray cluster has no room for {len(domains)} machines{f' ({where})' if label else ''} with "
            f"{wanted} free on each: it has {have}, some of which others may use; add machines, or lower "
            "job.engine.machines, spares, server_cpus, worker_cpus, server_memory or worker_memory"
        )
    return group


def inherit(options: Ray, controller: int, journal: Path) -> tuple[Inheritance, bytes] | None:
    """What the last controller of a job has left: the engine's part, and the charter; None if it had not got
    so far, or was about to end. The run's log is copied from the agents.

    It waits until most of the agents answer. Raises JobFailed if there is a newer controller.
    """
    assert options.name is not None
    records = _Records(options.name)
    engine, charter = records.get("engine"), records.get("charter")
    if engine is None or charter is None:
        _remove_agents(options.name)
        return None
    left = msgspec.msgpack.decode(engine, type=Inheritance)
    while True:
        agents = [actor for _, actor in _agents(left.group)]
        lengths = {}
        for actor in agents:
            with contextlib.suppress(RayError):
                answer = ray.get(actor.do.remote(controller, "look", 0, {}, 0.0), timeout=_CALL_SECONDS)
                lengths[actor] = NEWS.decode(answer).journal
        if agents and 2 * len(lengths) > len(agents):
            break
        if not agents:
            return None
        time.sleep(_AGAIN_SECONDS)
    longest = max(lengths, key=lambda actor: lengths[actor])
    copy = JournalCopy(journal)
    while data := ray.get(longest.do.remote(controller, "read_journal", copy.length), timeout=_CALL_SECONDS):
        copy.take(copy.length, data)
    return left, charter


def _agents(group: str) -> list[tuple[int, Any]]:
    """The agents of a placement group, with the numbers of their machines."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == _AGENTS and name.startswith(f"{group}/"):
            with contextlib.suppress(ValueError):  # it has died
                found.append((int(name.split("/")[-2]), ray.get_actor(name, namespace=_AGENTS)))
    return found


def _remove_agents(job: str) -> None:
    """End all agents of a job, and their processes, and free what was reserved for them."""
    for _, actor in _agents(job):
        ray.kill(actor)
    for entry in ray.util.placement_group_table().values():
        if entry["name"].startswith(f"{job}/") and entry["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                remove_placement_group(ray.util.get_placement_group(entry["name"]))


class _Host:
    """An actor that runs an object of a class that this module does not know.

    It shows that it lives in Ray's store, for agents that it cannot reach.

    Args:
        job: the actor's name.
        path: the import path of the class, "package.module:Class".
        arguments: of its constructor.
    """

    def __init__(self, job: str, path: str, arguments: dict[str, Any]) -> None:
        self._records = _Records(job)
        self._is_removed = False
        threading.Thread(target=self._show_life, name="alive", daemon=True).start()
        module, _, name = path.partition(":")
        self._object = getattr(importlib.import_module(module), name)(**arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        self._is_removed = self._is_removed or method == "remove"
        return getattr(self._object, method)(*arguments)

    def _show_life(self) -> None:
        beat = f"{secrets.token_hex(4)}/"
        while not self._is_removed:
            with contextlib.suppress(Exception):  # Ray's head may be away for a while
                self._records.put("alive", f"{beat}{time.monotonic()}".encode())
            time.sleep(_ALIVE_SECONDS)


class RayHosted:
    """An object in an actor that outlives whoever started it; by its name, everybody on the cluster finds it.

    Args:
        actor: the actor.
        name: its name.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self._name = name

    @classmethod
    def start(cls, options: Ray, name: str, path: str, arguments: dict[str, Any]) -> RayHosted:
        """Start it on this machine, under a name that nobody else has. It gets ``number=1``; when it is lost,
        another one is started with the same other arguments and the next number."""
        _connect(options)
        records = _Records(name)
        if name not in hosted_names(options):
            records.delete()  # left by one that was lost with all of its agents
        actor = _host(name, path, {**arguments, "number": 1})
        records.claim(1)
        records.put("hosted", msgspec.msgpack.encode((path, arguments)))
        return cls(actor, name)

    @classmethod
    def find(cls, options: Ray, name: str) -> RayHosted:
        """The one with this name. Raises ConfigError if there is none."""
        _connect(options)
        end = time.monotonic() + _TO_START_SECONDS
        while True:
            with contextlib.suppress(ValueError):
                return cls(ray.get_actor(name, namespace=NAMESPACE), name)
            if _Records(name).get("hosted") is None or time.monotonic() > end:
                names = ", ".join(hosted_names(options)) or "none"
                raise ConfigError(f"the cluster has no job {name!r}: it has {names}")
            time.sleep(_AGAIN_SECONDS)  # its controller was lost, and another one is starting

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method. Raises TimeoutError if there is no answer now: another actor may be taking over."""
        try:
            return ray.get(self._actor.call.remote(method, *arguments), timeout=_CALL_SECONDS)
        except (GetTimeoutError, ActorUnavailableError) as error:
            self._look_up()
            raise TimeoutError(str(error)) from None
        except ActorDiedError as error:
            self._look_up()
            raise TimeoutError(f"the controller of the job has died: {error}") from None

    def _look_up(self) -> None:
        """There may be another actor of this name by now."""
        with contextlib.suppress(ValueError, RayError):
            self._actor = ray.get_actor(self._name, namespace=NAMESPACE)

    def kill(self) -> None:
        """End the actor, the agents that it has started, and their processes."""
        records = _Records(self._name)
        records.delete("hosted")  # from here on, nobody takes over
        with contextlib.suppress(RayError):
            ray.get(self._actor.call.remote("remove"), timeout=_PATIENCE_SECONDS)
        ray.kill(self._actor)
        _remove_agents(self._name)
        records.delete()


def _host(name: str, path: str, arguments: dict[str, Any], patience: float = 0.0) -> Any:
    """Start an actor on this machine, under a name that nobody else has; waits so long for the name."""
    here = ray.get_runtime_context().get_node_id()
    end = time.monotonic() + patience
    while True:
        try:
            return (
                ray.remote(_Host)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=0,
                    max_concurrency=_CALLS_AT_ONCE,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
                )
                .remote(name, path, arguments)
            )
        except ValueError as error:
            if "already taken" not in str(error) and "already exists" not in str(error):
                raise
            if time.monotonic() > end:
                raise ConfigError(
                    f"the cluster has a job {name!r} already: choose another job.engine.name, watch it with "
                    f"`holdfast attach {name}`, or end it with `holdfast stop {name}`"
                ) from None
        time.sleep(_AGAIN_SECONDS)


def hosted_names(options: Ray) -> list[str]:
    """The names of all jobs on the cluster."""
    _connect(options)
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in named if actor["namespace"] == NAMESPACE)
