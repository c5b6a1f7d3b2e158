from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("num_top", [0, 1, 5, 100])
def test_against_float64(num_top: int) -> None:
    logits = torch.randn(4, 33) * 10
    token_ids = torch.tensor([0, 32, 7, 7])
    expected = torch.log_softmax(logits.double(), -1)
    chosen, top_ids, top = ops.top_logprobs(logits, token_ids, num_top)
    torch.testing.assert_close(
        chosen.double(), expected.gather(1, token_ids.unsqueeze(1)).squeeze(1), rtol=1e-6, atol=1e-5
    )
    best = expected.topk(min(num_top, 33))
    assert top_ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(top.double(), best.values, rtol=1e-6, atol=1e-5)


def test_banned_tokens_have_minus_infinity() -> None:
    logits = torch.tensor([[0.0, float("-inf")]])
    chosen, top_ids, top = ops.top_logprobs(logits, torch.tensor([1]), 2)
    assert chosen.item() == float("-inf")
    assert top_ids.tolist() == [[0, 1]]
    assert top.tolist() == [[0.0, float("-inf")]]
