"""Weights of linear layers: a plain tensor, or blocks of quantised values (`QuantizedWeight`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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


def concatenate_rows(weights: Sequence[LinearWeight]) -> list[LinearWeight]:
    """The weights, stacked by output, in as few pieces as their formats allow: neighbours stored alike are joined."""
    joined = []
    for _, group in itertools.groupby(weights, key=_storage):
        members = list(group)
        joined.append(members[0] if len(members) == 1 else _concatenate(members))
    return joined


def _storage(weight: LinearWeight) -> str:
    return weight.format if isinstance(weight, QuantizedWeight) else str(weight.dtype)


def _concatenate(weights: Sequence[LinearWeight]) -> LinearWeight:
    blocks = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not blocks:
        return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])
    tensors = {name: torch.cat([weight.tensors[name] for weight in blocks]) for name in blocks[0].tensors}
    shape = (sum(weight.shape[0] for weight in blocks), blocks[0].shape[1])
    return QuantizedWeight(blocks[0].format, shape, tensors)
