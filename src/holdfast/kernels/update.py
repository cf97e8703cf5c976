"""The hot loops of a server: first values, reading rows, and applying a push in one pass over its records.

Records are uint32 [records, words], weights first, as ``GroupPlan.fields`` lays them out; the loops see the
same bits as float32. ``places`` are the records that a push or a pull names: ``check_places`` has to have
found nothing wrong with them, since the loops trust them. Sums and products are IEEE single steps, none
fused and none reordered: equal pushes in equal order give equal bits on every machine.

``marks`` is a bitmap of records that changed. ``differences`` is uint32 [places, words] and becomes old XOR
new of each record, or has no rows if nobody wants them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from holdfast.kernels.rows import _mixed, _prefetch

_compiled = njit(cache=True, nogil=True, error_model="numpy")
_inlined = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, forceinline=True)

_AHEAD = 8
_LINE = 64
_MOST_ASKED = 1024  # bytes of a record; behind them the processor runs on by itself
_GOLDEN = 0x9E3779B97F4A7C15

FINE, BEYOND, UNUSED, TWICE = range(4)
"""What ``check_places`` finds: nothing, no such record, a record that stands for no row, one named before."""


@_inlined
def _ask(address, count):
    """Ask for the cache lines of a record that is needed in a while: rows lie anywhere."""
    for offset in range(0, min(count, _MOST_ASKED), _LINE):
        _prefetch(address + offset)
    _prefetch(address + count - 4)


@_inlined
def _begin(records, places, i, marks, differences):
    """What comes before each record's update: the record's number."""
    if i + _AHEAD < places.shape[0]:
        count = records.shape[1] * 4
        _ask(records.ctypes.data + np.int64(places[i + _AHEAD]) * count, count)
    place = np.int64(places[i])
    marks[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
    if differences.shape[0]:
        source, target = records[place], differences[i]
        for w in range(records.shape[1]):
            target[w] = source[w]
    return place


@_inlined
def _end(records, place, i, differences):
    """What comes behind it."""
    if differences.shape[0]:
        source, target = records[place], differences[i]
        for w in range(records.shape[1]):
            target[w] ^= source[w]


# Each field of a record is a slice of its own: indexes like ``dim + d`` would hide from LLVM that the loop
# over the columns can be done in vectors.


@_compiled
def update_sgd(records, places, gradients, lr, marks, differences):
    """w -= lr g"""
    floats = records.view(np.float32)
    dim = gradients.shape[1]
    for i in range(places.shape[0]):
        place = _begin(records, places, i, marks, differences)
        weight, gradient = floats[place, :dim], gradients[i]
        for d in range(dim):
            weight[d] -= lr * gradient[d]
        _end(records, place, i, differences)


@_compiled
def update_momentum(records, places, gradients, lr, momentum, marks, differences):
    """b = momentum b + g; w -= lr b"""
    floats = records.view(np.float32)
    dim = gradients.shape[1]
    for i in range(places.shape[0]):
        place = _begin(records, places, i, marks, differences)
        weight, buffer, gradient = floats[place, :dim], floats[place, dim : 2 * dim], gradients[i]
        for d in range(dim):
            moved = buffer[d] * momentum + gradient[d]
            buffer[d] = moved
            weight[d] -= lr * moved
        _end(records, place, i, differences)


@_compiled
def update_adagrad(records, places, gradients, lr, eps, marks, differences):
    """s += g²; w -= lr g / (sqrt(s) + eps)"""
    floats = records.view(np.float32)
    dim = gradients.shape[1]
    for i in range(places.shape[0]):
        place = _begin(records, places, i, marks, differences)
        weight, sums, gradient = floats[place, :dim], floats[place, dim : 2 * dim], gradients[i]
        for d in range(dim):
            g = gradient[d]
            total = sums[d] + g * g
            sums[d] = total
            weight[d] -= lr * (g / (np.sqrt(total) + eps))
        _end(records, place, i, differences)


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


@_compiled
def update_rowwise_adagrad(records, places, gradients, lr, eps, marks, differences):
    """s += mean of g²; w -= lr g / (sqrt(s) + eps)"""
    floats = records.view(np.float32)
    dim = gradients.shape[1]
    for i in range(places.shape[0]):
        place = _begin(records, places, i, marks, differences)
        total = floats[place, dim] + _square_sum(gradients, i) / np.float32(dim)
        floats[place, dim] = total
        divisor = np.sqrt(total) + eps
        weight, gradient = floats[place, :dim], gradients[i]
        for d in range(dim):
            weight[d] -= lr * (gradient[d] / divisor)
        _end(records, place, i, differences)


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


@_compiled
def update_adam(records, places, gradients, lr, eps, beta1, beta2, marks, differences):
    """m += (1 - beta1)(g - m); v += (1 - beta2)(g² - v); w -= size m / (sqrt(v) + eps)

    size = lr sqrt(1 - beta2^t) / (1 - beta1^t), t the record's own number of updates. ``lr`` and the betas
    are float64, as in torch.
    """
    floats = records.view(np.float32)
    dim = gradients.shape[1]
    part1, part2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    for i in range(places.shape[0]):
        place = _begin(records, places, i, marks, differences)
        step = np.int64(records[place, 3 * dim]) + 1
        records[place, 3 * dim] = np.uint32(step)
        size = np.float32(lr * np.sqrt(1.0 - _power(beta2, step)) / (1.0 - _power(beta1, step)))
        weight, gradient = floats[place, :dim], gradients[i]
        means, squares = floats[place, dim : 2 * dim], floats[place, 2 * dim : 3 * dim]
        for d in range(dim):
            g, m, v = gradient[d], means[d], squares[d]
            m += (g - m) * part1
            v += (g * g - v) * part2
            means[d] = m
            squares[d] = v
            weight[d] -= size * (m / (np.sqrt(v) + eps))
        _end(records, place, i, differences)


@_compiled
def check_places(places, server, servers, k, r, rows, seen):
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
        if not 0 <= place < records:
            wrong, at = BEYOND, i
            break
        if place >= certain and row_of(place, server, servers, k, r) >= rows:
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
def row_of(place, server, servers, k, r):
    """``Placement.row`` of one record."""
    member = place % k
    return (place // k * servers + (server - r - member) % servers) * k + member


@_compiled
def gather_weights(records, places, out):
    """Copy the first words of each record to ``out``, float32 [places, dim]."""
    floats = records.view(np.float32)
    row_bytes, asked = records.shape[1] * 4, out.shape[1] * 4
    for i in range(places.shape[0]):
        if i + _AHEAD < places.shape[0]:
            _ask(records.ctypes.data + np.int64(places[i + _AHEAD]) * row_bytes, asked)
        weight, target = floats[np.int64(places[i]), : out.shape[1]], out[i]
        for d in range(out.shape[1]):
            target[d] = weight[d]


@_compiled
def fill_uniform(records, dim, server, servers, k, r, firsts, keys, scales):
    """Write the first weights of all rows: odd multiples of scales[table] (float32), less than 2**24 of it.

    A weight follows from keys[table] (uint64), its row and its column alone, so it is the same on whichever
    server it lies. Records that stand for no row are left as they are.
    """
    floats = records.view(np.float32)
    golden = np.uint64(_GOLDEN)
    for place in range(records.shape[0]):
        row = row_of(place, server, servers, k, r)
        if row >= firsts[-1]:
            continue
        table = np.searchsorted(firsts, row, "right") - 1
        state = _mixed(keys[table] + np.uint64(row - firsts[table]) * golden)
        for d in range(0, dim, 2):  # 24 bits for each weight: two of a word
            state += golden
            word = _mixed(state)
            floats[place, d] = scales[table] * np.float32(np.int64(word >> np.uint64(40)) * 2 - 0xFFFFFF)
            if d + 1 < dim:
                low = np.int64(word & np.uint64(0xFFFFFF))
                floats[place, d + 1] = scales[table] * np.float32(low * 2 - 0xFFFFFF)
