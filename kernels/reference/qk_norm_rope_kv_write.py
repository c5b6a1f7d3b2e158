"""What happens between the QKV product and attention: per-head norm of q and k (qwen3, gemma3), rotation, KV write."""

from __future__ import annotations

import torch

from kernels.reference.kv_write import kv_write
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import rope


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    position_ids: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """qkv [T, (Hq + 2 Hk) * D], q heads first, then k, then v; returns the rotated q [T, Hq, D]."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    kv_write(rope(k, cos_sin, position_ids), v, key_cache, value_cache, slot_mapping)
    return rope(q, cos_sin, position_ids)
