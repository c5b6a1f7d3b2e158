"""A packed pass (decode rows, then chunks) as one array of int32 words, and back into tensors on the device.

    slot_mapping i64 [T] | logits_indices, table_slots, sample_slots i64 [B] each | token_ids [T] | position_ids [T] |
    context_lens [B] | cu_seqlens [B + 1]

Decode rows come before the chunks, but after one whole prompt (`PackedKey.whole_prompt`), whose `cu_seqlens` then say
nothing. The token id of a decode row is -(slot + 1): only the device knows the slot's last token. Every sequence has a
row of logits, its last token; one that samples nothing writes its choice to the padding slot.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runners.execution.device_slots import TABLE_ALIGNMENT, DeviceSlots
from runners.execution.input_batch import ForwardBatch, check_capacity, check_token_ids
from runners.execution.step_keys import PackedKey
from runners.scheduling.scheduler_output import PrefillChunk, StepPlan


def num_packed_words(key: PackedKey) -> int:
    """Length of the array, even, so that what follows it may hold 64-bit numbers."""
    words = 4 * key.tokens + 8 * key.sequences + 1
    return words + words % 2


def pack_step(
    plan: StepPlan, slots: DeviceSlots, key: PackedKey, block_tokens: int, vocab_size: int, words: NDArray[np.int32]
) -> None:
    """Fill `words` [num_packed_words(key)] for a plan whose inits and appends the slots know.

    Raises LaunchError, naming the request, where a token has no block or a prompt id lies outside the vocabulary.
    """
    table, rows, chunks = slots.table, plan.decode_rows, plan.chunks
    row_slots = np.array([row.slot for row in rows], dtype=np.int64)
    row_positions = np.array([row.position for row in rows], dtype=np.int32)
    chunk_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
    check_capacity(rows, row_slots, row_positions + 1, table, block_tokens)
    check_capacity(chunks, chunk_slots, starts + lens, table, block_tokens)
    ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), dtype=np.int64, count=int(lens.sum()))
    _check_ids(chunks, lens, ids, vocab_size)

    num_rows, num_chunks, num_tokens = len(rows), len(chunks), len(ids)
    R, first_row, first_token = key.rows, key.first_row, key.first_token
    words[:] = padding_words(key, slots.padding_slot)
    slot_mapping, logits_indices, table_slots, sample_slots, token_ids, position_ids, context_lens, cu_seqlens = _parts(
        words, key
    )
    row_tokens = slice(first_row, first_row + num_rows)
    token_ids[row_tokens] = -row_slots - 1
    position_ids[row_tokens] = row_positions
    slot_mapping[row_tokens] = _where(table.block_tables, row_slots, row_positions, block_tokens)
    context_lens[:num_rows] = row_positions + 1
    table_slots[:num_rows] = sample_slots[:num_rows] = row_slots
    tokens, sequences = slice(first_token, first_token + num_tokens), slice(R, R + num_chunks)
    ends = np.cumsum(lens)
    positions = np.arange(num_tokens) + np.repeat(starts - (ends - lens), lens)
    token_ids[tokens] = ids
    position_ids[tokens] = positions
    slot_mapping[tokens] = _where(table.block_tables, np.repeat(chunk_slots, lens), positions, block_tokens)
    context_lens[sequences] = starts + lens
    table_slots[sequences] = chunk_slots
    samples = np.array([chunk.samples for chunk in chunks])
    sample_slots[sequences][samples] = chunk_slots[samples]
    logits_indices[sequences] = first_token + ends - 1
    cu_seqlens[R + 1 : R + 1 + num_chunks] = R + ends
    cu_seqlens[R + 1 + num_chunks :] = R + num_tokens


def padding_words(key: PackedKey, padding_slot: int) -> NDArray[np.int32]:
    """The words of a pass whose rows, chunks and tokens are all padding."""
    words, R, first_row = np.zeros(num_packed_words(key), dtype=np.int32), key.rows, key.first_row
    slot_mapping, logits_indices, table_slots, sample_slots, token_ids, _, context_lens, cu_seqlens = _parts(words, key)
    slot_mapping[:] = -1
    logits_indices[:R] = np.arange(first_row, first_row + R)
    table_slots[:] = sample_slots[:] = padding_slot
    token_ids[first_row : first_row + R] = -padding_slot - 1
    context_lens[:R] = 1  # a row must attend to something: to one token of any block
    cu_seqlens[:] = np.minimum(np.arange(key.sequences + 1), R)
    return words


def _parts(words: NDArray[np.int32], key: PackedKey) -> list[NDArray[Any]]:
    T, B = key.tokens, key.sequences
    wide_end = 2 * T + 6 * B
    wide = np.split(words[:wide_end].view(np.int64), [T, T + B, T + 2 * B])
    return wide + np.split(words[wide_end : wide_end + 2 * T + 2 * B + 1], [T, 2 * T, 2 * T + B])


def unpack_step(
    words: torch.Tensor, key: PackedKey, slots: DeviceSlots, block_tokens: int
) -> tuple[ForwardBatch, torch.Tensor, torch.Tensor]:
    """(batch, sample_slots [B] int64, context_lens [B] int32) from the words on the device."""
    T, B = key.tokens, key.sequences
    wide = words[: 2 * T + 6 * B].view(torch.int64)
    slot_mapping, logits_indices, table_slots, sample_slots = torch.split(wide, [T, B, B, B])
    narrow = words[2 * T + 6 * B : 4 * T + 8 * B + 1]
    token_ids, position_ids, context_lens, cu_seqlens = torch.split(narrow, [T, T, B, B + 1])
    input_ids = token_ids
    if key.rows:
        before, of_rows, after = torch.split(
            token_ids, [key.first_row, key.rows, key.tokens - key.first_row - key.rows]
        )
        input_ids = torch.cat((before, slots.last_tokens.index_select(0, -of_rows - 1), after))
    table_width = min(slots.table_columns, padded_table_width(key.max_context, block_tokens))
    batch = ForwardBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        slot_mapping=slot_mapping,
        block_tables=slots.block_tables[:, :table_width].index_select(0, table_slots),
        context_lens=context_lens,
        cu_seqlens_q=cu_seqlens,
        num_decode_rows=key.rows,
        max_query_len=key.max_query,
        max_context_len=key.max_context,
        logits_indices=logits_indices,
        whole_prompt_tokens=key.whole_prompt,
    )
    return batch, sample_slots, context_lens


def padded_table_width(num_tokens: int, block_tokens: int) -> int:
    """Columns of a block table of `num_tokens`, in whole lines."""
    return -(-num_tokens // (block_tokens * TABLE_ALIGNMENT)) * TABLE_ALIGNMENT


def _where(
    block_tables: NDArray[np.int32], slots: NDArray[np.int64], positions: NDArray[np.int32], block_tokens: int
) -> NDArray[np.int64]:
    blocks = block_tables[slots, positions // block_tokens].astype(np.int64)
    return blocks * block_tokens + positions % block_tokens


def _check_ids(
    chunks: tuple[PrefillChunk, ...], lens: NDArray[np.int32], ids: NDArray[np.int64], vocab_size: int
) -> None:
    if lens.min() > 0 and ids.min() >= 0 and ids.max() < vocab_size:
        return
    check_token_ids(chunks, np.split(ids, np.cumsum(lens)[:-1].tolist()), vocab_size)
