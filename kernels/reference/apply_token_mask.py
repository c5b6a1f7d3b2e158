"""Ban the tokens that a grammar does not allow."""

from __future__ import annotations

import torch


def apply_token_mask(logits: torch.Tensor, row_ids: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Copy of logits [n, V] with -inf in rows row_ids [m] wherever bit t % 32 of word t // 32 of bits [m, W] is 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits.unsqueeze(-1) >> shifts) & 1
    banned = allowed.flatten(1)[:, : logits.shape[1]] == 0
    return logits.index_copy(0, row_ids, logits.index_select(0, row_ids).masked_fill(banned, float("-inf")))
