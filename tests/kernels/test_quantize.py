"""The quantization kernels against their twins, byte by byte; and what the papers say of the methods."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.checkpoint.codecs.quantize import (
    FloatCodec,
    LogCodec,
    Method,
    RowCodec,
    UniformCodec,
    l2_losses,
)
from holdfast.checkpoint.codecs.quantized import encode_rows
from holdfast.kernels import kmeans
from tests.checkpoint.codecs import quantize_twins as twins

Floats = NDArray[np.float32]
METHODS: list[Method] = ["symmetric", "asymmetric", "adaptive"]


def decoded(codec: RowCodec, values: Floats) -> Floats:
    stored, raw = encode_rows(codec, values)
    assert not raw.any()
    out = np.empty_like(values)
    codec.decode(stored, out)
    return out


def mean_loss(codec: RowCodec, values: Floats) -> float:
    return float(l2_losses(values, decoded(codec, values)).mean())


def trained_like(dim: int, rows: int = 2000) -> Floats:
    """Uniform at the start, and each row moved its own way, as training does."""
    random = np.random.default_rng(dim)
    start = random.uniform(-0.02, 0.02, (rows, dim))
    moved = random.normal(size=(rows, dim)) * random.gamma(1, 0.02, (rows, 1))
    return (start + moved + random.normal(size=(rows, 1)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("width", [2, 3, 7, 8, 9, 16, 29, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("grid", [16, 32])
@pytest.mark.parametrize("method", METHODS)
def test_uniform_rows_equal_their_twins(width: int, bits: int, grid: int, method: Method) -> None:
    random = np.random.default_rng(width)
    values = random.normal(size=(37, width)) * 10.0 ** random.integers(-9, 9, (37, 1))
    values = np.concatenate([values, random.random((37, width)) + 0.5, random.lognormal(size=(37, width))])
    codec = UniformCodec(bits, grid, method)
    stored, raw = encode_rows(codec, values.astype(np.float32))
    values, stored = values.astype(np.float32)[~raw], stored[~raw]
    assert len(values) > 80
    assert codec.num_bins is not None
    expected = twins.encode_uniform(values, bits, grid, method, codec.num_bins, codec.moves)
    assert np.array_equal(stored, expected)
    out = np.empty_like(values)
    codec.decode(stored, out)
    assert np.array_equal(out, twins.decode_uniform(stored, width, bits, grid))


def test_bfloat16_rounds_to_nearest_even() -> None:
    """Against the two neighbours in float64, for patterns all over the range."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, (4000, 8), np.uint32)
    bits[:1000] &= np.uint32(0xFFFF8000)  # halfway between two
    values = bits.view(np.float32)
    values = values[np.isfinite(values).all(1)]
    down = (values.view(np.uint32) & np.uint32(0xFFFF0000)).astype(np.uint64)
    up = np.minimum(down + 0x10000, (down & 0x80000000) + 0x7F7F0000)
    candidates = [c.astype(np.uint32).view(np.float32) for c in (down, up)]
    errors = [np.abs(c.astype(np.float64) - values) for c in candidates]
    even = (down >> np.uint64(16)) & np.uint64(1) == 0
    lower = (errors[0] < errors[1]) | ((errors[0] == errors[1]) & even)
    assert np.array_equal(decoded(FloatCodec(), values), np.where(lower, *candidates))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("width", [1, 4, 8, 13, 64])
