"""Quantised weights for tests, made with the public `gguf` package."""

from __future__ import annotations

import gguf
import torch

from kernels.weights import QuantizedWeight


def make_q8_0(weight: torch.Tensor) -> QuantizedWeight:
    """weight [out, in], `in` a multiple of 32, as Q8_0 blocks."""
    blocks = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    out_features, in_features = weight.shape
    return QuantizedWeight("q8_0", (out_features, in_features), {"blocks": torch.from_numpy(blocks)})
