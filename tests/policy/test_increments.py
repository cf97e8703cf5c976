from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from holdfast.policy.increments import (
    RowSize,
    Strategy,
    Touches,
    chunked_cycle,
    fewest_bits,
    quantized_auc_loss,
    sizes,
)

ROW = RowSize(64, 4)


def test_bytes_of_rows() -> None:
    assert ROW.raw == 260
    assert ROW.stored(None) == 1
    assert ROW.stored(2) * 260 == pytest.approx(16 + 8 + 4)
    assert ROW.stored_with_id(8) * 260 == pytest.approx(64 + 8 + 4 + 1)


def test_touched_rows_never_exceed_all() -> None:
    touches = Touches()
    assert touches.within(0.5) == pytest.approx(0.26)
    assert touches.within(1e6) == 1


@pytest.mark.parametrize("strategy", ["full", "differential", "chunked"])
@pytest.mark.parametrize("hours", [0.02, 0.5, 24.0, 1000.0])
def test_sizes_are_plausible(strategy: Strategy, hours: float) -> None:
    raw, quantized = (sizes(strategy, Touches(), hours, ROW, bits) for bits in (None, 4))
    for amounts in (raw, quantized):
        assert amounts.written > 0
        assert 0 < amounts.copied <= 1
        assert amounts.read >= amounts.stored * 0.99
    assert quantized.written < raw.written
    assert quantized.stored < raw.stored


def test_a_new_full_version_comes_when_increments_cost_as_much_to_read() -> None:
    """IncrCP, section 4.5."""
    touches = Touches()
    count = chunked_cycle(touches, 0.5)
    for i, more in ((count, True), (count - 1, False)):
        assert (touches.within(0.5) + 1.22 * touches.within(0.5 * i) > 1) == more


def test_bits_by_the_tolerated_loss() -> None:
    """Check-N-Run, section 5.2.1, with 4 bits for half as many restores."""
    assert [fewest_bits(restores, 1e-4) for restores in (0.5, 1, 2, 3, 3.6, 10, 11, 100)] == [
        2, 2, 3, 3, 4, 4, 8, 8,
    ]  # fmt: skip
    assert fewest_bits(101, 1e-4) is None
    assert fewest_bits(1, 0.0) is None
    assert fewest_bits(4, 4e-4) == 2
    assert quantized_auc_loss(None, 50) == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"share of rows touched is 1\.5"):
        Touches(share=1.5)
    with pytest.raises(ConfigError, match="a row of 0 weights"):
        RowSize(0)
