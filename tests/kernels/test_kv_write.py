from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [4, 16])
def test_each_token_lands_at_its_slot_and_nothing_else_changes(block_tokens: int, cache_dtype: torch.dtype) -> None:
    pool = torch.randn(6, 2, 2, 3, block_tokens, 8).to(cache_dtype)
    expected = pool.clone()
    k, v = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    slot_mapping = torch.tensor([0, -1, 5 * block_tokens + 1, 2 * block_tokens - 1, -1])
    ops.kv_write(k, v, pool[:, 1, 0], pool[:, 1, 1], slot_mapping)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_tokens)
            expected[block, 1, 0, :, offset] = k[token].to(cache_dtype)
            expected[block, 1, 1, :, offset] = v[token].to(cache_dtype)
    assert torch.equal(pool, expected)


def test_only_padding_writes_nothing() -> None:
    pool = torch.randn(2, 1, 2, 1, 4, 8)
    before = pool.clone()
    k = torch.randn(2, 1, 8)
    ops.kv_write(k, k, pool[:, 0, 0], pool[:, 0, 1], torch.tensor([-1, -1]))
    assert torch.equal(pool, before)


def test_mapping_of_another_length_is_refused() -> None:
    cache = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ops.ShapeError, match="kv_write"):
        ops.kv_write(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), cache, cache, torch.tensor([0]))
