from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.training.metrics import auc, digest, log_loss

# Few distinct scores, so that ties are common.
SAMPLES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40)


@given(SAMPLES)
def test_auc_counts_pairs(samples: list[tuple[int, bool]]) -> None:
    clicks = [score for score, label in samples if label]
    others = [score for score, label in samples if not label]
    result = auc(np.array([s for s, _ in samples], float), np.array([c for _, c in samples], float))
    if not clicks or not others:
        assert math.isnan(result)
        return
    pairs = [(c > o) + 0.5 * (c == o) for c in clicks for o in others]
    assert math.isclose(result, sum(pairs) / len(pairs))


def test_auc_of_a_nan_is_nan() -> None:
    assert math.isnan(auc(np.array([0.1, float("nan")]), np.array([0.0, 1.0])))


def test_log_loss_matches_the_formula_and_survives_large_logits() -> None:
    logits, labels = np.array([0.3, -2.0], np.float32), np.array([1.0, 0.0], np.float32)
    probability = 1 / (1 + np.exp(-logits.astype(float)))
    expected = -(np.log(probability[0]) + np.log(1 - probability[1])) / 2
    assert math.isclose(log_loss(logits, labels), expected, rel_tol=1e-6)
    assert log_loss(np.array([1000.0, -1000.0]), np.array([1.0, 0.0])) == 0.0


def test_digest_sees_a_single_bit() -> None:
    model = nn.Linear(3, 2)
    before = digest(model)
    assert digest(model) == before
    bits = model.weight.detach().numpy().view(np.uint32)
    bits[1, 1] ^= 1
    assert digest(model) != before
