"""Weights of linear layers: a plain tensor, or blocks of quantised values (`QuantizedWeight`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Dequantizer = Callable[["QuantizedWeight", torch.dtype], torch.Tensor]

_dequantizers: dict[str, Dequantizer] = {}


def register_dequantizer(format_name: str, dequantizer: Dequantizer) -> None:
    """Teach `QuantizedWeight.dequantize` a format; a backend that repacks weights registers its own formats here."""
    _dequantizers[format_name] = dequantizer


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out, in] in blocks.

    `format` is a GGML type in lower case ("q8_0", "q4_1", "q4_k", …) with `tensors["blocks"]` uint8
    [out, in / block_elements * block_bytes], the bytes as in the GGUF file; or a backend's own repacked format
    ("cpu_…", "cuda_…") with whatever tensors that backend wants.
    """

    format: str
    shape: tuple[int, int]
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def to(self, device: torch.device | str) -> QuantizedWeight:
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return QuantizedWeight(self.format, self.shape, moved)

    def select_rows(self, row_ids: torch.Tensor) -> QuantizedWeight:
        """Rows `row_ids` [n] as a weight of shape [n, in]; only for formats whose tensors all lead with `out`."""
        rows = {name: tensor.index_select(0, row_ids) for name, tensor in self.tensors.items()}
        return QuantizedWeight(self.format, (row_ids.numel(), self.shape[1]), rows)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [out, in] in `dtype`. ValueError for a format nobody registered."""
        if self.format not in _dequantizers:
            from kernels.reference import dequantize  # noqa: F401 (registers the GGML formats)
        dequantizer = _dequantizers.get(self.format)
        if dequantizer is None:
            raise ValueError(f"no dequantizer for weight format {self.format!r}")
        return dequantizer(self, dtype)


LinearWeight = torch.Tensor | QuantizedWeight


def concatenate_rows(weights: list[LinearWeight]) -> LinearWeight | None:
    """One weight [sum of out, in] from several of equal format; None where their formats differ."""
    first = weights[0]
    if all(isinstance(weight, torch.Tensor) for weight in weights):
        tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
        return torch.cat(tensors) if len({weight.dtype for weight in tensors}) == 1 else None
    blocks = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(blocks) < len(weights) or len({weight.format for weight in blocks}) > 1:
        return None
    assert isinstance(first, QuantizedWeight)
    joined = {name: torch.cat([weight.tensors[name] for weight in blocks]) for name in first.tensors}
    return QuantizedWeight(first.format, (sum(weight.shape[0] for weight in blocks), first.shape[1]), joined)
