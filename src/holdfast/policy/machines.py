"""A code's servers on machines: how many it needs, what the loss of one costs, and how many may be lost.

Servers are placed as jobs place them (``coding.machines``). What is said of the loss of *a* machine is true
of the one that runs most servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from holdfast.coding.machines import best_spread, check_spread, fewest_machines, most_on_one, windows
from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError
from holdfast.policy.erasure import CodeModel
from holdfast.policy.situation import Situation

MOST_SERVERS = 10_000
"""For more, placements are not computed."""
FEWEST = 3
"""A majority of machines keeps the supervisor's state, so of fewer machines none may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnMachines:
    """A code's servers on machines.

    Args:
        needed: the fewest machines of which any one may be lost.
        machines: with how many this reckons: as many as there are, or as are needed.
        servers_each: the fewest and the most servers on a machine.
        memory_bytes: tables and parities on the machine with most servers.
        lost_rows: of the tables, with a machine.
        lost_bytes: of rows and parities, with a machine.
        read_bytes: from other machines to recover them.
        recovery_hours: until everything is back, on other machines.
        further_machines: that may be lost until then.
        further_servers: that may be lost until then, wherever they are.
        at_once: machines that may be lost at once.
        in_turn: machines that may be lost one after the other, each after the last one's servers are back, if
            none is replaced.
        objection: why the loss of a machine is not covered; None if it is.
    """

    needed: int
    machines: int
    servers_each: tuple[int, int]
    memory_bytes: float
    lost_rows: float
    lost_bytes: float
    read_bytes: float
    recovery_hours: float
    further_machines: int
    further_servers: int
    at_once: int
    in_turn: int
    objection: str | None = None

    @property
    def lost_servers(self) -> int:
        """Servers that die with a machine."""
        return self.servers_each[1]


@lru_cache(maxsize=64)
def on_machines(situation: Situation, code: CodeModel) -> OnMachines | None:
    """A code's servers on the situation's machines, or on as few as it needs; None: too many servers."""
    if code.servers > MOST_SERVERS:
        return None
    placement = Placement.grouped(code.servers, code.k, code.r)
    needed = max(FEWEST, fewest_machines(placement))
    machines = situation.machines or needed
    machine_of = _placed(code, machines)
    count = Counter(machine_of)
    loads = [count[machine] for machine in range(machines)]
    lost, left = max(loads), code.servers - max(loads)
    lost_bytes = lost * situation.server_bytes
    covered = 0 if machines < needed else min(most_at_once(placement, machine_of), (machines - 1) // 2)
    rate = situation.costs.rebuild_share * situation.network_rate
    return OnMachines(
        needed=needed,
        machines=machines,
        servers_each=(min(loads), lost),
        memory_bytes=lost_bytes * (1 + code.memory_share),
        lost_rows=lost_bytes / situation.row.raw,
        lost_bytes=lost_bytes * (1 + code.memory_share),
        read_bytes=code.k * lost_bytes,
        # Servers are rebuilt side by side, if those that are left can send so much.
        recovery_hours=situation.costs.pause_hours
        + code.rebuild_hours(situation.server_bytes, rate) * max(1.0, lost / max(left, 1)),
        further_machines=max(0, covered - 1),
        further_servers=max(0, code.r - most_on_one(placement, machine_of)) if covered else 0,
        at_once=covered,
        in_turn=max(0, machines - needed + 1),
        objection=_objection(placement, machines),
    )


def most_at_once(placement: Placement, machine_of: Sequence[int]) -> int:
    """How many machines may be lost at once, whichever they are."""
    fatal = len(set(machine_of))
    for window in windows(placement, machine_of):
        lost = 0
        for number, (_, records) in enumerate(Counter(window).most_common(), 1):
            lost += records
            if lost > placement.r:
                fatal = min(fatal, number)
                break
    return fatal - 1


def losses_per_hour(situation: Situation, code: CodeModel, rebuild_hours: float) -> float:
    """Rate at which more is lost at once than the code covers, where machines and processes fail.

    A set of ``x`` failures at rates ``a`` that take ``rebuild_hours`` each overlaps at the rate ``x a ** x
    rebuild_hours ** (x - 1)``. For each number of machines, only the sets with fewest processes count.
    """
    of_process = situation.process_failures_per_hour / code.servers
    total = code.losses_per_hour(of_process, rebuild_hours)
    if situation.machines is None or situation.machine_mtbf_hours is None:
        return total
    if code.servers > MOST_SERVERS:
        raise ConfigError(
            f"{code.servers:,} servers on machines: plans with --machine-mtbf are for at most "
            f"{MOST_SERVERS:,}; give --mtbf and --servers-per-failure instead"
        )
    placement = Placement.grouped(code.servers, code.k, code.r)
    sets = fatal_sets(placement, _placed(code, situation.machines))
    for (machines, processes), count in sets.items():
        size = machines + processes
        rates = situation.machine_mtbf_hours**-machines * of_process**processes
        total += count * rates * size * rebuild_hours ** (size - 1)
    return total


def fatal_sets(placement: Placement, machine_of: Sequence[int]) -> dict[tuple[int, int], int]:
    """How many sets of machines and of processes on others are more than the code covers, by how many of each
    there are: for each number of machines the fewest processes."""
    around = [Counter(window) for window in windows(placement, machine_of)]
    servers = list(windows(placement, range(placement.servers)))
    found: dict[tuple[int, int], int] = {}
    for machines in range(1, placement.r + 2):
        lost = max(sum(sorted(window.values())[-machines:]) for window in around)
        processes = max(0, placement.r + 1 - lost)
        sets = {
            (frozenset(those), frozenset(others))
            for window, members in zip(around, servers, strict=True)
            for those in combinations(window, min(machines, len(window)))
            if sum(window[machine] for machine in those) + processes > placement.r
            for others in combinations(
                [server for server in members if server is not None and machine_of[server] not in those],
                processes,
            )
        }
        found[machines, processes] = len(sets)
        if not processes:
            break
    return found


def all_failures(
    *, servers: int, machines: int, machine_mtbf_hours: float, process_mtbf_hours: float | None
) -> tuple[float, float]:
    """The mean time between failures of machines and of single processes together, and how many servers a
    failure takes on average. Machines without a server do not count."""
    of_machines = min(machines, servers) / machine_mtbf_hours  # each takes its own servers, all of them all
    of_processes = 1 / process_mtbf_hours if process_mtbf_hours is not None else 0.0
    both = of_machines + of_processes
    return 1 / both, (servers / machine_mtbf_hours + of_processes) / both


def _placed(code: CodeModel, machines: int) -> tuple[int, ...]:
    return best_spread(Placement.grouped(code.servers, code.k, code.r), range(machines))


def _objection(placement: Placement, machines: int) -> str | None:
    try:
        check_spread(placement, machines)
    except ConfigError as error:
        return str(error)
    if machines < FEWEST:
        return (
            f"of {machines} machine{'s' * (machines != 1)} none may be lost, because a majority keeps the "
            f"supervisor's state: use {FEWEST} machines"
        )
    return None
