"""The hot loops of a server: first values, reading rows, and applying a push in one pass over its records.

Records are uint32 [records, words], weights first, as ``GroupPlan.fields`` lays them out; the loops see the
same bits as float32. ``places`` are the records that a push or a pull names: ``check_places`` has to have
found nothing wrong with them, since the loops trust them. Sums and products are IEEE single steps, none
fused and none reordered: equal pushes in equal order give equal bits on every machine.

``marks`` is a bitmap of records that changed. ``changes`` is for whoever has to tell others what changed: the
first time that a record is updated, it is copied as it was. It is four arrays: a bitmap of the records that
are copied (without elements if nobody wants to know), then by member (place % k): their blocks (place // k,
uint32 [k, room]), the copies ([k, room, words], aligned to a cache line), and how many there are (int64 [k]).
There must be room for all that is updated. ``take_changes`` makes differences of the copies.

Several threads may apply one push: ``part`` of ``parts`` updates its share of the places, whatever thread it
runs in. No two parts touch the same record or the same word of a bitmap. Each needs ``changes`` of its own,
but for the bitmap, which is everybody's. With one part, all records are its.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from holdfast.kernels.machine import mixed, pointer, prefetch
from holdfast.kernels.simd import COUNT, compiled, each, load, splat, store

# Numba keeps what it compiled of this file until the file changes. So it must change with the one that it is
# built with: a test compares their checksums.
BUILT_WITH = {"simd": "d06c9da87557", "machine": "d8b2aca3c980"}

_inlined = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, forceinline=True)

_AHEAD = 8
_LINE = 64
_LINE_BITS = 9  # 2**9 bits are a cache line
_MOST_ASKED = 1024  # bytes of a record; behind them the processor runs on by itself
_GOLDEN = 0x9E3779B97F4A7C15

FINE, BEYOND, UNUSED, TWICE = range(4)
"""What ``check_places`` finds: nothing, no such record, a record that stands for no row, one named before."""


@_inlined
def _ask(address, count):
    """Ask for the cache lines of a record that is needed in a while: rows lie anywhere."""
    for offset in range(0, min(count, _MOST_ASKED), _LINE):
        prefetch(address + offset)
    prefetch(address + count - 4)


# What is called for every record takes addresses and numbers: arrays that are passed on would be counted as
# references, each by an atomic operation, which took a quarter of an update's time.


@_inlined
def _word(address):
    """The 64-bit word at an address, as an array of one."""
    return carray(pointer(address), 1, np.uint64)


@_inlined
def _copy(to, at, words):
    """Copy a record from one address to another."""
    some = words // COUNT * COUNT * 4
    for w in range(0, some, COUNT * 4):
        store(to + w, load(at + w))
    for w in range(some, words * 4, 4):
        carray(pointer(to + w), 1, np.uint32)[0] = carray(pointer(at + w), 1, np.uint32)[0]


@_inlined
def _addresses(changes):
    """Where the arrays of ``changes`` are, k, and the room of each member; 0 if nobody wants to know."""
    copied, blocks, copies, counts = changes
    k, room = blocks.shape
    wanted = np.int64(copied.ctypes.data) if copied.shape[0] else np.int64(0)
    first, copy = np.int64(blocks.ctypes.data), np.int64(copies.ctypes.data)
    return wanted, first, copy, np.int64(counts.ctypes.data), k, room


@_inlined
def _keep(records, words, place, kept):
    """Copy a record as it is before its first update."""
    copied, blocks, copies, counts, k, room = kept
    bit = np.uint64(1) << np.uint64(place & 63)
    bits = _word(copied + (place >> 6) * 8)
    if not bits[0] & bit:
        bits[0] |= bit
        block = np.uint32(place) // np.uint32(k)
        member = place - np.int64(block) * k
        count = carray(pointer(counts + member * 8), 1, np.int64)
        at = member * room + count[0]
        count[0] += 1
        carray(pointer(blocks + at * 4), 1, np.uint32)[0] = block
        _copy(copies + at * words * 4, records + place * words * 4, words)


@_inlined
def _is_mine(place, part, parts):
    """Whether a record is one of this part: those whose bits of ``marks`` share a cache line are together, so
    that threads do not wait for each other's lines."""
    return parts == 1 or np.uint32(place >> _LINE_BITS) % np.uint32(parts) == np.uint32(part)


