"""GGUF blocks repacked for the GPU: the bits of a row as planes that are read in 16-byte lines, scales beside them.

A unit is 64 elements of a row. `low` holds their low four bits: byte j of a unit is element j (low nibble) and element
32 + j (high nibble). `high` holds bits above: of two units' positions a nibble each (6 bits), of four units two bits
each (5 bits). 8-bit types have one byte an element and no unit. Values are scale × (q − zero), or scale × q − minimum;
K types keep 8-bit sub-scales and one float16 pair per 256 elements. 1.00 to 1.03 times the file's bytes.
Source of the block structs: ggml's `ggml-common.h`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.weights import LinearWeight, QuantizedWeight

UNIT = 64
# Rows are repacked in pieces of this many elements, to bound the temporaries.
CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """How a GGML type lies in planes. `bits` of a value, `group` elements a scale, what is subtracted from a value
    (`zero`), whether groups have minima, whether scales are 8-bit with a float16 factor per 256 (`is_nested`)."""

    bits: int
    group: int
    zero: int
    has_minimum: bool
    is_nested: bool
    block_elements: int


FORMATS = {
    "q8_0": PlaneFormat(8, 32, 128, False, False, 32),
    "q4_0": PlaneFormat(4, 32, 8, False, False, 32),
    "q4_1": PlaneFormat(4, 32, 0, True, False, 32),
    "q5_0": PlaneFormat(5, 32, 16, False, False, 32),
    "q5_1": PlaneFormat(5, 32, 0, True, False, 32),
    "q4_k": PlaneFormat(4, 32, 0, True, True, 256),
    "q5_k": PlaneFormat(5, 32, 0, True, True, 256),
    "q6_k": PlaneFormat(6, 16, 32, False, True, 256),
}
PREFIX = "cuda_"


def plane_format(weight: QuantizedWeight) -> PlaneFormat:
    return FORMATS[weight.format.removeprefix(PREFIX)]


def is_packed(weight: object, *_: object) -> bool:
    """Whether `weight` is in planes."""
    return isinstance(weight, QuantizedWeight) and weight.format.startswith(PREFIX)


def pack_weight(weight: LinearWeight, quantization: str = "none") -> LinearWeight:
    """Blocks of a known type as planes; everything else as it is. ValueError for a quantisation by name."""
    if quantization != "none":
        raise ValueError(f"quantization {quantization!r} is not available on this device")
    if not isinstance(weight, QuantizedWeight) or weight.format not in FORMATS or weight.shape[1] % UNIT:
        return weight
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    parts = [
        _pack_rows(weight.tensors["blocks"][start : start + step], weight.format)
        for start in range(0, weight.shape[0], step)
    ]
    planes = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
    return QuantizedWeight(PREFIX + weight.format, weight.shape, planes)


def _pack_rows(rows: Tensor, name: str) -> dict[str, Tensor]:
    spec = FORMATS[name]
    values, scales = _UNPACKERS[name](rows)
    return _bit_planes(values, spec.bits) | {key: plane.contiguous() for key, plane in scales.items()}


def _bit_planes(values: Tensor, bits: int) -> dict[str, Tensor]:
    """uint8 [out, in] of `bits` bits each → `low` [out, in/2] and `high`, or `low` [out, in] for 8 bits."""
    if bits == 8:
        return {"low": values.contiguous()}
    out = values.shape[0]
    first, second = values.reshape(out, -1, 2, UNIT // 2).unbind(2)
    planes = {"low": ((first & 15) | ((second & 15) << 4)).reshape(out, -1)}
    if bits > 4:
        width = bits - 4
        units_a_byte = 4 // width
        position = (first >> 4) | ((second >> 4) << width)
        missing = -position.shape[1] % units_a_byte
        position = torch.nn.functional.pad(position, (0, 0, 0, missing)).reshape(out, -1, units_a_byte, UNIT // 2)
        high = position[:, :, 0].clone()
        for unit in range(1, units_a_byte):
            high |= position[:, :, unit] << (2 * width * unit)
        planes["high"] = high.reshape(out, -1)
    return planes


def _blocks(rows: Tensor, size: int) -> Tensor:
    return rows.reshape(rows.shape[0], -1, size)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, [out, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor) -> Tensor:
    """[..., 4] bytes → [..., 32] bits, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _unpack_q8_0(rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    blocks = _blocks(rows, 34)
    return (blocks[..., 2:] ^ 128).reshape(rows.shape[0], -1), {"scale": _halves(blocks, 0)}


def _unpack_32(rows: Tensor, has_minimum: bool, has_high: bool) -> tuple[Tensor, dict[str, Tensor]]:
    at = 4 if has_minimum else 2
    size = at + (4 if has_high else 0) + 16
    blocks = _blocks(rows, size)
    values = _nibbles(blocks[..., size - 16 :])
    if has_high:
        values = values | (_bits(blocks[..., at : at + 4]) << 4)
    scales = {"scale": _halves(blocks, 0)}
    if has_minimum:
        # Stored as what is added; the kernels subtract.
        scales["minimum"] = -_halves(blocks, 2)
    return values.reshape(rows.shape[0], -1), scales


def _unpack_q4_k(rows: Tensor, has_high: bool) -> tuple[Tensor, dict[str, Tensor]]:
    blocks = _blocks(rows, 176 if has_high else 144)
    out = rows.shape[0]
    packed = blocks[..., -128:].reshape(out, -1, 4, 1, 32)
    values = torch.cat((packed & 15, packed >> 4), 3).reshape(out, -1, 8, 32)
    if has_high:
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)[:, None]
        values = values | (((blocks[..., None, 16:48] >> shifts) & 1) << 4)
    six = blocks[..., 4:16]
    scale = torch.cat((six[..., :4] & 63, (six[..., 8:] & 15) | ((six[..., :4] >> 6) << 4)), -1)
    minimum = torch.cat((six[..., 4:8] & 63, (six[..., 8:] >> 4) | ((six[..., 4:8] >> 6) << 4)), -1)
    scales = {
        "sub_scale": scale.reshape(out, -1),
        "sub_minimum": minimum.reshape(out, -1),
        "scale": _halves(blocks, 0),
        "minimum": _halves(blocks, 2),
    }
    return values.reshape(out, -1), scales


