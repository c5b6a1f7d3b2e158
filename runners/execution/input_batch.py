"""`ForwardBatch`: the tensors of one packed forward pass, and how a plan becomes one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runners.execution.executor import LaunchError
from runners.execution.slot_table import SlotTable
from runners.scheduling.scheduler_output import DecodeRow, PrefillChunk, StepPlan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T packed tokens of B sequences: `num_decode_rows` sequences of one token first, then the prefill chunks.

    input_ids, position_ids [T] int32; slot_mapping [T] int64 (block_id * block_tokens + offset of each token's KV, -1
    writes nothing); block_tables [B, max_blocks] int32; context_lens [B] int32, tokens including this step's;
    cu_seqlens_q [B + 1] int32, where each sequence's tokens start; logits_indices [n] int64, the packed rows whose
    logits are wanted, None for every row. `max_query_len` and `max_context_len` are the largest of the batch.
    `whole_prompt_tokens`: T rounded up where the only chunk is a prompt from its first position; else 0. Its tokens
    come first then, and the decode rows last.
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
    whole_prompt_tokens: int = 0


def build_batch(
    plan: StepPlan, slots: SlotTable, block_tokens: int, vocab_size: int, device: torch.device
) -> ForwardBatch:
    """The packed batch of a plan whose slot inits and block appends have been applied.

    Raises LaunchError, naming the request, where a token has no block or a prompt id lies outside the vocabulary.
    """
    rows = plan.decode_rows
    row_slots = np.array([row.slot for row in rows], dtype=np.int64)
    starts = np.array([row.position for row in rows], dtype=np.int32)
    check_capacity(rows, row_slots, starts + 1, slots, block_tokens)
    input_ids, position_ids = slots.last_tokens[row_slots], starts
    blocks = slots.block_tables[row_slots, starts // block_tokens]
    context_lens, query_lens, logits_indices = starts + 1, np.ones(len(rows), dtype=np.int32), None
    if plan.chunks:
        chunk_slots = np.array([chunk.slot for chunk in plan.chunks], dtype=np.int64)
        chunk_ends = np.array([chunk.end for chunk in plan.chunks], dtype=np.int32)
        check_capacity(plan.chunks, chunk_slots, chunk_ends, slots, block_tokens)
        chunk_ids = [np.array(chunk.token_ids, dtype=np.int64) for chunk in plan.chunks]
        check_token_ids(plan.chunks, chunk_ids, vocab_size)
        positions = [np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in plan.chunks]
        input_ids = np.concatenate([input_ids, *chunk_ids]).astype(np.int32)
        chunk_blocks = [
            slots.block_tables[c.slot, p // block_tokens] for c, p in zip(plan.chunks, positions, strict=True)
        ]
        blocks = np.concatenate([blocks, *chunk_blocks])
        position_ids = np.concatenate([position_ids, *positions])
        context_lens = np.concatenate([context_lens, chunk_ends])
        query_lens = np.concatenate([query_lens, [len(ids) for ids in chunk_ids]])
        row_slots = np.concatenate([row_slots, chunk_slots])
        samples = [True] * len(rows) + [chunk.samples for chunk in plan.chunks]
        logits_indices = np.cumsum(query_lens)[samples] - 1
    max_context_len = int(context_lens.max())
    cu_seqlens_q = np.zeros(len(query_lens) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=cu_seqlens_q[1:])
    table_width = -(-max_context_len // block_tokens)

    def on_device(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        input_ids=on_device(input_ids),
        position_ids=on_device(position_ids),
        slot_mapping=on_device(blocks.astype(np.int64) * block_tokens + position_ids % block_tokens),
        block_tables=on_device(slots.block_tables[row_slots, :table_width]),
        context_lens=on_device(context_lens),
        cu_seqlens_q=on_device(cu_seqlens_q),
        num_decode_rows=len(rows),
        max_query_len=int(query_lens.max()),
        max_context_len=max_context_len,
        logits_indices=None if logits_indices is None else on_device(logits_indices.astype(np.int64)),
    )


def check_capacity(
    parts: tuple[DecodeRow, ...] | tuple[PrefillChunk, ...],
    part_slots: NDArray[np.int64],
    ends: NDArray[np.int32],
    slots: SlotTable,
    block_tokens: int,
) -> None:
    """Every position before `ends` must have a block: a missing one would write another sequence's KV."""
    if len(parts) == 0:
        return
    if part_slots.min() < 0 or part_slots.max() >= slots.num_slots:
        raise LaunchError(f"slots {part_slots.tolist()} are not all inside 0..{slots.num_slots - 1}")
    is_short = slots.block_counts[part_slots] * block_tokens < ends
    if is_short.any():
        first = int(is_short.argmax())
        held = int(slots.block_counts[part_slots[first]])
        raise LaunchError(
            f"request {parts[first].request_id}: position {ends[first] - 1} has no block "
            f"(slot {part_slots[first]} holds {held} blocks of {block_tokens} tokens)"
        )


def check_token_ids(chunks: tuple[PrefillChunk, ...], chunk_ids: list[NDArray[np.int64]], vocab_size: int) -> None:
    for chunk, ids in zip(chunks, chunk_ids, strict=True):
        if not len(ids):
            raise LaunchError(f"request {chunk.request_id}: empty chunk at position {chunk.start}")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise LaunchError(f"request {chunk.request_id}: token id outside the vocabulary of {vocab_size}")
