"""Weights in the tiles of `kernels/cpu_src/tile_format.h`: the same bits as the GGUF blocks, 16 rows interleaved."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import DTYPE_IDS, require_library
from kernels.host_memory import HostArena
from kernels.weights import QuantizedWeight

PREFIX = "cpu_"
_arena = HostArena(buffer_bytes=64 << 20)

# GGML type → (id, as `FormatId` in tile_format.h; elements of a block).
TILED_TYPES = {
    "q4_0": (0, 32),
    "q4_1": (1, 32),
    "q5_0": (2, 32),
    "q5_1": (3, 32),
    "q8_0": (4, 32),
    "q2_k": (5, 256),
    "q3_k": (6, 256),
    "q4_k": (7, 256),
    "q5_k": (8, 256),
    "q6_k": (9, 256),
    "iq4_nl": (10, 32),
    "iq4_xs": (11, 256),
}
FORMAT_IDS = {PREFIX + name: format_id for name, (format_id, _) in TILED_TYPES.items()}


def tile_weight(weight: QuantizedWeight) -> QuantizedWeight:
    """GGUF blocks as tiles: format "cpu_<type>", `tensors["tiles"]` uint8. The source may be a read-only mapping."""
    format_id, _ = TILED_TYPES[weight.format]
    out_features, in_features = weight.shape
    blocks = weight.tensors["blocks"]
    if blocks.stride(-1) != 1:
        blocks = blocks.contiguous()
    library = require_library()
    tiles = _arena.take(library.wl_tiled_bytes(format_id, out_features, in_features))
    library.wl_repack(format_id, blocks.data_ptr(), blocks.stride(0), out_features, in_features, tiles.data_ptr())
    return QuantizedWeight(PREFIX + weight.format, weight.shape, {"tiles": tiles})


def gather_rows(weight: QuantizedWeight, row_ids: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows row_ids [n] int32 of a tiled weight [out, in], times `scale`, rounded once: [n, in] float32 or bfloat16.

    IndexError where an id is outside the weight.
    """
    out_features, in_features = weight.shape
    row_ids = row_ids.to(torch.int32).contiguous()
    rows = torch.empty(row_ids.numel(), in_features, dtype=dtype)
    outside = require_library().wl_gather_tiled(
        FORMAT_IDS[weight.format],
        row_ids.data_ptr(),
        row_ids.numel(),
        out_features,
        in_features,
        weight.tensors["tiles"].data_ptr(),
        scale,
        rows.data_ptr(),
        DTYPE_IDS[dtype],
    )
    if outside >= 0:
        raise IndexError(f"row id {int(row_ids[outside])} is outside 0..{out_features - 1}")
    return rows


def dequantize_tiles(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The whole matrix [out, in] in `dtype`."""
    return gather_rows(weight, torch.arange(weight.shape[0], dtype=torch.int32), 1.0, torch.float32).to(dtype)


def quantize_q8_0(weight: torch.Tensor) -> QuantizedWeight:
    """A float weight [out, in] in Q8_0 blocks: 32 values share a float16 scale, the largest magnitude over 127."""
    out_features, in_features = weight.shape
    blocks = weight.float().view(out_features, in_features // 32, 32)
    scales = (blocks.abs().amax(dim=-1, keepdim=True) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    codes = (blocks * inverse).round().clamp(-127, 127).to(torch.int8)
    packed = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=-1)
    return QuantizedWeight("q8_0", (out_features, in_features), {"blocks": packed.view(out_features, -1)})
