"""Row codecs: what they promise, for any bits that a row may hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from holdfast.checkpoint.codecs.quantize import (
    FloatCodec,
    LogCodec,
    RowCodec,
    UniformCodec,
    as_float32,
    choose_grid_bits,
    codec_from_json,
    from_float32,
)
from holdfast.errors import ConfigError, CorruptCheckpoint

Floats = NDArray[np.float32]
UNIFORM = [
    UniformCodec(bits, grid, method)
    for bits in (2, 3, 4, 8)
    for grid in (16, 32)
    for method in ("symmetric", "asymmetric", "adaptive")
]
CODECS: list[RowCodec] = [*UNIFORM, FloatCodec(), LogCodec()]
GUARD = 0xA5


def name(codec: RowCodec) -> str:
    return "-".join(str(value) for value in list(codec.to_json().values())[:4])


def there_and_back(codec: RowCodec, values: Floats) -> tuple[NDArray[np.bool_], Floats]:
    """Which rows are raw, and the others' values; guards round the stored rows and the result."""
    rows, width = values.shape
    size = codec.stored_bytes(width)
    room = np.full((rows + 2, size + 6), GUARD, np.uint8)
    stored = room[1:-1, 3 : 3 + size]
    raw = codec.encode(values, stored)
    assert (room[0] == GUARD).all() and (room[-1] == GUARD).all()  # noqa: PT018
    assert (room[:, :3] == GUARD).all() and (room[:, 3 + size :] == GUARD).all()  # noqa: PT018
    assert np.array_equal(codec.is_raw(stored), raw)
    live = np.full((rows + 2, width + 2), np.float32(7), np.float32)
    decoded = live[1:-1, 1:-1]
    codec.decode(stored, decoded)
    assert (live[0] == 7).all() and (live[-1] == 7).all()  # noqa: PT018
    assert (live[:, 0] == 7).all() and (live[:, -1] == 7).all()  # noqa: PT018
    assert (decoded[raw] == 7).all(), "a raw row's place was written to"
    return raw, decoded.copy()


def steps(codec: RowCodec, values: Floats) -> NDArray[np.float64]:
    """How far each value may be off, as the codecs' docstrings say."""
    wide = values.astype(np.float64)
    if isinstance(codec, UniformCodec):
        magnitude = np.abs(wide).max(1)
        extent = 2 * magnitude if codec.method == "symmetric" else wide.max(1) - wide.min(1)
        extent = np.where(wide.max(1) == wide.min(1), 0, extent)
        return np.repeat((extent / (2**codec.bits - 1))[:, None], values.shape[1], 1)
    if isinstance(codec, FloatCodec):
        return np.maximum(np.abs(wide) * 2.0**-8, 2.0**-133)
    largest = np.abs(wide).max(1, keepdims=True)
    negative = (wide < 0).any(1, keepdims=True)
    relative = np.where(negative, 2 ** (1 / 4), 2 ** (1 / 8)) - 1
    lowest = np.where(negative, 2.0**-31.5, 2.0**-31.75) * 1.01
    allowed: NDArray[np.float64] = np.maximum(np.abs(wide) * relative, largest * lowest)
    return np.maximum(allowed, 2.0**-149)


bit_patterns = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 5, 7, 8, 9, 16, 17, 33])).flatmap(
    lambda shape: hnp.arrays(
        np.uint32,
        shape,
        elements=st.one_of(
            st.integers(0, 2**32 - 1),
            st.sampled_from([0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7FC00001]),
            st.integers(0x3F800000, 0x3F800010),
            st.integers(0, 0x10),
            st.integers(0x3A000000, 0x3F000000),
        ),
    )
)


