"""A checkpoint whose float matrices are quantised as they are read: `models[].quantization: q8_0` or `q4_k`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from runners.loading.block_quantizers import quantize_q4_k, quantize_q8_0
from runners.loading.ggml_types import GGMLType
from runners.loading.gguf_dequant import dequantize_rows
from runners.models.config import ModelConfig
from runners.models.weight_source import StoredWeight, WeightSource

logger = logging.getLogger(__name__)

QUANTIZE_AT_LOAD = {"q8_0": GGMLType.Q8_0, "q4_k": GGMLType.Q4_K}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight that was quantised at load; as `RawTensor`, with its blocks on `device`."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    blocks: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def block_bytes(self) -> torch.Tensor:
        """uint8 [out, row_bytes]."""
        return self.blocks

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Values as `dtype`, shape `shape`, on `device`."""
        return dequantize_rows(self.blocks, self.ggml_type, self.name, dtype, device).reshape(self.shape)


class QuantizedAtLoad:
    """`checkpoint` with its float projections in blocks of `quantization`, computed on `device`.

    Embedding and head become Q8_0 under `q4_k` too: they are the most sensitive. A row length that the blocks do not
    divide takes Q8_0, or stays as it is. What is stored quantised already is left alone.
    """

    def __init__(self, checkpoint: WeightSource, quantization: str, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._target = QUANTIZE_AT_LOAD[quantization]
        self._device = device

    @property
    def config(self) -> ModelConfig:
        return self._checkpoint.config

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def get(self, name: str) -> StoredWeight:
        raw = self._checkpoint.get(name)
        stored_float = _FLOATS.get(raw.ggml_type.name)
        if len(raw.shape) != 2 or stored_float is None:
            return raw
        target = GGMLType.Q8_0 if name in ("embed_tokens", "lm_head") else self._target
        if raw.shape[1] % target.block_elements:
            target = GGMLType.Q8_0
        if raw.shape[1] % target.block_elements:
            logger.info("%s stays %s: %d columns are no whole blocks", name, raw.ggml_type.name, raw.shape[1])
            return raw
        quantize = quantize_q8_0 if target is GGMLType.Q8_0 else quantize_q4_k
        # Through the stored type: bf16 and f16 weights are half the bytes on their way to the device.
        values = raw.dequantize(stored_float, self._device)
        return QuantizedTensor(name, raw.shape, target, quantize(values))
