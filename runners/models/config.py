"""`ModelConfig`: everything the decoder needs to know about an architecture, torch-free."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Activation(enum.StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling. `kind` is "linear", "llama3" or "factors".

    linear: positions divided by `factor`. llama3: the wavelength rule of Llama 3.1 with `low_freq_factor`,
    `high_freq_factor`, `original_max_context`. factors: `frequency_factors` (GGUF `rope_freqs.weight`), one divisor
    a frequency.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Sizes in elements, context in tokens.

    `layer_windows[i]` is layer i's sliding window in tokens (a query sees itself and the `window - 1` tokens before
    it), None for full attention. `layer_rope_theta[i]` and `layer_rope_scaling[i]` allow gemma3's local and global
    layers to differ. `norm_placement` is "pre" (llama: before attention and FFN) or "sandwich" (gemma3: before and
    after both). `embedding_scale` multiplies embeddings (gemma3: sqrt(hidden)). `norm_plus_one` says that a
    safetensors norm weight w means 1 + w; a GGUF already holds the sum.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context: int
    norm_eps: float
    activation: Activation = Activation.SILU
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_placement: str = "pre"
    norm_plus_one: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    layer_windows: tuple[int | None, ...] = ()
    layer_rope_theta: tuple[float, ...] = ()
    layer_rope_scaling: tuple[RopeScaling | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def query_scale(self) -> float:
        """Factor on q·k: `attention_scale`, or head_dim ** -0.5."""
        return self.attention_scale if self.attention_scale is not None else self.head_dim**-0.5
