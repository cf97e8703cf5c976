"""Which machine runs which server, so that the code covers the loss of a machine.

A code of ``k + r`` survives the loss of ``r`` records of a stripe. A stripe lies on ``k + r`` servers that
follow each other in a ring, and every such *window* of a ring has a stripe. So a machine may be lost if it
runs at most ``r`` servers of any window. A *machine* is here whatever fails at once: a host, or a rack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError

_MOST_TRIES = 50_000
"""Of the search for an arrangement that no formula has found."""
_FURTHER_SERVERS = 4
"""A cure names at most this many times as many servers as there are."""


def most_on_one(placement: Placement, machine_of: Sequence[int]) -> int:
    """The most records of one stripe on one machine. ``machine_of`` is the machine of each server."""
    return max(count for window in _windows(placement, machine_of) for count in Counter(window).values())


def survives(placement: Placement, machine_of: Sequence[int]) -> bool:
    """Whether the code covers the loss of any one machine."""
    return most_on_one(placement, machine_of) <= placement.r


def lost_together(placement: Placement, servers: Sequence[int]) -> tuple[int, ...]:
    """Those of some servers that may be lost at once: as many as the code covers, the first ones first."""
    slots: tuple[int, ...] = ()
    for server in servers:
        gone = [None if slot in (*slots, server) else slot for slot in range(placement.servers)]
        if max(window.count(None) for window in _windows(placement, gone)) <= placement.r:
            slots += (server,)
    return slots


def spread(placement: Placement, machines: int) -> tuple[int, ...] | None:
    """The machine of each server, such that the code covers the loss of any machine; None: there is none.

    Machines get equally many servers where that is possible. Without a code, they only get equally many.
    """
    load = [0] * machines
    found = [0] * placement.servers
    for ring in {placement.ring(server) for server in range(placement.groups)}:
        arranged = _arrange(len(ring), placement.k + placement.r, placement.r, machines)
        if arranged is None:
            return None
        shift = min(range(machines), key=lambda shift: _most_loaded(load, arranged, shift))
        for server, machine in zip(ring, arranged, strict=True):
            found[server] = (machine + shift) % machines
            load[found[server]] += 1
    return tuple(found)


def fewest_machines(placement: Placement) -> int:
    """The fewest machines of which any one may be lost."""
    if not placement.r:
        raise ConfigError("without parities, the loss of any machine loses rows: choose a protection")
    return next(m for m in range(1, placement.servers + 1) if spread(placement, m) is not None)


def check_spread(placement: Placement, machines: int) -> tuple[int, ...]:
    """As ``spread``. Raises ConfigError with the remedy if the code would not cover the loss of a machine."""
    found = spread(placement, machines)
    if found is not None:
        return found
    n, k, r = placement.servers, placement.k, placement.r
    cures = [f"{fewest_machines(placement)} machines"]
    more = range(n + 1, _FURTHER_SERVERS * n + 1)
    enough = next((m for m in more if spread(_with_servers(placement, m), machines) is not None), None)
    if enough is not None:
        cures.append(f"{enough} servers")
    raise ConfigError(
        f"{n} servers with a code of {k} + {r} on {machines} machine{'s' * (machines != 1)}: the loss of a "
        f"machine would take more than {r} of the {k + r} records of some stripes; use {' or '.join(cures)}, "
        "or a code with more parities"
    )


def best_machine(
    placement: Placement, machine_of: Sequence[int | None], server: int, usable: Sequence[int]
) -> int:
    """The machine to run a server on, of those that are usable, given where all others are.

    The one that keeps most redundancy if a machine is lost; of those, the one with the fewest servers. None
    is the machine of a server that does not run.
    """

    def cost(machine: int) -> tuple[int, int, int]:
        there = [machine if slot == server else at for slot, at in enumerate(machine_of)]
        windows = _windows(placement, there)
        # Only windows with this server can become worse.
        counts = [window.count(machine) for window in windows]
        return max(0, max(counts) - placement.r), there.count(machine), usable.index(machine)

    return min(usable, key=cost)


def next_move(
    placement: Placement, machine_of: Sequence[int], home: Sequence[int], usable: Sequence[int]
) -> tuple[int, int] | None:
    """A server to start anew, and on which machine, such that the code covers the loss of more machines; None
    if it covers that of any, or no move helps.

    Where servers are not at home, they go there, one after the other, if their home is usable: a few moves
    may help only together, and when all are at home, the code covers everything.
    """
    now = _uncovered(placement, machine_of)
    if not now:
        return None

    def left(move: tuple[int, int]) -> int:
        server, machine = move
        return _uncovered(placement, [machine if s == server else at for s, at in enumerate(machine_of)])

    servers = range(placement.servers)
    back = [(s, home[s]) for s in servers if machine_of[s] != home[s] and home[s] in usable]
    if back:
        return min(back, key=left)
    best = min(((s, machine) for s in servers for machine in usable), key=left)
    return best if left(best) < now else None


def _uncovered(placement: Placement, machine_of: Sequence[int]) -> int:
    """Records that the loss of one machine would take beyond what the code covers: over all windows, and all
    machines."""
    counts = (count for window in _windows(placement, machine_of) for count in Counter(window).values())
    return sum(max(0, count - placement.r) for count in counts)


def _with_servers(placement: Placement, servers: int) -> Placement:
    if placement.groups == 1:
        return Placement(servers, placement.k, placement.r)
    return Placement.grouped(servers, placement.k, placement.r)


def _windows(placement: Placement, machine_of: Sequence[int | None]) -> Iterator[list[int | None]]:
    width = placement.k + placement.r
    for first in range(placement.groups):
        ring = placement.ring(first)
        for start in range(len(ring)):
            yield [machine_of[ring[(start + i) % len(ring)]] for i in range(min(width, len(ring)))]


def _most_loaded(load: Sequence[int], arranged: Sequence[int], shift: int) -> tuple[int, int]:
    after = list(load)
    for machine in arranged:
        after[(machine + shift) % len(load)] += 1
    return max(after), shift


def _arrange(count: int, width: int, r: int, machines: int) -> tuple[int, ...] | None:
    """The machines of a ring's servers; None if there is no way."""
    modulo = tuple(i % machines for i in range(count))
    if not r:
        return modulo
    if machines < -(-count // (r * count // width)):  # a machine is in width windows for each of its servers
        return None
    valid = [each for each in (modulo, *_formulas(count, width, r, machines)) if _fits(each, width, r)]
    balanced = (each for each in valid if _imbalance(each, machines) <= 1)
    return (
        next(balanced, None)
        or min(valid, key=lambda each: _imbalance(each, machines), default=None)
        or _search(count, width, r, machines)
    )


def _formulas(count: int, width: int, r: int, machines: int) -> Iterator[tuple[int, ...]]:
    """Arrangements that may fit."""
    for step in range(1, count):  # each machine has an arc of a circle on which neighbours are a step apart
        yield tuple(i * step % count * machines // count for i in range(count))
    apart = -(-width // r)  # if servers of a machine are so far apart, a window has at most r of them
    for blocks in range(-(-count // machines), count // apart + 1):
        sizes = [count // blocks + (i < count % blocks) for i in range(blocks)]
        yield tuple(at for size in sizes for at in range(size))


def _fits(arranged: Sequence[int], width: int, r: int) -> bool:
    count = len(arranged)
    return all(
        max(Counter(arranged[(start + i) % count] for i in range(width)).values()) <= r
        for start in range(count)
    )


def _imbalance(arranged: Sequence[int], machines: int) -> int:
    loads = [arranged.count(machine) for machine in range(machines)]
    return max(loads) - min(loads)


def _search(count: int, width: int, r: int, machines: int) -> tuple[int, ...] | None:
    """Try all arrangements, up to a limit."""
    tries = 0

    def extended(so_far: tuple[int, ...]) -> tuple[int, ...] | None:
        nonlocal tries
        tries += 1
        if tries > _MOST_TRIES:
            return None
        if len(so_far) == count:
            return so_far if _fits(so_far, width, r) else None
        before = so_far[max(0, len(so_far) - width + 1) :]
        for machine in range(min(max(so_far, default=-1) + 2, machines)):
            if before.count(machine) < r:
                found = extended((*so_far, machine))
                if found is not None:
                    return found
        return None

    return extended(())
