"""GGML blocks to floats, vectorised in torch on any device.

Source: the block structs of ggml's `ggml-common.h` and `dequantize_row_*` of `ggml-quants.c`. Every decoder maps uint8
[n, block_bytes] to float32 [n, block_elements] and multiplies in ggml's order, so values equal ggml's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runners.errors import StartupError
from runners.loading.ggml_types import GGMLType

# Decoding makes several float32 temporaries: bounded row chunks keep them near 100 MB whatever the tensor's size.
CHUNK_ELEMENTS = 1 << 22

# The 16 values of IQ4_NL and IQ4_XS (`kvalues_iq4nl`).
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize_rows(
    rows: Tensor, ggml_type: GGMLType, name: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Decode uint8 [n, row_bytes] into `dtype` [n, elements] on `device`; the result never aliases `rows`.

    Blocks are decoded in float32 on `device` and rounded once. `name` is for the error only: StartupError for a type
    that has no decoder.
    """
    decode = DECODERS.get(ggml_type)
    if decode is None:
        raise StartupError(f"tensor {name!r} has type {ggml_type.name}, which cannot be dequantised")
    num_rows, row_bytes = rows.shape
    row_elements = row_bytes // ggml_type.block_bytes * ggml_type.block_elements
    out = torch.empty((num_rows, row_elements), dtype=dtype, device=device)
    # A vector or a very long row is split by blocks, so chunk over the flat list of blocks.
    blocks = rows.reshape(-1, ggml_type.block_bytes)
    target = out.view(-1, ggml_type.block_elements)
    chunk = max(1, CHUNK_ELEMENTS // ggml_type.block_elements)
    for start in range(0, blocks.shape[0], chunk):
        target[start : start + chunk] = decode(blocks[start : start + chunk].to(device)).to(dtype)
    return out


def _view(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Bytes [start, stop) of every block as float32 [n, items]; a clone, because the file need not be aligned."""
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype).float()


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32 [n, 1]."""
    return _view(blocks, start, start + 2, torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., k] bytes to [..., 2k]: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """[..., k] bytes to [..., len(shifts), k]: the same bytes shifted right by each of `shifts`, masked."""
    return torch.stack([(packed >> shift) & mask for shift in shifts], dim=-2)


def _f32(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 4, torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return _half(blocks, 0)


def _bf16(blocks: Tensor) -> Tensor:
    return _view(blocks, 0, 2, torch.bfloat16)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _view(blocks, 2, 34, torch.int8)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]).float() + _half(blocks, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[n, 4] bytes to [n, 32]: bit i of the little-endian word, shifted to the place of a fifth bit."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (quants.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * quants.float() + _half(blocks, 2)


def _q2_k(blocks: Tensor) -> Tensor:
    """scales[16] | qs[64] | d | dmin: 16 groups of 16; 32 bytes hold 4 × 32 quants, two bits each."""
    scales, super_scale, super_min = blocks[:, :16], _half(blocks, 80), _half(blocks, 82)
    quants = _bits(blocks[:, 16:80].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 16, 16).float()
    scale = super_scale * (scales & 15).float()
    minimum = super_min * (scales >> 4).float()
    return (scale[:, :, None] * quants - minimum[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """hmask[32] | qs[64] | scales[12] | d: two low bits as in Q2_K, a third in hmask, 6-bit scales less 32."""
    high = _bits(blocks[:, :32], range(8), 1).reshape(-1, 16, 16)
    low = _bits(blocks[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 16, 16)
    packed = blocks[:, 96:108]
    low_scales = _nibbles(packed[:, :8])
    high_scales = _bits(packed[:, 8:12], range(0, 8, 2), 3).flatten(1)
    scales = (low_scales | (high_scales << 4)).float() - 32
    scale = _half(blocks, 108) * scales
    return (scale[:, :, None] * ((low | (high << 2)).float() - 4)).flatten(1)


def _k_scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes of Q4_K and Q5_K to eight 6-bit scales and eight 6-bit minima, float32 [n, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), minima.float()


def _k_affine(blocks: Tensor, quants: Tensor) -> Tensor:
    """d | dmin | scales[12] in front of [n, 8, 32] quants: d·scale·q - dmin·min."""
    scales, minima = _k_scales_and_mins(blocks[:, 4:16])
    scale = _half(blocks, 0) * scales
    minimum = _half(blocks, 2) * minima
    return (scale[:, :, None] * quants.float() - minimum[:, :, None]).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _bits(blocks[:, 16:144].reshape(-1, 4, 32), range(0, 8, 4), 15).reshape(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _bits(blocks[:, 16:48], range(8), 1)
    low = _bits(blocks[:, 48:176].reshape(-1, 4, 32), range(0, 8, 4), 15).reshape(-1, 8, 32)
    return _k_affine(blocks, low | (high << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    """ql[128] | qh[64] | scales[16] (int8) | d: each half of 128 takes 64 bytes of ql and 32 of qh."""
    low = _bits(blocks[:, :128].reshape(-1, 2, 64), range(0, 8, 4), 15).reshape(-1, 2, 128)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 2, 128)
    quants = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scale = _half(blocks, 208) * _view(blocks, 192, 208, torch.int8)
    return (scale[:, :, None] * quants).flatten(1)


def _iq4_values(nibbles: Tensor) -> Tensor:
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=nibbles.device)[nibbles.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _iq4_values(_nibbles(blocks[:, 2:18]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """d | scales_h (16 bits: 8 × 2) | scales_l[4] (8 × 4) | qs[128]: eight groups of 32, 6-bit scales less 32."""
    high = _bits(blocks[:, 2:4, None], range(0, 8, 2), 3).flatten(1)
    low = _bits(blocks[:, 4:8, None], range(0, 8, 4), 15).flatten(1)
    scale = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return (scale[:, :, None] * _iq4_values(_nibbles(blocks[:, 8:136].reshape(-1, 8, 16)))).flatten(1)


DECODERS: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
}