@_inlined
def _begin(records, words, place, marks, kept):
    """What comes before each record's update."""
    _word(marks + (place >> 6) * 8)[0] |= np.uint64(1) << np.uint64(place & 63)
    if kept[0]:
        _keep(records, words, place, kept)


@compiled
def keep_records(records, places, changes):
    """Copy records that are about to be changed by others than the loops below."""
    kept = _addresses(changes)
    first = np.int64(records.ctypes.data)
    for i in range(places.shape[0]):
        _keep(first, records.shape[1], np.int64(places[i]), kept)


@compiled
def take_changes(records, changes):
    """Turn all copies into old XOR new, where they are, and begin anew: nothing counts as copied then."""
    copied, blocks, copies, counts = changes
    k, room, words = copies.shape
    for member in range(k):
        for i in range(counts[member]):
            if i + _AHEAD < counts[member]:
                coming = np.int64(blocks[member, i + _AHEAD]) * k + member
                _ask(records.ctypes.data + coming * words * 4, words * 4)
            place = np.int64(blocks[member, i]) * k + member
            copied[place >> 6] = np.uint64(0)
            new = records.ctypes.data + place * words * 4
            old = copies.ctypes.data + (member * room + i) * words * 4
            for w in range(0, words // COUNT * COUNT * 4, COUNT * 4):
                store(old + w, _xor(load(old + w), load(new + w)))
            for w in range(words // COUNT * COUNT, words):
                copies[member, i, w] ^= records[place, w]
        counts[member] = 0


@intrinsic
def _xor(typing_context, a, b):
    """Of the bits of two vectors of floats."""

    def build(builder, one, other):
        integer = ir.IntType(32)
        kind = ir.VectorType(integer, COUNT) if isinstance(one.type, ir.VectorType) else integer
        bits = [builder.bitcast(value, kind) for value in (one, other)]
        return builder.bitcast(builder.xor(*bits), one.type)

    def generate(context, builder, sig, arguments):
        return each(builder, build, *arguments)

    return a(a, b), generate


@intrinsic
def _root(typing_context, value):
    """The square root of a float32, or of each of a vector."""

    def build(builder, value):
        kind = value.type
        name = "llvm.sqrt.v8f32" if isinstance(kind, ir.VectorType) else "llvm.sqrt.f32"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name)
        return builder.call(function, [value])

    def generate(context, builder, sig, arguments):
        if sig.args[0] is types.float32:
            return build(builder, *arguments)
        return each(builder, build, *arguments)

    return value(value), generate


# Each optimizer is a formula, which is for one float32 or for eight side by side, and a loop that applies it:
# eight columns at a time, then the few that are left. LLVM would find the eight by itself only in long rows,
# and slices of rows would be counted as references.


@_inlined
def _sgd(w, g, lr):
    return w - lr * g


@compiled
def update_sgd(records, places, gradients, lr, marks, changes, part, parts):
    """w -= lr g"""
    kept = _addresses(changes)
    floats = records.view(np.float32)
    words, dim = records.shape[1], gradients.shape[1]
    first, marked = np.int64(records.ctypes.data), np.int64(marks.ctypes.data)
    ahead = _AHEAD * parts
    some = dim // COUNT * COUNT
    for i in range(places.shape[0]):
        if i + ahead < places.shape[0] and _is_mine(places[i + ahead], part, parts):
            _ask(first + np.int64(places[i + ahead]) * words * 4, words * 4)
        if not _is_mine(places[i], part, parts):
            continue
        place = np.int64(places[i])
        _begin(first, words, place, marked, kept)
        at, of = first + place * words * 4, gradients.ctypes.data + i * dim * 4
        for d in range(0, some * 4, COUNT * 4):
            store(at + d, _sgd(load(at + d), load(of + d), splat(lr)))
        for d in range(some, dim):
            floats[place, d] = _sgd(floats[place, d], gradients[i, d], lr)


@_inlined
def _momentum(w, b, g, lr, momentum):
    moved = b * momentum + g
    return w - lr * moved, moved


@compiled
def update_momentum(records, places, gradients, lr, momentum, marks, changes, part, parts):
    """b = momentum b + g; w -= lr b"""
    kept = _addresses(changes)
    floats = records.view(np.float32)
    words, dim = records.shape[1], gradients.shape[1]
    first, marked = np.int64(records.ctypes.data), np.int64(marks.ctypes.data)
    ahead = _AHEAD * parts
    some = dim // COUNT * COUNT
    for i in range(places.shape[0]):
        if i + ahead < places.shape[0] and _is_mine(places[i + ahead], part, parts):
            _ask(first + np.int64(places[i + ahead]) * words * 4, words * 4)
        if not _is_mine(places[i], part, parts):
            continue
        place = np.int64(places[i])
        _begin(first, words, place, marked, kept)
        at, of = first + place * words * 4, gradients.ctypes.data + i * dim * 4
        for d in range(0, some * 4, COUNT * 4):
            b = at + dim * 4 + d
            weight, moved = _momentum(load(at + d), load(b), load(of + d), splat(lr), splat(momentum))
            store(at + d, weight)
            store(b, moved)
        for d in range(some, dim):
            weight, moved = _momentum(floats[place, d], floats[place, dim + d], gradients[i, d], lr, momentum)
            floats[place, d] = weight
            floats[place, dim + d] = moved


@_inlined
def _adagrad(w, s, g, lr, eps):
    total = s + g * g
    return w - lr * (g / (_root(total) + eps)), total


@compiled
def update_adagrad(records, places, gradients, lr, eps, marks, changes, part, parts):
    """s += g²; w -= lr g / (sqrt(s) + eps)"""
    kept = _addresses(changes)
    floats = records.view(np.float32)
    words, dim = records.shape[1], gradients.shape[1]
    first, marked = np.int64(records.ctypes.data), np.int64(marks.ctypes.data)
    ahead = _AHEAD * parts
    some = dim // COUNT * COUNT
    for i in range(places.shape[0]):
        if i + ahead < places.shape[0] and _is_mine(places[i + ahead], part, parts):
            _ask(first + np.int64(places[i + ahead]) * words * 4, words * 4)
        if not _is_mine(places[i], part, parts):
            continue
        place = np.int64(places[i])
        _begin(first, words, place, marked, kept)
        at, of = first + place * words * 4, gradients.ctypes.data + i * dim * 4
        for d in range(0, some * 4, COUNT * 4):
            s = at + dim * 4 + d
            weights, totals = _adagrad(load(at + d), load(s), load(of + d), splat(lr), splat(eps))
            store(at + d, weights)
            store(s, totals)
        for d in range(some, dim):
            weight, total = _adagrad(floats[place, d], floats[place, dim + d], gradients[i, d], lr, eps)
            floats[place, d] = weight
            floats[place, dim + d] = total


@_inlined
def _square_sum(gradients, i):
    """The sum of a gradient's squares, as eight partial sums that are added in pairs: the same order whatever
    vectors the machine has."""
    dim = gradients.shape[1]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    d = 0
    while d + 8 <= dim:
        s0 += gradients[i, d] * gradients[i, d]
        s1 += gradients[i, d + 1] * gradients[i, d + 1]
        s2 += gradients[i, d + 2] * gradients[i, d + 2]
        s3 += gradients[i, d + 3] * gradients[i, d + 3]
        s4 += gradients[i, d + 4] * gradients[i, d + 4]
        s5 += gradients[i, d + 5] * gradients[i, d + 5]
        s6 += gradients[i, d + 6] * gradients[i, d + 6]
        s7 += gradients[i, d + 7] * gradients[i, d + 7]
        d += 8
    total = ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))
    while d < dim:
        total += gradients[i, d] * gradients[i, d]
        d += 1
    return total


