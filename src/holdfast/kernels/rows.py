"""The hot loops over rows. Each has a slow, obvious twin in the tests.

Rows are handled as bits: nothing here knows what a number means. All loops release the GIL.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def _pointer(typing_context, address):
    """An integer as the address that it is."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _prefetch(typing_context, address):
    """Ask for a cache line that will be written to soon."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, i32(1), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(address), generate


_LINE = 64  # bytes of a cache line


@intrinsic
def _copy_line(typing_context, target, source):
    """Copy as many bytes as a cache line has, between any addresses."""

    def generate(context, builder, signature, arguments):
        half = ir.VectorType(ir.IntType(64), 4)
        to, from_ = (builder.inttoptr(a, half.as_pointer()) for a in arguments)
        places = [ir.IntType(64)(k) for k in range(_LINE // 32)]
        values = [builder.load(builder.gep(from_, [k]), align=1) for k in places]
        for k, value in zip(places, values, strict=True):
            builder.store(value, builder.gep(to, [k]), align=1)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def _stream_line(typing_context, target, source):
    """Copy a cache line, at addresses, past the caches: it is not read before it is written."""

    def generate(context, builder, signature, arguments):
        line = ir.VectorType(ir.IntType(64), _LINE // 8)
        to, from_ = (builder.inttoptr(a, line.as_pointer()) for a in arguments)
        hint = builder.module.add_metadata([ir.IntType(32)(1)])
        value = builder.load(from_, align=1)
        builder.store(value, to, align=_LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def _finish_streams(typing_context):
    """Lines that were streamed are in memory before anything that is written from here on."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _trailing_zeros(typing_context, word):
    """How many of a word's lowest bits are 0: the place of its lowest 1."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(word), generate


@intrinsic
def _ones(typing_context, word):
    """How many of a word's bits are 1."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(word), generate


@njit(cache=True, nogil=True)
def mark_rows(bits, ids, first, rows):
    """Set the bits first + id of a uint64 bitmap. Ids outside of the table are not its concern."""
    for i in range(ids.shape[0]):
        row = ids[i]
        if 0 <= row < rows:
            bit = first + row
            bits[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)


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
        total += np.int64(_ones(bits[w]))
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
        end = found + np.int64(_ones(word))
        out[found] = w * 64 + np.int64(_trailing_zeros(word))
        word &= word - np.uint64(1)
        out[found + 1] = w * 64 + np.int64(_trailing_zeros(word))
        word &= word - np.uint64(1)
        found += 2
        while word != np.uint64(0):
            out[found] = w * 64 + np.int64(_trailing_zeros(word))
            word &= word - np.uint64(1)
            found += 1
        found = end
    return found, bits.shape[0]


_AHEAD = 8
_GATHER_BLOCK = 2048
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
            ones = np.int64(_trailing_zeros(~word))
            quotient = ones
            if ones + k < _WORD_BITS:  # all of it is in this word, as a rule
                low = np.int64((word >> np.uint64(1) >> np.uint64(ones)) & mask)
                at += ones + 1 + k
            else:
                while ones >= _WORD_BITS - 1 and at < limit:
                    at += _WORD_BITS - 1
                    quotient -= ones - (_WORD_BITS - 1)
                    ones = np.int64(_trailing_zeros(~_word(address, at, limit)))
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
    return carray(_pointer(address + (at >> 3)), 1, np.uint64)[0] >> np.uint64(at & 7)


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


FROM_FRONT, FROM_BEHIND, UNTIL_HELPED = range(3)


