"""A random paged KV pool with block tables in shuffled order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.tensors import random_tensor

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Caches [num_blocks, Hk, 16, D] (layer 1 of a 2-layer pool, so strided), and each sequence's table and length."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    def slots(self, query_lens: list[int]) -> torch.Tensor:
        """slot_mapping int64 of the last query_lens[b] tokens of each sequence b."""
        slots = []
        for sequence, query_len in enumerate(query_lens):
            context = int(self.context_lens[sequence])
            for position in range(context - query_len, context):
                block = int(self.block_tables[sequence, position // BLOCK_TOKENS])
                slots.append(block * BLOCK_TOKENS + position % BLOCK_TOKENS)
        return torch.tensor(slots, dtype=torch.int64, device=self.key_cache.device)


def paged_context(
    context_lens: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> PagedContext:
    """Random keys and values for sequences of the given lengths; blocks that no table names hold NaN."""
    blocks_each = [max(1, -(-length // BLOCK_TOKENS)) for length in context_lens]
    num_blocks = sum(blocks_each) + 3
    pool = random_tensor(num_blocks, 2, 2, num_kv_heads, BLOCK_TOKENS, head_dim, dtype=dtype, device=device, seed=7)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    tables = torch.zeros(len(context_lens), max(blocks_each) + 2, dtype=torch.int32)
    start = 0
    for sequence, count in enumerate(blocks_each):
        tables[sequence, :count] = order[start : start + count]
        start += count
    # Entries past a table name block 0, or whatever was there: reading it must not matter.
    pool[order[start:].long().to(device)] = float("nan")
    return PagedContext(
        pool[:, 1, 0],
        pool[:, 1, 1],
        tables.to(device),
        torch.tensor(context_lens, dtype=torch.int32, device=device),
    )
