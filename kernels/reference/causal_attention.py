"""Causal attention of one whole sequence over dense keys and values: softmax(scale · q kᵀ) v per head, in float32."""

from __future__ import annotations

import torch


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [S, Hq, D], k and v [S, Hk, D] → [S, Hq, D]. Query j sees keys 0..j, head h reads KV head h // (Hq / Hk)."""
    num_queries, num_heads, head_dim = q.shape
    grouped = q.float().view(num_queries, k.shape[1], -1, head_dim).permute(1, 2, 0, 3)  # [Hk, group, S, D]
    keys, values = (part.float().transpose(0, 1).unsqueeze(1) for part in (k, v))  # [Hk, 1, S, D]
    scores = torch.matmul(grouped * scale, keys.transpose(-1, -2))
    later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).triu(1)
    mixed = torch.matmul(torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1), values)
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q.dtype).contiguous()


def prefers_causal_attention(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """The reference gains nothing by it."""
    return False
