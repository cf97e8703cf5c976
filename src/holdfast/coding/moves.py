"""To which machine a server goes after a loss, such that most redundancy is left. See ``machines``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.coding.machines import spread_in_domains, windows
from holdfast.coding.placement import Placement


def best_machine(
    placement: Placement,
    machine_of: Sequence[int | None],
    server: int,
    usable: Sequence[int],
    domain_of: Sequence[int] | None = None,
) -> int:
    """The machine to run a server on, of those that are usable, given where all others are.

    The one that keeps most redundancy if a domain is lost; of those, if a machine is; of those, the one with
    the fewest servers. None is the machine of a server that does not run.
    """

    def excess(where: Sequence[int | None]) -> int:
        # Only windows with this server can become worse.
        counts = (window.count(where[server]) for window in windows(placement, where, server))
        return max(0, max(counts) - placement.r)

    def cost(machine: int) -> tuple[int, int, int, int]:
        there = [machine if slot == server else at for slot, at in enumerate(machine_of)]
        of_domain = excess(_domains(there, domain_of))
        return of_domain, excess(there), there.count(machine), usable.index(machine)

    return min(usable, key=cost)


def next_move(
    placement: Placement,
    machine_of: Sequence[int],
    home: Sequence[int],
    usable: Sequence[int],
    domain_of: Sequence[int] | None = None,
) -> tuple[int, int] | None:
    """A server to start anew, and on which machine, such that in the end the code covers the loss of more
    domains, or of as many domains and more machines; None if it covers that of any, or no move helps.

    Where they can, servers go home, one after the other. Otherwise they go where each move helps by itself,
    if the code then covers everything in the end; if not, to a spread over the machines that are usable,
    because a few moves may help only together. If there is none, each move helps by itself.
    """
    now = _left(placement, machine_of, domain_of)
    if not any(now):
        return None
    wanted = [there if there in usable else at for there, at in zip(home, machine_of, strict=True)]
    after_return = _left(placement, wanted, domain_of)
    if not any(after_return):
        return _step_to(placement, machine_of, wanted, domain_of)
    first = move = _helpful_move(placement, machine_of, usable, domain_of)
    at = list(machine_of)
    while move is not None:
        at[move[0]] = move[1]
        move = _helpful_move(placement, at, usable, domain_of)
    if not any(_left(placement, at, domain_of)):
        return first
    found = spread_in_domains(
        placement, [machine if domain_of is None else domain_of[machine] for machine in usable]
    )
    if found is not None:
        return _step_to(placement, machine_of, [usable[at] for at in found], domain_of)
    return _step_to(placement, machine_of, wanted, domain_of) if after_return < now else first


def _step_to(
    placement: Placement, machine_of: Sequence[int], target: Sequence[int], domain_of: Sequence[int] | None
) -> tuple[int, int]:
    """The move towards a target that helps most."""

    def after(move: tuple[int, int]) -> tuple[int, int]:
        return _left(placement, _moved(machine_of, move), domain_of)

    moves = enumerate(target)
    return min((move for move in moves if machine_of[move[0]] != move[1]), key=after)


def _helpful_move(
    placement: Placement, machine_of: Sequence[int], usable: Sequence[int], domain_of: Sequence[int] | None
) -> tuple[int, int] | None:
    """The move that helps most by itself; None if none does."""

    def gain(move: tuple[int, int]) -> tuple[int, int]:
        server = move[0]  # only windows with it change
        before = _left(placement, machine_of, domain_of, server)
        after = _left(placement, _moved(machine_of, move), domain_of, server)
        return after[0] - before[0], after[1] - before[1]

    servers = [s for s in range(placement.servers) if any(_left(placement, machine_of, domain_of, s))]
    best = min(((s, machine) for s in servers for machine in usable), key=gain, default=None)
    return best if best is not None and gain(best) < (0, 0) else None


def _moved(machine_of: Sequence[int], move: tuple[int, int]) -> list[int]:
    server, machine = move
    return [machine if s == server else at for s, at in enumerate(machine_of)]


def _left(
    placement: Placement,
    machine_of: Sequence[int],
    domain_of: Sequence[int] | None,
    server: int | None = None,
) -> tuple[int, int]:
    """What is not covered, by domain and by machine; with a server, in the windows that it is in."""
    of_machines = _uncovered(placement, machine_of, server)
    if domain_of is None:
        return of_machines, of_machines
    return _uncovered(placement, _domains(machine_of, domain_of), server), of_machines


def _domains(machine_of: Sequence[int | None], domain_of: Sequence[int] | None) -> Sequence[int | None]:
    if domain_of is None:
        return machine_of
    return [None if machine is None else domain_of[machine] for machine in machine_of]


def _uncovered(placement: Placement, machine_of: Sequence[int | None], server: int | None = None) -> int:
    """Records that the loss of one machine would take beyond what the code covers: over all windows, and all
    machines."""
    concerned = windows(placement, machine_of, server)
    return sum(max(0, count - placement.r) for window in concerned for count in Counter(window).values())
