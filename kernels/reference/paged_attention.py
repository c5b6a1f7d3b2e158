"""Causal attention over paged keys and values: softmax(scale · q kᵀ) v per head, in float32.

Query head h reads KV head h // (Hq / Hk) (grouped-query attention, arXiv:2305.13245). The block table gives, for
position p of a sequence, block table[p // block_tokens] and offset p % block_tokens (PagedAttention, arXiv:2309.06180).
"""

from __future__ import annotations

import torch

# Bounds the score matrix of a long prompt: 256 queries of 32 heads over 8,192 positions are 256 MiB.
QUERY_TILE = 256


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_query_len: int,
    max_context_len: int,
) -> torch.Tensor:
    """q [T, Hq, D] packed by cu_seqlens_q [B + 1]; caches [num_blocks, Hk, block_tokens, D]; returns [T, Hq, D].

    Only the blocks that some query of the sequence can see are read. Padding rows come back as zeros.
    """
    output = torch.zeros_like(q)
    starts = cu_seqlens_q.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        for tile_start in range(start, end, QUERY_TILE):
            tile_end = min(tile_start + QUERY_TILE, end)
            first_position = context_len - (end - tile_start)
            output[tile_start:tile_end] = _attend(
                q[tile_start:tile_end],
                key_cache,
                value_cache,
                block_tables[sequence],
                first_position,
                scale,
                sliding_window,
                soft_cap,
            )
    return output


def _attend(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_position: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Queries q [n, Hq, D] at positions first_position.. of one sequence; [n, Hq, D] in the dtype of q."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = key_cache.shape[1]
    end = first_position + num_queries
    lowest_visible = 0 if sliding_window is None else max(0, first_position - sliding_window + 1)
    keys, first_key = _gather(key_cache, block_table, lowest_visible, end)
    values, _ = _gather(value_cache, block_table, lowest_visible, end)

    grouped = q.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [Hk, group, n, D]
    scores = torch.matmul(grouped * scale, keys.unsqueeze(1).transpose(-1, -2))  # [Hk, group, n, keys]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if num_queries > 1 or first_key < lowest_visible:
        query_positions = torch.arange(first_position, end, device=q.device).unsqueeze(1)
        key_positions = torch.arange(first_key, end, device=q.device).unsqueeze(0)
        hidden = key_positions > query_positions
        if sliding_window is not None:
            hidden |= key_positions <= query_positions - sliding_window
        scores.masked_fill_(hidden, float("-inf"))
    mixed = torch.matmul(torch.softmax(scores, dim=-1), values.unsqueeze(1))  # [Hk, group, n, D]
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q.dtype)


def _gather(cache: torch.Tensor, block_table: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, int]:
    """Whole blocks that cover positions start..end-1, cut at `end`: ([Hk, positions, D] float32, first position)."""
    block_tokens = cache.shape[2]
    first_block, last_block = start // block_tokens, (end + block_tokens - 1) // block_tokens
    blocks = cache.index_select(0, block_table[first_block:last_block])  # [blocks, Hk, block_tokens, D]
    first_position = first_block * block_tokens
    flat = blocks.float().transpose(0, 1).reshape(cache.shape[1], -1, cache.shape[3])
    return flat[:, : end - first_position], first_position
