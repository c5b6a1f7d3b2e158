"""4-bit groups of GPTQ, AWQ and compressed-tensors checkpoints as Q4_1 blocks, for which there are kernels. Torch-free.

A group's value is scale × (q − zero); a Q4_1 block of 32 says d × q + m, so d = scale and m = −scale × zero, rounded
once to float16: exact where the zero is a power of two (8 in every symmetric checkpoint). Sources: the packing of
AutoGPTQ's `QuantLinear`, AutoAWQ's `WQLinear_GEMM` and compressed-tensors' `pack_to_int32`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
# Output column of the nibble at bits 4·i of a word, within its eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _nibbles(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """int32 [a, b] → [a, b, 8], lowest bits first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & 15).astype(np.uint8)


def gptq_groups(
    qweight: NDArray[np.int32], qzeros: NDArray[np.int32], zero_offset: int
) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """qweight [in/8, out], qzeros [groups, out/8] → q [out, in], zeros [out, groups]."""
    rows, out = qweight.shape
    values = _nibbles(qweight).transpose(1, 0, 2).reshape(out, rows * 8)
    zeros = _nibbles(qzeros).reshape(qzeros.shape[0], -1).T.astype(np.int16) + np.int16(zero_offset)
    return values, zeros


def awq_groups(qweight: NDArray[np.int32], qzeros: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """qweight [in, out/8], qzeros [groups, out/8] → q [out, in], zeros [out, groups]."""

    def columns(words: NDArray[np.int32]) -> NDArray[np.uint8]:
        nibbles = _nibbles(words)
        ordered = np.empty_like(nibbles)
        ordered[..., _AWQ_ORDER] = nibbles
        return ordered.reshape(words.shape[0], -1).T

    return columns(qweight), columns(qzeros).astype(np.int16)


def int4_groups(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """weight_packed [out, in/8] → q [out, in]; the zero is 8."""
    return _nibbles(packed).reshape(packed.shape[0], -1)


def q4_1_rows(values: NDArray[np.uint8], scales: NDArray[np.float16], zeros: NDArray[np.int16]) -> NDArray[np.uint8]:
    """q [out, in] with scales and zeros [out, groups] → Q4_1 rows, uint8 [out, in/32 × 20]."""
    out, num_inputs = values.shape
    repeat = num_inputs // scales.shape[1] // BLOCK
    minimum = (-(scales.astype(np.float32)) * zeros).astype(np.float16)
    blocks = np.empty((out, num_inputs // BLOCK, 20), dtype=np.uint8)
    blocks[..., 0:2] = np.repeat(scales, repeat, axis=1)[..., None].view(np.uint8)
    blocks[..., 2:4] = np.repeat(minimum, repeat, axis=1)[..., None].view(np.uint8)
    halves = values.reshape(out, -1, 2, BLOCK // 2)
    blocks[..., 4:] = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return blocks.reshape(out, -1)
