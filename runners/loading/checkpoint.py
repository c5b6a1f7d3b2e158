"""`open_checkpoint`: a GGUF file or a safetensors folder as canonical, shape-checked weights.

Canonical names: `embed_tokens`, `lm_head` (absent when tied), `norm`, and per layer `layers.{i}.` + `input_norm`,
`q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`, `post_attention_norm`, `pre_ffn_norm`, `post_ffn_norm`,
`gate_proj`, `up_proj`, `down_proj`; biases carry the suffix `.bias`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runners.errors import StartupError
from runners.loading.ggml_types import GGMLType
from runners.loading.gguf_config import ROPE_FACTORS, config_from_gguf
from runners.loading.gguf_dequant import DECODERS
from runners.loading.gguf_reader import GGUFFile, open_gguf
from runners.loading.hf_config import config_from_folder
from runners.loading.model_files import locate_model
from runners.loading.name_maps import HfNames, Shape, expected_shapes, gguf_name
from runners.loading.packed_safetensors import PackedSafetensors
from runners.loading.quantized_layout import layout_from_folder
from runners.loading.raw_tensor import RawTensor
from runners.loading.safetensors_reader import SafetensorsModel, open_safetensors
from runners.models.config import ModelConfig

logger = logging.getLogger(__name__)

# Q4_1 is what packed 4-bit groups are read as (`packed_safetensors`).
_SAFETENSORS_TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16, "Q4_1": GGMLType.Q4_1}


class _Source(Protocol):
    """What both file formats offer to `Checkpoint`."""

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]: ...

    def tensor_path(self, name: str) -> Path: ...


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A weight's name, shape [out, in] and type in its file."""

    name: str
    shape: Shape
    ggml_type: GGMLType


class Checkpoint:
    """Weights under canonical names, HF orientation [out, in], half-split RoPE layout; nothing is read before `get`.

    `config` is the model's architecture, `path` the file or folder it came from.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        source: _Source,
        stored: Mapping[str, _StoredTensor],
        *,
        interleaved_rope: bool,
        add_one_to_norms: bool,
    ) -> None:
        """`stored` maps canonical names; use `open_checkpoint`."""
        self.path = path
        self.config = config
        self._source = source
        self._stored = stored
        self._interleaved_rope = interleaved_rope
        self._add_one_to_norms = add_one_to_norms

    def names(self) -> list[str]:
        """Canonical names present: exactly those that `config` calls for."""
        return list(self._stored)

    def get(self, name: str) -> RawTensor:
        """The weight `name`. Raises KeyError for an unknown name.

        Matrices come as stored. Vectors (norms, biases) are small and come as F32, norms with gemma's +1 included.
        """
        stored = self._stored[name]
        row_order = self._row_order(name, stored.shape[0])
        raw = RawTensor(name, stored.shape, stored.ggml_type, self._source.tensor_bytes(stored.name), row_order)
        if len(stored.shape) == 2:
            return raw
        values = RawTensor(name, stored.shape, stored.ggml_type, raw.rows).dequantize(torch.float32).numpy()
        if row_order is not None:
            values = values[row_order]
        if self._add_one_to_norms and name.endswith("norm"):
            values = values + np.float32(1)
        return RawTensor(name, stored.shape, GGMLType.F32, values.view(np.uint8).reshape(1, -1))

    def _row_order(self, name: str, rows: int) -> NDArray[np.int64] | None:
        """Gather that undoes the q and k permutation of llama GGUFs.

        Their converter interleaves the two halves of every head, [heads, 2, D/2] → [heads, D/2, 2], because llama.cpp
        rotates neighbouring pairs there. Whole rows move, so quantised blocks along a row stay whole.
        """
        if not self._interleaved_rope or name.removesuffix(".bias").rpartition(".")[2] not in ("q_proj", "k_proj"):
            return None
        order = np.arange(rows, dtype=np.int64).reshape(-1, self.config.head_dim // 2, 2)
        return order.swapaxes(1, 2).reshape(-1)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file (any shard of a split one) or a folder with safetensors or one GGUF model.

    Only headers are read. Raises StartupError, one line: which file, where, why; also for a missing or unexpected
    tensor, a wrong shape, or a type that cannot be decoded.
    """
    located = locate_model(path)
    return _from_folder(located) if located.is_dir() else _from_gguf(open_gguf(located))


