"""Sizes, speeds and time spans as people write them: ``220GB``, ``25Gbit/s``, ``30m``."""

from __future__ import annotations

import math
import re

from holdfast.errors import ConfigError

_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([a-zA-Z]*)(/s)?\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{prefix}B": value for prefix, value in _PREFIXES.items()} | {
    f"{prefix}IB": 1024.0 ** (power + 1) for power, prefix in enumerate("KMGTP")
}
_BITS = {f"{prefix}BIT": value / 8 for prefix, value in _PREFIXES.items()}
_HOURS = {
    "MS": 1 / 3.6e6, "S": 1 / 3600, "M": 1 / 60, "MIN": 1 / 60, "H": 1.0, "D": 24.0, "W": 168.0, "Y": 8766.0,
}  # fmt: skip


def parse_bytes(text: str, name: str) -> float:
    """A size: a number with B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, … (of 1024)."""
    return _parse(text, name, _BYTES, "a size such as 220GB", rate=False)


def parse_rate(text: str, name: str) -> float:
    """Bytes a second: a size or a number of bits (25Gbit), with or without ``/s``."""
    return _parse(text, name, _BYTES | _BITS, "a speed such as 1.5GB/s or 25Gbit/s", rate=True)


def parse_hours(text: str, name: str) -> float:
    """Hours: a number with ms, s, m (minutes), h, d, w or y."""
    return _parse(text, name, _HOURS, "a time such as 45s, 30m, 28h or 2d", rate=False)


def _parse(text: str, name: str, units: dict[str, float], expected: str, *, rate: bool) -> float:
    found = _NUMBER.fullmatch(text)
    # "Gb" is read as bits by some and as bytes by others.
    ambiguous = found is not None and found[2].endswith("b")
    if found is None or ambiguous or found[2].upper() not in units or (found[3] and not rate):
        raise ConfigError(f"{name} is {text!r}: expected {expected}")
    return float(found[1]) * units[found[2].upper()]


def show_hours(hours: float) -> str:
    """A time span in the unit that people would choose."""
    if math.isinf(hours):
        return "never"
    for unit, length in (("y", 8766.0), ("d", 48.0), ("h", 1.0), ("min", 1 / 60), ("s", 1 / 3600)):
        if abs(hours) >= length:
            return f"{_three_digits(hours / (24.0 if unit == 'd' else length))} {unit}"
    return f"{hours * 3.6e6:.3g} ms" if hours else "0 s"


def show_bytes(size: float) -> str:
    """A size in powers of 1000."""
    for unit, length in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= length:
            return f"{_three_digits(size / length)} {unit}"
    return f"{size:.0f} B"


def show_percent(share: float) -> str:
    """A share in percent, with two digits that matter."""
    percent = 100 * share
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.01:
        return f"{percent:.2g} %"
    return f"{percent:,.0f} %" if abs(percent) >= 100 else f"{percent:.3g} %"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
