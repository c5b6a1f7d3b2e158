"""Sampling without leaving the device and without a sort.

Top-k and top-p both keep "everything at least as likely as some token", so each is a threshold, found by a radix search
over (max - logit) / temperature in fixed point: per pass, the count (top-k) or mass (top-p) up to each of 16 buckets,
and the last program of a row picks the bucket that the target falls in.
The draw is one more pass: kept mass a chunk, then the chunk and the token where the cumulative mass exceeds u times the
whole. Sums have a fixed order, so a row's token does not depend on its neighbours or on scheduling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling import SamplingTensors
from kernels.triton_ops.launch import arrival_counters, dependent_launch, start_next, wait_for_inputs
from kernels.triton_ops.threshold_search import (
    distance_behind,
    fixed_point_key,
    threshold_search_kernel,
)

CHUNK = 2048
# Many rows fill the GPU anyway: then fewer, longer chunks spend less on the sums at their end.
LONG_SEARCH_CHUNK, LONG_SEARCH_ROWS = 8192, 16
SEARCH_BLOCK = 256
DIGIT_BITS = 4
KEY_BITS = 24


@triton.jit
def row_maximum_kernel(
    logits_ptr,
    chunk_best_ptr,
    chunk_ids_ptr,
    counters_ptr,
    best_ptr,
    best_id_ptr,
    k_bound_ptr,
    p_bound_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Largest logit of each row and the lowest id that has it; sets both thresholds to "keep all"."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("inf"))
    best = tl.max(logits, axis=0)
    tl.store(chunk_best_ptr + row * num_chunks + chunk, best)
    best_id = tl.min(tl.where((logits == best) & inside, token, vocab_size), axis=0)
    tl.store(chunk_ids_ptr + row * num_chunks + chunk, best_id)
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1) == num_chunks - 1:
        index = tl.arange(0, BLOCK_C)
        present = index < num_chunks
        bests = tl.load(chunk_best_ptr + row * num_chunks + index, present, float("-inf"), cache_modifier=".cg")
        ids = tl.load(chunk_ids_ptr + row * num_chunks + index, present, vocab_size, cache_modifier=".cg")
        largest = tl.max(bests, axis=0)
        tl.store(best_ptr + row, largest)
        tl.store(best_id_ptr + row, tl.min(tl.where(bests == largest, ids, vocab_size), axis=0).to(tl.int64))
        tl.store(k_bound_ptr + row, 0x7FFFFFFF)
        tl.store(p_bound_ptr + row, 0x7FFFFFFF)
        tl.store(counters_ptr + row, 0)


@triton.jit
def draw_kernel(
    logits_ptr,
    best_ptr,
    best_id_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    k_bound_ptr,
    p_bound_ptr,
    chunk_mass_ptr,
    counters_ptr,
    out_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kept mass of each chunk; the last program of a row draws. Greedy rows take the likeliest token."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        if chunk == 0:
            tl.store(out_ptr + row, tl.load(best_id_ptr + row))
        return
    largest = tl.load(best_ptr + row)
    bound = tl.minimum(tl.load(k_bound_ptr + row), tl.load(p_bound_ptr + row))
    min_p = tl.load(min_p_ptr + row)
    row_ptr = logits_ptr + row * logits_stride
    kept = _kept_mass(row_ptr, chunk, vocab_size, largest, temperature, bound, min_p, CHUNK)
    tl.store(chunk_mass_ptr + row * num_chunks + chunk, tl.sum(kept, axis=0))
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1) == num_chunks - 1:
        index = tl.arange(0, BLOCK_C)
        masses = tl.load(chunk_mass_ptr + row * num_chunks + index, index < num_chunks, 0.0, cache_modifier=".cg")
        position = tl.load(positions_ptr + row)
        low = (position & 0xFFFFFFFF).to(tl.uint32)
        high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        zero = low * 0
        word, _, _, _ = tl.philox(tl.load(seeds_ptr + row).to(tl.uint64), low, high, zero, zero)
        uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
        cumulative = tl.cumsum(masses, axis=0)
        wanted = uniform * tl.max(cumulative, axis=0)
        last_chunk = tl.max(tl.where(masses > 0, index, 0), axis=0)
        chosen = tl.min(tl.where((cumulative > wanted) & (masses > 0), index, last_chunk), axis=0)
        before = tl.sum(tl.where(index < chosen, masses, 0.0), axis=0)
        kept = _kept_mass(row_ptr, chosen, vocab_size, largest, temperature, bound, min_p, CHUNK)
        token = chosen * CHUNK + tl.arange(0, CHUNK)
        cumulative_in = tl.cumsum(kept, axis=0)
        last_token = tl.max(tl.where(kept > 0, token, 0), axis=0)
        drawn = tl.min(tl.where((cumulative_in > wanted - before) & (kept > 0), token, last_token), axis=0)
        tl.store(out_ptr + row, drawn.to(tl.int64))
        tl.store(counters_ptr + row, 0)


@triton.jit
def _kept_mass(row_ptr, chunk, vocab_size, largest, temperature, bound, min_p, CHUNK: tl.constexpr):
    """exp(-distance) of the chunk's tokens that every filter keeps, else 0: [CHUNK] float32."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    distance = distance_behind(tl.load(row_ptr + token, mask=inside, other=float("-inf")), largest, temperature)
    mass = tl.exp(-distance)
    keep = inside & (fixed_point_key(distance) <= bound) & (mass >= min_p)
    return tl.where(keep, mass, 0.0)


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """`kernels.ops.sample`: logits [n, V] float32 → [n] int64. 2 launches, 6 more for top-k, 5 for top-p."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    grid = (num_rows, num_chunks)
    sizes = (logits.stride(0), vocab_size, num_chunks)
    counters = arrival_counters(device, num_rows)
    best = torch.empty(num_rows, dtype=torch.float32, device=device)
    best_id = torch.empty(num_rows, dtype=torch.int64, device=device)
    bounds = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    prefix = torch.empty(num_rows, dtype=torch.int32, device=device)
    remaining = torch.empty(num_rows, dtype=torch.float32, device=device)
    sums = torch.empty(num_rows, num_chunks, 16, dtype=torch.float32, device=device)
    chunk_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    shape = {"CHUNK": CHUNK, "BLOCK_C": triton.next_power_of_2(num_chunks), "num_warps": 8, **dependent_launch(logits)}
    row_maximum_kernel[grid](logits, sums, chunk_ids, counters, best, best_id, bounds[0], bounds[1], *sizes, **shape)
    search_chunk = LONG_SEARCH_CHUNK if num_rows >= LONG_SEARCH_ROWS else CHUNK
    search_chunks = triton.cdiv(vocab_size, search_chunk)
    search_shape = shape | {"CHUNK": search_chunk, "BLOCK_C": triton.next_power_of_2(search_chunks)}
    searches = (
        (params.any_top_k, params.top_k, bounds[0], False, 0),
        (params.any_top_p, params.top_p, bounds[1], True, DIGIT_BITS),
    )
    for used, target, bound, by_mass, last_shift in searches:
        if not used:
            continue
        for shift in range(KEY_BITS - DIGIT_BITS, last_shift - 1, -DIGIT_BITS):
            threshold_search_kernel[(num_rows, search_chunks)](
                logits,
                best,
                params.temperature,
                target,
                bounds[0],
                bound,
                prefix,
                remaining,
                sums,
                counters,
                logits.stride(0),
                vocab_size,
                search_chunks,
                SHIFT=shift,
                FIRST=shift == KEY_BITS - DIGIT_BITS,
                LAST=shift == last_shift,
                BY_MASS=by_mass,
                COMPILED=not triton.knobs.runtime.interpret,
                BLOCK=SEARCH_BLOCK,
                **search_shape,
            )
    draw_kernel[grid](
        logits,
        best,
        best_id,
        params.temperature,
        params.min_p,
        params.seeds,
        params.positions,
        bounds[0],
        bounds[1],
        sums,
        counters,
        out,
        *sizes,
        **shape,
    )
    return out
