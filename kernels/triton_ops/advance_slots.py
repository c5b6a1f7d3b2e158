"""The end of a step, in one launch (specification: `kernels/reference/advance_slots.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs


@triton.jit(
    # They lie wherever the packed step puts them: a kernel for each alignment would be compiled while requests wait.
    do_not_specialize_on_alignment=["slot_ids_ptr", "context_lens_ptr", "last_tokens_ptr", "positions_ptr", "out_ptr"]
)
def advance_slots_kernel(
    token_ids_ptr,
    best_ids_ptr,
    logits_ptr,
    slot_ids_ptr,
    context_lens_ptr,
    last_tokens_ptr,
    positions_ptr,
    counts_ptr,
    out_ptr,
    logits_stride,
    vocab_size,
    padding_slot,
    HAS_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    token = tl.minimum(tl.maximum(tl.load(token_ids_ptr + row), 0), vocab_size - 1)
    largest = tl.load(logits_ptr + row * logits_stride + tl.load(best_ids_ptr + row))
    # NaN and both infinities fail the comparison.
    failed = tl.where(tl.abs(largest) < float("inf"), 0, 1)
    slot = tl.load(slot_ids_ptr + row)
    used = slot != padding_slot
    tl.store(last_tokens_ptr + slot, token.to(tl.int32), mask=used)
    tl.store(positions_ptr + slot, tl.load(context_lens_ptr + row), mask=used)
    if HAS_COUNTS:
        count_ptr = counts_ptr + slot * vocab_size + token
        tl.store(count_ptr, tl.load(count_ptr) + 1 - failed, mask=used)
    tl.store(out_ptr + row * 2, token.to(tl.int32))
    tl.store(out_ptr + row * 2 + 1, failed)


def advance_slots(
    token_ids: torch.Tensor,
    best_ids: torch.Tensor,
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    context_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """`kernels.ops.advance_slots`: one program a row; no slot but the padding one may appear twice."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, 2, dtype=torch.int32, device=logits.device)
    if num_rows:
        advance_slots_kernel[(num_rows,)](
            token_ids,
            best_ids,
            logits,
            slot_ids,
            context_lens,
            last_tokens,
            positions,
            counts,
            out,
            logits.stride(0),
            vocab_size,
            last_tokens.shape[0] - 1,
            HAS_COUNTS=counts is not None,
            num_warps=1,
            **dependent_launch(logits),
        )
    return out
