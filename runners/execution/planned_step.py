"""A plan made ready for the device: its key, its packed pass, and where its tokens will stand in the result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runners.execution.device_sampler import DeviceSampler
from runners.execution.device_slots import DeviceSlots
from runners.execution.input_batch import check_capacity
from runners.execution.packed_step import num_packed_words, pack_step
from runners.execution.step_keys import DecodeKey, StepKey, context_bucket, packed_key, width_bucket
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, PrefillChunk, StepPlan

_NO_WORDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """`parts` sample, each for row `rows[i]` of the result, in slot `part_slots[i]`, a token at index `part_ends[i]`.

    `in_graph`: the key's sizes are buckets, and nothing but tokens is wanted of the pass.
    """

    plan: StepPlan
    key: StepKey
    in_graph: bool
    words: NDArray[np.int32]
    parts: list[DecodeRow | PrefillChunk]
    rows: list[int]
    part_slots: NDArray[np.int64]
    part_ends: NDArray[np.int32]


def plan_step(
    plan: StepPlan,
    slots: DeviceSlots,
    sampler: DeviceSampler,
    block_tokens: int,
    max_context: int,
    vocab_size: int,
    *,
    tells_whole_prompts: bool = False,
    batch_invariant: bool = False,
) -> PlannedStep:
    """Of a plan whose inits and appends the slots know. LaunchError, naming the request, where it does not fit.

    `tells_whole_prompts`: the forward pass has a faster way for one long prompt without history, on the main stream.
    `batch_invariant`: decode steps take all rows there may be and the longest context, whoever runs.
    """
    rows, chunks = plan.decode_rows, plan.chunks
    parts: list[DecodeRow | PrefillChunk] = [*rows, *(chunk for chunk in chunks if chunk.samples)]
    part_slots = np.array([part.slot for part in parts], dtype=np.int64)
    ends = [row.position + 1 for row in rows]
    part_ends = np.array(ends + [chunk.end for chunk in chunks if chunk.samples], dtype=np.int32)
    mode = sampler.mode(part_slots)
    if not chunks:
        check_capacity(rows, part_slots, part_ends, slots.table, block_tokens)
        width = min(len(slots.rows), width_bucket(max(plan.width, len(rows))))
        context = context_bucket(int(part_ends.max()), max_context)
        if batch_invariant:
            width, context = len(slots.rows), max_context
        decode_key = DecodeKey(width, context, mode)
        slots.set_rows(part_slots, width)
        slots.expect_positions(part_slots, part_ends - 1)
        return PlannedStep(plan, decode_key, True, _NO_WORDS, parts, list(range(len(rows))), part_slots, part_ends)
    longest = max([*ends, *(chunk.end for chunk in chunks)])
    lens = [len(chunk.token_ids) for chunk in chunks]
    is_whole = tells_whole_prompts and len(chunks) == 1 and chunks[0].start == 0 and plan.flight_id is None
    key, in_buckets = packed_key(len(rows), lens, longest, max_context, mode, bool(parts), is_whole_prompt=is_whole)
    words = np.empty(num_packed_words(key), dtype=np.int32)
    pack_step(plan, slots, key, block_tokens, vocab_size, words)
    result_rows = list(range(len(rows)))
    result_rows += [key.rows + number for number, chunk in enumerate(chunks) if chunk.samples]
    wants_hidden = plan.kind is PlanKind.EMBED
    in_graph = (
        in_buckets
        and not wants_hidden
        and all(slots.table.sampling[chunk.slot].prompt_logprobs is None for chunk in chunks)
    )
    return PlannedStep(plan, key, in_graph, words, parts, result_rows, part_slots, part_ends)
