from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from holdfast.errors import ConfigError
from holdfast.options import (
    AutoBits,
    Chunked,
    Differential,
    ErasureCode,
    PartialRecovery,
    Policy,
    Replication,
)


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Policy, "every_seconds"),
        (Policy, "keep_seconds"),
        (Policy, "deletion_delay_seconds"),
        (Policy, "background_share"),
        (Policy, "fraction"),
        (Differential, "extra_writes"),
        (Chunked, "extra_writes"),
        (AutoBits, "expected_restores"),
        (PartialRecovery, "target_pls"),
        (PartialRecovery, "mtbf_hours"),
        (PartialRecovery, "save_seconds"),
        (PartialRecovery, "load_seconds"),
        (PartialRecovery, "reschedule_seconds"),
        (Replication, "scrub_seconds"),
        (Replication, "recovery_share"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_by_name(
    make: Callable[..., object], name: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}.*: expected"):
        make(**{name: value})


def test_so_are_values_that_are_no_numbers() -> None:
    with pytest.raises(ConfigError, match="every_seconds is 'often': expected a finite number, at least 0"):
        Policy(every_seconds="often")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="k is '2': expected a finite number, at least 1"):
        ErasureCode(k="2")  # type: ignore[arg-type]
