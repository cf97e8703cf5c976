"""The shape of the Criteo click logs: what every Criteo-like reader agrees on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

DENSE_FEATURES = 13
CATEGORICAL_FEATURES = 26

Cardinalities = Literal["kaggle", "terabyte"]

# How many distinct ids each categorical feature has. Kaggle: the display-advertising challenge as the
# DLRM reference counts it. Terabyte: with ids folded at 40 million, as MLPerf trains it.
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
TERABYTE_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
    2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip


def capped_rows(cardinalities: Cardinalities, max_rows: int | None = None) -> Sequence[int]:
    """Rows of each of the 26 tables, none above ``max_rows``."""
    rows = {"kaggle": KAGGLE_ROWS, "terabyte": TERABYTE_ROWS}[cardinalities]
    return rows if max_rows is None else tuple(min(r, max_rows) for r in rows)
