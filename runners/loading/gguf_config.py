"""`ModelConfig` from GGUF metadata. Torch-free.

Source: the key names of ggml's GGUF specification and what llama.cpp fixes per architecture where a file is silent.
"""

from __future__ import annotations

import numpy as np

from runners.errors import StartupError
from runners.loading.end_tokens import end_token_ids_from_gguf
from runners.loading.ggml_types import GGMLType
from runners.loading.gguf_reader import GGUFFile
from runners.loading.limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    check_end_tokens,
    check_heads,
)
from runners.loading.settings import Settings, quote
from runners.models.config import Activation, ModelConfig, RopeScaling

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
GEMMA3_WINDOW_PERIOD = 6
GEMMA3_LOCAL_THETA = 10_000.0
# The one gemma3 that scales queries by hidden / heads instead of the head size is told by its depth.
GEMMA3_27B_LAYERS = 62
# Describe the file or restate a tensor shape; yarn's keys act only under a scaling type that is refused anyway.
_HARMLESS = frozenset(
    {
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier",
        "tensor_data_layout",
    }
)


def config_from_gguf(gguf: GGUFFile) -> ModelConfig:
    """Config of an opened GGUF file, from its metadata and tensor table.

    Raises StartupError naming the file and the key that is missing, wrong or not supported.
    """
    architecture = gguf.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES or not isinstance(architecture, str):
        known = ", ".join(ARCHITECTURES)
        raise StartupError(
            f"{gguf.path}: general.architecture: {quote(architecture)} is not supported (supported: {known})"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    settings = Settings(gguf.path, own, prefix)
    hidden_size = settings.integer("embedding_length", maximum=MAX_HIDDEN_SIZE)
    num_layers = settings.integer("block_count", maximum=MAX_LAYERS)
    num_heads = _same_for_all_layers(settings, "attention.head_count", None, MAX_HEADS)
    num_kv_heads = _same_for_all_layers(settings, "attention.head_count_kv", num_heads, MAX_HEADS)
    head_dim = settings.integer("attention.key_length", hidden_size // num_heads, maximum=MAX_HEAD_DIM)
    check_heads(gguf.path, num_heads, num_kv_heads, head_dim)
    is_gemma = architecture == "gemma3"
    windows = _layer_windows(settings, architecture, num_layers)
    thetas, scalings = _layer_rope(settings, gguf, windows, head_dim, is_gemma=is_gemma)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(settings, gguf),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_same_for_all_layers(settings, "feed_forward_length", None, MAX_HIDDEN_SIZE),
        max_context=settings.integer("context_length"),
        norm_eps=settings.number("attention.layer_norm_rms_epsilon", allow_zero=True),
        activation=Activation.GELU_TANH if is_gemma else Activation.SILU,
        tie_word_embeddings=HEAD not in gguf.tensors,
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        attention_output_bias="blk.0.attn_output.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in gguf.tensors,
        qk_norm=architecture in ("qwen3", "gemma3"),
        norm_placement="sandwich" if is_gemma else "pre",
        norm_plus_one=is_gemma,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        attention_scale=_attention_scale(settings, hidden_size, num_layers, num_heads, is_gemma=is_gemma),
        attention_soft_cap=settings.optional_number("attn_logit_softcapping"),
        logit_soft_cap=settings.optional_number("final_logit_softcapping"),
        layer_windows=windows,
        layer_rope_theta=thetas,
        layer_rope_scaling=scalings,
        bos_token_id=_bos(gguf),
        eos_token_ids=end_token_ids_from_gguf(gguf.metadata, gguf.path),
    )
    _refuse_unsupported(settings, head_dim)
    check_end_tokens(gguf.path, config)
    return config


def _refuse_unsupported(settings: Settings, head_dim: int) -> None:
    settings.require(
        "attention.value_length", head_dim, reason=f"keys have {head_dim} elements a head, values must too"
    )
    settings.require("rope.dimension_count", head_dim, reason=f"all {head_dim} elements of a head are rotated")
    settings.require("expert_count", 0, reason="mixtures of experts are not")
    settings.require("expert_used_count", 0, reason="mixtures of experts are not")
    settings.require("attention.causal", True, reason="attention is causal")
    settings.require("rope.scaling.attn_factor", 1.0, reason="attention is not rescaled")
    settings.reject_unread(_HARMLESS)


def _same_for_all_layers(settings: Settings, key: str, default: int | None, maximum: int) -> int:
    """An integer that may be given once or as an array over layers, all equal."""
    value = settings.get(key)
    if not isinstance(value, list):
        return settings.integer(key, default, maximum=maximum)
    if not value or any(entry != value[0] for entry in value):
        settings.fail(key, f"{quote(value)}: layers of different size are not supported")
    return Settings(settings.path, {key: value[0]}, settings.prefix).integer(key, maximum=maximum)


def _vocab_size(settings: Settings, gguf: GGUFFile) -> int:
    """Rows of the embedding, which every file has; the key is optional and must agree."""
    embedding = gguf.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise StartupError(f"{gguf.path}: tensor {EMBEDDING!r} is missing or not a matrix")
    rows = embedding.shape[0]
    if rows > MAX_VOCAB_SIZE or settings.integer("vocab_size", rows) != rows:
        settings.fail("vocab_size", f"{quote(settings.get('vocab_size'))} does not fit {EMBEDDING} of {rows} rows")
    return rows


def _layer_windows(settings: Settings, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Window by layer; absent or 0 means full attention. A list pattern holds one flag a layer, a number the period."""
    window = settings.integer("attention.sliding_window", 0, minimum=0)
    if window == 0:
        settings.get("attention.sliding_window_pattern")
        return (None,) * num_layers
    if architecture == "llama":
        return (window,) * num_layers
    if architecture != "gemma3":
        settings.fail("attention.sliding_window", f"{window} is not supported for {architecture}: which layers?")
    pattern = settings.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) < num_layers:
            settings.fail("attention.sliding_window_pattern", f"has {len(pattern)} entries for {num_layers} layers")
        return tuple(window if is_sliding else None for is_sliding in pattern[:num_layers])
    period = settings.integer("attention.sliding_window_pattern", GEMMA3_WINDOW_PERIOD)
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def _layer_rope(
    settings: Settings, gguf: GGUFFile, windows: tuple[int | None, ...], head_dim: int, *, is_gemma: bool
) -> tuple[tuple[float, ...], tuple[RopeScaling | None, ...]]:
    """Theta and scaling by layer: gemma3's sliding layers have their own base and no scaling."""
    theta = settings.number("rope.freq_base", 10_000.0)
    scaling = _rope_scaling(settings, gguf, head_dim)
    if not is_gemma:
        return (theta,) * len(windows), (scaling,) * len(windows)
    local_theta = settings.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)
    return (
        tuple(theta if window is None else local_theta for window in windows),
        tuple(scaling if window is None else None for window in windows),
    )


def _rope_scaling(settings: Settings, gguf: GGUFFile, head_dim: int) -> RopeScaling | None:
    kind = settings.get("rope.scaling.type") or "linear"
    if kind not in ("none", "linear"):
        settings.fail("rope.scaling.type", f"{quote(kind)} is not supported (none and linear are)")
    old_factor = settings.number("rope.scale_linear", 1.0, allow_zero=True)
    factor = settings.number("rope.scaling.factor", old_factor, allow_zero=True)
    # Converters write 0 for "no scaling".
    factor = factor if kind == "linear" and factor else 1.0
    if ROPE_FACTORS in gguf.tensors:
        divisors = _rope_factors(gguf, head_dim)
        return RopeScaling("factors", frequency_factors=tuple(float(divisor) * factor for divisor in divisors))
    return RopeScaling("linear", factor=factor) if factor != 1.0 else None


def _rope_factors(gguf: GGUFFile, head_dim: int) -> list[float]:
    """`rope_freqs.weight`: F32 [head_dim / 2], the divisor of each frequency (Llama 3.1 scaling, precomputed)."""
    info = gguf.tensors[ROPE_FACTORS]
    if info.ggml_type is not GGMLType.F32 or info.shape != (head_dim // 2,):
        raise StartupError(
            f"{gguf.tensor_path(ROPE_FACTORS)}: tensor {ROPE_FACTORS!r} is {info.ggml_type.name} {list(info.shape)}, "
            f"expected F32 [{head_dim // 2}]"
        )
    divisors: list[float] = gguf.tensor_bytes(ROPE_FACTORS).copy().view(np.float32)[0].tolist()
    if not all(0 < divisor < float("inf") for divisor in divisors):
        raise StartupError(
            f"{gguf.tensor_path(ROPE_FACTORS)}: tensor {ROPE_FACTORS!r} holds a value that is no divisor"
        )
    return divisors


def _attention_scale(
    settings: Settings, hidden_size: int, num_layers: int, num_heads: int, *, is_gemma: bool
) -> float | None:
    """Factor on q·k; None for head_dim ** -0.5. Only gemma3 27B differs without a key that says so."""
    by_key = settings.optional_number("attention.scale", allow_zero=True)
    if by_key:
        return by_key
    return float(hidden_size // num_heads) ** -0.5 if is_gemma and num_layers == GEMMA3_27B_LAYERS else None


def _bos(gguf: GGUFFile) -> int | None:
    settings = Settings(gguf.path, gguf.metadata)
    key = "tokenizer.ggml.bos_token_id"
    return settings.integer(key, minimum=0) if settings.get(key) is not None else None
