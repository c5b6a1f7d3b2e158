"""Paged attention: the decode kernel where every sequence has one query, else the prefill kernel."""

from __future__ import annotations

import torch

from kernels.triton_ops.decode_attention import decode_attention
from kernels.triton_ops.prefill_attention import prefill_attention


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
    """`kernels.ops.paged_attention`. With max_query_len 1, sequence b's query must be row b of q."""
    if max_query_len == 1 and q.shape[0] == context_lens.shape[0]:
        return decode_attention(
            q,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            q.shape[1],
            scale,
            sliding_window,
            soft_cap,
            max_context_len,
        )
    return prefill_attention(
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        scale,
        sliding_window,
        soft_cap,
        max_query_len,
    )
