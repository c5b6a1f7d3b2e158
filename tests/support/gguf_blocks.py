"""Random GGUF blocks of every type: all bit patterns, with float16 scales of a sane size."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from kernels.weights import QuantizedWeight

# Byte offsets of the float16 scales (and minima) in a block.
SCALE_OFFSETS = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}


def block_elements(format_name: str) -> int:
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_name.upper()]][0]


def random_weight(format_name: str, out_features: int, in_features: int, seed: int = 0) -> QuantizedWeight:
    """A weight [out, in] of random blocks."""
    rng = np.random.default_rng(seed)
    elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_name.upper()]]
    blocks = rng.integers(0, 256, (out_features, in_features // elements, block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[format_name]:
        scales = (rng.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    rows = torch.from_numpy(blocks.reshape(out_features, -1))
    return QuantizedWeight(format_name, (out_features, in_features), {"blocks": rows})


def expected_values(weight: QuantizedWeight) -> torch.Tensor:
    """The matrix [out, in] float32 by the public `gguf` package."""
    blocks = weight.tensors["blocks"].numpy()
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[weight.format.upper()]))