@_inlined
def _scaled(w, g, divisor, lr):
    return w - lr * (g / divisor)


@compiled
def update_rowwise_adagrad(records, places, gradients, lr, eps, marks, changes, part, parts):
    """s += mean of g²; w -= lr g / (sqrt(s) + eps)"""
    kept = _addresses(changes)
    floats = records.view(np.float32)
    words, dim = records.shape[1], gradients.shape[1]
    first, marked = np.int64(records.ctypes.data), np.int64(marks.ctypes.data)
    ahead = _AHEAD * parts
    some = dim // COUNT * COUNT
    for i in range(places.shape[0]):
        if i + ahead < places.shape[0] and _is_mine(places[i + ahead], part, parts):
            _ask(first + np.int64(places[i + ahead]) * words * 4, words * 4)
        if not _is_mine(places[i], part, parts):
            continue
        place = np.int64(places[i])
        _begin(first, words, place, marked, kept)
        total = floats[place, dim] + _square_sum(gradients, i) / np.float32(dim)
        floats[place, dim] = total
        divisor = np.sqrt(total) + eps
        at, of = first + place * words * 4, gradients.ctypes.data + i * dim * 4
        for d in range(0, some * 4, COUNT * 4):
            store(at + d, _scaled(load(at + d), load(of + d), splat(divisor), splat(lr)))
        for d in range(some, dim):
            floats[place, d] = _scaled(floats[place, d], gradients[i, d], divisor, lr)