@njit(cache=True, nogil=True)
def gather_rows(addresses, firsts, ids, targets, words, word, shared, helped, how):
    """Copy rows of tables that are numbered through, several fields of each, by one thread or two.

    Table t has rows firsts[t] to firsts[t + 1] - 1 of the numbering; its field f begins at memory address
    addresses[f, t] and has words[f] words a row, as long as an element of ``word``. Row ids[i] of a field is
    copied to row i of the array at targets[f]. ids ascend and lie within the numbering: the caller's duty.

    The work is cut into blocks, numbered through over all fields. shared[0] and shared[1], 0 and
    ``gather_blocks`` at first, are the first block and the one behind the last that nobody has taken: one
    thread takes them FROM_FRONT, the other FROM_BEHIND, until they meet. Without locks both may take the
    last one: then it is copied twice. UNTIL_HELPED is from behind too, until the first thread is there.
    """
    blocks = (ids.shape[0] + _GATHER_BLOCK - 1) // _GATHER_BLOCK
    if how == FROM_FRONT:
        helped[0] = 1
    while True:
        if how == FROM_FRONT:
            taken = shared[0]
            if taken >= shared[1]:
                return
            shared[0] = taken + 1
        else:
            taken = shared[1] - 1
            if taken < shared[0] or (how == UNTIL_HELPED and helped[0]):
                return
            shared[1] = taken
        field = taken // blocks
        begin = (taken - field * blocks) * _GATHER_BLOCK
        part = ids[begin : begin + _GATHER_BLOCK]
        width = words[field]
        out = carray(_pointer(targets[field]), (ids.shape[0], width), word.dtype)[begin:]
        _gather(addresses[field], firsts, part, out)


