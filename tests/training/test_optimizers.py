"""The optimizers that PyTorch lacks, against dense twins that see every row in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.models.factory import build
from holdfast.models.presets import Sizes
from holdfast.models.recommender import Recommender
from holdfast.training.config import OptimizerConfig
from holdfast.training.optimizers import RowMomentum, RowWiseAdagrad, build_optimizers

NAMES = ["sgd", "momentum", "adagrad", "rowwise-adagrad", "adam"]


def sparse_gradient(rows: list[int], values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, size, check_invariants=True)


def test_row_momentum_is_torch_sgd_when_every_row_is_touched() -> None:
    torch.manual_seed(0)
    ours, twin = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.empty(4, 3))
    twin.data.copy_(ours.data)
    row, dense = RowMomentum([ours], lr=0.1, momentum=0.9), torch.optim.SGD([twin], lr=0.1, momentum=0.9)
    for _ in range(20):
        gradient = torch.randn(4, 3)
        ours.grad, twin.grad = sparse_gradient([0, 1, 2, 3], gradient, (4, 3)), gradient
        row.step()
        dense.step()
    torch.testing.assert_close(ours, twin)


def test_row_momentum_leaves_other_rows_alone_and_sums_repeats() -> None:
    table = nn.Parameter(torch.zeros(3, 2))
    optimizer = RowMomentum([table], lr=1.0, momentum=0.5)
    for _ in range(2):
        table.grad = sparse_gradient([1, 1], torch.ones(2, 2), (3, 2))
        optimizer.step()
    assert table[0].tolist() == [0, 0]
    assert table[1].tolist() == [-5, -5]  # -2, then -(0.5 * 2 + 2)
    assert optimizer.state[table]["momentum_buffer"][1].tolist() == [3, 3]


def test_rowwise_adagrad_against_a_loop() -> None:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(5, 3))
    twin, sums = table.detach().clone(), [0.0] * 5
    optimizer = RowWiseAdagrad([table], lr=0.1, eps=1e-8)
    for step in range(30):
        rows = [step % 5, (step * 2) % 5, 0]
        values = torch.randn(3, 3)
        table.grad = sparse_gradient(rows, values, (5, 3))
        optimizer.step()
        for row in set(rows):
            gradient = sum(values[i] for i in range(3) if rows[i] == row)
            assert isinstance(gradient, torch.Tensor)
            sums[row] += float(gradient.square().mean())
            twin[row] -= 0.1 * gradient / (sums[row] ** 0.5 + 1e-8)
    torch.testing.assert_close(table.detach(), twin)
    torch.testing.assert_close(optimizer.state[table]["sum"], torch.tensor(sums))


def test_dense_gradients_are_refused() -> None:
    table = nn.Parameter(torch.zeros(3, 2))
    table.grad = torch.ones(3, 2)
    with pytest.raises(TypeError, match="sparse=True"):
        RowWiseAdagrad([table], lr=0.1).step()


@pytest.mark.parametrize("name", NAMES)
def test_only_rows_that_were_looked_up_move_and_the_network_learns(name: str) -> None:
    torch.manual_seed(0)
    model = Recommender(build("dlrm", Sizes(4, (8, 4), (8, 1)), 2, 2), [10, 10])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizers = build_optimizers(OptimizerConfig(name=name), model)  # type: ignore[arg-type]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids = [torch.tensor([1, 1, 7]), torch.tensor([0, 2, 9])]
        model(torch.randn(3, 2), ids, None).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for key, value in model.state_dict().items():
        changed = (value != before[key]).reshape(len(value), -1).any(1).nonzero().flatten().tolist()
        if key.startswith("tables."):
            assert changed == ([1, 7] if key == "tables.0.weight" else [0, 2, 9])
        else:
            assert changed, key
