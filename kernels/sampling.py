"""`SamplingTensors`: how each row of a batch draws its token, as device tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Parameters of `ops.sample` for n rows, all on the device of the logits.

    temperature [n] float32, 0 = greedy; top_k [n] int32, 0 = off; top_p [n] float32, 1 = off; min_p [n] float32,
    0 = off; seeds [n] int64 (the bits of an unsigned 64-bit seed); positions [n] int64: the index in its sequence of
    the token being drawn. The flags say, without asking the device, whether any row uses a filter.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    any_top_k: bool = True
    any_top_p: bool = True
    any_min_p: bool = True