@pytest.mark.parametrize("codec", CODECS, ids=name)
@settings(max_examples=40, deadline=None)
@given(bit_patterns)
@example(np.array([[0x7F7FFFFF, 0xFF7FFFFF]], np.uint32))
@example(np.array([[0x7F7FFFFF, 0x7F7FFFFF], [0, 0], [0x80000000, 0], [1, 0x80000001]], np.uint32))
@example(np.array([[0x3F800000], [0x7FC00001], [0xFF800000], [1]], np.uint32))
def test_any_bits_in_finite_out_within_a_step_or_raw(codec: RowCodec, patterns: NDArray[np.uint32]) -> None:
    values = patterns.view(np.float32)
    raw, decoded = there_and_back(codec, values)
    finite = np.isfinite(values).all(1)
    assert raw[~finite].all()
    good = ~raw
    assert np.isfinite(decoded[good]).all()
    error = np.abs(decoded[good].astype(np.float64) - values[good])
    assert (error <= steps(codec, values[good])).all()
    if not isinstance(codec, UniformCodec):
        assert not raw[finite].any()
    if isinstance(codec, LogCodec):
        assert np.array_equal(np.sign(decoded[good]), np.sign(values[good]))
    if isinstance(codec, FloatCodec):
        assert (np.sign(decoded[good]) * np.sign(values[good]) >= 0).all()


@pytest.mark.parametrize("grid", [16, 32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rows_that_did_not_change_lose_nothing_more(bits: int, grid: int) -> None:
    """A restored row that training does not touch is stored as it was: errors do not add up by restores."""
    values = np.random.default_rng(bits).normal(0, 0.02, (5000, 16)).astype(np.float32)
    codec = UniformCodec(bits, grid)
    _, once = there_and_back(codec, values)
    _, again = there_and_back(codec, once)
    lost = np.linalg.norm(once - values, axis=1).mean()
    moved = np.linalg.norm(again - once, axis=1)
    # The search misses a row's grid once in thousands; grids of 32 bits add float32's rounding.
    assert np.mean(moved > 1e-5 * lost) < 1e-3
    assert moved.mean() < 1e-3 * lost
    if grid == 16:
        assert np.mean(moved > 0) < 1e-3


@pytest.mark.parametrize("codec", UNIFORM, ids=name)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 15, 16, 64, 65, 128])
def test_ordinary_rows_are_not_raw(codec: UniformCodec, width: int) -> None:
    random = np.random.default_rng(width)
    values = np.concatenate(
        [
            random.normal(size=(50, width)) * 10.0 ** random.integers(-14, 15, (50, 1)),
            random.normal(size=(50, width)) + 2,
            np.zeros((1, width)),
        ]
    ).astype(np.float32)
    raw, decoded = there_and_back(codec, values)
    spread = values.max(1) - values.min(1)
    near = spread * (8 if codec.bits == 8 else 30) > np.abs(values).max(1)
    assert not raw[near].any()
    assert codec.grid_bits == 16 or not raw.any()
    assert not decoded[-1].any()


@pytest.mark.parametrize("codec", UNIFORM, ids=name)
@pytest.mark.parametrize("value", [0.1, -3.25e-7, 3.4028235e38, -3.4028235e38, 1e-45, 0.0])
def test_equal_values_come_back_exactly(codec: UniformCodec, value: float) -> None:
    values = np.full((3, 16), value, np.float32)
    raw, decoded = there_and_back(codec, values)
    assert not raw.any()
    assert np.array_equal(decoded, values)


@pytest.mark.parametrize("codec", CODECS, ids=name)
def test_any_stored_bytes_give_finite_rows_or_raw(codec: RowCodec) -> None:
    random = np.random.default_rng(0)
    for width in (1, 2, 3, 8, 33):
        stored = random.integers(0, 256, (3000, codec.stored_bytes(width))).astype(np.uint8)
        stored[:1000, 1] |= 0x7F
        stored[500:1500, 3:4] |= 0x7F
        stored[:500, :2] = [0xFE, 0xFF]
        decoded = np.full((3000, width), np.nan, np.float32)
        codec.decode(stored, decoded)
        assert np.array_equal(np.isfinite(decoded).all(1), ~codec.is_raw(stored))
        assert np.array_equal(np.isfinite(decoded).any(1), ~codec.is_raw(stored))


