"""Between the QKV product and attention, in one pass: per-head norms, rotation, K and V into their blocks."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import ACTIVATION_DTYPES, DTYPE_IDS, require_library


def accepts(
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
) -> bool:
    return (
        qkv.dtype in ACTIVATION_DTYPES
        and key_cache.dtype in ACTIVATION_DTYPES
        and qkv.is_contiguous()
        and key_cache.stride() == value_cache.stride()
        and key_cache.stride(3) == 1
        and head_dim % 2 == 0
    )


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
    tokens = qkv.shape[0]
    block_stride, head_stride, token_stride, _ = key_cache.stride()
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype)
    _qk_norm_rope_kv_write(
        qkv.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        cos_sin.data_ptr(),
        position_ids.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_stride,
        head_stride,
        token_stride,
        slot_mapping.data_ptr(),
        key_cache.shape[2],
        q.data_ptr(),
        DTYPE_IDS[qkv.dtype],
        DTYPE_IDS[key_cache.dtype],
    )
    return q


_qk_norm_rope_kv_write = require_library().wl_qk_norm_rope_kv_write
