"""A checkpoint in memory: random weights for a `ModelConfig`, no files and no transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.model_shapes import llama_shapes
from runners.models.config import ModelConfig


@dataclass(frozen=True)
class ElementType:
    name: str


@dataclass(frozen=True)
class MemoryWeight:
    """A float32 weight that looks stored."""

    tensor: torch.Tensor
    ggml_type: ElementType = ElementType("F32")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def block_bytes(self) -> torch.Tensor:
        return self.tensor.view(torch.uint8)

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.tensor.to(device=device, dtype=dtype, copy=True)


@dataclass
class MemoryCheckpoint:
    """What `build_decoder` needs, from a dict of tensors under canonical names."""

    config: ModelConfig
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def names(self) -> Iterable[str]:
        return self.tensors

    def get(self, name: str) -> MemoryWeight:
        return MemoryWeight(self.tensors[name])


def small_config(**overrides: Any) -> ModelConfig:
    """A llama of three layers; `overrides` replace single settings."""
    settings: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_context": 256,
        "norm_eps": 1e-5,
    }
    settings |= overrides
    settings.setdefault("layer_rope_theta", (10000.0,) * settings["num_layers"])
    return ModelConfig(**settings)


def random_checkpoint(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    """Weights of a llama (pre-norm, no biases) in the shapes that `config` calls for."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in llama_shapes(config).items():
        if name == "norm":
            tensors[name] = torch.ones(shape)
        elif len(shape) == 1:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    # Random models settle on one token; a wide embedding keeps their choices varied.
    tensors["embed_tokens"] *= config.hidden_size**0.5
    return MemoryCheckpoint(config, tensors)
