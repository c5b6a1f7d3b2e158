"""`open_checkpoint`: a GGUF file or a safetensors folder as canonical, shape-checked weights.

Canonical names: `embed_tokens`, `lm_head` (absent when tied), `norm`, and per layer `layers.{i}.` + `input_norm`,
`q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`, `post_attention_norm`, `pre_ffn_norm`, `post_ffn_norm`,
`gate_proj`, `up_proj`, `down_proj`; biases carry the suffix `.bias`.
"""

from __future__ import annotations

from pathlib import Path

from runners.loading.raw_tensor import RawTensor
from runners.models.config import ModelConfig


class Checkpoint:
    """Weights under canonical names, HF orientation [out, in], half-split RoPE layout; nothing is read before `get`.

    `config` is the model's architecture, `path` the file or folder it came from.
    """

    config: ModelConfig
    path: Path

    def names(self) -> list[str]:
        """Canonical names present: exactly those that `config` calls for."""
        raise NotImplementedError

    def get(self, name: str) -> RawTensor:
        """The weight `name`. Norm weights are F32 with gemma's +1 included. Raises KeyError for an unknown name."""
        raise NotImplementedError


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file (any shard of a split one) or a folder with safetensors or one GGUF model.

    Raises StartupError, one line: which file, where, why.
    """
    raise NotImplementedError
