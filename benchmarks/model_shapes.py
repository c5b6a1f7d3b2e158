"""Published model shapes with random weights, made on the device: speed does not depend on what the weights are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from runners.models.config import ModelConfig, RopeScaling

LLAMA3_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)

SHAPES = {
    "llama-3.1-8b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_context=8192,
        norm_eps=1e-5,
        layer_rope_theta=(500000.0,) * 32,
        layer_rope_scaling=(LLAMA3_SCALING,) * 32,
    ),
    # For a try-out of the benchmark itself where there is no GPU.
    "tiny": ModelConfig(
        architecture="llama",
        vocab_size=2000,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_context=8192,
        norm_eps=1e-5,
        layer_rope_theta=(500000.0,) * 2,
    ),
}


@dataclass(frozen=True)
class _ElementType:
    name: str = "BF16"


@dataclass(frozen=True)
class RandomWeight:
    """Normal values, standard deviation in ** -0.5, so that activations keep their size; norms are 1."""

    shape: tuple[int, ...]
    seed: int
    ggml_type: _ElementType = _ElementType()

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)

    def block_bytes(self) -> torch.Tensor:
        raise ValueError("random weights have no blocks")

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        if len(self.shape) == 1:
            return torch.ones(self.shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(self.seed)
        weight = torch.empty(self.shape, dtype=dtype, device=device)
        return weight.normal_(std=self.shape[-1] ** -0.5, generator=generator)


def llama_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of a llama (norms before each half, no biases) under its canonical name."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
        "input_norm": (hidden,),
        "pre_ffn_norm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


class RandomCheckpoint:
    """What `build_decoder` asks of a checkpoint, for a llama of the given config."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = llama_shapes(config)

    def names(self) -> Iterable[str]:
        return self._shapes

    def get(self, name: str) -> RandomWeight:
        return RandomWeight(self._shapes[name], seed=list(self._shapes).index(name))
