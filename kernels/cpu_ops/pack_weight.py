"""Weights in the form that the CPU kernels run, made once when a model is built."""

from __future__ import annotations

import torch

from kernels.cpu_ops.tile_formats import FORMAT_IDS, TILED_TYPES, quantize_q8_0, tile_weight
from kernels.weights import LinearWeight, QuantizedWeight


def pack_weight(weight: LinearWeight, quantization: str = "none") -> LinearWeight:
    """GGUF blocks as tiles (the same bits), "int8": float weights as Q8_0 tiles; everything else as it is.

    ValueError on another quantisation, and for "int8" on rows that are no multiple of 32.
    """
    if quantization not in ("none", "int8"):
        raise ValueError(f"quantization {quantization!r} is not available on the CPU; there is: int8")
    if isinstance(weight, torch.Tensor) and quantization == "int8":
        if weight.shape[1] % 32:
            raise ValueError(f"quantization int8 needs rows of a multiple of 32, not {weight.shape[1]}")
        weight = quantize_q8_0(weight)
    if isinstance(weight, QuantizedWeight) and weight.format in TILED_TYPES and weight.format not in FORMAT_IDS:
        return tile_weight(weight)
    return weight
