"""64-bit digests of rows, and finding rows that differ from their digests.

A digest is made of a row's bytes in all of its fields, 16 at a time: each pair of words is multiplied into
the digest so far, and the halves of the 128-bit product are folded together, as wyhash does. Two different
rows have the same digest with a probability of about 2**-64. A digest is never 0: that means "unknown".
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from holdfast.kernels.machine import fetch_add, pointer

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "4640a77db278"}

BLOCK = 4096
"""Rows that a thread takes at a time; a multiple of the bits of a word, so that no two write to one word."""
UNKNOWN = 0
KEEP_UNKNOWN, MARK_UNKNOWN = range(2)

_SEED = 0xA0761D6478BD642F
_FIRST = 0xE7037ED1A0B428DB
_SECOND = 0x8EBC6AF09C88C6E3


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
def digest_rows(addresses, row_bytes, ids, digests):
    """Store the digests of contiguous rows: that of row i in digests[ids[i]].

    Field f begins at memory address addresses[f, 0] and has row_bytes[f] bytes a row.
    """
    for i in range(ids.shape[0]):
        digests[ids[i]] = _digest(addresses, 0, i, row_bytes)


@njit(cache=True, nogil=True)
def _mark_block(addresses, firsts, row_bytes, begin, end, digests, marked, unknown):
    """See ``mark_changed``; for rows of one block."""
    found = 0
    table = np.searchsorted(firsts, begin, "right") - 1
    for row in range(begin, end):
        while row >= firsts[table + 1]:
            table += 1
        bit = np.uint64(1) << np.uint64(row & 63)
        if marked[row >> 6] & bit:
            continue
        digest = _digest(addresses, table, row - firsts[table], row_bytes)
        known = digests[row]
        if known == digest:
            continue
        if known == np.uint64(UNKNOWN) and unknown == KEEP_UNKNOWN:
            digests[row] = digest
            continue
        marked[row >> 6] |= bit
        found += 1
    return found


@njit(cache=True, nogil=True)
def mark_changed(addresses, firsts, row_bytes, begin, end, digests, marked, unknown, shared):
    """Mark the rows that do not match their digests. Any number of threads may call this together.

    Table t has rows firsts[t] to firsts[t + 1] - 1 of the numbering; its field f begins at memory address
    addresses[f, t] and has row_bytes[f] bytes a row. Looks at rows begin to end - 1 that have no bit in
    ``marked`` yet. Rows whose digest is unknown get it (KEEP_UNKNOWN), or are marked, too (MARK_UNKNOWN).

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
        found = _mark_block(addresses, firsts, row_bytes, low, high, digests, marked, unknown)
        if found:
            fetch_add(shared.ctypes.data + 8, found)


MARK_NUMBERS = 12


def mark_packed(packed):
    """``mark_changed`` for whoever calls functions with one address: that of MARK_NUMBERS 64-bit integers,
    how many fields, tables and rows, then begin, end and ``unknown``, then the addresses of its arrays."""
    numbers = carray(packed, MARK_NUMBERS, np.int64)
    fields, tables, rows = numbers[0], numbers[1], numbers[2]
    mark_changed(
        carray(pointer(numbers[6]), (fields, tables), np.int64),
        carray(pointer(numbers[7]), tables + 1, np.int64),
        carray(pointer(numbers[8]), fields, np.int64),
        numbers[3],
        numbers[4],
        carray(pointer(numbers[9]), rows, np.uint64),
        carray(pointer(numbers[10]), (rows + 63) // 64, np.uint64),
        numbers[5],
        carray(pointer(numbers[11]), 2, np.int64),
    )
