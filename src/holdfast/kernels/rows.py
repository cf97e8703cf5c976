"""The hot loops that copy rows. Each has a slow, obvious twin in the tests.

Rows are handled as bits: nothing here knows what a number means. All loops release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from holdfast.kernels.machine import (
    LINE,
    copy_line,
    fetch_add,
    finish_streams,
    pointer,
    prefetch,
    stream_line,
)

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "d8b2aca3c980"}

_AHEAD = 8
_GATHER_BLOCK = 2048
HELP, UNTIL_HELPED, ALL = range(3)


@njit(cache=True, nogil=True)
def gather_rows(addresses, firsts, ids, targets, row_bytes, shared, how):
    """Copy rows of consecutively numbered tables, several fields of each, by any number of threads.

    Table t has rows firsts[t] to firsts[t + 1] - 1 of the numbering; its field f begins at memory address
    addresses[f, t] and has row_bytes[f] bytes a row. Row ids[i] of a field is copied to row i of the rows at
    memory address targets[f]. The caller makes sure that ids ascend and are in range.

    The work is cut into blocks, numbered through over all fields, and whoever calls takes them until none is
    left: shared[0] is the next one, 0 at first. A thread that comes to HELP sets shared[1]; UNTIL_HELPED ends
    as soon as one has.
    """
    rows = ids.shape[0]
    blocks = (rows + _GATHER_BLOCK - 1) // _GATHER_BLOCK
    if how == HELP:
        shared[1] = 1
    while how != UNTIL_HELPED or not shared[1]:
        taken = fetch_add(shared.ctypes.data, 1)
        if taken >= blocks * addresses.shape[0]:
            return
        f = taken // blocks
        begin = (taken - f * blocks) * _GATHER_BLOCK
        end = min(begin + _GATHER_BLOCK, rows)
        _gather(addresses[f], firsts, ids, begin, end, targets[f], row_bytes[f])


@njit(cache=True, nogil=True)
def _gather(addresses, firsts, ids, begin, end, target, row_bytes):
    table = np.searchsorted(firsts, ids[begin], "right") - 1
    ahead = table
    for i in range(begin, end):
        if i + _AHEAD < end:  # access is random: prefetch a later row
            coming = ids[i + _AHEAD]
            while coming >= firsts[ahead + 1]:
                ahead += 1
            _prefetch_row(addresses[ahead] + (coming - firsts[ahead]) * row_bytes, row_bytes)
        while ids[i] >= firsts[table + 1]:
            table += 1
        copy_bytes(addresses[table] + (ids[i] - firsts[table]) * row_bytes, target + i * row_bytes, row_bytes)


GATHER_NUMBERS = 8


def gather_packed(packed):
    """``gather_rows`` for whoever calls functions with one address: that of GATHER_NUMBERS 64-bit integers,
    how many fields, tables and rows, then the addresses of its arguments."""
    numbers = carray(packed, GATHER_NUMBERS, np.int64)
    fields, tables, rows = numbers[0], numbers[1], numbers[2]
    gather_rows(
        carray(pointer(numbers[3]), (fields, tables), np.int64),
        carray(pointer(numbers[4]), tables + 1, np.int64),
        carray(pointer(numbers[5]), rows, np.int64),
        carray(pointer(numbers[6]), fields, np.int64),
        carray(pointer(numbers[6] + 8 * fields), fields, np.int64),
        carray(pointer(numbers[7]), 2, np.int64),
        ALL,
    )


@njit(cache=True, nogil=True)
def scatter_rows(addresses, firsts, ids, values, row_bytes, positions):
    """Copy rows into consecutively numbered tables, several fields of each.

    Table t has rows firsts[t] to firsts[t + 1] - 1 of the numbering; its field f begins at memory address
    addresses[f, t] and has row_bytes[f] bytes a row. Row p of the rows at memory address values[f] becomes
    row ids[p], for each p of ``positions``, or every p without any. ids ascend and lie within the numbering:
    the caller's duty.
    """
    f = 0
    while f < addresses.shape[0]:
        if not are_lines(addresses[f], row_bytes[f]):
            _scatter_bytes(addresses[f], firsts, ids, values[f], row_bytes[f], positions)
            f += 1
            continue
        together = 1
        if f + 1 < addresses.shape[0] and row_bytes[f + 1] == row_bytes[f]:
            together += are_lines(addresses[f + 1], row_bytes[f])
        end = f + together
        if row_bytes[f] == LINE:  # a constant makes loops shorter
            _scatter_lines(addresses[f:end], firsts, ids, values[f:end], LINE, positions)
        else:
            _scatter_lines(addresses[f:end], firsts, ids, values[f:end], row_bytes[f], positions)
        f = end
    finish_streams()


@njit(cache=True, nogil=True)
def are_lines(addresses, row_bytes):
    """Whether rows are whole cache lines in every table."""
    whole = row_bytes % LINE == 0
    for t in range(addresses.shape[0]):
        whole &= addresses[t] % LINE == 0
    return whole


# Rows that lie anywhere are not in the caches, and writing whole lines they need not come there. Two fields
# are written side by side, which takes three quarters of the time of one after the other. Loops have no more
# in them than they must: each instruction leaves less room for writes that are under way.


@njit(cache=True, nogil=True, inline="always")
def _scatter_lines(addresses, firsts, ids, values, row_bytes, positions):
    """``scatter_rows`` of one field, or of two with rows of one size, that are whole lines."""
    some = positions.shape[0] > 0
    count = positions.shape[0] if some else ids.shape[0]
    begin = 0
    for table in range(addresses.shape[1]):
        end = _first_from(ids, positions, begin, count, firsts[table + 1])
        if end > begin:
            before = firsts[table] * row_bytes
            to, also_to = addresses[0, table] - before, addresses[-1, table] - before
            if some:
                chosen = positions[begin:end]
                if addresses.shape[0] == 2:
                    _write_some_of_two(to, also_to, ids, values[0], values[1], chosen, row_bytes)
                else:
                    _write_some(to, ids, values[0], chosen, row_bytes)
            else:
                here, first = ids[begin:end], begin * row_bytes
                if addresses.shape[0] == 2:
                    _write_two(to, also_to, here, values[0] + first, values[1] + first, row_bytes)
                else:
                    _write(to, here, values[0] + first, row_bytes)
        begin = end


@njit(cache=True, nogil=True)
def _first_from(ids, positions, begin, count, limit):
    """From ``begin`` on, the first of the ids, or of those at the positions, that is not below a limit."""
    low, high = begin, count
    while low < high:
        middle = (low + high) // 2
        if ids[positions[middle] if positions.shape[0] else middle] < limit:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True, inline="always")
def _write(to, ids, values, row_bytes):
    for p in range(ids.shape[0]):
        row, at = to + ids[p] * row_bytes, values + p * row_bytes
        for offset in range(0, row_bytes, LINE):
            stream_line(row + offset, at + offset)


@njit(cache=True, nogil=True, inline="always")
def _write_two(to, also_to, ids, values, other_values, row_bytes):
    for p in range(ids.shape[0]):
        row, at = ids[p] * row_bytes, p * row_bytes
        for offset in range(0, row_bytes, LINE):
            stream_line(to + row + offset, values + at + offset)
            stream_line(also_to + row + offset, other_values + at + offset)


@njit(cache=True, nogil=True, inline="always")
def _write_some(to, ids, values, positions, row_bytes):
    for p in positions:
        row, at = to + ids[p] * row_bytes, values + p * row_bytes
        for offset in range(0, row_bytes, LINE):
            stream_line(row + offset, at + offset)


@njit(cache=True, nogil=True, inline="always")
def _write_some_of_two(to, also_to, ids, values, other_values, positions, row_bytes):
    for p in positions:
        row, at = ids[p] * row_bytes, p * row_bytes
        for offset in range(0, row_bytes, LINE):
            stream_line(to + row + offset, values + at + offset)
            stream_line(also_to + row + offset, other_values + at + offset)


@njit(cache=True, nogil=True)
def _scatter_bytes(addresses, firsts, ids, values, row_bytes, positions):
    some = positions.shape[0] > 0
    count = positions.shape[0] if some else ids.shape[0]
    table = ahead = 0
    for i in range(count):
        p = positions[i] if some else i
        if i + _AHEAD < count:
            coming = ids[positions[i + _AHEAD] if some else i + _AHEAD]
            while coming >= firsts[ahead + 1]:
                ahead += 1
            _prefetch_row(addresses[ahead] + (coming - firsts[ahead]) * row_bytes, row_bytes)
        while ids[p] >= firsts[table + 1]:
            table += 1
        copy_bytes(values + p * row_bytes, addresses[table] + (ids[p] - firsts[table]) * row_bytes, row_bytes)


@njit(cache=True, nogil=True)
def copy_past_caches(source, target, size):
    """Copy bytes from one memory address to another that is not read soon; call ``finish_streams`` then."""
    begin = min(-target % LINE, size)
    end = begin + (size - begin) // LINE * LINE
    copy_bytes(source, target, begin)
    for at in range(begin, end, LINE):
        stream_line(target + at, source + at)
    copy_bytes(source + end, target + end, size - end)


@njit(cache=True, nogil=True, inline="always")
def copy_bytes(source, target, size):
    """Copy ``size`` bytes from one memory address to another."""
    at = 0
    while at + LINE <= size:
        copy_line(target + at, source + at)
        at += LINE
    while at + 8 <= size:
        carray(pointer(target + at), 1, np.uint64)[0] = carray(pointer(source + at), 1, np.uint64)[0]
        at += 8
    while at < size:
        carray(pointer(target + at), 1, np.uint8)[0] = carray(pointer(source + at), 1, np.uint8)[0]
        at += 1


@njit(cache=True, nogil=True, inline="always")
def _prefetch_row(address, row_bytes):
    """The lines of a row; of a long one the first few, behind which the processor runs on by itself."""
    prefetch(address)
    for offset in range(64, min(row_bytes, 256), 64):
        prefetch(address + offset)


@njit(cache=True, nogil=True)
def copy_ranges(addresses, sizes, out):
    """Copy sizes[i] bytes from each memory address to ``out``, one after the other."""
    at = np.int64(out.ctypes.data)
    for i in range(addresses.shape[0]):  # a slice assigned to a slice would be copied byte by byte
        copy_bytes(addresses[i], at, sizes[i])
        at += sizes[i]
