from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def test_adds_at_the_named_places_only() -> None:
    logits = torch.randn(3, 6)
    rows, tokens = torch.tensor([0, 2, 2, 2]), torch.tensor([5, 1, 1, 0])
    bias = torch.tensor([1.5, 2.0, 0.25, float("-inf")])
    result = ops.add_logit_bias(logits, rows, tokens, bias)
    expected = logits.clone()
    expected[0, 5] += 1.5
    expected[2, 1] += 2.25
    expected[2, 0] = float("-inf")
    assert torch.equal(result, expected)
    assert torch.isfinite(logits).all()
