"""64-bit digests of rows, and finding rows that differ from their digests.

A digest is made of a row's bytes in all of its fields, 16 at a time: each pair of words is multiplied into
the digest so far, and the halves of the 128-bit product are folded together, as wyhash does. A long field has
four such digests side by side, since a processor can do four multiplications in the time that it waits for
one. Two different rows have the same digest with a probability of about 2**-64. A digest is never 0: that
means "unknown".
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from holdfast.kernels.machine import fetch_add, finish_streams, pointer
from holdfast.kernels.rows import copy_past_caches

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "d8b2aca3c980", "rows": "a65c3bc76467"}

BLOCK = 4096
"""Rows that a thread takes at a time; a multiple of the bits of a word, so that no two write to one word."""
UNKNOWN = 0
_FILL_BYTES = 1 << 15

_SEED = 0xA0761D6478BD642F
_FIRST = 0xE7037ED1A0B428DB
_SECOND = 0x8EBC6AF09C88C6E3
_THIRD = 0x589965CC75374CC3
_FOURTH = 0x1D8E4E27C47D124F


@intrinsic
def _fold(typing_context, one, other):
    """Both halves of the 128-bit product of two words, one XOR the other."""

    def generate(context, builder, signature, arguments):
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        high = builder.trunc(builder.lshr(product, wide(64)), word)
        return builder.xor(high, builder.trunc(product, word))

    return types.uint64(one, other), generate


@njit(cache=True, nogil=True, inline="always")
def _word(address):
    return carray(pointer(address), 1, np.uint64)[0]


@njit(cache=True, nogil=True)
def _last_word(address, length):
    """Up to 7 bytes, and how many there are."""
    found = np.uint64(length) << np.uint64(56)
    for i in range(length):
        found |= np.uint64(carray(pointer(address + i), 1, np.uint8)[0]) << np.uint64(8 * i)
    return found


@njit(cache=True, nogil=True, inline="always")
def _add_field(digest, address, length):
    if length >= 64:
        second = third = fourth = digest
        end = address + (length & ~63)
        while address < end:
            digest = _fold(_word(address) ^ np.uint64(_FIRST), _word(address + 8) ^ digest)
            second = _fold(_word(address + 16) ^ np.uint64(_SECOND), _word(address + 24) ^ second)
            third = _fold(_word(address + 32) ^ np.uint64(_THIRD), _word(address + 40) ^ third)
            fourth = _fold(_word(address + 48) ^ np.uint64(_FOURTH), _word(address + 56) ^ fourth)
            address += 64
        digest ^= second ^ third ^ fourth
        length &= 63
    end = address + (length & ~15)
    while address < end:
        first = _word(address) ^ np.uint64(_FIRST)
        digest = _fold(first, _word(address + 8) ^ np.uint64(_SECOND) ^ digest)
        address += 16
    if length & 8:
        digest = _fold(_word(address) ^ np.uint64(_FIRST), digest ^ np.uint64(_SECOND))
        address += 8
    if length & 7:
        rest = _last_word(address, length & 7)
        digest = _fold(rest ^ np.uint64(_SECOND), digest ^ np.uint64(_FIRST))
    return digest


@njit(cache=True, nogil=True, inline="always")
def _digest(addresses, table, row, row_bytes):
    digest = np.uint64(_SEED)
    for f in range(addresses.shape[0]):
        digest = _add_field(digest, addresses[f, table] + row * row_bytes[f], row_bytes[f])
    # A last round: else the last word of the row would move only some bits.
    digest = _fold(digest ^ np.uint64(_FIRST), np.uint64(_SEED))
    return digest if digest != np.uint64(UNKNOWN) else np.uint64(1)


@njit(cache=True, nogil=True)
def digest_rows(addresses, row_bytes, ids, positions, digests):
    """Store the digests of contiguous rows: that of row p in digests[ids[p]].

    Field f begins at memory address addresses[f, 0] and has row_bytes[f] bytes a row. Takes each p of
    ``positions``, or every p without any.
    """
    some = positions.shape[0] > 0
    for i in range(positions.shape[0] if some else ids.shape[0]):
        p = positions[i] if some else i
        digests[ids[p]] = _digest(addresses, 0, p, row_bytes)


@njit(cache=True, nogil=True)
def fill_rows(targets, sources, row_bytes, rows, digests):
    """Copy contiguous rows to targets that are not read soon, and store their digests, if ``digests`` has
    room for any.

    Field f is copied from memory address sources[f, 0] to targets[f], and has row_bytes[f] bytes a row.
    """
    block = _FILL_BYTES // row_bytes.sum() + 1
    for begin in range(0, rows, block):
        end = min(begin + block, rows)
        if digests.shape[0]:  # which brings the block into the nearest cache
            for row in range(begin, end):
                digests[row] = _digest(sources, 0, row, row_bytes)
        for f in range(targets.shape[0]):
            at = begin * row_bytes[f]
            copy_past_caches(sources[f, 0] + at, targets[f] + at, (end - begin) * row_bytes[f])
    finish_streams()


@njit(cache=True, nogil=True)
def digest_live(addresses, firsts, row_bytes, ids, digests):
    """Store the digests of rows of consecutively numbered tables, which ``mark_changed`` describes: that of
    row ids[i] in digests[ids[i]]. ids ascend and lie within the numbering: the caller's duty."""
    table = 0
    for row in ids:
        while row >= firsts[table + 1]:
            table += 1
        digests[row] = _digest(addresses, table, row - firsts[table], row_bytes)


