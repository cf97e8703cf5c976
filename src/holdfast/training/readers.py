"""From a configuration's data section to the readers of its two parts."""

from __future__ import annotations

from holdfast.data.criteo_shape import capped_rows
from holdfast.data.reader import Reader
from holdfast.data.synthetic import Synthetic
from holdfast.training.config import Config, SyntheticConfig


def build_readers(config: Config) -> tuple[Reader, Reader]:
    """The training part and the test part."""
    data = config.data
    rows = capped_rows(data.cardinalities, data.max_rows)
    if isinstance(data, SyntheticConfig):

        def synthetic(part: str, samples: int) -> Synthetic:
            return Synthetic(
                samples=samples,
                batch_size=config.batch_size,
                table_rows=rows,
                ids_per_sample=data.ids_per_sample,
                zipf_exponent=data.zipf_exponent,
                seed=config.seed,
                part=part,  # type: ignore[arg-type]
            )

        return synthetic("train", data.samples), synthetic("test", data.test_samples)
    raise AssertionError("criteo comes with its reader")
