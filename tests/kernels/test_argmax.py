from __future__ import annotations

import math

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("vocab_size", [1, 7, 1025, 49152])
def test_finds_the_largest(vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size)
    expected = [max(range(vocab_size), key=row.__getitem__) for row in logits.tolist()]
    result = ops.argmax(logits)
    assert result.dtype == torch.int64
    assert result.tolist() == expected


def test_lowest_id_wins_ties() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [17, 900, 4999]] = 2.0
    logits[1, [4998, 4999]] = 1.0
    assert ops.argmax(logits).tolist() == [17, 4998, 0]


def test_a_row_with_nan_points_at_it() -> None:
    logits = torch.randn(2, 3000)
    logits[1, 2345] = math.nan
    result = ops.argmax(logits)
    assert torch.isfinite(logits[0, result[0]])
    assert torch.isnan(logits[1, result[1]])