@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e-25, 3e-39, 1e35])
def test_logarithms_are_the_nearest(negative: bool, width: int, magnitude: float) -> None:
    """A value's code is the factor that is nearest in logarithms, to a thousandth of a step."""
    random = np.random.default_rng(width)
    values = magnitude * random.random((200, width)) * 2.0 ** -random.integers(0, 36, (200, width))
    values[random.random((200, width)) < 0.1] = 0
    if negative:
        values *= random.choice([-1, 1], (200, width))
        values[:, 0] = -np.abs(values[:, 0]) - magnitude / 3
    rows = values.astype(np.float32)
    stored, raw = encode_rows(LogCodec(), rows)
    assert not raw.any()
    words = stored[:, :2].copy().view("<u2")
    assert np.array_equal(words[:, 0] >> 15 == 1, (rows < 0).any(1))
    scale = ((words & 0x7FFF).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    largest = np.abs(rows).max(1, keepdims=True)
    assert (scale >= largest).all()
    assert (scale <= largest * (1 + 2**-7) + 2.0**-133).all()
    parts, top = (4, 127) if negative else (8, 255)
    codes = stored[:, 2:].astype(int) & top
    assert np.array_equal(codes == 0, rows == 0)
    assert np.array_equal(stored[:, 2:] & ~np.uint8(top) != 0, rows < 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.clip(top + parts * np.log2(np.abs(rows.astype(np.float64)) / scale), 1, top)
    assert (np.abs(codes - exact) <= 0.501)[rows != 0].all()
    back = decoded(LogCodec(), rows).astype(np.float64)
    expected = np.sign(rows) * np.maximum(scale * 2.0 ** ((codes - top) / parts), 2.0**-149)
    assert np.allclose(back, expected, rtol=1e-6, atol=2.0**-149)


@pytest.mark.parametrize("plus_plus", [False, True])
def test_kmeans_equals_its_twin(plus_plus: bool) -> None:
    random = np.random.default_rng(1)
    rows = random.normal(size=(20, 33)).astype(np.float32)
    ordered = np.sort(rows, 1).astype(np.float64)
    start = np.empty(8)
    expected = np.empty_like(rows)
    for i, row in enumerate(rows.astype(np.float64)):
        state = kmeans.row_state(5, i)
        begin = kmeans.start_apart if plus_plus else kmeans.start_anywhere
        begin(ordered[i], start, np.uint64(state))
        assert set(start) <= set(row)
        assert plus_plus or len(set(start)) == 8
        expected[i] = twins.kmeans(row, start, 15)
    found = np.empty_like(rows)
    kmeans.kmeans_rows(rows, ordered, 8, 15, plus_plus, 5, found)
    assert np.allclose(found, expected, rtol=1e-6)
    kmeans.kmeans_rows(rows, ordered, 64, 15, plus_plus, 5, found)
    assert np.array_equal(found, rows)


GOLDEN = {
    "symmetric": "44b7b392f6ebd377",
    "asymmetric": "b61adaed523aa255",
    "adaptive": "8fd37191a9969c50",
    "float": "c7933147b8147887",
    "log": "54b005611c230da4",
}


def test_bytes_are_the_same_on_every_machine() -> None:
    """Rows from integers alone, and a checksum that no machine's vectors may change."""
    integers = np.arange(997 * 24, dtype=np.uint64).reshape(997, 24) * np.uint64(0x9E3779B97F4A7C15)
    values = ((integers >> np.uint64(40)).astype(np.float32) - np.float32(2**23)) * np.float32(2**-26)
    values *= values  # skewed
    values[:, ::3] *= np.float32(-1)
    codecs: dict[str, list[RowCodec]] = {
        method: [UniformCodec(bits, grid, method) for bits in (2, 3, 4, 8) for grid in (16, 32)]
        for method in METHODS
    }
    codecs |= {"float": [FloatCodec()], "log": [LogCodec()]}
    found = {}
    for name, several in codecs.items():
        digest = hashlib.sha256()
        for codec in several:
            digest.update(encode_rows(codec, values)[0].tobytes())
        found[name] = digest.hexdigest()[:16]
    assert found == GOLDEN


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_section_4_2_1_asymmetric_is_better_than_symmetric(dim: int, bits: int) -> None:
    values = trained_like(dim)
    assert mean_loss(UniformCodec(bits, 32, "asymmetric"), values) < mean_loss(
        UniformCodec(bits, 32, "symmetric"), values
    )


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_section_4_2_3_adaptive_is_better_than_asymmetric(dim: int, bits: int) -> None:
    """On the average by the more, the fewer the bits; and for no single row worse."""
    values = trained_like(dim)
    adaptive, plain = (
        l2_losses(values, decoded(UniformCodec(bits, 16, method), values))
        for method in ("adaptive", "asymmetric")
    )
    assert (adaptive <= plain * (1 + 1e-4)).all()
    assert adaptive.mean() < {2: 0.85, 3: 0.95, 4: 0.99}[bits] * plain.mean()


def test_figure_6_more_bins_help_until_they_do_not() -> None:
    values = trained_like(64)
    losses = [mean_loss(UniformCodec(2, 16, "adaptive", bins, 0.5), values) for bins in (2, 6, 25, 100)]
    assert losses[2] < losses[1] < losses[0]
    assert losses[3] > 0.99 * losses[2]


def test_figure_7_two_bits_need_a_larger_part_of_the_range() -> None:
    values = trained_like(64)
    for bits, ratio in ((2, 0.5), (3, 0.2)):
        short, chosen, long = (
            mean_loss(UniformCodec(bits, 16, "adaptive", 25, part), values) for part in (0.04, ratio, 0.9)
        )
        assert chosen <= short
        assert chosen < 1.01 * long


def test_section_4_2_3_how_far_the_walk_goes() -> None:
    """It ends when the range has shrunk by the ratio; as printed, it would not begin (hole 32)."""
    assert UniformCodec(2).moves == 13  # of 25 bins, a half
    assert UniformCodec(3).moves == 5
    assert UniformCodec(4, num_bins=45, ratio=0.2).moves == 9
    assert UniformCodec(4, num_bins=10, ratio=1.0).moves == 9  # the last would leave nothing
    assert UniformCodec(4, num_bins=10, ratio=0.0001).moves == 1


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_section_4_2_3_adaptive_is_about_as_good_as_kmeans(dim: int, bits: int) -> None:
    """K-means as in section 4.2.2: 15 iterations from values that are drawn at random."""
    values = trained_like(dim, 300)
    out = np.empty_like(values)
    kmeans.kmeans_rows(values, np.sort(values, 1).astype(np.float64), 2**bits, 15, False, 0, out)
    assert mean_loss(UniformCodec(bits), values) < 1.02 * l2_losses(values, out).mean()


def test_a_single_outlier_does_not_cost_the_others_their_grid() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(500, 64)).astype(np.float32)
    values[np.arange(500), random.integers(0, 64, 500)] *= 20
    adaptive = decoded(UniformCodec(4), values)
    step = (values.max(1) - values.min(1)) / 15
    assert (np.abs(adaptive - values).max(1) <= step).all()
    assert mean_loss(UniformCodec(4), values) < 0.92 * mean_loss(UniformCodec(4, 16, "asymmetric"), values)
