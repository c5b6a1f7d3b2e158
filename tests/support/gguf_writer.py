"""Turns a small transformers model into a GGUF file, as llama.cpp's converter lays it out.

Tensor names come from the `gguf` package, not from our own maps, so that a round trip tests those maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    matrix_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensor_types: Mapping[str, GGMLQuantizationType] | None = None,
    add_metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors_per_shard: int = 0,
) -> list[Path]:
    """Write `model` (llama, mistral, qwen2, qwen3, gemma3_text) to `path`; returns the files written.

    Matrices are stored as `matrix_type`, or as `tensor_types` says by GGUF name (types the `gguf` package can
    quantise: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1); vectors as F32. `add_metadata` adds keys of its own, for
    example a vocabulary. With `tensors_per_shard` the model is split into path-0000N-of-0000M.gguf.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=tensors_per_shard)
    _add_config(writer, config)
    if add_metadata is not None:
        add_metadata(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    rope_factors = llama3_rope_factors(config)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        values = _converted(hf_name, tensor.float(), config).numpy()
        stored_type = (tensor_types or {}).get(name, matrix_type) if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored_type), raw_dtype=stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if tensors_per_shard else [path]


def interleave_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k as llama GGUFs hold them: the halves of each head interleaved, [h, 2, D/2] → [h, D/2, 2]."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama3_rope_factors(config: Any) -> np.ndarray | None:
    """`rope_freqs.weight`, float32 [head_dim / 2]: the divisor of each frequency under Llama 3.1 scaling."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    frequencies = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _converted(hf_name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    if config.model_type in ("llama", "mistral"):
        if ".q_proj." in hf_name:
            return interleave_halves(tensor, config.num_attention_heads)
        if ".k_proj." in hf_name:
            return interleave_halves(tensor, config.num_key_value_heads)
    if config.model_type == "gemma3_text" and hf_name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
        writer.add_sliding_window(config.sliding_window)
        if config.final_logit_softcapping is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif config.model_type == "mistral" and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
