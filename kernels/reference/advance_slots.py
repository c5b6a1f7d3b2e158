"""The end of a step: chosen tokens become the slots' last tokens, and a row's answer for the host is made."""

from __future__ import annotations

import torch


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
    """token_ids, best_ids [n] int64, logits [n, V] float32, slot_ids [n] int64, context_lens [n] int32.

    Writes last_tokens and positions [slots + 1] int32 at slot_ids (the last slot, padding, excepted) and adds one to
    counts [slots + 1, V] int32 where those are given. Returns [n, 2] int32: the token, and 1 where the row's largest
    logit (at best_ids) is NaN or infinite, so that its token means nothing.
    """
    largest = logits.gather(1, best_ids.unsqueeze(1)).squeeze(1)
    failed = ~torch.isfinite(largest)
    tokens = token_ids.clamp(0, logits.shape[1] - 1)
    used = slot_ids != last_tokens.shape[0] - 1
    slots = slot_ids[used]
    last_tokens[slots] = tokens[used].to(torch.int32)
    positions[slots] = context_lens[used]
    if counts is not None:
        counts[slots, tokens[used]] += (~failed[used]).to(torch.int32)
    return torch.stack((tokens.to(torch.int32), failed.to(torch.int32)), dim=1)
