from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70])
def test_bans_exactly_the_tokens_whose_bit_is_clear(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size)
    words = -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, words), dtype=torch.int64).to(torch.int32)
    rows = torch.tensor([3, 0])
    result = ops.apply_token_mask(logits, rows, bits)
    expected = logits.clone()
    for index, row in enumerate(rows.tolist()):
        for token in range(vocab_size):
            if not int(bits[index, token // 32]) >> (token % 32) & 1:
                expected[row, token] = float("-inf")
    assert torch.equal(result, expected)
    assert torch.isfinite(logits).all()


def test_a_mask_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ops.ShapeError):
        ops.apply_token_mask(torch.zeros(1, 40), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