def _unpack_q6_k(rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    blocks = _blocks(rows, 210)
    out = rows.shape[0]
    low = blocks[..., :128].reshape(out, -1, 2, 2, 32)
    high = blocks[..., 128:192].reshape(out, -1, 2, 1, 32)
    # Quarters of 128 elements: low nibbles of both lines, then their high nibbles; two high bits each, in that order.
    quarters = torch.cat((low & 15, low >> 4), 3)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=rows.device)[:, None]
    values = quarters | (((high >> shifts) & 3) << 4)
    scales = {"sub_scale": blocks[..., 192:208].reshape(out, -1).view(torch.int8), "scale": _halves(blocks, 208)}
    return values.reshape(out, -1), scales


_UNPACKERS = {
    "q8_0": _unpack_q8_0,
    "q4_0": lambda rows: _unpack_32(rows, False, False),
    "q4_1": lambda rows: _unpack_32(rows, True, False),
    "q5_0": lambda rows: _unpack_32(rows, False, True),
    "q5_1": lambda rows: _unpack_32(rows, True, True),
    "q4_k": lambda rows: _unpack_q4_k(rows, False),
    "q5_k": lambda rows: _unpack_q4_k(rows, True),
    "q6_k": _unpack_q6_k,
}


def dequantize_planes(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`, in plain torch: the specification of the planes. Decoded in float32, rounded once."""
    spec = plane_format(weight)
    planes, out = weight.tensors, weight.shape[0]
    values = planes["low"]
    if spec.bits < 8:
        low = values.reshape(out, -1, UNIT // 2)
        first, second = low & 15, low >> 4
        if spec.bits > 4:
            width = spec.bits - 4
            units_a_byte = 4 // width
            high = planes["high"].reshape(out, -1, 1, UNIT // 2)
            shifts = torch.arange(units_a_byte, dtype=torch.uint8, device=high.device)[:, None] * (2 * width)
            position = (high >> shifts).reshape(out, -1, UNIT // 2)[:, : low.shape[1]]
            mask = (1 << width) - 1
            first = first | ((position & mask) << 4)
            second = second | (((position >> width) & mask) << 4)
        values = torch.stack((first, second), 2)
    groups = values.reshape(out, -1, spec.group).float() - spec.zero
    scale = planes["scale"].float()
    minimum = planes["minimum"].float() if spec.has_minimum else None
    if spec.is_nested:
        per_block = 256 // spec.group
        scale = scale.repeat_interleave(per_block, 1) * planes["sub_scale"].float()
        if minimum is not None:
            minimum = minimum.repeat_interleave(per_block, 1) * planes["sub_minimum"].float()
    result = groups * scale[..., None]
    if minimum is not None:
        result = result - minimum[..., None]
    return result.reshape(weight.shape).to(dtype)
