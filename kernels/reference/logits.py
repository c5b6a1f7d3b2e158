"""Next-token logits: h Wᵀ in float32, softly capped where the model says so: s → c tanh(s / c) (Gemma 2)."""

from __future__ import annotations

import torch

from kernels.reference.linear import linear
from kernels.weights import LinearWeight


def logits(hidden: torch.Tensor, weight: LinearWeight, soft_cap: float | None = None) -> torch.Tensor:
    """hidden [n, H], weight [V, H] → [n, V] float32."""
    scores = linear(hidden, weight).float()
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
