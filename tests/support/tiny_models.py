"""Tiny random transformers models of every supported family, small enough to run in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "smollm")

# Every row is whole blocks of 32; three query heads share a KV head, so a wrong head count cannot go unnoticed.
_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Config of `family`, one of FAMILIES; `overrides` replace single settings."""
    sizes = dict(_SIZES)
    if family == "llama":
        return LlamaConfig(**(sizes | {"rope_parameters": dict(LLAMA3_ROPE)} | overrides))
    if family == "smollm":
        return LlamaConfig(**(sizes | {"tie_word_embeddings": True, "head_dim": 16} | overrides))
    if family == "mistral":
        return MistralConfig(**(sizes | {"sliding_window": 24} | overrides))
    if family == "qwen2":
        # Qwen2Config has no head_dim of its own: it follows from the other two sizes.
        del sizes["head_dim"]
        return Qwen2Config(**(sizes | overrides))
    if family == "qwen3":
        return Qwen3Config(**(sizes | {"tie_word_embeddings": True} | overrides))
    if family == "gemma3":
        # Seven layers: five sliding ones, a full one, a sliding one.
        gemma = {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 32}
        return Gemma3TextConfig(**(sizes | gemma | overrides))
    raise ValueError(f"unknown family {family!r}")


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model of `family` in eval mode whose every parameter is random, norms and biases too."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms stay near their neutral value, matrices keep activations near one.
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    return model.eval()
