"""Write keys and values of packed tokens into their blocks: cache[s // block_tokens, :, s % block_tokens] = k."""

from __future__ import annotations

import torch


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """k, v [T, Hk, D] into caches [num_blocks, Hk, block_tokens, D]; slot_mapping [T] int64, -1 writes nothing."""
    block_tokens = key_cache.shape[2]
    is_padding = slot_mapping < 0
    if bool(is_padding.any()):
        kept = ~is_padding
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    blocks = torch.div(slot_mapping, block_tokens, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_tokens
    key_cache[blocks, :, offsets] = k.to(key_cache.dtype)
    value_cache[blocks, :, offsets] = v.to(value_cache.dtype)
