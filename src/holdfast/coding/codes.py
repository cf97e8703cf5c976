"""Choose the code for given numbers of data and parity records."""

from __future__ import annotations

from holdfast.coding.code import Code
from holdfast.coding.reed_solomon import MOST_MEMBERS, MOST_PARITIES, ReedSolomon
from holdfast.coding.xor import XorCode
from holdfast.errors import ConfigError


def code_for(k: int, r: int) -> Code:
    """XOR for one parity per stripe, Reed-Solomon for two or three."""
    if not 1 <= k <= MOST_MEMBERS or not 1 <= r <= MOST_PARITIES:
        raise ConfigError(
            f"a code of {k} data and {r} parity records a stripe: expected 1 to {MOST_MEMBERS} data records "
            f"and 1 to {MOST_PARITIES} parities"
        )
    return XorCode(k) if r == 1 else ReedSolomon(k, r)
