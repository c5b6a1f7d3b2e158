"""Repetition, frequency and presence penalties.

Repetition r (CTRL, arXiv:1909.05858) on every token of prompt and output: l → l / r where l > 0, else l · r. Then
OpenAI's, on generated tokens only: l → l − frequency · count − presence · [count > 0].
"""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    generated_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    slot_ids: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """logits [n, V] float32 → penalised copy; counts [slots, V] int32, in_prompt [slots, V] bool, by slot_ids [n]."""
    counts = generated_counts.index_select(0, slot_ids)
    seen = in_prompt.index_select(0, slot_ids) | (counts > 0)
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(seen, repeated, logits)
    return penalised - frequency.unsqueeze(1) * counts - presence.unsqueeze(1) * (counts > 0)
