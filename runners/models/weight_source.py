"""What a decoder is built from, whoever stores it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from runners.models.config import ModelConfig


class StoredType(Protocol):
    """The element type of a stored weight: a GGML type by name ("Q4_K", "BF16")."""

    @property
    def name(self) -> str: ...


class StoredWeight(Protocol):
    """One weight as `runners.loading` gives it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ggml_type(self) -> StoredType: ...
    @property
    def nbytes(self) -> int: ...
    def block_bytes(self) -> torch.Tensor: ...
    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor: ...


class WeightSource(Protocol):
    """What `build_decoder` asks of a checkpoint."""

    @property
    def config(self) -> ModelConfig: ...
    def names(self) -> Iterable[str]: ...
    def get(self, name: str) -> StoredWeight: ...
