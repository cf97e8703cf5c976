"""The hot loops of copy-on-write snapshots: rows go to a side log before they change, and from there into
the copy of their block. Each has a slow, obvious twin in the tests. All loops release the GIL.

The side log is a slab of slots, one record each. A slot knows its row and the next slot of the same block, so
each block's slots are a linked list. ``state`` holds how many slots have ever been used, how many of them are
free again, and the most that were taken at once.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from holdfast.kernels.machine import LINE, fetch_add, finish_streams, pointer, prefetch, stream_line
from holdfast.kernels.rows import copy_bytes

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "d8b2aca3c980", "rows": "a65c3bc76467"}

STATE_NUMBERS = 3
USED, FREE, PEAK = range(STATE_NUMBERS)
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
    taken,
):
    """Copy the pending rows among these of one table to the side log; they are no longer pending.

    Field f of the table begins at memory address addresses[f] and has row_bytes[f] bytes a row; the table has
    rows ``first`` to first + rows - 1 of the numbering, and ids count within the table: those outside of it
    are ignored. Goes on with ids[begin]. ``taken`` is memory for one number for each id. Returns the position
    of the first id for which there is no slot left; the number of ids if all are done.
    """
    end, count = _take_slots(
        first, rows, ids, begin, pending, block_rows, heads, nexts, row_of, free, state, taken
    )
    _copy_rows(addresses, row_bytes, first, row_of, taken[:count], np.int64(slab.ctypes.data))
    finish_streams()
    return end


@njit(cache=True, nogil=True)
def _take_slots(first, rows, ids, begin, pending, block_rows, heads, nexts, row_of, free, state, taken):
    """Give a slot to each pending row; see ``log_rows``. Returns where it ended, and how many it gave."""
    first, rows = np.uint64(first), np.uint64(rows)
    slots = nexts.shape[0]
    count = 0
    end = ids.shape[0]
    for i in range(begin, ids.shape[0]):
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
            end = i
            break
        pending[word] &= ~bit
        row_of[slot] = np.int64(number)
        block = np.int64(number) // block_rows
        nexts[slot] = heads[block]
        heads[block] = slot
        taken[count] = slot
        count += 1
    state[PEAK] = max(state[PEAK], state[USED] - state[FREE])
    return end, count


@njit(cache=True, nogil=True)
def _copy_rows(addresses, row_bytes, first, row_of, taken, base):
    """Copy rows of a table to the slots that they have, behind an address. Call ``finish_streams`` then."""
    record = row_bytes.sum()
    are_lines = (base | record) % LINE == 0
    for f in range(addresses.shape[0]):
        are_lines &= (addresses[f] | row_bytes[f]) % LINE == 0
    for i in range(taken.shape[0]):
        if i + _AHEAD < taken.shape[0]:
            coming = row_of[taken[i + _AHEAD]] - first
            for f in range(addresses.shape[0]):
                at = addresses[f] + coming * row_bytes[f]
                for offset in range(0, min(row_bytes[f], 256), 64):
                    prefetch(at + offset)
        slot = np.int64(taken[i])
        row, to = row_of[slot] - first, base + slot * record
        for f in range(addresses.shape[0]):
            source = addresses[f] + row * row_bytes[f]
            if are_lines:
                for offset in range(0, row_bytes[f], LINE):
                    stream_line(to + offset, source + offset)  # it is read seconds later
            else:
                copy_bytes(source, to, row_bytes[f])
            to += row_bytes[f]


LOG_NUMBERS = 21
SHARED_NUMBERS = 5
END, _GIVEN, _TURN, _READY, _NEXT = range(SHARED_NUMBERS)
_BLOCK = 128


def log_packed(packed):
    """``log_rows`` for several threads that all call it with one address: that of LOG_NUMBERS 64-bit
    integers.

    They are how many fields, then ``first``, ``rows``, how many ids, ``begin``, ``block_rows``, and the sizes
    of ``pending``, ``heads`` and ``nexts``; then the addresses of all arrays in the order of the
    arguments of ``log_rows``, and that of SHARED_NUMBERS zeros, of which END becomes what ``log_rows``
    returns. ids are 64-bit integers.

    All in one call: were it several, an interrupt could come between giving slots and copying rows.
    """
    numbers = carray(packed, LOG_NUMBERS, np.int64)
    fields, first, count, slots = numbers[0], numbers[1], numbers[3], numbers[8]
    row_of = carray(pointer(numbers[15]), slots, np.int64)
    taken = carray(pointer(numbers[19]), count, np.int32)
    shared = numbers[20]
    if fetch_add(shared + 8 * _TURN, 1) == 0:
        end, given = _take_slots(
            first,
            numbers[2],
            carray(pointer(numbers[11]), count, np.int64),
            numbers[4],
            carray(pointer(numbers[12]), numbers[6], np.uint64),
            numbers[5],
            carray(pointer(numbers[13]), numbers[7], np.int32),
            carray(pointer(numbers[14]), slots, np.int32),
            row_of,
            carray(pointer(numbers[16]), slots, np.int32),
            carray(pointer(numbers[17]), STATE_NUMBERS, np.int64),
            taken,
        )
        fetch_add(shared + 8 * END, end)
        fetch_add(shared + 8 * _GIVEN, given)
        fetch_add(shared + 8 * _READY, 1)
    else:
        while fetch_add(shared + 8 * _READY, 0) == 0:
            pass
    given = fetch_add(shared + 8 * _GIVEN, 0)
    addresses = carray(pointer(numbers[9]), fields, np.int64)
    row_bytes = carray(pointer(numbers[10]), fields, np.int64)
    while True:
        begin = _BLOCK * fetch_add(shared + 8 * _NEXT, 1)
        if begin >= given:
            break
        some = taken[begin : min(begin + _BLOCK, given)]
        _copy_rows(addresses, row_bytes, first, row_of, some, numbers[18])
    finish_streams()


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
