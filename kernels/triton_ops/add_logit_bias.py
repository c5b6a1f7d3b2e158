"""Sparse bias on logits; repeated entries add up, -inf bans a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def add_logit_bias_kernel(out_ptr, row_ids_ptr, token_ids_ptr, bias_ptr, vocab_size, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    row = tl.load(row_ids_ptr + entry, mask=inside, other=0)
    token = tl.load(token_ids_ptr + entry, mask=inside, other=0)
    bias = tl.load(bias_ptr + entry, mask=inside, other=0.0)
    tl.atomic_add(out_ptr + row * vocab_size + token, bias, mask=inside)


def add_logit_bias(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """`kernels.ops.add_logit_bias`: copy of logits [n, V] float32 with bias [m] added at (row_ids, token_ids)."""
    out = logits.clone(memory_format=torch.contiguous_format)
    num_entries = bias.shape[0]
    if num_entries:
        add_logit_bias_kernel[(triton.cdiv(num_entries, BLOCK),)](
            out, row_ids, token_ids, bias, logits.shape[1], num_entries, BLOCK=BLOCK, num_warps=4
        )
    return out
