"""Repetition, frequency and presence penalties, looked up by slot; formulas in the reference of this name."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs

BLOCK_V = 2048


@triton.jit
def apply_penalties_kernel(
    logits_ptr,
    counts_ptr,
    in_prompt_ptr,
    slots_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    out_ptr,
    logits_stride,
    counts_stride,
    prompt_stride,
    vocab_size,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = token < vocab_size
    wait_for_inputs(PDL)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=0.0)
    # A row without penalties skips the reading of its counts.
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        slot = tl.load(slots_ptr + row)
        counts = tl.load(counts_ptr + slot * counts_stride + token, mask=inside, other=0)
        seen = (counts > 0) | (tl.load(in_prompt_ptr + slot * prompt_stride + token, mask=inside, other=0) != 0)
        repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits = tl.where(seen, repeated, logits)
        logits = logits - frequency * counts.to(tl.float32) - tl.where(counts > 0, presence, 0.0)
    tl.store(out_ptr + row * vocab_size + token, logits, mask=inside)


def apply_penalties(
    logits: torch.Tensor,
    generated_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    slot_ids: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """`kernels.ops.apply_penalties`: penalised copy of logits [n, V] float32."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, vocab_size, dtype=logits.dtype, device=logits.device)
    if num_rows:
        apply_penalties_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK_V))](
            logits,
            generated_counts,
            in_prompt.view(torch.uint8),
            slot_ids,
            presence,
            frequency,
            repetition,
            out,
            logits.stride(0),
            generated_counts.stride(0),
            in_prompt.stride(0),
            vocab_size,
            BLOCK_V=BLOCK_V,
            num_warps=4,
            **dependent_launch(logits),
        )
    return out
