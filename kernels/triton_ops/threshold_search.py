"""The threshold of top-k: one digit a pass of a radix search over fixed-point distances (`sample.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling import SamplingTensors
from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs

CHUNK, BLOCK = 2048, 256
# Many rows fill the GPU anyway: then fewer, longer chunks spend less on the sums at their end.
LONG_CHUNK, LONG_CHUNK_ROWS = 8192, 16

# A key counts steps of 2^-19 behind the likeliest token, up to 32: e^-32 times a vocabulary is nothing. Tokens closer
# than a step, 2e-6 of log-probability, count as equals.
KEY_BITS, DIGIT_BITS = 24, 4
KEEP_ALL = 0x7FFFFFFF
KEY_SCALE = tl.constexpr(524288.0)
LAST_KEY = tl.constexpr(0xFFFFFF)


@triton.jit
def distance_behind(logits, largest, temperature):
    """(largest - logit) / temperature, at least 0: how far a token is behind the likeliest, in log-probability."""
    return tl.maximum((largest - logits) / temperature, 0.0)


@triton.jit
def fixed_point_key(distance):
    """24-bit fixed-point distance; larger is less likely."""
    return tl.minimum(distance * KEY_SCALE, LAST_KEY).to(tl.int32)


@triton.jit
def _at_most(digit, limit, COMPILED: tl.constexpr):
    """1.0 where digit <= limit, else 0.0, of whole numbers: limit + 1 - digit, clamped to 0..1.

    One saturating subtraction, which the GPU does at twice the rate of a compare and a select.
    """
    if COMPILED:
        ones = tl.inline_asm_elementwise(
            "sub.sat.f32 $0, $1, $2;", "=f,f,f", [limit + 1.0, digit], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        ones = tl.where(digit <= limit, 1.0, 0.0)
    return ones


@triton.jit
def top_k_search_kernel(
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    bound_ptr,
    prefix_ptr,
    remaining_ptr,
    chunk_sums_ptr,
    counters_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    COMPILED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of rows with top-k and top-p: one digit of the key of the last token that top-k keeps."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    if (temperature <= 0) | (top_k <= 0) | (tl.load(top_p_ptr + row) >= 1):
        return
    row_ptr = logits_ptr + row * logits_stride
    largest = tl.load(row_ptr + tl.load(best_ids_ptr + row))
    prefix = 0
    if not FIRST:
        prefix = tl.load(prefix_ptr + row)
    digit_row = tl.arange(0, 16)[:, None].to(tl.float32)
    sums = tl.zeros([16, BLOCK], tl.float32)
    for start in tl.range(0, CHUNK, BLOCK, loop_unroll_factor=4):
        token = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = token < vocab_size
        logits = tl.load(row_ptr + token, mask=inside, other=float("-inf"))
        key = fixed_point_key(distance_behind(logits, largest, temperature))
        counts = inside
        if not FIRST:
            # The bits above this digit must equal those found so far.
            counts = counts & ((key >> (SHIFT + 4)) == (prefix >> (SHIFT + 4)))
        amount = tl.where(counts, 1.0, 0.0)
        digit = ((key >> SHIFT) & 15).to(tl.float32)
        sums += _at_most(digit[None, :], digit_row, COMPILED) * amount[None, :]
    sums_ptr = chunk_sums_ptr + row * num_chunks * 16
    tl.store(sums_ptr + chunk * 16 + tl.arange(0, 16), tl.sum(sums, axis=1))
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1) == num_chunks - 1:
        index = tl.arange(0, BLOCK_C)
        digits = tl.arange(0, 16)
        chunk_sums = sums_ptr + index[:, None] * 16 + digits[None, :]
        present = (index < num_chunks)[:, None]
        reached = tl.sum(tl.load(chunk_sums, mask=present, other=0.0, cache_modifier=".cg"), axis=0)
        present = present & (digits > 0)[None, :]
        before = tl.sum(tl.load(chunk_sums - 1, mask=present, other=0.0, cache_modifier=".cg"), axis=0)
        if FIRST:
            remaining = top_k.to(tl.float32)
        else:
            remaining = tl.load(remaining_ptr + row)
        # The first digit whose cumulative sum reaches what is left; rounding may leave none, then the last with any.
        first_reaching = tl.min(tl.where((reached >= remaining) & (reached > before), digits, 16), axis=0)
        last_present = tl.max(tl.where(reached > before, digits, 0), axis=0)
        chosen = tl.where(first_reaching < 16, first_reaching, last_present)
        prefix = prefix | (chosen << SHIFT)
        tl.store(prefix_ptr + row, prefix)
        tl.store(remaining_ptr + row, remaining - tl.sum(tl.where(digits == chosen, before, 0.0), axis=0))
        tl.store(counters_ptr + row, 0)
        if SHIFT == 0:
            tl.store(bound_ptr + row, prefix)


def top_k_bound(
    logits: torch.Tensor, best_ids: torch.Tensor, params: SamplingTensors, counters: torch.Tensor
) -> torch.Tensor:
    """Key of the last token that top-k keeps [n] int32, of rows that have top-p too; KEEP_ALL of the others."""
    num_rows, vocab_size = logits.shape
    chunk = LONG_CHUNK if num_rows >= LONG_CHUNK_ROWS else CHUNK
    num_chunks = triton.cdiv(vocab_size, chunk)
    bound = torch.full((num_rows,), KEEP_ALL, dtype=torch.int32, device=logits.device)
    prefix = torch.empty_like(bound)
    remaining = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sums = torch.empty(num_rows, num_chunks, 16, dtype=torch.float32, device=logits.device)
    for shift in range(KEY_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        top_k_search_kernel[(num_rows, num_chunks)](
            logits,
            best_ids,
            params.temperature,
            params.top_k,
            params.top_p,
            bound,
            prefix,
            remaining,
            sums,
            counters,
            logits.stride(0),
            vocab_size,
            num_chunks,
            SHIFT=shift,
            FIRST=shift == KEY_BITS - DIGIT_BITS,
            COMPILED=not triton.knobs.runtime.interpret,
            CHUNK=chunk,
            BLOCK=BLOCK,
            BLOCK_C=triton.next_power_of_2(num_chunks),
            num_warps=8,
            **dependent_launch(logits),
        )
    return bound
