"""`ModelConfig` from a Hugging Face config.json, of transformers 4 and 5. Torch-free.

Source: the configuration classes of transformers 5 (llama, mistral, qwen2, qwen3, gemma3), whose defaults hold for
absent keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runners.loading.end_tokens import end_token_ids_from_folder
from runners.loading.hf_rope import layer_rope
from runners.loading.limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    check_end_tokens,
    check_heads,
)
from runners.loading.settings import Settings, quote, read_json_object
from runners.models.config import Activation, ModelConfig


@dataclass(frozen=True, slots=True)
class _Family:
    """What one `model_type` fixes, and its defaults for absent keys (None: the key is required)."""

    architecture: str
    max_context: int
    num_kv_heads: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"


_FAMILIES = {
    "llama": _Family("llama", max_context=2048),
    "mistral": _Family("mistral", max_context=131072, num_kv_heads=8),
    "qwen2": _Family("qwen2", max_context=32768, num_kv_heads=32),
    "qwen3": _Family("qwen3", max_context=32768, num_kv_heads=32, head_dim=128),
    "gemma3_text": _Family(
        "gemma3",
        max_context=131072,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        vocab_size=262208,
        tie_word_embeddings=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
    ),
}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_CAUSAL_LM = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
}
# Settings that say how the model was trained, saved, shown or sampled from, and cannot change a forward pass.
_HARMLESS = frozenset(
    {
        "architectures", "attention_dropout", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
        "decoder_start_token_id", "do_sample", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
        "hidden_dropout", "id2label", "initializer_range", "is_llama_config", "label2id", "max_length",
        "max_window_layers", "model_type", "name_or_path", "pad_token_id", "pretraining_tp", "problem_type",
        "repetition_penalty", "resid_pdrop", "return_dict", "sliding_window", "temperature", "top_k", "top_p",
        "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
        "use_cache",
    }
)  # fmt: skip
_MULTIMODAL_HARMLESS = _HARMLESS | {
    "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config",
}  # fmt: skip


def config_from_folder(folder: Path) -> ModelConfig:
    """Read config.json, generation_config.json and tokenizer_config.json of `folder`.

    Raises StartupError naming the file and the setting that is missing, wrong or not supported.
    """
    path = folder / "config.json"
    settings = Settings(path, read_json_object(path))
    architectures = settings.get("architectures") or []
    if not isinstance(architectures, list) or not all(name in _CAUSAL_LM for name in map(str, architectures)):
        settings.fail("architectures", f"{quote(architectures)} is not supported")
    if settings.get("model_type") == "gemma3":
        return _text_part_of_gemma3(folder, settings)
    return _decoder_config(folder, settings)


def _text_part_of_gemma3(folder: Path, outer: Settings) -> ModelConfig:
    """The multimodal gemma3: its text model is served, its vision tower is not loaded."""
    inner = outer.section("text_config")
    if inner is None:
        outer.fail("text_config", "is missing")
    outer.get("quantization_config")  # `quantized_layout` reads it
    outer.require("tie_word_embeddings", True, reason="gemma3 ties head and embedding")
    outer.reject_unread(_MULTIMODAL_HARMLESS)
    return _decoder_config(folder, inner, model_type="gemma3_text")


def _decoder_config(folder: Path, settings: Settings, model_type: str | None = None) -> ModelConfig:
    model_type = model_type or settings.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        settings.fail("model_type", f"{quote(model_type)} is not supported (supported: {known})")
    hidden_size = settings.integer("hidden_size", maximum=MAX_HIDDEN_SIZE)
    num_layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = settings.integer("num_attention_heads", family.num_heads, maximum=MAX_HEADS)
    # An explicit null means "as many as query heads", which is not the default of an absent key.
    kv_default = num_heads if settings.has("num_key_value_heads") else family.num_kv_heads or num_heads
    num_kv_heads = settings.integer("num_key_value_heads", kv_default, maximum=MAX_HEADS)
    head_dim = settings.integer("head_dim", family.head_dim or hidden_size // num_heads, maximum=MAX_HEAD_DIM)
    check_heads(settings.path, num_heads, num_kv_heads, head_dim)
    vocab_size = settings.integer("vocab_size", family.vocab_size, maximum=MAX_VOCAB_SIZE)
    max_context = settings.integer("max_position_embeddings", family.max_context)
    layer_types = _layer_types(settings, family.architecture, num_layers)
    rope = layer_rope(settings, family.architecture, layer_types, max_context)
    is_gemma = family.architecture == "gemma3"
    attention_bias = _attention_bias(settings, family.architecture)
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=settings.integer("intermediate_size", maximum=MAX_HIDDEN_SIZE),
        max_context=max_context,
        norm_eps=settings.number("rms_norm_eps", 1e-6, allow_zero=True),
        activation=_activation(settings, family),
        tie_word_embeddings=settings.flag("tie_word_embeddings", family.tie_word_embeddings),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and family.architecture != "qwen2",
        mlp_bias=family.architecture == "llama" and settings.flag("mlp_bias"),
        qk_norm=family.architecture in ("qwen3", "gemma3"),
        norm_placement="sandwich" if is_gemma else "pre",
        norm_plus_one=is_gemma,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        attention_scale=settings.number("query_pre_attn_scalar", 256) ** -0.5 if is_gemma else None,
        attention_soft_cap=settings.optional_number("attn_logit_softcapping") if is_gemma else None,
        logit_soft_cap=settings.optional_number("final_logit_softcapping") if is_gemma else None,
        layer_windows=_layer_windows(settings, layer_types),
        layer_rope_theta=tuple(theta for theta, _ in rope),
        layer_rope_scaling=tuple(scaling for _, scaling in rope),
        bos_token_id=_bos(settings),
        eos_token_ids=end_token_ids_from_folder(folder),
    )
    _refuse_unsupported(settings)
    check_end_tokens(settings.path, config)
    return config


def _refuse_unsupported(settings: Settings) -> None:
    """Name what is known to matter; `reject_unread` then refuses the rest."""
    settings.get("quantization_config")  # `quantized_layout` reads it
    settings.require("auto_map", reason="no code from a model repository is run")
    settings.require("rope_interleaved", False, reason="only half-split rotary embeddings are")
    settings.require("partial_rotary_factor", 1.0, 1, reason="only whole heads are rotated")
    settings.require("use_bidirectional_attention", False, reason="attention is causal")
    settings.require("is_decoder", True, False, reason="only decoders are")
    settings.reject_unread(_HARMLESS)


def _activation(settings: Settings, family: _Family) -> Activation:
    # gemma3 reads hidden_activation; its published configs may carry the other key too, with the same value.
    other = settings.get("hidden_act") if family.activation_key != "hidden_act" else None
    name = settings.get(family.activation_key) or other or family.activation
    if name not in _ACTIVATIONS:
        settings.fail(family.activation_key, f"{quote(name)} is not supported")
    return _ACTIVATIONS[name]


def _attention_bias(settings: Settings, architecture: str) -> bool:
    """Whether q, k and v have biases; qwen2 always has them, mistral never, the others say so."""
    if architecture in ("mistral", "qwen2"):
        settings.require("attention_bias", architecture == "qwen2", reason=f"{architecture} has a fixed layout")
        return architecture == "qwen2"
    return settings.flag("attention_bias")


def _layer_types(settings: Settings, architecture: str, num_layers: int) -> tuple[str, ...]:
    """ "full_attention" or "sliding_attention" for every layer."""
    derived = _derived_layer_types(settings, architecture, num_layers)
    given = settings.get("layer_types")
    if given is None:
        return derived
    if not isinstance(given, list) or len(given) != num_layers:
        settings.fail("layer_types", f"needs one entry for each of {num_layers} layers")
    for kind in given:
        if kind not in ("full_attention", "sliding_attention"):
            settings.fail("layer_types", f"{quote(kind)} is not supported")
    if architecture in ("llama", "mistral") and tuple(given) != derived:
        settings.fail("layer_types", f"{architecture} does not mix attention kinds")
    return tuple(given)


def _derived_layer_types(settings: Settings, architecture: str, num_layers: int) -> tuple[str, ...]:
    """Layer types by the rule of the architecture, for a config without `layer_types`."""
    full, sliding = "full_attention", "sliding_attention"
    if architecture == "gemma3":
        key = "sliding_window_pattern" if settings.has("sliding_window_pattern") else "_sliding_window_pattern"
        pattern = settings.integer(key, 6)
        return tuple(sliding if (layer + 1) % pattern else full for layer in range(num_layers))
    if architecture in ("qwen2", "qwen3"):
        uses_window = settings.flag("use_sliding_window") and _window(settings) is not None
        first = settings.integer("max_window_layers", 28, minimum=0) if uses_window else num_layers
        return tuple(sliding if layer >= first else full for layer in range(num_layers))
    if architecture == "mistral":
        return (full if _window(settings) is None else sliding,) * num_layers
    settings.require("sliding_window", reason="llama has none")
    return (full,) * num_layers


def _window(settings: Settings) -> int | None:
    """Window in tokens; 4096 where the key is absent, None where it is null."""
    if settings.has("sliding_window") and settings.get("sliding_window") is None:
        return None
    return settings.integer("sliding_window", 4096)


def _layer_windows(settings: Settings, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    if "sliding_attention" not in layer_types:
        return (None,) * len(layer_types)
    window = _window(settings)
    if window is None:
        settings.fail("sliding_window", "is null, but layer_types asks for sliding attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _bos(settings: Settings) -> int | None:
    return settings.integer("bos_token_id", minimum=0) if settings.get("bos_token_id") is not None else None
