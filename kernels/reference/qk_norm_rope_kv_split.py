"""`qk_norm_rope_kv_write` that also gives K and V back, dense, for attention that does not read them from the cache."""

from __future__ import annotations

import torch

from kernels.reference.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import rope


def qk_norm_rope_kv_split(
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
    num_keys: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [T, (Hq + 2 Hk) * D] → q [num_rows, Hq, D], k and v [num_rows, Hk, D].

    Zeros: q from T on, k and v from num_keys on.
    """
    sizes = (num_heads, num_kv_heads, head_dim)
    caches = (key_cache, value_cache, slot_mapping)
    q = qk_norm_rope_kv_write(qkv, q_norm, k_norm, eps, cos_sin, position_ids, *caches, *sizes)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    k, v = heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    k = rope(k, cos_sin, position_ids)
    q, k, v = (
        torch.cat((part, part.new_zeros(num_rows - len(part), *part.shape[1:])))
        for part in (q, k[:num_keys], v[:num_keys])
    )
    return q, k, v