@pytest.mark.parametrize("codec", [UniformCodec(2), UniformCodec(3, 32), UniformCodec(4), UniformCodec(8, 16),
                                   FloatCodec(), LogCodec()], ids=name)  # fmt: skip
@pytest.mark.parametrize("width", [1, 5, 16, 33])
@pytest.mark.parametrize("tables", [[5], [0, 5], [3, 0, 0, 4, 0], [40, 2, 100]])
def test_rows_are_decoded_into_their_tables(codec: RowCodec, width: int, tables: list[int]) -> None:
    random = np.random.default_rng(width)
    firsts = np.concatenate([[0], np.cumsum(tables)])
    live = [random.random((rows + 2, width)).astype(np.float32) for rows in tables]
    expected = [table.copy() for table in live]
    addresses = np.array([table[1:].ctypes.data for table in live], np.int64)
    for share in (0.3, 1.0):
        ids = np.flatnonzero(random.random(firsts[-1]) <= share)
        values = random.normal(size=(len(ids), width)).astype(np.float32)
        values[::5] = np.nan
        stored = np.empty((len(ids), codec.stored_bytes(width)), np.uint8)
        raw = codec.encode(values, stored)
        codec.decode(stored, values)
        some = np.flatnonzero(random.random(len(ids)) < 0.5)
        for positions in (some, np.arange(len(ids))):
            for p in positions:
                table = int(np.searchsorted(firsts, ids[p], "right")) - 1
                if not raw[p]:
                    expected[table][1 + ids[p] - firsts[table]] = values[p]
            if len(positions) == len(ids):
                codec.decode_into(addresses, firsts, width, ids, stored)
            elif len(positions):
                codec.decode_into(addresses, firsts, width, ids, stored, positions)
            for mine, theirs in zip(expected, live, strict=True):
                assert np.array_equal(mine, theirs)


def test_sizes_are_as_documented() -> None:
    assert [UniformCodec(2).stored_bytes(width) for width in (1, 4, 5, 64)] == [5, 5, 6, 20]
    assert [UniformCodec(3).stored_bytes(width) for width in (1, 8, 9, 64)] == [5, 7, 8, 28]
    assert [UniformCodec(4, 32).stored_bytes(width) for width in (1, 2, 3, 64)] == [9, 9, 10, 40]
    assert UniformCodec(8).stored_bytes(64) == 68
    assert FloatCodec().stored_bytes(5) == 10
    assert LogCodec().stored_bytes(5) == 7


@pytest.mark.parametrize("codec", CODECS, ids=name)
def test_json_there_and_back(codec: RowCodec) -> None:
    assert codec_from_json(json.loads(json.dumps(codec.to_json()))) == codec


GOOD = UniformCodec(4).to_json()
REFUSED: list[Any] = [
    None, [], "uniform", {}, {"codec": "gzip"}, {"codec": ["uniform"]}, {"codec": "uniform"},
    {"codec": "float", "bits": 8}, {"codec": "log", "bits": 16}, {"codec": "log", "bits": 8, "more": 1},
    {"codec": "log"}, {"codec": "float", "bits": 16.0}, {"codec": "float", "bits": True},
    GOOD | {"bits": 5}, GOOD | {"bits": True}, GOOD | {"bits": "4"}, GOOD | {"bits": 4.0},
    GOOD | {"grid_bits": 8}, GOOD | {"grid_bits": [16]}, GOOD | {"method": "kmeans"}, GOOD | {"method": 1},
    GOOD | {"method": None} | {"ratio": 2}, GOOD | {"num_bins": 1}, GOOD | {"num_bins": 10**9},
    GOOD | {"num_bins": 1.5}, GOOD | {"ratio": 0}, GOOD | {"ratio": float("nan")}, GOOD | {"ratio": "1"},
    GOOD | {"ratio": True}, GOOD | {"other": 1}, {k: v for k, v in GOOD.items() if k != "ratio"},
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=str)
def test_json_that_no_codec_writes_is_refused(value: Any) -> None:
    with pytest.raises(CorruptCheckpoint):
        codec_from_json(value)


