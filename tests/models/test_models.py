"""Each model against a slow, obvious twin written per sample."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from holdfast.models.deepfm import DeepFM
from holdfast.models.dlrm import DLRM
from holdfast.models.factory import build
from holdfast.models.pnn import PNN
from holdfast.models.presets import PRESETS
from holdfast.models.recommender import Recommender

SAMPLES, DENSE, TABLES, DIM = 5, 3, 4, 6


def inputs(dim: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, DENSE), [torch.randn(SAMPLES, dim) for _ in range(TABLES)]


def test_dlrm_is_pairwise_products_between_two_networks() -> None:
    model = DLRM(DENSE, TABLES, DIM, bottom=(8, DIM), top=(7, 1))
    dense, embeddings = inputs(DIM)
    expected = []
    for s in range(SAMPLES):
        x = model.bottom(dense[s])
        fields = [x, *(e[s] for e in embeddings)]
        products = [fields[i] @ fields[j] for i in range(len(fields)) for j in range(i)]
        expected.append(model.top(torch.cat([x, torch.stack(products)])))
    torch.testing.assert_close(model(dense, embeddings), torch.cat(expected))


def test_deepfm_is_linear_and_pairs_and_deep() -> None:
    model = DeepFM(DENSE, TABLES, DIM, hidden=(8,))
    nn.init.normal_(model.bias)
    dense, embeddings = inputs(DIM + 1)
    expected = []
    for s in range(SAMPLES):
        rows = [dense[s, j] * model.dense_rows[j] for j in range(DENSE)] + [e[s] for e in embeddings]
        pairs = torch.stack([a[1:] @ b[1:] for a, b in combinations(rows, 2)]).sum()
        deep = model.deep(torch.cat([row[1:] for row in rows]))[0]
        expected.append(model.bias + torch.stack([row[0] for row in rows]).sum() + pairs + deep)
    torch.testing.assert_close(model(dense, embeddings), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_pnn_reads_fields_and_their_products() -> None:
    model = PNN(DENSE, TABLES, DIM, hidden=(8,))
    dense, embeddings = inputs(DIM)
    expected = []
    for s in range(SAMPLES):
        rows = [dense[s, j] * model.dense_vectors[j] for j in range(DENSE)] + [e[s] for e in embeddings]
        products = [rows[i] @ rows[j] for i in range(len(rows)) for j in range(i)]
        expected.append(model.deep(torch.cat([*rows, torch.stack(products)])))
    torch.testing.assert_close(model(dense, embeddings), torch.cat(expected))


@pytest.mark.parametrize("architecture", ["dlrm", "deepfm", "pnn"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_build_and_every_parameter_learns(architecture: str, preset: str) -> None:
    network = build(architecture, PRESETS[preset], 13, 26)  # type: ignore[arg-type]
    model = Recommender(network, [10] * 26)
    ids = [torch.randint(0, 10, (4,)) for _ in range(26)]
    logits = model(torch.rand(4, 13), ids, None)
    assert logits.shape == (4,)
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.is_sparse == name.startswith("tables.")


def test_the_presets_have_the_published_sizes() -> None:
    kaggle, terabyte = PRESETS["criteo-kaggle"], PRESETS["criteo-terabyte"]
    assert (kaggle.dim, kaggle.bottom, kaggle.top) == (16, (512, 256, 64, 16), (512, 256, 1))
    assert (terabyte.dim, terabyte.bottom, terabyte.top) == (64, (512, 256, 64), (512, 512, 256, 1))


def test_tables_sum_the_ids_of_a_sample() -> None:
    model = Recommender(build("pnn", PRESETS["criteo-kaggle"], 13, 2), [5, 5])
    ids = [torch.tensor([0, 1, 4]), torch.tensor([2, 2, 3])]
    offsets = [torch.tensor([0, 2]), torch.tensor([0, 1])]
    first, second = model.tables(ids, offsets)
    weights = list(model.tables.parameters())
    torch.testing.assert_close(first, torch.stack([weights[0][0] + weights[0][1], weights[0][4]]))
    torch.testing.assert_close(second, torch.stack([weights[1][2], weights[1][2] + weights[1][3]]))


def test_parameter_names_are_stable() -> None:
    """Checkpoints name parameters by these."""
    names = set(Recommender(build("dlrm", PRESETS["criteo-kaggle"], 13, 26), [3] * 26).state_dict())
    assert {"tables.0.weight", "tables.25.weight", "network.bottom.0.weight", "network.top.4.bias"} <= names
    assert len(names) == 26 + 2 * (4 + 3)