@_inlined
def _power(base, exponent):
    """A float64 to the power of a count, by products alone: ``pow`` is not the same on every machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@_inlined
def _adam(w, m, v, g, part1, part2, size, eps):
    m = m + (g - m) * part1
    v = v + (g * g - v) * part2
    return w - size * (m / (_root(v) + eps)), m, v


@compiled
def update_adam(records, places, gradients, lr, eps, beta1, beta2, marks, changes, part, parts):
    """m += (1 - beta1)(g - m); v += (1 - beta2)(g² - v); w -= size m / (sqrt(v) + eps)

    size = lr sqrt(1 - beta2^t) / (1 - beta1^t), t the record's own number of updates. ``lr`` and the betas
    are float64, as in torch.
    """
    kept = _addresses(changes)
    floats = records.view(np.float32)
    words, dim = records.shape[1], gradients.shape[1]
    first, marked = np.int64(records.ctypes.data), np.int64(marks.ctypes.data)
    ahead = _AHEAD * parts
    some = dim // COUNT * COUNT
    part1, part2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    for i in range(places.shape[0]):
        if i + ahead < places.shape[0] and _is_mine(places[i + ahead], part, parts):
            _ask(first + np.int64(places[i + ahead]) * words * 4, words * 4)
        if not _is_mine(places[i], part, parts):
            continue
        place = np.int64(places[i])
        _begin(first, words, place, marked, kept)
        step = np.int64(records[place, 3 * dim]) + 1
        records[place, 3 * dim] = np.uint32(step)
        size = np.float32(lr * np.sqrt(1.0 - _power(beta2, step)) / (1.0 - _power(beta1, step)))
        at, of = first + place * words * 4, gradients.ctypes.data + i * dim * 4
        for d in range(0, some * 4, COUNT * 4):
            m, v = at + dim * 4 + d, at + dim * 8 + d
            weights, means, squares = _adam(
                load(at + d),
                load(m),
                load(v),
                load(of + d),
                splat(part1),
                splat(part2),
                splat(size),
                splat(eps),
            )
            store(at + d, weights)
            store(m, means)
            store(v, squares)
        for d in range(some, dim):
            weight, mean, square = _adam(
                floats[place, d],
                floats[place, dim + d],
                floats[place, 2 * dim + d],
                gradients[i, d],
                part1,
                part2,
                size,
                eps,
            )
            floats[place, d] = weight
            floats[place, dim + d] = mean
            floats[place, 2 * dim + d] = square


@compiled
def check_places(places, server, servers, k, r, groups, rows, seen):
    """Whether places name different records that stand for rows: (what is wrong, where in ``places``).

    Rows lie as in ``coding.placement``. ``seen`` is a bitmap of the server's records, all zero, and is left
    so; without elements, places may be named twice.
    """
    stripes = (rows + k - 1) // k
    records = (stripes + servers - 1) // servers * k
    certain = rows // (k * servers) * k  # below, no record is unused
    wrong, at = FINE, places.shape[0]
    once = seen.shape[0] > 0
    for i in range(places.shape[0]):
        place = np.int64(places[i])
        if not 0 <= place < certain:
            if not 0 <= place < records:
                wrong, at = BEYOND, i
                break
            if _row_of(place, _ring(server, servers, groups), servers, k, r, groups) >= rows:
                wrong, at = UNUSED, i
                break
        if once:
            bit = np.uint64(1) << np.uint64(place & 63)
            word = seen[place >> 6]
            if word & bit:
                wrong, at = TWICE, i
                break
            seen[place >> 6] = word | bit
    if once:
        for i in range(at):
            seen[np.int64(places[i]) >> 6] = np.uint64(0)
    return wrong, at


@_inlined
def _ring(server, servers, groups):
    """Which group of servers one is in, how many are, and its number among them."""
    group = server % groups
    return group, (servers - group + groups - 1) // groups, server // groups


@_inlined
def _row_of(place, ring, servers, k, r, groups):
    """``Placement.row`` of one record."""
    group, count, index = ring
    member = place % k
    return (place // k * servers + group + (index - r - member) % count * groups) * k + member


@compiled
def gather_weights(records, places, out):
    """Copy the first words of each record, or all, to ``out``, float32 [places, words]."""
    floats = records.view(np.float32)
    dim = out.shape[1]
    row_bytes, some = records.shape[1] * 4, dim // COUNT * COUNT
    for i in range(places.shape[0]):
        if i + _AHEAD < places.shape[0]:
            _ask(records.ctypes.data + np.int64(places[i + _AHEAD]) * row_bytes, dim * 4)
        place = np.int64(places[i])
        at, to = records.ctypes.data + place * row_bytes, out.ctypes.data + i * dim * 4
        for d in range(0, some * 4, COUNT * 4):
            store(to + d, load(at + d))
        for d in range(some, dim):
            out[i, d] = floats[place, d]


@compiled
def put_records(records, places, values):
    """records[places[i]] = values[i]"""
    words = records.shape[1]
    at, of = records.ctypes.data, values.ctypes.data
    for i in range(places.shape[0]):
        if i + _AHEAD < places.shape[0]:
            _ask(at + np.int64(places[i + _AHEAD]) * words * 4, words * 4)
        _copy(at + np.int64(places[i]) * words * 4, of + i * words * 4, words)


@compiled
def fill_uniform(records, dim, server, servers, k, r, groups, firsts, keys, scales):
    """Write the first weights of all rows; records that stand for no row are left as they are."""
    floats = records.view(np.float32)
    ring = _ring(server, servers, groups)
    for place in range(records.shape[0]):
        row = _row_of(place, ring, servers, k, r, groups)
        if row < firsts[-1]:
            _draw(floats, place, dim, row, firsts, keys, scales)


@compiled
def first_values(out, dim, rows, firsts, keys, scales):
    """Write the first weights of rows[i] to out[i]; of those beyond the last row, it is left as it is."""
    floats = out.view(np.float32)
    for i in range(rows.shape[0]):
        if rows[i] < firsts[-1]:
            _draw(floats, i, dim, rows[i], firsts, keys, scales)


@_inlined
def _draw(floats, i, dim, row, firsts, keys, scales):
    """The first weights of a row: odd multiples of scales[table] (float32), less than 2**24 of it.

    A weight follows from keys[table] (uint64), its row and its column alone, so it is the same on whichever
    server it lies.
    """
    golden = np.uint64(_GOLDEN)
    table = np.searchsorted(firsts, row, "right") - 1
    scale = scales[table]
    state = mixed(keys[table] + np.uint64(row - firsts[table]) * golden)
    for d in range(0, dim, 2):  # 24 bits for each weight: two of a word
        state += golden
        word = mixed(state)
        floats[i, d] = scale * np.float32(np.int64(word >> np.uint64(40)) * 2 - 0xFFFFFF)
        if d + 1 < dim:
            low = np.int64(word & np.uint64(0xFFFFFF))
            floats[i, d + 1] = scale * np.float32(low * 2 - 0xFFFFFF)
