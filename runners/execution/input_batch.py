"""`ForwardBatch`: the tensors of one packed forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T packed tokens of B sequences: `num_decode_rows` sequences of one token first, then the prefill chunks.

    input_ids, position_ids [T] int32; slot_mapping [T] int64 (block_id * block_tokens + offset of each token's KV, -1
    writes nothing); block_tables [B, max_blocks] int32; context_lens [B] int32, tokens including this step's;
    cu_seqlens_q [B + 1] int32, where each sequence's tokens start; logits_indices [n] int64, the packed rows whose
    logits are wanted, None for every row. `max_query_len` and `max_context_len` are the largest of the batch.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    num_decode_rows: int
    max_query_len: int
    max_context_len: int
    logits_indices: torch.Tensor | None = None