def test_arrays_that_do_not_fit_are_refused() -> None:
    codec = UniformCodec(4)
    values = np.zeros((3, 16), np.float32)
    stored: Any
    for stored in (np.zeros((3, 11), np.uint8), np.zeros((2, 12), np.uint8), np.zeros((3, 12), np.int8)):
        with pytest.raises(ConfigError, match="expected"):
            codec.encode(values, stored)
    good = np.zeros((3, 12), np.uint8)
    with pytest.raises(ConfigError, match="float32"):
        codec.encode(values.astype(np.float64), good)
    with pytest.raises(ConfigError, match="gaps"):
        codec.encode(np.zeros((3, 32), np.float32)[:, ::2], good)
    with pytest.raises(ConfigError, match="expected"):
        codec.encode(np.zeros(16, np.float32), good)
    locked = good.copy()
    locked.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        codec.encode(values, locked)
    codec.decode(locked, values)
    values.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        codec.decode(good, values)
    for each in (codec, FloatCodec(), LogCodec()):
        with pytest.raises(ConfigError, match="or more"):
            each.is_raw(good[:, :1])
        with pytest.raises(ConfigError, match="expected"):
            each.decode_into(np.zeros(1, np.int64), np.array([0, 9]), 17, np.arange(3), good)


def test_grids_of_16_bits_where_they_cost_nothing() -> None:
    random = np.random.default_rng(0)
    usual = (random.normal(size=(2000, 64)) * 0.01).astype(np.float32)
    far = usual + np.float32(10)
    few = np.concatenate([np.repeat(usual, 2, 0), far[:3]])
    for bits in (2, 3, 4, 8):
        assert choose_grid_bits(usual, bits) == 16
        assert choose_grid_bits(usual * np.float32(1e-12), bits) == 16
        assert choose_grid_bits(usual * np.float32(1e-30), bits) == 32
        assert choose_grid_bits(few, bits) == 16
        assert choose_grid_bits(far, bits) == 32
        assert choose_grid_bits(usual[:0], bits) == 16
    many = np.concatenate([usual] * 40)
    assert choose_grid_bits(many, 2) == 16


@given(hnp.arrays(np.uint16, (3, 4), elements=st.integers(0, 65535)))
def test_halves_are_widened_exactly_and_come_back(bits: NDArray[np.uint16]) -> None:
    stored = bits.view(np.uint8)
    for dtype in ("F16", "BF16"):
        values = as_float32(stored, dtype)
        back = from_float32(values, dtype).view(np.uint16)
        number = ~np.isnan(values)
        assert np.array_equal(back[number], bits[number])
        assert np.isnan(as_float32(from_float32(values, dtype), dtype)[~number]).all()


def test_halves_stay_finite_and_others_are_refused() -> None:
    values = np.array([[3.4028235e38, -3.4028235e38, 65520.0, 1.0, np.inf]], np.float32)
    for dtype in ("F16", "BF16"):
        back = as_float32(from_float32(values, dtype), dtype)
        assert np.isfinite(back[:, :4]).all()
        assert back[0, 4] == np.inf
    assert np.shares_memory(as_float32(from_float32(values, "F32"), "F32"), values)
    for dtype in ("F64", "I32"):
        with pytest.raises(ConfigError, match="expected F32, F16 or BF16"):
            as_float32(np.zeros((1, 8), np.uint8), dtype)
        with pytest.raises(ConfigError, match="expected F32, F16 or BF16"):
            from_float32(values, dtype)
