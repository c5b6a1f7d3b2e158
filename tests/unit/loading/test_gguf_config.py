"""GGUF metadata to ModelConfig; what the decoder does not support is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from runners.errors import StartupError
from runners.loading.model_config import read_model_config
from runners.models.config import Activation, ModelConfig, RopeScaling

Change = Callable[[gguf.GGUFWriter], None]


def read(
    folder: Path,
    change: Change | None = None,
    *,
    architecture: str = "llama",
    layers: int = 2,
    heads: int | list[int] = 4,
    tensors: dict[str, np.ndarray] | None = None,
) -> ModelConfig:
    """Config of a header-only model: hidden 64, vocabulary 10, and what `change` adds."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(128)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if change is not None:
        change(writer)
    for name, values in ({"token_embd.weight": np.zeros((10, 64), np.float32)} | (tensors or {})).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_model_config(path)


def test_llama_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.architecture, config.vocab_size, config.max_context) == ("llama", 10, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.layer_rope_theta == (10_000.0,) * 2
    assert config.layer_rope_scaling == config.layer_windows == (None, None)
    assert config.tie_word_embeddings
    assert (config.activation, config.norm_placement, config.qk_norm) == (Activation.SILU, "pre", False)
    assert not config.norm_plus_one
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_tensors_decide_head_and_biases(tmp_path: Path) -> None:
    zeros = np.zeros(4, np.float32)
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias")
    config = read(tmp_path, tensors=dict.fromkeys(names, zeros))
    assert not config.tie_word_embeddings
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, True, True)


def test_linear_scaling_and_window(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(50_000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_sliding_window(100)
        writer.add_vocab_size(10)
        writer.add_rope_dimension_count(16)

    config = read(tmp_path, change)
    assert config.layer_rope_scaling == (RopeScaling("linear", factor=4.0),) * 2
    assert config.layer_rope_theta == (50_000.0,) * 2
    assert config.layer_windows == (100, 100)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), RopeScaling("linear", factor=2.0)),
        (lambda w: w.add_rope_scaling_factor(2.0), RopeScaling("linear", factor=2.0)),
        (lambda w: w.add_rope_scaling_factor(0.0), None),
        (lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.NONE), w.add_rope_scaling_factor(2.0)), None),
    ],
)
def test_other_ways_to_scale(tmp_path: Path, change: Change, expected: RopeScaling | None) -> None:
    assert read(tmp_path, change).layer_rope_scaling == (expected,) * 2


def test_rope_factors_are_divisors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    config = read(tmp_path, tensors={"rope_freqs.weight": factors})
    assert config.layer_rope_scaling[0] == RopeScaling("factors", frequency_factors=tuple(factors.tolist()))
    config = read(tmp_path, lambda w: w.add_rope_scaling_factor(2.0), tensors={"rope_freqs.weight": factors})
    assert config.layer_rope_scaling[0] == RopeScaling("factors", frequency_factors=tuple((factors * 2).tolist()))


@pytest.mark.parametrize("values", [np.ones(7, np.float32), np.zeros(8, np.float32), np.full(8, np.nan, np.float32)])
def test_bad_rope_factors(tmp_path: Path, values: np.ndarray) -> None:
    with pytest.raises(StartupError, match=r"m\.gguf: tensor 'rope_freqs\.weight'"):
        read(tmp_path, tensors={"rope_freqs.weight": values})


def gemma3_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    writer.add_sliding_window(1024)
    writer.add_final_logit_softcapping(30.0)


def test_gemma3(tmp_path: Path) -> None:
    config = read(tmp_path, gemma3_keys, architecture="gemma3", layers=7)
    assert config.layer_windows == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert config.layer_rope_theta == (10_000.0,) * 5 + (1_000_000.0, 10_000.0)
    assert config.layer_rope_scaling == (None,) * 5 + (RopeScaling("linear", factor=8.0), None)
    assert (config.embedding_scale, config.logit_soft_cap) == (8.0, 30.0)
    assert (config.attention_scale, config.query_scale) == (None, 32**-0.5)
    assert (config.activation, config.norm_placement, config.qk_norm) == (Activation.GELU_TANH, "sandwich", True)