def _from_gguf(gguf: GGUFFile) -> Checkpoint:
    config = config_from_gguf(gguf)
    available = {info.name: _StoredTensor(info.name, info.shape, info.ggml_type) for info in gguf.tensors.values()}
    # Already part of the config, as RoPE factors.
    available.pop(ROPE_FACTORS, None)
    wanted = {name: gguf_name(name) for name in expected_shapes(config)}
    stored = _match(gguf.path, gguf, config, wanted, available)
    return Checkpoint(
        gguf.path, config, gguf, stored, interleaved_rope=config.architecture == "llama", add_one_to_norms=False
    )


def _from_folder(folder: Path) -> Checkpoint:
    config = config_from_folder(folder)
    layout = layout_from_folder(folder)
    stored_model = open_safetensors(folder)
    model = stored_model if layout is None else PackedSafetensors(stored_model, layout)
    if layout is not None and layout.method == "fp8":
        logger.info("%s: fp8 weights are read as bfloat16", folder)
    names = HfNames(config, model.tensors, str(folder))
    vision = {name for name in model.tensors if config.architecture == "gemma3" and names.is_vision(name)}
    if vision:
        logger.warning("%s: the vision part (%d tensors) is not loaded, text only", folder, len(vision))
    wanted = {name: names.stored_name(name) for name in expected_shapes(config)}
    skipped = {name for name in model.tensors if names.has_no_effect(name, tied=config.tie_word_embeddings)} | vision
    available = _typed(model, skipped)
    stored = _match(folder, model, config, wanted, available)
    return Checkpoint(folder, config, model, stored, interleaved_rope=False, add_one_to_norms=config.norm_plus_one)


def _typed(model: SafetensorsModel | PackedSafetensors, skipped: set[str]) -> dict[str, _StoredTensor]:
    available = {}
    for name, info in model.tensors.items():
        if name in skipped:
            continue
        if info.dtype not in _SAFETENSORS_TYPES:
            known = "F32, F16, BF16"
            raise StartupError(
                f"{model.tensor_path(name)}: tensor {name!r} has dtype {info.dtype} (supported: {known})"
            )
        available[name] = _StoredTensor(name, info.shape, _SAFETENSORS_TYPES[info.dtype])
    return available


def _match(
    path: Path,
    source: _Source,
    config: ModelConfig,
    wanted: Mapping[str, str],
    available: Mapping[str, _StoredTensor],
) -> dict[str, _StoredTensor]:
    """Stored tensors by canonical name: all there, none too many, every shape and type right."""
    matched = {}
    for canonical, shape in expected_shapes(config).items():
        stored = available.get(wanted[canonical])
        if stored is None:
            raise StartupError(f"{path}: tensor {wanted[canonical]!r} is missing")
        if stored.shape != shape:
            raise StartupError(
                f"{source.tensor_path(stored.name)}: tensor {stored.name!r} has shape {list(stored.shape)}, "
                f"the config asks for {list(shape)}"
            )
        if stored.ggml_type not in DECODERS:
            raise StartupError(
                f"{source.tensor_path(stored.name)}: tensor {stored.name!r} has type {stored.ggml_type.name}, "
                "which is not supported"
            )
        matched[canonical] = stored
    unexpected = sorted(available.keys() - set(wanted.values()))
    if unexpected:
        more = f" ({len(unexpected) - 1} more like it)" if len(unexpected) > 1 else ""
        raise StartupError(
            f"{source.tensor_path(unexpected[0])}: tensor {unexpected[0]!r} does not belong to a "
            f"{config.architecture} model{more}"
        )
    return matched
