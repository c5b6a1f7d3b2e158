from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 4097])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_against_the_reference(rows: int, vocab: int) -> None:
    logits = torch.randn(rows, vocab)
    assert torch.equal(ops.argmax(logits), logits.argmax(dim=-1))


def test_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 100)
    logits[0, [40, 99]] = 1.0
    assert ops.argmax(logits).tolist() == [40, 0]


def test_infinities_and_nan() -> None:
    logits = torch.full((4, 33), float("-inf"))
    logits[1, 32] = -5.0
    logits[2, 20] = float("inf")
    logits[3, [9, 32]] = float("nan")
    logits[3, 1] = float("inf")
    assert ops.argmax(logits).tolist() == [0, 32, 20, 9]


def test_rows_with_a_stride() -> None:
    wide = torch.randn(5, 64)
    assert torch.equal(ops.argmax(wide[:, :50]), wide[:, :50].argmax(dim=-1))