def test_gemma3_27b_scales_by_hidden_over_heads(tmp_path: Path) -> None:
    config = read(tmp_path, gemma3_keys, architecture="gemma3", layers=62)
    assert config.attention_scale == (64 // 4) ** -0.5


@pytest.mark.parametrize("pattern", [3, [True, True, False, True]])
def test_gemma3_pattern_and_local_base_from_keys(tmp_path: Path, pattern: int | list[bool]) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        gemma3_keys(writer)
        writer.add_float32("gemma3.rope.freq_base_swa", 20_000.0)
        writer.add_sliding_window_pattern(pattern)

    config = read(tmp_path, change, architecture="gemma3", layers=4)
    assert config.layer_windows == (1024, 1024, None, 1024)
    assert config.layer_rope_theta[1:3] == (20_000.0, 1_000_000.0)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen(tmp_path: Path, architecture: str) -> None:
    config = read(tmp_path, architecture=architecture)
    assert config.qk_norm is (architecture == "qwen3")
    assert (config.norm_placement, config.activation) == ("pre", Activation.SILU)


def test_end_tokens_are_united(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(4)
        writer.add_token_list(["a", "<s>", "</s>", "<|im_end|>", "x", "<|im_end|>", "<end_of_turn>", "b", "c", "d"])
        # Only a control token (3) ends a turn: id 5 is an ordinary piece that is spelled like one.
        writer.add_token_types([1, 3, 3, 3, 3, 1, 3, 1, 1, 1])

    config = read(tmp_path, change)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3, 4, 6))


def test_equal_sizes_may_be_given_by_layer(tmp_path: Path) -> None:
    assert read(tmp_path, heads=[4, 4]).num_heads == 4
    with pytest.raises(StartupError, match=r"llama\.attention\.head_count: \[4, 2\]: layers of different size"):
        read(tmp_path, heads=[4, 2])


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


REFUSED: dict[str, tuple[Change, str]] = {
    "yarn": (yarn, r"llama\.rope\.scaling\.type: 'yarn' is not supported"),
    "experts": (lambda w: w.add_expert_count(8), r"llama\.expert_count: 8 is not supported: mixtures of experts"),
    "partial rope": (lambda w: w.add_rope_dimension_count(8), r"llama\.rope\.dimension_count: 8 is not supported"),
    "value size": (lambda w: w.add_value_length(8), r"llama\.attention\.value_length: 8 is not supported"),
    "unknown": (lambda w: w.add_logit_scale(0.5), r"llama\.logit_scale: setting 0.5 is not known"),
    "not causal": (lambda w: w.add_causal_attention(False), r"llama\.attention\.causal: False is not supported"),
    "vocabulary": (lambda w: w.add_vocab_size(11), r"llama\.vocab_size: 11 does not fit token_embd\.weight of 10 rows"),
    "eos": (lambda w: w.add_eos_token_id(10), "id 10 is outside the vocabulary of 10"),
    "attention factor": (
        lambda w: w.add_rope_scaling_attn_factors(0.5),
        r"llama\.rope\.scaling\.attn_factor: 0.5 is not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_key_is_named(tmp_path: Path, case: str) -> None:
    change, reason = REFUSED[case]
    with pytest.raises(StartupError, match=reason) as raised:
        read(tmp_path, change)
    assert str(raised.value).startswith(f"{tmp_path / 'm.gguf'}: ")


def test_unsupported_architectures(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"general\.architecture: 'mamba' is not supported \(supported: llama, "):
        read(tmp_path, architecture="mamba")
    with pytest.raises(StartupError, match=r"qwen2\.attention\.sliding_window: 7 is not supported for qwen2"):
        read(tmp_path, lambda w: w.add_sliding_window(7), architecture="qwen2")


def test_sizes_are_bounded_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"llama\.block_count: is 4000000000, not an integer from 1 to 1024"):
        read(tmp_path, layers=4_000_000_000)


def test_a_model_without_embedding(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tensor 'token_embd\.weight' is missing or not a matrix"):
        read(tmp_path, tensors={"token_embd.weight": np.zeros(4, np.float32)})
