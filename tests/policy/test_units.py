from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from holdfast.policy.units import (
    parse_bytes,
    parse_hours,
    parse_rate,
    show_bytes,
    show_hours,
    show_percent,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("220GB", 220e9),
        ("1.5 TB", 1.5e12),
        ("4KiB", 4096),
        ("12", None),
        ("8B", 8),
        ("1e3MB", 1e9),
        ("7kB", 7e3),
    ],
)
def test_sizes(text: str, size: float | None) -> None:
    if size is None:
        with pytest.raises(ConfigError, match="--size is '12': expected a size such as 220GB"):
            parse_bytes(text, "--size")
    else:
        assert parse_bytes(text, "--size") == size


@pytest.mark.parametrize(
    ("text", "rate"), [("25Gbit/s", 3.125e9), ("25Gbit", 3.125e9), ("1.5GB/s", 1.5e9), ("100MiB", 104857600)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text, "--write") == rate


@pytest.mark.parametrize(
    ("text", "hours"),
    [("30m", 0.5), ("90s", 0.025), ("28h", 28), ("2d", 48), ("50ms", 0.05 / 3600), ("-5h", -5)],
)
def test_times(text: str, hours: float) -> None:
    assert parse_hours(text, "--mtbf") == pytest.approx(hours)


def test_what_could_be_bits_or_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--network is '25Gb'"):
        parse_rate("25Gb", "--network")


@pytest.mark.parametrize("text", ["", "h", "three hours", "5 GB", "nan", "1/s", "5h/s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a time such as 45s, 30m, 28h or 2d"):
        parse_hours(text, "--mtbf")


def test_values_are_shown_as_people_write_them() -> None:
    shown = [show_hours(hours) for hours in (0, 0.05 / 3600, 7 / 3600, 0.5, 28, 72, 20000, float("inf"))]
    assert shown == ["0 s", "50 ms", "7 s", "30 min", "28 h", "3 d", "2.28 y", "never"]
    assert [show_bytes(size) for size in (0, 999, 220e9, 1.76e12)] == ["0 B", "999 B", "220 GB", "1.76 TB"]
    assert [show_percent(share) for share in (0, 0.00708, 0.65, 4.5389, 1.4e-5)] == [
        "0 %", "0.708 %", "65 %", "454 %", "0.0014 %",
    ]  # fmt: skip
