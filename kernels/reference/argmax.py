"""Greedy choice: the index of the largest logit, the lowest index among equals."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [n, V] → [n] int64. A row with NaN gives the index of its first NaN."""
    return logits.argmax(dim=-1)
