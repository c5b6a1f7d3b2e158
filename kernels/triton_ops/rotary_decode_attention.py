"""Decode attention that norms and rotates q and k and writes K and V itself."""

from __future__ import annotations

import torch

from kernels.triton_ops.decode_attention import Rotation, decode_attention


def rotary_decode_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    position_ids: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_context_len: int,
    follows_linear: bool = False,
) -> torch.Tensor:
    """`kernels.ops.rotary_decode_attention`: one launch a layer."""
    return decode_attention(
        qkv,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        num_heads,
        scale,
        sliding_window,
        soft_cap,
        max_context_len,
        Rotation(q_norm, k_norm, eps, cos_sin, position_ids, slot_mapping),
        early_loads=follows_linear,
    )
