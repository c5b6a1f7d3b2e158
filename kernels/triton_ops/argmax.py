"""Index of the largest logit of each row, in one launch: chunks of the vocabulary, merged by the last to arrive."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import arrival_counters, dependent_launch, start_next, wait_for_inputs

BLOCK_V = 4096


@triton.jit
def argmax_kernel(
    logits_ptr,
    best_ptr,
    best_id_ptr,
    counters_ptr,
    out_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = token < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    # NaN ranks above everything, so that a check of the chosen logit finds it.
    logits = tl.where(logits == logits, logits, float("inf"))
    best = tl.max(logits, axis=0)
    best_id = tl.min(tl.where((logits == best) & inside, token, vocab_size), axis=0)
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(best_id_ptr + row * num_chunks + chunk, best_id)
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1) == num_chunks - 1:
        index = tl.arange(0, BLOCK_C)
        present = index < num_chunks
        chunk_best = tl.load(best_ptr + row * num_chunks + index, present, float("-inf"), cache_modifier=".cg")
        chunk_ids = tl.load(best_id_ptr + row * num_chunks + index, present, vocab_size, cache_modifier=".cg")
        winner = tl.min(tl.where(chunk_best == tl.max(chunk_best, axis=0), chunk_ids, vocab_size), axis=0)
        tl.store(out_ptr + row, winner.to(tl.int64))
        tl.store(counters_ptr + row, 0)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """`kernels.ops.argmax`: logits [n, V]; [n] int64, the lowest id among equals. +inf and NaN count as equal."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, BLOCK_V)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    if num_rows:
        argmax_kernel[(num_rows, num_chunks)](
            logits,
            best,
            best_id,
            arrival_counters(logits.device, num_rows),
            out,
            logits.stride(0),
            vocab_size,
            num_chunks,
            BLOCK_V=BLOCK_V,
            BLOCK_C=triton.next_power_of_2(num_chunks),
            num_warps=8,
            **dependent_launch(logits),
        )
    return out
