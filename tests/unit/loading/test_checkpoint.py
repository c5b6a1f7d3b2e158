"""Checkpoints: GGUF and safetensors of one model give the same weights; misfits are one-line errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from runners.errors import StartupError
from runners.loading.checkpoint import Checkpoint, open_checkpoint
from runners.loading.ggml_types import GGMLType
from tests.support.gguf_writer import interleave_halves, write_gguf
from tests.support.tiny_models import FAMILIES, tiny_model


def assert_same_weights(first: Checkpoint, second: Checkpoint) -> None:
    assert first.names() == second.names()
    for name in first.names():
        one, two = first.get(name), second.get(name)
        assert one.shape == two.shape, name
        assert torch.equal(one.dequantize(torch.float32), two.dequantize(torch.float32)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_safetensors(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, seed=1)
    model.save_pretrained(tmp_path / "hf")
    write_gguf(model, tmp_path / "m.gguf")
    folder, file = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "m.gguf")
    assert_same_weights(folder, file)
    for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_context"):
        assert getattr(folder.config, field) == getattr(file.config, field), field
    for field in ("intermediate_size", "activation", "tie_word_embeddings", "attention_bias", "qk_norm"):
        assert getattr(folder.config, field) == getattr(file.config, field), field
    for field in ("norm_placement", "embedding_scale", "query_scale", "layer_windows", "layer_rope_theta"):
        assert getattr(folder.config, field) == getattr(file.config, field), field
    assert file.config.eos_token_ids == folder.config.eos_token_ids == (2,)


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_equal_the_model(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, seed=2)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    plus_one = 1.0 if family == "gemma3" else 0.0
    norm_names = {"pre": "post_attention_layernorm", "sandwich": "pre_feedforward_layernorm"}
    before_ffn = state[f"model.layers.1.{norm_names[checkpoint.config.norm_placement]}.weight"]
    assert torch.equal(checkpoint.get("layers.1.pre_ffn_norm").dequantize(torch.float32), before_ffn + plus_one)
    assert torch.equal(checkpoint.get("norm").dequantize(torch.float32), state["model.norm.weight"] + plus_one)
    assert torch.equal(
        checkpoint.get("layers.2.q_proj").dequantize(torch.float32), state["model.layers.2.self_attn.q_proj.weight"]
    )
    assert ("lm_head" in checkpoint.names()) is not model.config.tie_word_embeddings
    assert checkpoint.get("norm").ggml_type is GGMLType.F32
    if family == "qwen2":
        bias = checkpoint.get("layers.0.k_proj.bias").dequantize(torch.float32)
        assert torch.equal(bias, state["model.layers.0.self_attn.k_proj.bias"])


def test_quantised_blocks_stay_whole_under_the_permutation(tmp_path: Path) -> None:
    """Un-permuting rows of blocks equals quantising the unpermuted matrix: rows are quantised one by one."""
    model = tiny_model("llama")
    types = {"blk.0.attn_k.weight": GGMLQuantizationType.Q4_1, "blk.1.attn_q.weight": GGMLQuantizationType.F16}
    write_gguf(model, tmp_path / "m.gguf", matrix_type=GGMLQuantizationType.Q8_0, tensor_types=types)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    state = model.state_dict()
    for name, kind in (
        ("layers.0.q_proj", GGMLQuantizationType.Q8_0),
        ("layers.0.k_proj", GGMLQuantizationType.Q4_1),
        ("layers.1.q_proj", GGMLQuantizationType.F16),
        ("layers.1.v_proj", GGMLQuantizationType.Q8_0),
    ):
        hf_name = "model." + name.replace("layers.0.", "layers.0.self_attn.").replace(
            "layers.1.", "layers.1.self_attn."
        )
        raw = checkpoint.get(name)
        expected = gguf.quants.quantize(state[f"{hf_name}.weight"].numpy(), kind)
        assert raw.ggml_type == int(kind)
        assert torch.equal(raw.block_bytes(), torch.from_numpy(expected).view(torch.uint8).reshape(raw.rows.shape))
        assert raw.nbytes == expected.nbytes


def test_biases_of_llama_q_and_k_are_reordered_too(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True, seed=3)
    model.save_pretrained(tmp_path / "hf")
    write_gguf(model, tmp_path / "m.gguf")
    assert_same_weights(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "m.gguf"))
    stored = gguf.GGUFReader(tmp_path / "m.gguf")
    bias = next(tensor for tensor in stored.tensors if tensor.name == "blk.0.attn_q.bias")
    original = model.state_dict()["model.layers.0.self_attn.q_proj.bias"]
    assert not torch.equal(torch.from_numpy(bias.data.copy()), original)
    assert torch.equal(torch.from_numpy(bias.data.copy()), interleave_halves(original, 6))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_shards_of_both_formats(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    assert (tmp_path / "hf/model.safetensors.index.json").is_file()
    paths = write_gguf(model, tmp_path / "m.gguf", tensors_per_shard=7)
    assert len(paths) > 3
    assert_same_weights(open_checkpoint(tmp_path / "hf"), open_checkpoint(paths[-1]))
    (tmp_path / "only").mkdir()
    for path in paths:
        path.rename(tmp_path / "only" / path.name)
    assert open_checkpoint(tmp_path / "only").names() == open_checkpoint(tmp_path / "hf").names()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folders(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("gemma3").to(dtype)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    q_proj = checkpoint.get("layers.0.q_proj").dequantize(dtype)
    assert q_proj.dtype is dtype
    assert torch.equal(q_proj, state["model.layers.0.self_attn.q_proj.weight"])
    # The sum is taken in float32: 1 + w rarely fits the narrow type.
    norm = checkpoint.get("layers.0.k_norm").dequantize(torch.float32)
    assert torch.equal(norm, state["model.layers.0.self_attn.k_norm.weight"].float() + 1)


def test_dequantize_never_aliases_the_file(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    before = checkpoint.get("embed_tokens").dequantize(torch.float32)
    checkpoint.get("embed_tokens").dequantize(torch.float32).zero_()
    assert torch.equal(checkpoint.get("embed_tokens").dequantize(torch.float32), before)


def test_unknown_name(tmp_path: Path) -> None:
    tiny_model("smollm").save_pretrained(tmp_path)
    with pytest.raises(KeyError, match="lm_head"):
        open_checkpoint(tmp_path).get("lm_head")


Edit = Callable[[dict[str, torch.Tensor]], None]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
BROKEN: dict[str, tuple[Edit, str]] = {
    "missing": (lambda t: t.pop(K_PROJ), rf"tensor '{K_PROJ}' is missing"),
    "shape": (
        lambda t: t.update({K_PROJ: torch.zeros(8, 96)}),
        rf"tensor '{K_PROJ}' has shape \[8, 96\], the config asks for \[64, 96\]",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.0.mlp.experts.0.w1.weight": torch.zeros(2), "z": torch.zeros(2)}),
        r"tensor 'model\.layers\.0\.mlp\.experts\.0\.w1\.weight' does not belong to a llama model \(1 more",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(192)}),
        r"tensor 'model\.layers\.0\.self_attn\.q_proj\.bias' does not belong to a llama model",
    ),
    "too many layers": (
        lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.zeros(96)}),
        r"tensor 'model\.layers\.3\.input_layernorm\.weight' does not belong",
    ),
    "dtype": (
        lambda t: t.update({K_PROJ: torch.zeros(64, 96, dtype=torch.float8_e4m3fn)}),
        rf"tensor '{K_PROJ}' has dtype F8_E4M3 \(supported: F32, F16, BF16\)",
    ),
    "no decoder": (lambda t: t.clear() or t.update({"x": torch.zeros(1)}), r"no tensor 'model\.embed_tokens\.weight'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_folders_that_do_not_fit_their_config(tmp_path: Path, case: str) -> None:
    edit, reason = BROKEN[case]
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=reason) as raised:
        open_checkpoint(tmp_path)
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_gguf_files_that_do_not_fit_their_config(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = tiny_model("llama")
    write_gguf(model, path)
    good = path.read_bytes()
    path.write_bytes(good.replace(b"blk.2.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(StartupError, match=r"m\.gguf: tensor 'blk\.2\.ffn_up\.weight' is missing"):
        open_checkpoint(path)
    path.write_bytes(good.replace(b"rope_freqs.weight", b"rope_other.weight"))
    with pytest.raises(StartupError, match=r"m\.gguf: tensor 'rope_other\.weight' does not belong to a llama model"):
        open_checkpoint(path)


def test_a_gguf_type_without_decoder(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(tiny_model("llama", hidden_size=768), path)
    data = bytearray(path.read_bytes())
    # The type of a tensor is the u32 between its shape and its offset; IQ2_XXS needs fewer bytes than F32.
    place = data.index(b"blk.0.attn_v.weight") + len(b"blk.0.attn_v.weight") + 4 + 16
    data[place : place + 4] = int(GGMLType.IQ2_XXS).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(StartupError, match=r"m\.gguf: tensor 'blk\.0\.attn_v\.weight' has type IQ2_XXS, which is not"):
        open_checkpoint(path)


def test_copies_and_constants_are_skipped(tmp_path: Path) -> None:
    """Old exports hold RoPE frequencies, and a tied head may be saved beside the embedding."""
    tiny_model("smollm").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = open_checkpoint(tmp_path).names()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).names() == names


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma3(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("gemma3")
    model.save_pretrained(tmp_path)
    plain = {
        name: open_checkpoint(tmp_path).get(name).dequantize(torch.float32)
        for name in open_checkpoint(tmp_path).names()
    }
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        f'{{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {text}}}'
    )
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    vision = "model.vision_tower.x.weight" if prefix.startswith("model.") else "vision_tower.x.weight"
    save_file(moved | {vision: torch.zeros(3)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(tmp_path)
    assert "the vision part (1 tensors) is not loaded" in caplog.text
    assert checkpoint.names() == list(plain)
    for name, values in plain.items():
        assert torch.equal(checkpoint.get(name).dequantize(torch.float32), values)
