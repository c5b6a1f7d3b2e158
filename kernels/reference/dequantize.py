"""GGML block formats for `QuantizedWeight.dequantize`: the decoders of `runners.loading.gguf_dequant` by name.

The loader and the kernels share one decoder a format, which its own tests hold against the `gguf` package.
"""

from __future__ import annotations

import torch

from kernels.weights import QuantizedWeight, register_dequantizer
from runners.loading.ggml_types import GGMLType
from runners.loading.gguf_dequant import dequantize_rows


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] in `dtype`, from `tensors["blocks"]` uint8 [out, row_bytes]; decoded in float32, rounded once."""
    blocks = weight.tensors["blocks"]
    ggml_type = GGMLType[weight.format.upper()]
    return dequantize_rows(blocks, ggml_type, weight.format, dtype, blocks.device).reshape(weight.shape)


for _ggml_type in GGMLType:
    if _ggml_type.is_quantized:
        register_dequantizer(_ggml_type.name.lower(), dequantize)
