from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def test_copies_whole_blocks_and_nothing_else() -> None:
    pool = torch.randn(6, 2, 2, 3, 4, 8)
    before = pool.clone()
    ops.copy_blocks(pool, torch.tensor([0, 5]), torch.tensor([3, 1]))
    assert torch.equal(pool[3], before[0])
    assert torch.equal(pool[1], before[5])
    assert torch.equal(pool[[0, 2, 4, 5]], before[[0, 2, 4, 5]])


def test_a_source_that_is_also_a_target_is_read_first() -> None:
    pool = torch.arange(3.0).view(3, 1)
    ops.copy_blocks(pool, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert pool.flatten().tolist() == [0.0, 0.0, 1.0]


def test_unequal_lists_are_refused() -> None:
    with pytest.raises(ops.ShapeError, match="copy_blocks"):
        ops.copy_blocks(torch.zeros(2, 1), torch.tensor([0]), torch.tensor([0, 1]))
