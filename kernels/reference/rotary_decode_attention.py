"""Everything between the QKV product and the output product of a decode step, composed of the single ops."""

from __future__ import annotations

import torch

from kernels.dispatch import run


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
    """qkv [B, (Hq + 2 Hk) * D], one token a sequence → [B, Hq, D]; K and V are written first.

    `follows_linear` is a hint for devices.
    """
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    device_type = qkv.device.type
    q = run(
        "qk_norm_rope_kv_write",
        device_type,
        qkv,
        q_norm,
        k_norm,
        eps,
        cos_sin,
        position_ids,
        key_cache,
        value_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
    )
    cu_seqlens_q = torch.arange(qkv.shape[0] + 1, dtype=torch.int32, device=qkv.device)
    return run(
        "paged_attention",
        device_type,
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        scale,
        sliding_window,
        soft_cap,
        1,
        max_context_len,
    )
