"""From a configuration's data section to the readers of its two parts."""

from __future__ import annotations

from typing import Literal

from holdfast.data.criteo import Criteo
from holdfast.data.criteo_shape import capped_rows
from holdfast.data.reader import Reader
from holdfast.data.synthetic import Synthetic
from holdfast.errors import DataError
from holdfast.recipe import Recipe, check_has, make
from holdfast.training.config import Config, OwnDataConfig, SyntheticConfig

_MEMBERS = ("table_rows", "dense_features", "__iter__", "split", "progress", "state_dict", "load_state_dict")


def make_reader(recipe: Recipe, part: Literal["train", "test"], batch_size: int) -> Reader:
    """What the recipe gives, ``reader(part, batch_size, **arguments)``, checked to be a ``Reader``.

    A part or batch size that the recipe gives itself comes before these.
    """
    extra = {"part": part, "batch_size": batch_size}
    reader = make(recipe, **{name: value for name, value in extra.items() if name not in recipe.arguments})
    check_has(reader, _MEMBERS, recipe.path, "a reader as holdfast.Reader describes it")
    return reader  # type: ignore[no-any-return]


def check_test_part(reader: Reader) -> None:
    """Raise DataError if there is nothing to test on: at the end all that was trained would be lost by it."""
    if not any(len(batch) for batch in reader.split(0, 1)):
        raise DataError(
            "the test part of the data has no samples: give more data, more of it to test on, or other test "
            "data"
        )


def build_readers(config: Config) -> tuple[Reader, Reader]:
    """The training part and the test part."""
    data = config.data
    if isinstance(data, OwnDataConfig):
        test = (data.test or data).recipe
        return (
            make_reader(data.recipe, "train", config.batch_size),
            make_reader(test, "test", config.batch_size),
        )
    rows = capped_rows(data.cardinalities, data.max_rows)
    if isinstance(data, SyntheticConfig):

        def synthetic(part: Literal["train", "test"], samples: int) -> Synthetic:
            return Synthetic(
                samples=samples,
                batch_size=config.batch_size,
                table_rows=rows,
                ids_per_sample=data.ids_per_sample,
                zipf_exponent=data.zipf_exponent,
                noise=data.noise,
                seed=config.seed,
                part=part,
            )

        return synthetic("train", data.samples), synthetic("test", data.test_samples)

    def criteo(part: Literal["train", "test"]) -> Criteo:
        return Criteo(
            data.paths,
            batch_size=config.batch_size,
            table_rows=rows,
            part=part,
            test_fraction=data.test_fraction,
            test_files=data.test_files,
            on_bad_line=data.on_bad_line,
        )

    return criteo("train"), criteo("test")
