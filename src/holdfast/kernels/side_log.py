"""The hot loops of copy-on-write snapshots: rows go to a side log before they change, and from there into
the copy of their block. Each has a slow, obvious twin in the tests. All loops release the GIL.

The side log is a slab of slots, one record each. A slot knows its row and the next slot of the same block, so
each block's slots are a linked list. ``state`` holds how many slots have ever been used, how many of them are
free again, and the most that were taken at once.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from holdfast.kernels.machine import prefetch
from holdfast.kernels.rows import copy_bytes

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "4640a77db278", "rows": "4bff4e02e418"}

USED, FREE, PEAK = range(3)
NONE = -1
_AHEAD = 8


@njit(cache=True, nogil=True)
def log_rows(
    addresses,
    row_bytes,
    first,
    rows,
    ids,
    begin,
    pending,
    block_rows,
    heads,
    nexts,
    row_of,
    free,
    state,
    slab,
):
    """Copy the pending rows among these of one table to the side log; they are no longer pending.

    Field f of the table begins at memory address addresses[f] and has row_bytes[f] bytes a row; the table has
    rows ``first`` to first + rows - 1 of the numbering, and ids count within the table: those outside of it
    are ignored. Goes on with ids[begin]. Returns the position of the first id for which there is no slot
    left; the number of ids if all are done.
    """
    first, rows = np.uint64(first), np.uint64(rows)
    record = row_bytes.sum()
    slots = nexts.shape[0]
    base = np.int64(slab.ctypes.data)
    for i in range(begin, ids.shape[0]):
        if i + _AHEAD < ids.shape[0]:
            coming = np.uint64(ids[i + _AHEAD])
            if coming < rows and pending[(first + coming) >> np.uint64(6)] != np.uint64(0):
                for f in range(addresses.shape[0]):
                    at = addresses[f] + np.int64(coming) * row_bytes[f]
                    for offset in range(0, min(row_bytes[f], 256), 64):
                        prefetch(at + offset)
        row = np.uint64(ids[i])  # a negative id is a large one
        if row >= rows:
            continue
        number = first + row
        word, bit = number >> np.uint64(6), np.uint64(1) << (number & np.uint64(63))
        if pending[word] & bit == np.uint64(0):
            continue
        if state[FREE] > 0:
            state[FREE] -= 1
            slot = np.int64(free[state[FREE]])
        elif state[USED] < slots:
            slot = state[USED]
            state[USED] += 1
        else:
            return i
        state[PEAK] = max(state[PEAK], state[USED] - state[FREE])
        pending[word] &= ~bit
        to = base + slot * record
        for f in range(addresses.shape[0]):
            copy_bytes(addresses[f] + np.int64(row) * row_bytes[f], to, row_bytes[f])
            to += row_bytes[f]
        row_of[slot] = np.int64(number)
        block = np.int64(number) // block_rows
        nexts[slot] = heads[block]
        heads[block] = slot
    return ids.shape[0]


@njit(cache=True, nogil=True)
def lay_over(block, ids, targets, logged, row_bytes, heads, nexts, row_of, free, state, slab):
    """Copy a block's rows of the side log over the copy of that block, and free their slots.

    The copy has the rows ``ids``, ascending; its fields begin at memory addresses targets[f]. Sets logged[i]
    for each row ids[i] that was in the log.
    """
    rows = ids.shape[0]
    is_range = rows > 0 and ids[rows - 1] - ids[0] == rows - 1
    record = row_bytes.sum()
    base = np.int64(slab.ctypes.data)
    slot = np.int64(heads[block])
    heads[block] = NONE
    while slot != NONE:
        at = row_of[slot] - ids[0] if is_range else np.searchsorted(ids, row_of[slot])
        logged[at] = True
        source = base + slot * record
        for f in range(targets.shape[0]):
            copy_bytes(source, targets[f] + at * row_bytes[f], row_bytes[f])
            source += row_bytes[f]
        free[state[FREE]] = slot
        state[FREE] += 1
        slot = np.int64(nexts[slot])
