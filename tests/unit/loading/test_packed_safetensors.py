"""GPTQ, AWQ, compressed-tensors and fp8 checkpoints as published, against the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runners.errors import StartupError
from runners.loading.checkpoint import open_checkpoint
from runners.loading.ggml_types import GGMLType
from runners.models.builder import build_decoder
from tests.support.forward import logits_in_pieces
from tests.support.packed_checkpoints import CONFIGS, write_packed

PROJECTIONS = {"q_proj": "self_attn", "o_proj": "self_attn", "gate_proj": "mlp", "down_proj": "mlp"}


@pytest.mark.parametrize("kind", CONFIGS)
def test_values(tmp_path: Path, kind: str) -> None:
    meaning = write_packed(kind, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name, part in PROJECTIONS.items():
        raw = checkpoint.get(f"layers.1.{name}")
        expected = meaning[f"model.layers.1.{part}.{name}.weight"]
        values = raw.dequantize(torch.float32)
        # A minimum of up to 16 scales is rounded to float16: half a unit in the last place of 11 bits.
        tolerance = 0.0 if kind.startswith(("fp8", "int4", "gptq_v2")) else 16 * 0.03 * 2**-11
        assert (values - expected).abs().max() <= tolerance
        assert raw.ggml_type is (GGMLType.BF16 if kind.startswith("fp8") else GGMLType.Q4_1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_decoder_runs_on_them(tmp_path: Path, kind: str) -> None:
    meaning = write_packed(kind, tmp_path / "packed")
    write_plain(tmp_path / "packed", tmp_path / "plain", meaning)
    packed, plain = (
        build_decoder(open_checkpoint(tmp_path / folder), quantization="none") for folder in ("packed", "plain")
    )
    ids = [5, 17, 99, 3, 42]
    close = logits_in_pieces(packed, ids, [5]), logits_in_pieces(plain, ids, [5])
    assert (close[0] - close[1]).norm() / close[1].norm() < (5e-3 if kind in ("gptq", "awq") else 1e-5)
    native = logits_in_pieces(build_decoder(open_checkpoint(tmp_path / "packed")), ids, [5])
    assert (native - close[1]).norm() / close[1].norm() < 3e-2


def write_plain(packed: Path, folder: Path, meaning: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(meaning, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((packed / "config.json").read_text())
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("gptq", {"bits": 8}, "bits"),
        ("gptq", {"group_size": 48}, "multiple of 32"),
        ("gptq", {"group_size": 64}, "groups of 64"),
        ("gptq", {"new_setting": 3}, "new_setting"),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"quant_method": "hqq"}, "hqq"),
        ("int4", {"format": "marlin-24"}, "marlin-24"),
        ("fp8_tensor", {"fmt": "e5m2"}, "e5m2"),
    ],
)
def test_settings_that_are_not_read_are_named(tmp_path: Path, kind: str, config: dict[str, Any], words: str) -> None:
    write_packed(kind, tmp_path, **config)
    with pytest.raises(StartupError, match=words) as refusal:
        open_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name)
    save_file(tensors if value is None else tensors | {name: value}, file)


def test_act_order_is_refused_when_columns_are_permuted(tmp_path: Path) -> None:
    write_packed("gptq", tmp_path, desc_act=True)
    name = "model.layers.0.mlp.down_proj.g_idx"
    open_checkpoint(tmp_path).get("layers.0.down_proj")
    change(tmp_path, name, torch.arange(160, dtype=torch.int32).flip(0) // 32)
    with pytest.raises(StartupError, match="act-order"):
        open_checkpoint(tmp_path).get("layers.0.down_proj")


@pytest.mark.parametrize(
    ("kind", "part", "value", "words"),
    [
        ("gptq", "qzeros", None, "missing"),
        ("gptq", "scales", torch.zeros(5, 7, dtype=torch.float16), "fit groups"),
        ("awq", "qzeros", torch.zeros(6, 3, dtype=torch.int32), "qzeros"),
        ("int4", "weight_scale", torch.zeros(192, dtype=torch.float16), "no matrices"),
        ("fp8_tensor", "weight_scale", None, "weight_scale"),
        ("fp8_channel", "weight_scale", torch.zeros(3, 1), "no known form"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, kind: str, part: str, value: torch.Tensor | None, words: str
) -> None:
    write_packed(kind, tmp_path)
    change(tmp_path, f"model.layers.0.self_attn.q_proj.{part}", value)
    with pytest.raises(StartupError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("qweight", torch.zeros(24, 192), "float32|F32"),
        ("scales", torch.full((6, 192), 1e6), "range"),
        ("scales", torch.full((6, 192), torch.nan), "range"),
    ],
)
def test_contents_that_cannot_be_read_are_named(tmp_path: Path, part: str, value: torch.Tensor, words: str) -> None:
    write_packed("gptq", tmp_path)
    change(tmp_path, f"model.layers.0.self_attn.q_proj.{part}", value)
    with pytest.raises(StartupError, match=words):
        open_checkpoint(tmp_path).get("layers.0.q_proj")
