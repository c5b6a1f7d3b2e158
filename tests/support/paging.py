"""Paged KV caches for tests: sequences of given context, their blocks scattered over a pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedKV:
    """`keys[b]`, `values[b]` [context, Hk, D] are what the caches hold for sequence b; everything else is NaN."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_paged_kv(
    context_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    *,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedKV:
    """Random KV in shuffled blocks of a strided layer view, as `DeviceCache` lays it out; layer 1 of 2 is used."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_tokens) for length in context_lens]
    num_blocks = sum(counts) + 3
    pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_tokens, head_dim), float("nan"), dtype=dtype)
    key_cache, value_cache = pool[:, 1, 0], pool[:, 1, 1]
    order = torch.randperm(num_blocks, generator=generator)
    block_tables = torch.zeros(len(context_lens), max(counts, default=0) + 2, dtype=torch.int32)
    keys, values, taken = [], [], 0
    for sequence, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        block_ids = order[taken : taken + count]
        taken += count
        block_tables[sequence, :count] = block_ids.to(torch.int32)
        key = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
        value = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(length):
            block, offset = block_ids[position // block_tokens], position % block_tokens
            key_cache[block, :, offset] = key[position]
            value_cache[block, :, offset] = value[position]
        keys.append(key)
        values.append(value)
    return PagedKV(key_cache, value_cache, block_tables, torch.tensor(context_lens, dtype=torch.int32), keys, values)
