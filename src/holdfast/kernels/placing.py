"""The hot loops of a worker: which rows a batch looks up and where they lie, the lookup, and its gradients.

``inverse`` is what ties them together: for each looked-up id the position of its row among the batch's rows,
each of which is there once. A *bag* is what one sample looks up in one table; bag b has the ids from
offsets[b] to offsets[b + 1] - 1, or, if there are no offsets, each id is a bag. The loops trust both:
``tables.lookup`` makes them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_compiled = njit(cache=True, nogil=True, error_model="numpy")
_inlined = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, forceinline=True)

_GOLDEN = 0x9E3779B97F4A7C15


@_compiled
def place_ids(ids, bounds, firsts, servers, k, r, groups, slots, base, uniques, places, starts, inverse):
    """Find the different rows of a batch and where they lie: how many, or -1 - i if ids[i] is out of range.

    Rows lie as in ``coding.placement``, on ``servers`` in so many ``groups``.
    ids[bounds[t]:bounds[t + 1]] are of table t, whose rows are firsts[t] to firsts[t + 1] - 1 of the group.
    Rows come server after server, and in the order of their first lookup at each: server s has
    places[starts[s]:starts[s + 1]], and ids[i] is row inverse[i] of them.

    ``slots`` is a hash table, uint32, at least twice as long as the ids and a power of two: what is less than
    ``base`` counts as empty. It is left with numbers of up to base + len(ids) - 1. ``uniques`` (int64) and
    ``places`` (uint32) have room for as many as there are ids.
    """
    mask = np.uint64(slots.shape[0] - 1)
    shift = np.uint64(64)
    size = slots.shape[0]
    while size > 1:
        shift -= np.uint64(1)
        size >>= 1
    found = 0
    for t in range(bounds.shape[0] - 1):
        first, rows = firsts[t], firsts[t + 1] - firsts[t]
        for i in range(bounds[t], bounds[t + 1]):
            if not 0 <= ids[i] < rows:
                return -1 - i
            row = first + ids[i]
            slot = (np.uint64(row) * np.uint64(_GOLDEN)) >> shift
            while True:
                known = np.int64(slots[slot]) - base
                if known < 0:
                    slots[slot] = np.uint32(base + found)
                    uniques[found] = row
                    inverse[i] = found
                    found += 1
                    break
                if uniques[known] == row:
                    inverse[i] = known
                    break
                slot = (slot + np.uint64(1)) & mask
    _order(uniques[:found], servers, k, r, groups, places, starts)
    for i in range(ids.shape[0]):
        inverse[i] = uniques[inverse[i]]
    return found


@_compiled
def _order(rows, servers, k, r, groups, places, starts):
    """Write the rows' places server after server; each row becomes its position there."""
    # Divisions are most of the work: one of each kind for a row, and unsigned, which need not round down.
    n, k, r, groups = np.uint64(servers), np.uint64(k), np.uint64(r), np.uint64(groups)
    starts[:] = 0
    for u in range(rows.shape[0]):
        row = np.uint64(rows[u])
        stripe = row // k
        member = row - stripe * k
        block = stripe // n
        owner = _server(stripe - block * n, r + member, n, groups)
        starts[owner + np.uint64(1)] += 1
        rows[u] = np.int64((block * k + member) << np.uint64(31) | owner)
    for server in range(servers):
        starts[server + 1] += starts[server]
    for u in range(rows.shape[0]):
        owner = rows[u] & 0x7FFFFFFF
        position = starts[owner]
        starts[owner] = position + 1
        places[position] = np.uint32(rows[u] >> 31)
        rows[u] = position
    for server in range(servers, 0, -1):  # each has moved to where the next one begins
        starts[server] = starts[server - 1]
    starts[0] = 0


@_inlined
def _server(turn, record, servers, groups):
    """The server of one of a stripe's records, parities first; ``turn`` is the stripe's number in its block.

    All are uint64.
    """
    if groups == np.uint64(1):
        return (turn + record) % servers
    index = turn // groups
    group = turn - index * groups
    index += record
    count = (servers - group + groups - np.uint64(1)) // groups
    return group + (index - count if index >= count else index) * groups  # count is k + r or more


@_compiled
def gather_bags(rows, inverse, offsets, out):
    """out[b] = the sum of the rows of bag b, in the order of its ids; zero for an empty bag."""
    dim = rows.shape[1]
    if offsets.shape[0] == 0:
        for i in range(inverse.shape[0]):
            source, target = rows[inverse[i]], out[i]
            for d in range(dim):
                target[d] = source[d]
        return
    for b in range(offsets.shape[0] - 1):
        target = out[b]
        for d in range(dim):
            target[d] = np.float32(0)
        for i in range(offsets[b], offsets[b + 1]):
            source = rows[inverse[i]]
            for d in range(dim):
                target[d] += source[d]


@_compiled
def sum_gradients(gradients, inverse, offsets, result):
    """result[u] = the sum of gradients[b] over all lookups of row u, in the order of the ids.

    Each id of bag b gets gradients[b]; an id that is twice in a bag gets it twice.
    """
    dim = result.shape[1]
    result[:] = np.float32(0)
    if offsets.shape[0] == 0:
        for i in range(inverse.shape[0]):
            source, target = gradients[i], result[inverse[i]]
            for d in range(dim):
                target[d] += source[d]
        return
    for b in range(offsets.shape[0] - 1):
        source = gradients[b]
        for i in range(offsets[b], offsets[b + 1]):
            target = result[inverse[i]]
            for d in range(dim):
                target[d] += source[d]
