"""Linear layer on the CPU: tiled quantised and float32 weights for any number of rows, 16-bit weights for few.

With tiled and with float32 weights a row's result is the same to the bit whatever rows are beside it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.cpu_ops.library import ACTIVATION_DTYPES, DTYPE_IDS, require_library
from kernels.cpu_ops.tile_formats import FORMAT_IDS
from kernels.weights import LinearWeight, QuantizedWeight

# Rows up to which one pass over a 16-bit weight beats torch's product (2 cores with AVX-512, weights of 5–19 MB: with
# float32 activations up to 16 rows, with bfloat16 ones up to 4). Float32 weights stay here at any size, up to twice as
# fast up to 16 rows and 0.8 times as fast at 128: torch's product rounds a row by the shape of the whole.
MAX_DENSE_ROWS = 16
MAX_BFLOAT16_ROWS = 4
# Output features of a wide weight brought to the activations' type at a time: 4 MB at 2,048 inputs in float32.
PANEL_OUTPUTS = 512


def accepts(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> bool:
    if x.dtype not in ACTIVATION_DTYPES:
        return False
    if isinstance(weight, QuantizedWeight):
        return weight.format in FORMAT_IDS
    if weight.dtype not in DTYPE_IDS or not weight.is_contiguous():
        return False
    # Products of two bfloat16 operands in many rows are torch's.
    return weight.dtype != torch.bfloat16 or x.dtype != weight.dtype or x.numel() <= MAX_BFLOAT16_ROWS * x.shape[-1]


def linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out] in the dtype of x."""
    return multiply(x, weight, bias, x.dtype)


def multiply(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x Wᵀ + bias in `dtype` (float32 or bfloat16); sums in float32, rounded once."""
    in_features = x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.reshape(-1, in_features).contiguous()
    rows, out_features = x.shape[0], weight.shape[0]
    if bias is not None:
        bias = bias.float()
    bias_pointer = None if bias is None else bias.data_ptr()
    y = torch.empty((rows, out_features), dtype=dtype)
    if isinstance(weight, QuantizedWeight):
        _tiled(
            FORMAT_IDS[weight.format],
            x.data_ptr(),
            DTYPE_IDS[x.dtype],
            x.stride(0),
            rows,
            in_features,
            weight.tensors["tiles"].data_ptr(),
            out_features,
            bias_pointer,
            y.data_ptr(),
            DTYPE_IDS[dtype],
        )
    elif weight.dtype == torch.float32 or rows <= MAX_DENSE_ROWS:
        _dense(
            x.data_ptr(),
            DTYPE_IDS[x.dtype],
            x.stride(0),
            rows,
            in_features,
            weight.data_ptr(),
            DTYPE_IDS[weight.dtype],
            out_features,
            bias_pointer,
            y.data_ptr(),
            DTYPE_IDS[dtype],
        )
    else:
        _panels(x, weight, bias, y)
    return y


def _panels(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """Many rows and a weight of another type: the weight is never widened as a whole."""
    for start in range(0, weight.shape[0], PANEL_OUTPUTS):
        panel = slice(start, start + PANEL_OUTPUTS)
        product = functional.linear(x.float(), weight[panel].float(), None if bias is None else bias[panel])
        y[:, panel] = product


_library = require_library()
_tiled, _dense = _library.wl_linear_tiled, _library.wl_linear_dense
