"""A tiny llama folder whose projections are stored as a quantiser publishes them, with the values they stand for.

Packed nibble by nibble in plain loops, after the formats' own packing code: independent of the vectorised reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import tiny_model

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq_v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "checkpoint_format": "gptq_v2",
        "meta": {"quantizer": ["gptqmodel:4"]},
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, "strategy": "group"},
            }
        },
        "ignore": ["lm_head"],
    },
    "fp8_channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            }
        },
        "ignore": ["lm_head"],
    },
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8_block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def _words(columns: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """uint8 [n, 8·k] → int32 [n, k]; nibble i of a word is column order[i] of its eight."""
    words = np.zeros((columns.shape[0], columns.shape[1] // 8), dtype=np.uint32)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            for nibble, column in enumerate(order):
                words[row, word] |= np.uint32(columns[row, word * 8 + column]) << np.uint32(4 * nibble)
    return words.view(np.int32)


def _packed_int4(kind: str, base: str, shape: tuple[int, int], draw: np.random.Generator) -> tuple[dict, torch.Tensor]:
    out, columns = shape
    groups = columns // GROUP
    values = draw.integers(0, 16, size=shape, dtype=np.uint8)
    scales = draw.uniform(0.01, 0.03, size=(out, groups)).astype(np.float16)
    low = 1 if kind == "gptq" else 0
    zeros = draw.integers(low, 16, size=(out, groups)).astype(np.uint8)
    straight = tuple(range(8))
    if kind in ("gptq_v2", "int4"):
        zeros[:] = 8
    wide_scales, wide_zeros = (np.repeat(part.astype(np.float32), GROUP, axis=1) for part in (scales, zeros))
    meaning = torch.from_numpy(wide_scales * (values.astype(np.float32) - wide_zeros))
    if kind == "int4":
        parts = {
            "weight_packed": _words(values, straight),
            "weight_scale": scales,
            "weight_shape": np.array(shape, dtype=np.int64),
        }
    elif kind == "awq":
        parts = {"qweight": _words(values.T, _AWQ_ORDER), "qzeros": _words(zeros.T, _AWQ_ORDER), "scales": scales.T}
    else:
        parts = {
            "qweight": np.ascontiguousarray(_words(values, straight).T),
            "qzeros": _words(zeros.T - (1 if kind == "gptq" else 0), straight),
            "scales": scales.T,
            "g_idx": (np.arange(columns) // GROUP).astype(np.int32),
        }
    return {base + name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}, meaning


def _packed_fp8(kind: str, base: str, shape: tuple[int, int], draw: np.random.Generator) -> tuple[dict, torch.Tensor]:
    stored = torch.from_numpy(draw.normal(size=shape).astype(np.float32) * 40).to(torch.float8_e4m3fn)
    if kind == "fp8_tensor":
        scale = torch.tensor(0.003)
        parts = {"weight_scale": scale, "input_scale": torch.tensor(0.5)}
    elif kind == "fp8_channel":
        scale = torch.from_numpy(draw.uniform(0.001, 0.003, size=(shape[0], 1)).astype(np.float32)).bfloat16()
        parts = {"weight_scale": scale}
    else:
        blocks = tuple(-(-size // 128) for size in shape)
        per_block = torch.from_numpy(draw.uniform(0.001, 0.003, size=blocks).astype(np.float32))
        scale = per_block.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
        parts = {"weight_scale_inv": per_block}
    meaning = (stored.float() * scale.float()).bfloat16().float()
    return {f"{base}weight": stored} | {base + name: part for name, part in parts.items()}, meaning


def write_packed(kind: str, folder: Path, seed: int = 1, **config: Any) -> dict[str, torch.Tensor]:
    """Write the checkpoint (`kind`: a key of CONFIGS; `config` overrides its settings).

    Returns float32 values by stored name: what the plain checkpoint of the same model would hold.
    """
    model = tiny_model("llama", seed=seed, hidden_size=192, intermediate_size=160)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    draw = np.random.default_rng(seed)
    stored, meaning = {}, dict(state)
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        pack = _packed_fp8 if kind.startswith("fp8") else _packed_int4
        parts, meaning[name] = pack(kind, name.removesuffix("weight"), tuple(value.shape), draw)
        stored |= parts
    save_file(stored, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = CONFIGS[kind] | config
    (folder / "config.json").write_text(json.dumps(settings))
    return meaning
