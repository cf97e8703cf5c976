"""From a configuration's model section to a network."""

from __future__ import annotations

from torch import nn

from holdfast.data.reader import Reader
from holdfast.models.factory import build
from holdfast.models.recommender import table_dims
from holdfast.recipe import Recipe, check_has, make, takes
from holdfast.training.config import Config, OwnModelConfig


def build_network(config: Config, reader: Reader) -> nn.Module:
    """The network for this reader's samples."""
    model = config.model
    if isinstance(model, OwnModelConfig):
        return make_network(model.recipe, reader)
    return build(model.architecture, model.sizes(), reader.dense_features, len(reader.table_rows))


def make_network(recipe: Recipe, reader: Reader) -> nn.Module:
    """Call the recipe, ``build(reader, **arguments)``, and check that the result is a network.

    It is an ``nn.Module`` whose ``forward(dense, embeddings)`` gives logits [samples] from dense [samples,
    dense features] and a list with a [samples, width] for each table. ``table_dim`` is that width, or
    ``table_dims`` has one for each table. A ``loss(logits, labels)`` of its own takes the place of the mean
    cross-entropy. A callable that has no parameter ``reader`` is called without it.
    """
    network = make(recipe, reader=reader) if takes(recipe.path, "reader") else make(recipe)
    if not isinstance(network, nn.Module):
        check_has(network, ("forward", "named_parameters"), recipe.path, "an nn.Module")
    table_dims(network, len(reader.table_rows))
    return network  # type: ignore[no-any-return]
