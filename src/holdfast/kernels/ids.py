"""The hot loops over row ids: sets of them, their codes, which records live. Each has a slow, obvious twin
in the tests. All loops release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from holdfast.kernels.machine import mixed, ones, pointer, trailing_zeros

# Checksums of the files whose functions are inlined here, since Numba's cache depends on this file alone.
BUILT_WITH = {"machine": "d8b2aca3c980"}


@njit(cache=True, nogil=True)
def mark_rows(bits, ids, first, rows):
    """Set the bits first + id of a uint64 bitmap. Ids outside of the table are not its concern."""
    # Unsigned numbers: a negative id is a large one, and Numba does not look for places before the end.
    first, rows = np.uint64(first), np.uint64(rows)
    for i in range(ids.shape[0]):
        row = np.uint64(ids[i])
        if row < rows:
            bit = first + row
            bits[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))


@njit(cache=True, nogil=True)
def unmark_rows(bits, ids):
    """Clear the bits of these ids, all of which the bitmap has."""
    for i in range(ids.shape[0]):
        bits[ids[i] >> 6] &= ~(np.uint64(1) << np.uint64(ids[i] & 63))


@njit(cache=True, nogil=True)
def count_marked(bits):
    """How many bits are set."""
    total = np.int64(0)
    for w in range(bits.shape[0]):
        total += np.int64(ones(bits[w]))
    return total


@njit(cache=True, nogil=True)
def marked_rows(bits, out, clear):
    """Write the ids of set bits to ``out``, ascending: (how many, how many words of the bitmap were done).

    Stops where ``out`` has no room for all that a word may hold, which is 64 ids. ``clear`` clears what was
    written.
    """
    found = 0
    for w in range(bits.shape[0]):
        if found + 64 > out.shape[0]:
            return found, w
        word = bits[w]
        if clear:
            bits[w] = np.uint64(0)
        # Most words hold none to two. Two are written in any case: a guess at how many would often be wrong,
        # which costs more than what is written for nothing and overwritten by the next word.
        end = found + np.int64(ones(word))
        out[found] = w * 64 + np.int64(trailing_zeros(word))
        word &= word - np.uint64(1)
        out[found + 1] = w * 64 + np.int64(trailing_zeros(word))
        word &= word - np.uint64(1)
        found += 2
        while word != np.uint64(0):
            out[found] = w * 64 + np.int64(trailing_zeros(word))
            word &= word - np.uint64(1)
            found += 1
        found = end
    return found, bits.shape[0]


@njit(cache=True, nogil=True)
def nonzero_rows(address, row_bytes, out):
    """Write to ``out`` the rows that have a bit set, ascending; how many there are.

    There are as many rows as ``out`` has room for, one behind the other at a memory address.
    """
    found = 0
    words = row_bytes >> 3
    for row in range(out.shape[0]):
        begin = address + row * row_bytes
        bits = np.uint64(0)
        for word in carray(pointer(begin), words, np.uint64):
            bits |= word
        for rest in carray(pointer(begin + 8 * words), row_bytes & 7, np.uint8):
            bits |= np.uint64(rest)
        out[found] = row  # overwritten if it does not count
        found += bits != np.uint64(0)
    return found


_BLOCK = 128  # gaps that share one Rice parameter
_LARGEST_PARAMETER = 48  # gaps of up to 2**48
_WORD_BITS = 57  # of the stream, that a word which begins at any byte has at least


def gaps_bound(count, span):
    """Bytes that ``encode_gaps`` takes at most for this many ids from the first to the last."""
    # A gap of a block with parameter k takes k + 1 bits and gap >> k more; k is at least log2(mean) - 1, so
    # the latter add up to less than four for each gap, and k is at most log2(span).
    bits = count * (max(int(span), 1).bit_length() + 1 + 4) + 64
    return bits // 8 + count // _BLOCK + 16


@njit(cache=True, nogil=True)
def encode_gaps(ids, least, out):
    """Write the gaps between ids as blocks of Rice codes: a byte k, then for each gap q ones, a zero, k bits.

    ``least`` is taken off every gap. How many bytes were written.
    """
    at = 0
    bits = np.uint64(0)
    filled = 0
    count = ids.shape[0]
    for start in range(1, count, _BLOCK):
        end = min(start + _BLOCK, count)
        mean = (ids[end - 1] - ids[start - 1]) // (end - start) - least
        k = 0
        while (mean >> k) > 1:
            k += 1
        # The byte k and each code pass through a buffer of bits, lowest first.
        bits |= np.uint64(k) << np.uint64(filled)
        filled += 8
        while filled >= 8:
            out[at] = np.uint8(bits & np.uint64(255))
            at += 1
            bits >>= np.uint64(8)
            filled -= 8
        for i in range(start, end):
            gap = ids[i] - ids[i - 1] - least
            ones = gap >> k
            while ones > 0:
                step = min(ones, 32)
                bits |= ((np.uint64(1) << np.uint64(step)) - np.uint64(1)) << np.uint64(filled)
                filled += step
                ones -= step
                while filled >= 8:
                    out[at] = np.uint8(bits & np.uint64(255))
                    at += 1
                    bits >>= np.uint64(8)
                    filled -= 8
            low = np.uint64(gap) & ((np.uint64(1) << np.uint64(k)) - np.uint64(1))
            bits |= (low << np.uint64(1)) << np.uint64(filled)
            filled += k + 1
            while filled >= 8:
                out[at] = np.uint8(bits & np.uint64(255))
                at += 1
                bits >>= np.uint64(8)
                filled -= 8
    if filled:
        out[at] = np.uint8(bits & np.uint64(255))
        at += 1
    return at


@njit(cache=True, nogil=True)
def decode_gaps(data, first, last, least, ids):
    """Undo ``encode_gaps``; False if the data end too early or say what no encoder says.

    Whatever the data are, ids never descend and never leave ``first`` to ``last``, which lie within 0 to
    2**62. ``data`` must have 8 bytes more than were encoded: a word is read at any byte.
    """
    address = data.ctypes.data
    limit = (data.shape[0] - 8) * 8
    count = ids.shape[0]
    value = first
    ids[0] = value
    at = 0  # in bits
    for start in range(1, count, _BLOCK):
        k = np.int64((_word(address, at, limit)) & np.uint64(255))
        at += 8
        if k > _LARGEST_PARAMETER:
            return False
        mask = (np.uint64(1) << np.uint64(k)) - np.uint64(1)
        for i in range(start, min(start + _BLOCK, count)):
            word = _word(address, at, limit)
            ones = np.int64(trailing_zeros(~word))
            quotient = ones
            if ones + k < _WORD_BITS:  # all of it is in this word, as a rule
                low = np.int64((word >> np.uint64(1) >> np.uint64(ones)) & mask)
                at += ones + 1 + k
            else:
                while ones >= _WORD_BITS - 1 and at < limit:
                    at += _WORD_BITS - 1
                    quotient -= ones - (_WORD_BITS - 1)
                    ones = np.int64(trailing_zeros(~_word(address, at, limit)))
                    quotient += ones
                at += ones + 1
                low = np.int64(_word(address, at, limit) & mask)
                at += k
            # Before the shift, which could wrap around and let ids descend.
            if at > limit or quotient > (last - value) >> k:
                return False
            value += (quotient << k) + low + least
            if value > last:
                return False
            ids[i] = value
    return True


@njit(cache=True, nogil=True, inline="always")
def _word(address, at, limit):
    """64 bits from bit ``at`` on, of which the last 7 may be missing; zeros behind the limit."""
    if at > limit:
        return np.uint64(0)
    return carray(pointer(address + (at >> 3)), 1, np.uint64)[0] >> np.uint64(at & 7)


@njit(cache=True, nogil=True)
def living_rows(born, after, version, died, dead_at, out):
    """Write to ``out`` every i with after < born[i] <= version and died[i] > dead_at; how many there are.

    An empty array stands for 0 everywhere, and ``out`` has room for every row.
    """
    found = 0
    births, deaths = born.shape[0] > 0, died.shape[0] > 0
    for i in range(out.shape[0]):
        b = np.int64(born[i]) if births else np.int64(0)
        d = np.int64(died[i]) if deaths else np.int64(0)
        out[found] = i  # overwritten if it does not count
        found += (b > after) & (b <= version) & (d > dead_at)
    return found


@njit(cache=True, nogil=True)
def bloom_add(words, probes, ids):
    """Put ids into a Bloom filter: ``probes`` bits for each, all in one block of eight 64-bit words."""
    blocks = np.uint64(words.shape[0] >> 3)
    for i in range(ids.shape[0]):
        place = mixed(np.uint64(ids[i]) + np.uint64(0x9E3779B97F4A7C15))
        bits = mixed(place + np.uint64(0x9E3779B97F4A7C15))
        first = np.int64(((place >> np.uint64(32)) * blocks) >> np.uint64(32)) << 3
        for _ in range(probes):
            words[first + np.int64((bits >> np.uint64(6)) & np.uint64(7))] |= np.uint64(1) << (
                bits & np.uint64(63)
            )
            bits >>= np.uint64(9)


@njit(cache=True, nogil=True)
def bloom_count(words, probes, ids):
    """How many ids have all of their bits in the filter."""
    blocks = np.uint64(words.shape[0] >> 3)
    found = 0
    for i in range(ids.shape[0]):
        place = mixed(np.uint64(ids[i]) + np.uint64(0x9E3779B97F4A7C15))
        bits = mixed(place + np.uint64(0x9E3779B97F4A7C15))
        first = np.int64(((place >> np.uint64(32)) * blocks) >> np.uint64(32)) << 3
        hit = True
        for _ in range(probes):
            word = words[first + np.int64((bits >> np.uint64(6)) & np.uint64(7))]
            if (word >> (bits & np.uint64(63))) & np.uint64(1) == np.uint64(0):
                hit = False
                break
            bits >>= np.uint64(9)
        found += hit
    return found
