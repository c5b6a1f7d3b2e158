"""Sparse bias on logits: OpenAI's `logit_bias`, and the ban (-inf) of end tokens before `min_tokens`."""

from __future__ import annotations

import torch


def add_logit_bias(
    logits: torch.Tensor, row_ids: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Copy of logits [n, V] with bias [m] added at (row_ids [m], token_ids [m]); repeated entries add up."""
    return logits.index_put((row_ids, token_ids), bias, accumulate=True)
