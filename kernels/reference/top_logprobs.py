"""Log-probabilities: l_i − log Σ exp(l_j), in float32, of the chosen token and of the likeliest ones."""

from __future__ import annotations

import torch


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [n, V], token_ids [n] → (chosen [n], top_ids [n, num_top] int64, top [n, num_top]), best first."""
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), top.indices, top.values - normaliser
