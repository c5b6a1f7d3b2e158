"""Paged attention on the CPU: decode, prefill and prefill behind a history, read from the pool in place."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import ACTIVATION_DTYPES, DTYPE_IDS, require_library

MAX_GROUP = 64  # query heads of a KV head that fit the kernel's tile
HEAD_DIM_MULTIPLE = 16


def accepts(
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
) -> bool:
    return (
        q.shape[2] % HEAD_DIM_MULTIPLE == 0
        and q.shape[1] <= MAX_GROUP * key_cache.shape[1]
        and q.dtype in ACTIVATION_DTYPES
        and key_cache.dtype in ACTIVATION_DTYPES
        and q.is_contiguous()
        and key_cache.stride() == value_cache.stride()
        and key_cache.stride(3) == 1
        and block_tables.stride(1) == 1
    )


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
    """q [T, Hq, D] packed by cu_seqlens_q [B + 1]; caches [num_blocks, Hk, block_tokens, D]; returns [T, Hq, D]."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_tokens, _ = key_cache.shape
    block_stride, head_stride, token_stride, _ = key_cache.stride()
    output = torch.empty_like(q)
    _paged_attention(
        q.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_stride,
        head_stride,
        token_stride,
        block_tokens,
        block_tables.data_ptr(),
        block_tables.stride(0),
        context_lens.data_ptr(),
        cu_seqlens_q.data_ptr(),
        context_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        sliding_window or 0,
        soft_cap or 0.0,
        output.data_ptr(),
        DTYPE_IDS[q.dtype],
        DTYPE_IDS[key_cache.dtype],
    )
    return output


_paged_attention = require_library().wl_paged_attention
