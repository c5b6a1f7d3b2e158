"""The ops around the model's forward pass, part of `kernels.ops` (letters of shapes there): from logits to tokens, from
the tokens into their slots, and from the slots to the inputs of the next decode step."""

from __future__ import annotations

import torch

from kernels.dispatch import ShapeError, run
from kernels.sampling import SamplingTensors

Tensor = torch.Tensor


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest of each row of logits [n, V]: [n] int64. The lowest id wins ties; a row with NaN gives the
    index of a NaN, so that a check of the chosen logits finds it."""
    return run("argmax", logits.device.type, logits)


def sample(logits: Tensor, best_ids: Tensor, params: SamplingTensors) -> Tensor:
    """Draw one token a row of logits [n, V] float32, whose `argmax` is best_ids [n]: [n] int64. Greedy rows
    (temperature 0) take the argmax. A row with NaN draws some token of the vocabulary."""
    if not params.temperature.shape[0] == best_ids.shape[0] == logits.shape[0]:
        raise ShapeError(
            f"sample: {params.temperature.shape[0]} rows of parameters, {best_ids.shape[0]} best ids for logits "
            f"{tuple(logits.shape)}"
        )
    return run("sample", logits.device.type, logits, best_ids, params)


def apply_penalties(
    logits: Tensor,
    generated_counts: Tensor,
    in_prompt: Tensor,
    slot_ids: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Penalised copy of logits [n, V] float32.

    generated_counts [slots, V] int32 and in_prompt [slots, V] bool are looked up by slot_ids [n] int64; presence,
    frequency, repetition [n] float32 (0, 0, 1 leave a row as it is).
    """
    if generated_counts.shape != in_prompt.shape or generated_counts.shape[1] != logits.shape[1]:
        raise ShapeError(f"apply_penalties: counts {tuple(generated_counts.shape)}, logits {tuple(logits.shape)}")
    return run(
        "apply_penalties",
        logits.device.type,
        logits,
        generated_counts,
        in_prompt,
        slot_ids,
        presence,
        frequency,
        repetition,
    )


def add_logit_bias(logits: Tensor, row_ids: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Copy of logits [n, V] with bias [m] float32 added at (row_ids [m], token_ids [m]) int64; -inf bans a token."""
    return run("add_logit_bias", logits.device.type, logits, row_ids, token_ids, bias)


def apply_token_mask(logits: Tensor, row_ids: Tensor, bits: Tensor) -> Tensor:
    """Copy of logits [n, V] float32 with -inf where rows row_ids [m] int64 ban a token: bit t % 32 of word t // 32 of
    bits [m, ceil(V / 32)] int32 is 0."""
    if bits.shape != (row_ids.shape[0], -(-logits.shape[1] // 32)):
        raise ShapeError(f"apply_token_mask: logits {tuple(logits.shape)}, bits {tuple(bits.shape)}")
    return run("apply_token_mask", logits.device.type, logits, row_ids, bits)


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-softmax of logits [n, V] float32 at token_ids [n] and at the `num_top` likeliest tokens:
    (chosen [n], top_ids [n, num_top] int64, top [n, num_top]), best first, lower id first among equals."""
    return run("top_logprobs", logits.device.type, logits, token_ids, num_top)


def decode_inputs(
    rows: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    block_tokens: int,
    table_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a decode step by slot: (input_ids, position_ids, slot_mapping, block_tables, context_lens, slot_ids).

    rows [W], last_tokens and positions [slots + 1], block_tables [slots + 1, max_blocks], all int32; row r computes the
    last token of slot rows[r]; the last slot is padding and writes no KV. `table_width` columns of the tables are
    returned. slot_mapping and slot_ids are int64, the rest int32.
    """
    if positions.shape != last_tokens.shape or not 0 < table_width <= block_tables.shape[1]:
        raise ShapeError(f"decode_inputs: {tuple(positions.shape)} slots, {table_width} of {tuple(block_tables.shape)}")
    return run(
        "decode_inputs",
        rows.device.type,
        rows,
        last_tokens,
        positions,
        block_tables,
        block_tokens,
        table_width,
    )


def advance_slots(
    token_ids: Tensor,
    best_ids: Tensor,
    logits: Tensor,
    slot_ids: Tensor,
    context_lens: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """Make the tokens chosen for rows of logits [n, V] the last tokens of slots slot_ids [n] int64, in place.

    token_ids, best_ids [n] int64; context_lens [n] int32 become the slots' positions; counts [slots + 1, V] int32,
    where given, rise by one. Returns [n, 2] int32: the token, and 1 where the logit at best_ids is NaN or infinite.
    """
    if not token_ids.shape == best_ids.shape == slot_ids.shape == context_lens.shape == logits.shape[:1]:
        raise ShapeError(f"advance_slots: {tuple(token_ids.shape)} tokens for logits {tuple(logits.shape)}")
    return run(
        "advance_slots",
        logits.device.type,
        token_ids,
        best_ids,
        logits,
        slot_ids,
        context_lens,
        last_tokens,
        positions,
        counts,
    )
