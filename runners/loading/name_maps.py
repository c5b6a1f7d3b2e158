"""Canonical weight names: their shapes, and their names in GGUF files and in Hugging Face checkpoints. Torch-free."""

from __future__ import annotations

from collections.abc import Collection

from runners.errors import StartupError
from runners.models.config import ModelConfig

Shape = tuple[int, ...]

# Canonical names within one layer.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_GGUF_TOP = {"embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm"}
_GGUF_LAYER = {
    "input_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "pre_ffn_norm": "ffn_norm",
    "post_ffn_norm": "post_ffw_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_HF_LAYER = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
# Hugging Face gives the norm before a llama FFN the name that gemma3 uses for the norm after attention.
_HF_NORMS = {
    "pre": {"pre_ffn_norm": "post_attention_layernorm"},
    "sandwich": {
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    },
}
# Plain models, then the text part of a multimodal gemma3 (transformers 5 and 4), then a bare decoder.
_HF_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HF_HEADS = ("lm_head", "language_model.lm_head")


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape [out, in] or [n] of every weight that `config` calls for, by canonical name."""
    hidden, head_dim, ffn = config.hidden_size, config.head_dim, config.intermediate_size
    query, key_value = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, Shape] = {
        "input_norm": (hidden,),
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
        "pre_ffn_norm": (hidden,),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    if config.qk_norm:
        layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    if config.norm_placement == "sandwich":
        layer |= {"post_attention_norm": (hidden,), "post_ffn_norm": (hidden,)}
    biased = {
        "q_proj": config.attention_bias,
        "k_proj": config.attention_bias,
        "v_proj": config.attention_bias,
        "o_proj": config.attention_output_bias,
    }
    for name in PROJECTIONS:
        if biased.get(name, config.mlp_bias):
            layer[f"{name}.bias"] = layer[name][:1]
    shapes: dict[str, Shape] = {"embed_tokens": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def gguf_name(canonical: str) -> str:
    """`layers.3.q_proj.bias` → `blk.3.attn_q.bias`."""
    base, suffix = _split_suffix(canonical)
    if base in _GGUF_TOP:
        return f"{_GGUF_TOP[base]}.{suffix}"
    _, index, name = base.split(".")
    return f"blk.{index}.{_GGUF_LAYER[name]}.{suffix}"


class HfNames:
    """Names of one Hugging Face checkpoint, whose prefix is found from the tensors it holds."""

    def __init__(self, config: ModelConfig, stored: Collection[str], source: str) -> None:
        """Raises StartupError, naming `source`, if no embedding is found under a known prefix."""
        prefixes = [prefix for prefix in _HF_PREFIXES if f"{prefix}embed_tokens.weight" in stored]
        if not prefixes:
            raise StartupError(f"{source}: no tensor 'model.embed_tokens.weight' (is this a decoder checkpoint?)")
        self._prefix = prefixes[0]
        self._heads = [head for head in _HF_HEADS if f"{head}.weight" in stored]
        self._layer = _HF_LAYER | _HF_NORMS[config.norm_placement]

    def stored_name(self, canonical: str) -> str:
        """`layers.3.q_proj.bias` → `model.layers.3.self_attn.q_proj.bias`."""
        base, suffix = _split_suffix(canonical)
        if base == "lm_head":
            return f"{self._heads[0] if self._heads else _HF_HEADS[0]}.{suffix}"
        if base in ("embed_tokens", "norm"):
            return f"{self._prefix}{base}.{suffix}"
        _, index, name = base.split(".")
        return f"{self._prefix}layers.{index}.{self._layer[name]}.{suffix}"

    def has_no_effect(self, stored: str, *, tied: bool) -> bool:
        """Whether a stored tensor is a copy or a constant: the saved head of a tied model, RoPE frequencies."""
        is_tied_head = tied and stored in {f"{head}.weight" for head in _HF_HEADS}
        return is_tied_head or stored.endswith(".rotary_emb.inv_freq")

    @staticmethod
    def is_vision(stored: str) -> bool:
        """Whether a tensor belongs to the vision part of a multimodal checkpoint, which is not served."""
        return stored.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))


def _split_suffix(canonical: str) -> tuple[str, str]:
    return (canonical[: -len(".bias")], "bias") if canonical.endswith(".bias") else (canonical, "weight")
