"""Which machine runs which server, so that the code covers the loss of a machine.

A code of ``k + r`` survives the loss of ``r`` records of a stripe. A stripe lies on ``k + r`` servers that
follow each other in a ring, and every such *window* of a ring has a stripe. So a machine may be lost if it
runs at most ``r`` servers of any window.

A *failure domain* is a set of machines that fail at once, such as those of a rack. It may be lost under the
same condition. ``domain_of`` is the domain of each machine; without it, each machine is a domain of its own.
Servers are first spread over domains, as if these were machines, and then over the machines of each domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, cycle, islice

import numpy as np
from numpy.typing import NDArray

from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError

_MOST_TRIES = 50_000
"""Of the search for an arrangement that no formula has found."""
_FURTHER_SERVERS = 4
"""A cure names at most this many times as many servers as there are."""


def most_on_one(placement: Placement, machine_of: Sequence[int]) -> int:
    """The most records of one stripe on one machine. ``machine_of`` is the machine of each server."""
    return max(count for window in windows(placement, machine_of) for count in Counter(window).values())


def survives(placement: Placement, machine_of: Sequence[int], domain_of: Sequence[int] | None = None) -> bool:
    """Whether the code covers the loss of any one domain."""
    if domain_of is not None:
        machine_of = [domain_of[machine] for machine in machine_of]
    return most_on_one(placement, machine_of) <= placement.r


def lost_together(placement: Placement, servers: Sequence[int]) -> tuple[int, ...]:
    """Those of some servers that may be lost at once: as many as the code covers, the first ones first."""
    slots: tuple[int, ...] = ()
    for server in servers:
        gone = [None if slot in (*slots, server) else slot for slot in range(placement.servers)]
        if max(window.count(None) for window in windows(placement, gone)) <= placement.r:
            slots += (server,)
    return slots


def spread(placement: Placement, machines: int) -> tuple[int, ...] | None:
    """The machine of each server, such that the code covers the loss of any machine; None: there is none.

    Machines get equally many servers where that is possible. Without a code, they only get equally many.
    """
    load = np.zeros(machines, np.int64)
    found = [0] * placement.servers
    for first in range(placement.groups):
        ring = placement.ring(first)
        arranged = _arrange(len(ring), placement.k + placement.r, placement.r, machines)
        if arranged is None:
            return None
        shift = _least_loading_shift(load, arranged)
        for server, machine in zip(ring, arranged, strict=True):
            found[server] = (machine + shift) % machines
            load[found[server]] += 1
    return tuple(found)


def spread_in_domains(placement: Placement, domain_of: Sequence[int]) -> tuple[int, ...] | None:
    """The machine of each server, such that the code covers the loss of any domain; None: there is none.

    Machines get equally many servers where that is possible. Of a domain's servers, those that share stripes
    are on different machines where that is possible.
    """
    domains = sorted(set(domain_of))
    found = spread(placement, len(domains))
    if found is None:
        return None
    return _levelled(placement, _within(placement, [domains[at] for at in found], domain_of), domain_of)


def best_spread(placement: Placement, domain_of: Sequence[int]) -> tuple[int, ...]:
    """As ``spread_in_domains``. If there is none, such that the code covers at least the loss of any machine;
    if there is none either, over all machines in turn."""
    in_domains = spread_in_domains(placement, domain_of) if placement.r else None
    if in_domains is not None:
        return in_domains
    places = in_turn(domain_of)
    found = spread(placement, len(places))
    if found is None:
        found = tuple(s // placement.groups % len(places) for s in range(placement.servers))
    return tuple(places[at] for at in found)


def evenly(sizes: Mapping[str, int], machines: int) -> list[str]:
    """The domain of each of so many machines: one of each domain in turn, those with most machines first, as
    far as they have so many; beyond that, as if all had more."""
    ordered = sorted(sizes, key=lambda domain: (-sizes[domain], domain))
    rounds = [[domain for domain in ordered if sizes[domain] > i] for i in range(max(sizes.values()))]
    return list(islice(chain(chain.from_iterable(rounds), cycle(ordered)), machines))


def in_turn(domain_of: Sequence[int]) -> tuple[int, ...]:
    """All machines, such that neighbours are in different domains as long as there are several left."""
    ordinal: Counter[int] = Counter()
    turns = []
    for machine, domain in enumerate(domain_of):
        turns.append((ordinal[domain], domain, machine))
        ordinal[domain] += 1
    return tuple(machine for _, _, machine in sorted(turns))


def voters(domain_of: Sequence[int]) -> tuple[int, ...]:
    """As many machines as possible such that a majority of them is left after the loss of any domain; all
    machines if no choice is such, as with two domains."""
    size = Counter(domain_of)
    for most in range(max(size.values()), 0, -1):
        if 2 * most < sum(min(count, most) for count in size.values()):
            break
    else:
        return tuple(range(len(domain_of)))
    chosen: Counter[int] = Counter()
    found = []
    for machine, domain in enumerate(domain_of):
        if chosen[domain] < most:
            chosen[domain] += 1
            found.append(machine)
    return tuple(found)


def fewest_machines(placement: Placement) -> int:
    """The fewest machines, or domains, of which any one may be lost."""
    if not placement.r:
        raise ConfigError("without parities, the loss of any machine loses rows: choose a protection")
    return next(m for m in range(1, placement.servers + 1) if _fits_on(placement, m))


def check_spread(placement: Placement, machines: int) -> tuple[int, ...]:
    """As ``spread``. Raises ConfigError with the remedy if the code would not cover the loss of a machine."""
    found = spread(placement, machines)
    if found is None:
        raise _refusal(placement, machines, f"on {machines} machine{'s' * (machines != 1)}", "machine")
    return found


def check_spread_in_domains(placement: Placement, domain_of: Sequence[int], kind: str) -> tuple[int, ...]:
    """As ``spread_in_domains``. Raises ConfigError with the remedy if the code would not cover the loss of a
    domain. ``kind`` says what a domain is, such as "rack"."""
    found = spread_in_domains(placement, domain_of)
    if found is None:
        machines, domains = len(domain_of), len(set(domain_of))
        where = f"on {machines} machine{'s' * (machines != 1)} in {domains} domain{'s' * (domains != 1)} "
        raise _refusal(placement, domains, f"{where}({kind})", "domain")
    return found


def _refusal(placement: Placement, places: int, where: str, place: str) -> ConfigError:
    n, k, r = placement.servers, placement.k, placement.r
    cures = [f"{fewest_machines(placement)} {place}s"]
    more = range(n + 1, _FURTHER_SERVERS * n + 1)
    enough = next((m for m in more if _fits_on(_with_servers(placement, m), places)), None)
    if enough is not None:
        cures.append(f"{enough} servers")
    return ConfigError(
        f"{n} servers with a code of {k} + {r} {where}: the loss of a {place} would take more than {r} of "
        f"the {k + r} records of some stripes; use {' or '.join(cures)}, or a code with more parities"
    )


def _within(placement: Placement, domains: Sequence[int], domain_of: Sequence[int]) -> tuple[int, ...]:
    """The machine of each server, given its domain: the machines of the domain in turn, along each ring."""
    turns = {
        domain: cycle([machine for machine, at in enumerate(domain_of) if at == domain])
        for domain in set(domain_of)
    }
    along = sorted(range(placement.servers), key=lambda s: (s % placement.groups, s))
    found = {server: next(turns[domains[server]]) for server in along}
    return tuple(found[server] for server in range(placement.servers))


def _levelled(placement: Placement, machine_of: Sequence[int], domain_of: Sequence[int]) -> tuple[int, ...]:
    """Servers go from machines with most servers to others, as long as the code covers the loss of any
    domain: domains have different numbers of machines."""
    at = list(machine_of)

    def is_covered(server: int, machine: int) -> bool:
        before, at[server] = at[server], machine
        there = windows(placement, at, server)
        domains = (Counter(domain_of[m] for m in window if m is not None) for window in there)
        covered = all(count[domain_of[machine]] <= placement.r for count in domains)
        at[server] = before
        return covered

    while True:
        load = Counter(at)
        full = max(load.values())
        emptier = sorted((m for m in range(len(domain_of)) if load[m] < full - 1), key=load.__getitem__)
        moves = ((s, m) for m in emptier for s, there in enumerate(at) if load[there] == full)
        move = next((move for move in moves if is_covered(*move)), None)
        if move is None:
            return tuple(at)
        at[move[0]] = move[1]


def _with_servers(placement: Placement, servers: int) -> Placement:
    if placement.groups == 1:
        return Placement(servers, placement.k, placement.r)
    return Placement.grouped(servers, placement.k, placement.r)


def windows(
    placement: Placement, machine_of: Sequence[int | None], server: int | None = None
) -> Iterator[list[int | None]]:
    """The machines of each window; with a server, of those that it is in."""
    width = placement.k + placement.r
    for first in range(placement.groups) if server is None else (server % placement.groups,):
        ring = placement.ring(first)
        starts = (
            range(len(ring))
            if server is None
            else range(server // placement.groups - width + 1, server // placement.groups + 1)
        )
        for start in starts:
            yield [machine_of[ring[(start + i) % len(ring)]] for i in range(min(width, len(ring)))]


def _fits_on(placement: Placement, machines: int) -> bool:
    """Whether there is a spread over so many machines."""
    rings = {len(placement.ring(first)) for first in range(placement.groups)}
    width = placement.k + placement.r
    return all(_arrange(count, width, placement.r, machines) is not None for count in rings)


def _least_loading_shift(load: NDArray[np.int64], arranged: Sequence[int]) -> int:
    """By how much to rotate the machines of a ring, so that the most loaded machine has fewest servers."""
    machines = len(load)
    added = np.bincount(arranged, minlength=machines)
    used = np.flatnonzero(added)
    at = (used + np.arange(machines)[:, None]) % machines
    most = np.maximum((load[at] + added[used]).max(axis=1), load.max())
    return int(np.lexsort(((load[at] * added[used]).sum(axis=1), most))[0])


@lru_cache(maxsize=4096)
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
    inside = Counter(arranged[: width - 1])
    if max(inside.values(), default=0) > r:
        return False
    for last in range(width - 1, width - 1 + count):
        machine = arranged[last % count]
        inside[machine] += 1
        if inside[machine] > r:
            return False
        inside[arranged[last - width + 1]] -= 1
    return True


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
