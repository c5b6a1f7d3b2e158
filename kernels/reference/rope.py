"""Rotary position embedding, half-split pairs (Su et al. 2021, arXiv:2104.09864, in the GPT-NeoX layout):

with a = x[:D/2], b = x[D/2:] and angle m·θ_i for position m:  (a, b) → (a cos − b sin, b cos + a sin).
"""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos_sin: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos_sin [max_positions, D] float32 (D/2 cosines, D/2 sines), position_ids [T] int32."""
    half = x.shape[-1] // 2
    table = cos_sin.index_select(0, position_ids).unsqueeze(1)
    cos, sin = table[..., :half], table[..., half:]
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
