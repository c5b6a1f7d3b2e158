"""config.json of transformers 4 and 5 to ModelConfig; what the decoder does not support is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, MistralConfig

from runners.errors import StartupError
from runners.loading.model_config import config_from_folder
from runners.models.config import Activation, ModelConfig, RopeScaling
from tests.support.tiny_models import FAMILIES, tiny_config

# As published in the layout of transformers 4.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
}
GEMMA3_27B_TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def read(folder: Path, config: dict[str, Any], **other_files: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in other_files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return config_from_folder(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_configs_of_every_family(tmp_path: Path, family: str) -> None:
    original = tiny_config(family)
    original.save_pretrained(tmp_path)
    config = config_from_folder(tmp_path)
    assert config.architecture == ("llama" if family == "smollm" else family)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (160, 96, 160)
    assert (config.num_heads, config.num_kv_heads) == (6, 2)
    assert config.head_dim == getattr(original, "head_dim", 96 // 6)
    assert config.max_context == 256
    assert config.tie_word_embeddings is original.tie_word_embeddings
    assert config.attention_bias is (family == "qwen2")
    assert config.attention_output_bias is False
    assert config.qk_norm is (family in ("qwen3", "gemma3"))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    layers = (config.layer_windows, config.layer_rope_theta, config.layer_rope_scaling)
    assert [len(layer) for layer in layers] == [original.num_hidden_layers] * 3


def test_llama_31_in_both_layouts(tmp_path: Path) -> None:
    old = read(tmp_path, LLAMA_31)
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert old.layer_rope_scaling == (scaling,) * 32
    assert old.layer_rope_theta == (500000.0,) * 32
    assert old.head_dim == 128
    assert old.eos_token_ids == (128001, 128008, 128009)
    new = {key: value for key, value in LLAMA_31.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA_31["rope_scaling"] | {"rope_theta": 500000.0}  # type: ignore[operator]
    assert read(tmp_path, new) == old
    # Published Llama 3.1 files still carry the older key beside the new one.
    legacy = LLAMA_31 | {"rope_scaling": LLAMA_31["rope_scaling"] | {"type": "llama3"}}  # type: ignore[operator]
    assert read(tmp_path, legacy) == old


def test_gemma3_27b_inside_a_multimodal_config(tmp_path: Path) -> None:
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": GEMMA3_27B_TEXT,
        "vision_config": {"hidden_size": 1152},
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
    }
    config = read(tmp_path, outer)
    assert (config.architecture, config.vocab_size, config.num_layers) == ("gemma3", 262208, 62)
    assert config.query_scale == pytest.approx(168**-0.5)
    assert config.embedding_scale == pytest.approx(5376**0.5)
    assert (config.activation, config.norm_placement) == (Activation.GELU_TANH, "sandwich")
    assert config.norm_plus_one
    assert config.tie_word_embeddings
    assert config.layer_windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert config.layer_rope_theta[4:6] == (10_000.0, 1_000_000.0)
    assert config.layer_rope_scaling[4:6] == (None, RopeScaling("linear", factor=8.0))
    assert config.eos_token_ids == (1, 106)


def test_gemma3_in_the_newer_layout(tmp_path: Path) -> None:
    Gemma3Config(text_config=GEMMA3_27B_TEXT).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved["text_config"]
    newer = config_from_folder(tmp_path)
    assert newer.eos_token_ids == (1,)
    assert newer == read(tmp_path, GEMMA3_27B_TEXT | {"eos_token_id": 1, "bos_token_id": 2})


def test_sliding_windows(tmp_path: Path) -> None:
    qwen = {**LLAMA_31, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": None}
    qwen |= {"rope_scaling": None, "num_hidden_layers": 4, "sliding_window": 512, "max_window_layers": 3}
    assert read(tmp_path, qwen).layer_windows == (None,) * 4
    assert read(tmp_path, qwen | {"use_sliding_window": True}).layer_windows == (None, None, None, 512)
    layer_types = ["sliding_attention", "full_attention"] * 2
    typed = qwen | {"use_sliding_window": True, "layer_types": layer_types}
    assert read(tmp_path, typed).layer_windows == (512, None, 512, None)
    mistral = qwen | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read(tmp_path, mistral).layer_windows == (512,) * 4
    assert read(tmp_path, mistral | {"sliding_window": None}).layer_windows == (None,) * 4
    del mistral["sliding_window"]
    assert read(tmp_path, mistral).layer_windows == (MistralConfig().sliding_window,) * 4


def test_kv_heads_default_to_the_class_or_to_all_heads(tmp_path: Path) -> None:
    without = {key: value for key, value in LLAMA_31.items() if key != "num_key_value_heads"}
    assert read(tmp_path, without).num_kv_heads == 32
    mistral = without | {"model_type": "mistral", "architectures": None, "rope_scaling": None}
    assert read(tmp_path, mistral).num_kv_heads == 8
    assert read(tmp_path, mistral | {"num_key_value_heads": None}).num_kv_heads == 32


def test_end_tokens_are_united(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        LLAMA_31 | {"eos_token_id": 7},
        generation_config={"eos_token_id": [7, 9]},
        tokenizer_config={"eos_token": {"content": "<|end|>"}, "added_tokens_decoder": {"5": {"content": "<|end|>"}}},
    )
    assert config.eos_token_ids == (5, 7, 9)
    config = read(
        tmp_path,
        LLAMA_31 | {"eos_token_id": None},
        tokenizer_config={"eos_token": "</s>"},
        tokenizer={"added_tokens": [{"id": 3, "content": "</s>"}]},
    )
    assert config.eos_token_ids == (3, 7, 9)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type: 'yarn' is not supp"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    "mrope": ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}, "rope_scaling": None}, "mrope_secti"),
    "two ropes": ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling: contradicts rope_parameters"),
    "factor": ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor: is missing"),
    "factor nan": ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "nan, not a finite number"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved: True is not supported"),
    "experts": ({"num_local_experts": 8}, "num_local_experts: setting 8 is not known"),
    "activation": ({"hidden_act": "relu2"}, "hidden_act: 'relu2' is not supported"),
    "model type": ({"model_type": "mamba"}, r"model_type: 'mamba' is not supported \(supported: gemma3_text, llama"),
    "no model type": ({"model_type": None}, "model_type: None is not supported"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: .* is not supported"),
    "code": ({"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map: .* no code from a model repository is run"),
    "attention": ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: setting 30.0 is not known"),
    "llama window": ({"sliding_window": 128}, "sliding_window: 128 is not supported: llama has none"),
    "llama mix": (
        {"layer_types": ["sliding_attention"] * 32},
        "layer_types: llama does not mix attention kinds",
    ),
    "layer count": ({"layer_types": ["full_attention"]}, "layer_types: needs one entry for each of 32 layers"),
    "layer kind": ({"layer_types": ["linear_attention"] * 32}, "'linear_attention' is not supported"),
    "heads": ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 KV heads"),
    "odd head": ({"head_dim": 127}, "head size 127 is not an even number"),
    "missing": ({"hidden_size": None}, "hidden_size: is missing"),
    "text": ({"num_hidden_layers": "32"}, "num_hidden_layers: is '32', not an integer"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers: is 1000000000, not an integer from 1 to 1024"),
    "eos": ({"eos_token_id": -1}, "eos_token_id: -1 is not a token id"),
    "eos range": ({"eos_token_id": 200000}, "id 200000 is outside the vocabulary of 128256"),
    "tied": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: is 'yes', not true or false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_setting_is_named(tmp_path: Path, case: str) -> None:
    change, reason = REFUSED[case]
    with pytest.raises(StartupError, match=reason) as raised:
        read(tmp_path, LLAMA_31 | change)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(raised.value)


def test_settings_without_effect_are_accepted(tmp_path: Path) -> None:
    extra = {"num_local_experts": None, "use_moe": False, "_commit_hash": "x", "rope_interleaved": False, "tags": []}
    assert read(tmp_path, LLAMA_31 | extra) == read(tmp_path, LLAMA_31)


def test_gemma3_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="use_bidirectional_attention: True is not supported"):
        read(tmp_path, GEMMA3_27B_TEXT | {"use_bidirectional_attention": True})
    with pytest.raises(StartupError, match="sliding_window: is null, but layer_types asks for sliding attention"):
        read(tmp_path, GEMMA3_27B_TEXT | {"sliding_window": None})


def test_soft_caps_of_gemma3(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_27B_TEXT | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "not valid JSON"), (b"[]", "holds list, not a JSON object"), (b"[" * 99_999, "not valid JSON")],
)
def test_a_config_that_is_no_object(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(StartupError, match=reason):
        config_from_folder(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json: cannot be read: No such file"):
        config_from_folder(tmp_path)
