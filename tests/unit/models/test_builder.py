from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runners.errors import StartupError
from runners.models.builder import build_decoder
from tests.support.forward import logits_in_pieces
from tests.support.memory_checkpoint import random_checkpoint, small_config


def test_projections_stored_alike_become_one() -> None:
    decoder = build_decoder(random_checkpoint(small_config()))
    layer = decoder.layers[0]
    assert [len(part.weights) for part in (layer.qkv_proj, layer.gate_up_proj)] == [1, 1]
    assert layer.qkv_proj.weights[0].shape == ((4 + 2 + 2) * 16, 64)
    assert layer.gate_up_proj.weights[0].shape == (2 * 96, 64)


def test_rope_tables_are_shared_between_layers_and_as_long_as_the_context() -> None:
    decoder = build_decoder(random_checkpoint(small_config()), max_context=40)
    assert decoder.max_context == 40
    assert {layer.rope_table.data_ptr() for layer in decoder.layers} == {decoder.layers[0].rope_table.data_ptr()}
    assert decoder.layers[0].rope_table.shape == (40, 16)


def test_a_context_beyond_the_models_is_cut_to_it() -> None:
    assert build_decoder(random_checkpoint(small_config()), max_context=10**6).max_context == 256


def test_a_tied_head_is_the_embedding_even_where_the_file_repeats_it() -> None:
    checkpoint = random_checkpoint(small_config(tie_word_embeddings=True))
    checkpoint.tensors["lm_head"] = torch.zeros(97, 64)
    decoder = build_decoder(checkpoint)
    assert decoder.lm_head is decoder.embed_tokens
    assert logits_in_pieces(decoder, [1, 2, 3], [3]).any()


def test_missing_weight_is_named() -> None:
    checkpoint = random_checkpoint(small_config())
    del checkpoint.tensors["layers.1.up_proj"]
    with pytest.raises(StartupError, match=r"'layers\.1\.up_proj' is missing"):
        build_decoder(checkpoint)


def test_wrong_shape_is_named_with_both_shapes() -> None:
    checkpoint = random_checkpoint(small_config())
    checkpoint.tensors["layers.2.o_proj"] = torch.zeros(64, 60)
    with pytest.raises(StartupError, match=r"layers\.2\.o_proj.*\[64, 60\].*\[64, 64\]"):
        build_decoder(checkpoint)


def test_weight_without_a_place_is_named() -> None:
    checkpoint = random_checkpoint(small_config())
    checkpoint.tensors["layers.0.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(StartupError, match=r"no place.*layers\.0\.q_proj\.bias"):
        build_decoder(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "'mamba' is not supported; supported: gemma3, llama"),
        ({"norm_placement": "post"}, "norm_placement 'post'"),
        ({"activation": "relu"}, "activation 'relu'"),
        ({"qk_norm": True}, "qk_norm True"),
        ({"num_kv_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"layer_windows": (8, None, 0)}, "sliding window 0 is less than one token"),
        ({"layer_windows": (None,)}, "layer_windows has 1 entries for 3 layers"),
        ({"extra": {"partial_rotary_factor": "0.5"}}, "partial_rotary_factor=0.5"),
    ],
)
def test_unsupported_setting_is_named(changes: dict[str, object], message: str) -> None:
    checkpoint = random_checkpoint(small_config())
    checkpoint.config = replace(checkpoint.config, **changes)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=message):
        build_decoder(checkpoint)


@pytest.mark.parametrize(("setting", "value"), [("dtype", "int4"), ("quantization", "awq")])
def test_unknown_dtype_or_quantization_is_named(setting: str, value: str) -> None:
    with pytest.raises(StartupError, match=f"{setting} '{value}' is not supported"):
        build_decoder(random_checkpoint(small_config()), **{setting: value})  # type: ignore[arg-type]
