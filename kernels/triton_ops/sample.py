"""Gumbel-max sampling under top-k, top-p and min-p without leaving the device and without a sort.

The winner among all tokens is drawn first. If the filters keep it, it is the winner among those they keep. If not, no
token that is at most as likely is kept either, and the next winner is looked for among the likelier ones: one pass over
the logits a round, which sums up how many tokens and how much mass are likelier than the last winner, and finds the
best of those. A row needs about 1 + ln(1 / top_p) rounds, so the first three are launches over all of the GPU, where
rows that are done leave at once, and one program a row does the rest. Rows with both top-k and top-p need the mass that
top-k leaves first: its threshold comes from a radix search. Sums have a fixed order, so a row's token does not depend
on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling import SamplingTensors
from kernels.triton_ops.gumbel import gumbel_noise
from kernels.triton_ops.launch import arrival_counters, dependent_launch, start_next, wait_for_inputs
from kernels.triton_ops.threshold_search import distance_behind, fixed_point_key, top_k_bound

CHUNK = 2048
# Rounds that launch a program a chunk, after the first draw.
WIDE_ROUNDS = 3


@triton.jit
def _likelier(row_ptr, first_token, vocab_size, largest, temperature, bound, BLOCK: tl.constexpr):
    """Of BLOCK tokens: which have a logit above `bound`, and their distance behind the likeliest."""
    token = first_token + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    return logits > bound, distance_behind(logits, largest, temperature)


@triton.jit
def _winner(is_candidate, distance, seed, position, first_token, BLOCK: tl.constexpr, COMPILED: tl.constexpr):
    """Largest log p + noise of the candidates of a block, and the lowest id that has it."""
    best = float("-inf")
    best_id = 0x7FFFFFFF
    if tl.max(is_candidate.to(tl.int32), axis=0) > 0:
        noise = gumbel_noise(seed, position, first_token, BLOCK, COMPILED)
        scores = tl.where(is_candidate, noise - distance, float("-inf"))
        best = tl.max(scores, axis=0)
        token = first_token + tl.arange(0, BLOCK)
        best_id = tl.min(tl.where(is_candidate & (scores == best), token, 0x7FFFFFFF), axis=0)
    return best, best_id


@triton.jit
def _is_kept(mass, count, wanted_mass, top_k):
    """Whether the filters keep a token that `count` likelier ones with `mass` together stand before."""
    return (mass < wanted_mass) & ((top_k <= 0) | (count < top_k))


@triton.jit
def first_draw_kernel(
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    k_bound_ptr,
    chunk_sums_ptr,
    chunk_ids_ptr,
    counters_ptr,
    out_ptr,
    wanted_ptr,
    pending_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    HAS_K_BOUND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The winner among all tokens that min-p keeps; `wanted`: the mass that top-p keeps; `pending`: to be checked."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row)
    best_id = tl.load(best_ids_ptr + row).to(tl.int32)
    if temperature <= 0:
        if chunk == 0:
            tl.store(out_ptr + row, best_id.to(tl.int64))
            tl.store(pending_ptr + row, 0)
        return
    row_ptr = logits_ptr + row * logits_stride
    largest = tl.load(row_ptr + best_id)
    first_token = chunk * CHUNK
    above, distance = _likelier(row_ptr, first_token, vocab_size, largest, temperature, float("-inf"), CHUNK)
    mass = tl.where(above, tl.exp(-distance), 0.0)
    candidate = above & (mass >= tl.load(min_p_ptr + row))
    if HAS_K_BOUND:
        in_top_k = fixed_point_key(distance) <= tl.load(k_bound_ptr + row)
        mass = tl.where(in_top_k, mass, 0.0)
        candidate = candidate & in_top_k
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    score, token = _winner(candidate, distance, seed, position, first_token, CHUNK, COMPILED)
    sums_ptr = chunk_sums_ptr + row * num_chunks * 4
    ids_ptr = chunk_ids_ptr + row * num_chunks
    tl.store(sums_ptr + chunk * 4, score)
    tl.store(sums_ptr + chunk * 4 + 1, tl.sum(mass, axis=0))
    tl.store(ids_ptr + chunk, token)
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1) == num_chunks - 1:
        index = tl.arange(0, BLOCK_C)
        present = index < num_chunks
        scores = tl.load(sums_ptr + index * 4, present, float("-inf"), cache_modifier=".cg")
        masses = tl.load(sums_ptr + index * 4 + 1, present, 0.0, cache_modifier=".cg")
        ids = tl.load(ids_ptr + index, present, 0x7FFFFFFF, cache_modifier=".cg")
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, 0x7FFFFFFF), axis=0)
        # A row with NaN has no winner; it fails for its largest logit, but its token must be one of the vocabulary.
        token = tl.where(token < vocab_size, token, best_id)
        top_p = tl.load(top_p_ptr + row)
        tl.store(out_ptr + row, token.to(tl.int64))
        tl.store(wanted_ptr + row, tl.where(top_p < 1, top_p * tl.sum(masses, axis=0), float("inf")))
        has_filter = (top_p < 1) | (tl.load(top_k_ptr + row) > 0)
        tl.store(pending_ptr + row, (has_filter & (token != best_id)).to(tl.int32))
        tl.store(counters_ptr + row, 0)


@triton.jit
def next_draw_kernel(
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_sums_ptr,
    chunk_ids_ptr,
    counters_ptr,
    out_ptr,
    wanted_ptr,
    pending_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Check the winner in `out`; where a filter drops it, the winner among the likelier tokens takes its place."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_inputs(PDL)
    if tl.load(pending_ptr + row) == 0:
        return
    row_ptr = logits_ptr + row * logits_stride
    best_id = tl.load(best_ids_ptr + row).to(tl.int32)
    largest = tl.load(row_ptr + best_id)
    bound = tl.load(row_ptr + tl.load(out_ptr + row))
    temperature = tl.load(temperature_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    first_token = chunk * CHUNK
    above, distance = _likelier(row_ptr, first_token, vocab_size, largest, temperature, bound, CHUNK)
    score, token = _winner(above, distance, seed, position, first_token, CHUNK, COMPILED)
    sums_ptr = chunk_sums_ptr + row * num_chunks * 4
    ids_ptr = chunk_ids_ptr + row * num_chunks
    tl.store(sums_ptr + chunk * 4, score)
    tl.store(sums_ptr + chunk * 4 + 1, tl.sum(tl.where(above, tl.exp(-distance), 0.0), axis=0))
    tl.store(sums_ptr + chunk * 4 + 2, tl.sum(above.to(tl.float32), axis=0))
    tl.store(ids_ptr + chunk, token)
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1) == num_chunks - 1:
        index = tl.arange(0, BLOCK_C)
        present = index < num_chunks
        scores = tl.load(sums_ptr + index * 4, present, float("-inf"), cache_modifier=".cg")
        mass = tl.sum(tl.load(sums_ptr + index * 4 + 1, present, 0.0, cache_modifier=".cg"), axis=0)
        count = tl.sum(tl.load(sums_ptr + index * 4 + 2, present, 0.0, cache_modifier=".cg"), axis=0)
        ids = tl.load(ids_ptr + index, present, 0x7FFFFFFF, cache_modifier=".cg")
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, 0x7FFFFFFF), axis=0)
        kept = _is_kept(mass, count, tl.load(wanted_ptr + row), tl.load(top_k_ptr + row)) | (token >= vocab_size)
        if not kept:
            tl.store(out_ptr + row, token.to(tl.int64))
        # The likeliest token needs no check: every filter keeps it.
        tl.store(pending_ptr + row, ((not kept) & (token != best_id)).to(tl.int32))
        tl.store(counters_ptr + row, 0)


@triton.jit
def last_draws_kernel(
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    seeds_ptr,
    positions_ptr,
    out_ptr,
    wanted_ptr,
    pending_ptr,
    logits_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rounds that are left of the few rows still pending, one program a row."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    pending = tl.load(pending_ptr + row)
    if pending == 0:
        return
    row_ptr = logits_ptr + row * logits_stride
    best_id = tl.load(best_ids_ptr + row).to(tl.int32)
    largest = tl.load(row_ptr + best_id)
    temperature = tl.load(temperature_ptr + row)
    wanted, top_k = tl.load(wanted_ptr + row), tl.load(top_k_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    winner = tl.load(out_ptr + row).to(tl.int32)
    while pending != 0:
        bound = tl.load(row_ptr + winner)
        best_score = float("-inf")
        next_winner = 0x7FFFFFFF
        mass, count = 0.0, 0.0
        for first_token in tl.range(0, vocab_size, CHUNK):
            above, distance = _likelier(row_ptr, first_token, vocab_size, largest, temperature, bound, CHUNK)
            mass += tl.sum(tl.where(above, tl.exp(-distance), 0.0), axis=0)
            count += tl.sum(above.to(tl.float32), axis=0)
            score, token = _winner(above, distance, seed, position, first_token, CHUNK, COMPILED)
            if score > best_score:
                best_score = score
                next_winner = token
        kept = _is_kept(mass, count, wanted, top_k) | (next_winner >= vocab_size)
        if kept:
            pending = 0
        else:
            winner = next_winner
            pending = (next_winner != best_id).to(tl.int32)
    tl.store(out_ptr + row, winner.to(tl.int64))


def sample(logits: torch.Tensor, best_ids: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """`kernels.ops.sample`: logits [n, V] float32 → [n] int64. 1 launch, 4 more for filters, 6 for top-k with top-p."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    grid = (num_rows, num_chunks)
    sizes = (logits.stride(0), vocab_size, num_chunks)
    counters = arrival_counters(device, num_rows)
    wanted = torch.empty(num_rows, dtype=torch.float32, device=device)
    pending = torch.empty(num_rows, dtype=torch.int32, device=device)
    chunk_sums = torch.empty(num_rows, num_chunks, 4, dtype=torch.float32, device=device)
    chunk_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    launch = {"COMPILED": not triton.knobs.runtime.interpret, **dependent_launch(logits)}
    shape = {"CHUNK": CHUNK, "BLOCK_C": triton.next_power_of_2(num_chunks), "num_warps": 8, **launch}
    has_both = params.any_top_k and params.any_top_p
    k_bound = top_k_bound(logits, best_ids, params, counters) if has_both else None
    drawn_by = (params.seeds, params.positions)
    state = (out, wanted, pending)
    first_draw_kernel[grid](
        logits,
        best_ids,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        *drawn_by,
        k_bound,
        chunk_sums,
        chunk_ids,
        counters,
        *state,
        *sizes,
        HAS_K_BOUND=has_both,
        **shape,
    )
    if not (params.any_top_k or params.any_top_p):
        return out
    filters = (logits, best_ids, params.temperature, params.top_k)
    for _ in range(WIDE_ROUNDS):
        next_draw_kernel[grid](*filters, *drawn_by, chunk_sums, chunk_ids, counters, *state, *sizes, **shape)
    last_draws_kernel[(num_rows,)](
        *filters, *drawn_by, *state, logits.stride(0), vocab_size, CHUNK=CHUNK, num_warps=16, **launch
    )
    return out