@njit(cache=True, nogil=True)
def _mark_block(addresses, firsts, row_bytes, begin, end, digests, marked):
    """See ``mark_changed``; for rows of one block."""
    found = 0
    table = np.searchsorted(firsts, begin, "right") - 1
    for row in range(begin, end):
        while row >= firsts[table + 1]:
            table += 1
        bit = np.uint64(1) << np.uint64(row & 63)
        if marked[row >> 6] & bit:
            continue
        if _digest(addresses, table, row - firsts[table], row_bytes) != digests[row]:
            marked[row >> 6] |= bit
            found += 1
    return found


@njit(cache=True, nogil=True)
def mark_changed(addresses, firsts, row_bytes, begin, end, digests, marked, shared):
    """Mark the rows that do not match their digests. Any number of threads may call this together.

    Table t has rows firsts[t] to firsts[t + 1] - 1 of the numbering; its field f begins at memory address
    addresses[f, t] and has row_bytes[f] bytes a row. Looks at rows begin to end - 1 that have no bit in
    ``marked`` yet.

    Whoever calls takes blocks until none is left: shared[0] is the next one, 0 at first; to shared[1] the
    number of rows is added that were marked.
    """
    first = begin // BLOCK
    blocks = (end + BLOCK - 1) // BLOCK - first
    while True:
        taken = fetch_add(shared.ctypes.data, 1)
        if taken >= blocks:
            return
        low = max((first + taken) * BLOCK, begin)
        high = min((first + taken + 1) * BLOCK, end)
        found = _mark_block(addresses, firsts, row_bytes, low, high, digests, marked)
        if found:
            fetch_add(shared.ctypes.data + 8, found)


MARK_NUMBERS = 11


def mark_packed(packed):
    """``mark_changed`` for whoever calls functions with one address: that of MARK_NUMBERS 64-bit integers,
    how many fields, tables and rows, then begin and end, then the addresses of its arrays."""
    numbers = carray(packed, MARK_NUMBERS, np.int64)
    fields, tables, rows = numbers[0], numbers[1], numbers[2]
    mark_changed(
        carray(pointer(numbers[5]), (fields, tables), np.int64),
        carray(pointer(numbers[6]), tables + 1, np.int64),
        carray(pointer(numbers[7]), fields, np.int64),
        numbers[3],
        numbers[4],
        carray(pointer(numbers[8]), rows, np.uint64),
        carray(pointer(numbers[9]), (rows + 63) // 64, np.uint64),
        carray(pointer(numbers[10]), 2, np.int64),
    )
