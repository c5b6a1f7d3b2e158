"""Compiled kernels for the CPU, one op a file; `kernels.dispatch` calls `register_ops` before the first op there."""

from __future__ import annotations

import importlib

from kernels.cpu_ops.library import load_library
from kernels.dispatch import register, register_formats
from kernels.weights import register_dequantizer

_OPS = (
    "add_rms_norm",
    "argmax",
    "embedding",
    "gated_activation",
    "linear",
    "logits",
    "paged_attention",
    "qk_norm_rope_kv_write",
    "rms_norm",
    "sample",
)


def register_ops() -> None:
    """Register every op that the compiled library has; nothing, after one log line, where it cannot be built."""
    if load_library() is None:
        return
    from kernels.cpu_ops.pack_weight import pack_weight
    from kernels.cpu_ops.tile_formats import FORMAT_IDS, TILED_TYPES, dequantize_tiles

    for name in _OPS:
        module = importlib.import_module(f"kernels.cpu_ops.{name}")
        register(name, "cpu", getattr(module, name), module.accepts)
    register("pack_weight", "cpu", pack_weight)
    register_formats("cpu", [*TILED_TYPES, *FORMAT_IDS, "bf16", "f16"])
    for format_name in FORMAT_IDS:
        register_dequantizer(format_name, dequantize_tiles)