def gather_blocks(fields, rows):
    """How many blocks ``gather_rows`` cuts its work into."""
    return fields * ((rows + _GATHER_BLOCK - 1) // _GATHER_BLOCK)


@njit(cache=True, nogil=True)
def _gather(addresses, firsts, ids, out):
    words = out.shape[1]
    row_bytes = words * out.itemsize
    table = np.searchsorted(firsts, ids[0], "right") - 1
    ahead = table
    live = carray(_pointer(addresses[table]), (firsts[table + 1] - firsts[table], words), out.dtype)
    for i in range(ids.shape[0]):
        if i + _AHEAD < ids.shape[0]:  # rows lie anywhere: ask for the one that comes in a while
            coming = ids[i + _AHEAD]
            while coming >= firsts[ahead + 1]:
                ahead += 1
            _prefetch_row(addresses[ahead] + (coming - firsts[ahead]) * row_bytes, row_bytes)
        if ids[i] >= firsts[table + 1]:
            while ids[i] >= firsts[table + 1]:
                table += 1
            live = carray(_pointer(addresses[table]), (firsts[table + 1] - firsts[table], words), out.dtype)
        _copy_row(live, ids[i] - firsts[table], out, i)


@njit(cache=True, nogil=True)
def scatter_rows(addresses, firsts, ids, values, row_bytes, positions):
    """Copy rows to where they belong in tables that are numbered through, several fields of each.

    Table t has rows firsts[t] to firsts[t + 1] - 1 of the numbering; its field f begins at memory address
    addresses[f, t] and has row_bytes[f] bytes a row. Row p of the rows at memory address values[f] becomes
    row ids[p], for each p of ``positions``, or every p without any. ids ascend and lie within the numbering:
    the caller's duty.
    """
    for f in range(addresses.shape[0]):
        if not are_lines(addresses[f], row_bytes[f]):
            _scatter_bytes(addresses[f], firsts, ids, values[f], row_bytes[f], positions)
        elif positions.shape[0]:
            _scatter_some_lines(addresses[f], firsts, ids, values[f], row_bytes[f], positions)
        elif row_bytes[f] == _LINE:
            _scatter_lines(addresses[f], firsts, ids, values[f], _LINE)
        else:
            _scatter_lines(addresses[f], firsts, ids, values[f], row_bytes[f])
    _finish_streams()


@njit(cache=True, nogil=True)
def are_lines(addresses, row_bytes):
    """Whether rows are whole cache lines in every table."""
    whole = row_bytes % _LINE == 0
    for t in range(addresses.shape[0]):
        whole &= addresses[t] % _LINE == 0
    return whole


# Rows that lie anywhere are not in the caches, and writing whole lines they need not come there. A loop for
# all rows and one for some: asking at each row which it is takes a fifth of the time.


@njit(cache=True, nogil=True, inline="always")
def _scatter_lines(addresses, firsts, ids, values, row_bytes):
    table = 0
    for p in range(ids.shape[0]):
        while ids[p] >= firsts[table + 1]:
            table += 1
        row = addresses[table] + (ids[p] - firsts[table]) * row_bytes
        for offset in range(0, row_bytes, _LINE):
            _stream_line(row + offset, values + p * row_bytes + offset)


@njit(cache=True, nogil=True)
def _scatter_some_lines(addresses, firsts, ids, values, row_bytes, positions):
    table = 0
    for p in positions:
        while ids[p] >= firsts[table + 1]:
            table += 1
        row = addresses[table] + (ids[p] - firsts[table]) * row_bytes
        for offset in range(0, row_bytes, _LINE):
            _stream_line(row + offset, values + p * row_bytes + offset)


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
        _copy_bytes(
            values + p * row_bytes, addresses[table] + (ids[p] - firsts[table]) * row_bytes, row_bytes
        )


@njit(cache=True, nogil=True)
def copy_past_caches(target, source):
    """Copy bytes to where nobody looks for them soon: whole lines are not read before they are written."""
    to, from_ = target.ctypes.data, source.ctypes.data
    size = target.shape[0]
    begin = min(-to % _LINE, size)
    end = begin + (size - begin) // _LINE * _LINE
    for i in range(begin):
        target[i] = source[i]
    for at in range(begin, end, _LINE):
        _stream_line(to + at, from_ + at)
    for i in range(end, size):
        target[i] = source[i]
    _finish_streams()


@njit(cache=True, nogil=True, inline="always")
def _copy_bytes(source, target, size):
    """Copy a row from one memory address to another."""
    at = 0
    while at + _LINE <= size:
        _copy_line(target + at, source + at)
        at += _LINE
    while at + 8 <= size:
        carray(_pointer(target + at), 1, np.uint64)[0] = carray(_pointer(source + at), 1, np.uint64)[0]
        at += 8
    while at < size:
        carray(_pointer(target + at), 1, np.uint8)[0] = carray(_pointer(source + at), 1, np.uint8)[0]
        at += 1


@njit(cache=True, nogil=True, inline="always")
def _prefetch_row(address, row_bytes):
    """The lines of a row; of a long one the first few, behind which the processor runs on by itself."""
    _prefetch(address)
    for offset in range(64, min(row_bytes, 256), 64):
        _prefetch(address + offset)


@njit(cache=True, nogil=True, inline="always")
def _copy_row(source, i, target, j):
    words = source.shape[1]
    w = 0
    while w + 8 <= words:  # eight loads, then eight stores: they may not be told apart otherwise
        a0 = source[i, w]
        a1 = source[i, w + 1]
        a2 = source[i, w + 2]
        a3 = source[i, w + 3]
        a4 = source[i, w + 4]
        a5 = source[i, w + 5]
        a6 = source[i, w + 6]
        a7 = source[i, w + 7]
        target[j, w] = a0
        target[j, w + 1] = a1
        target[j, w + 2] = a2
        target[j, w + 3] = a3
        target[j, w + 4] = a4
        target[j, w + 5] = a5
        target[j, w + 6] = a6
        target[j, w + 7] = a7
        w += 8
    while w < words:
        target[j, w] = source[i, w]
        w += 1


@njit(cache=True, nogil=True, inline="always")
def _mixed(value):
    """SplitMix64's last steps: every bit of the value moves every bit of the result."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def bloom_add(words, probes, ids):
    """Put ids into a Bloom filter: ``probes`` bits for each, all in one block of eight 64-bit words."""
    blocks = np.uint64(words.shape[0] >> 3)
    for i in range(ids.shape[0]):
        place = _mixed(np.uint64(ids[i]) + np.uint64(0x9E3779B97F4A7C15))
        bits = _mixed(place + np.uint64(0x9E3779B97F4A7C15))
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
        place = _mixed(np.uint64(ids[i]) + np.uint64(0x9E3779B97F4A7C15))
        bits = _mixed(place + np.uint64(0x9E3779B97F4A7C15))
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


@njit(cache=True, nogil=True)
def copy_ranges(addresses, sizes, out):
    """Copy sizes[i] bytes from each memory address, one range behind the other."""
    at = 0
    for i in range(addresses.shape[0]):
        if sizes[i]:
            out[at : at + sizes[i]] = carray(_pointer(addresses[i]), sizes[i], np.uint8)
            at += sizes[i]
