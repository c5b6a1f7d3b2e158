"""Compile every Triton kernel for a GPU that need not be here: `python -m tests.support.compile_kernels 80 89 90`.

The launchers run as they are, on CPU tensors of Llama-3.1-8B's widths. Prints a line a launch.
"""

from __future__ import annotations

import sys

import torch
import triton

from kernels.sampling import SamplingTensors
from kernels.triton_ops.ahead_of_time import compile_only
from kernels.weights import QuantizedWeight
from tests.support.gguf_blocks import random_weight

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 128256


def compile_for(capability: int) -> int:
    """Compile all; returns how many launches were compiled. Raises what the compiler raises."""
    with compile_only(capability) as compiled:
        launch_all(shared_memory_is_large=capability in (80, 90))
    for kernel in compiled:
        print(
            f"sm_{capability} {kernel.metadata.name} shared={kernel.metadata.shared} warps={kernel.metadata.num_warps}"
        )
    return len(compiled)


def launch_all(shared_memory_is_large: bool) -> None:
    """Call every launcher once, and attention for each head size."""
    from kernels.triton_ops import (
        add_logit_bias,
        add_rms_norm,
        advance_slots,
        apply_penalties,
        argmax,
        decode_inputs,
        embedding,
        fused_linear,
        gated_activation,
        sample,
    )

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    row, norm = empty(1, HIDDEN), empty(HIDDEN, dtype=torch.float32)
    add_rms_norm.rms_norm(row, norm, 1e-5)
    add_rms_norm.add_rms_norm(row, row, norm, 1e-5)
    gated_activation.gated_activation(empty(2, 2 * FFN), "silu")
    gated_activation.gated_activation(empty(2, 2 * FFN), "gelu_tanh")
    ids = torch.zeros(2, dtype=torch.int32)
    embedding.embedding(ids, empty(VOCAB, 64))
    for rows in (1, 8, 16):
        x = empty(rows, HIDDEN)
        fused_linear.fused_linear(x, empty(6144, HIDDEN), None, norm, 1e-5)
        fused_linear.fused_linear(x, empty(HIDDEN, HIDDEN), residual=x)
        fused_linear.fused_linear(x, empty(2 * FFN, HIDDEN), None, norm, 1e-5, None, "silu")
        fused_linear.fused_linear(empty(rows, FFN), empty(HIDDEN, FFN), residual=x)
    logits = empty(2, VOCAB, dtype=torch.float32)
    argmax.argmax(logits)
    floats, longs = torch.ones(2), torch.ones(2, dtype=torch.int64)
    sample.sample(logits, longs, SamplingTensors(floats, ids, floats, floats, longs, longs))
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    apply_penalties.apply_penalties(logits, counts, counts.bool(), longs, floats, floats, floats)
    add_logit_bias.add_logit_bias(logits, longs, longs, floats)
    decode_inputs.decode_inputs(ids, ids, ids, torch.zeros(2, 32, dtype=torch.int32), 16, 16)
    for table in (counts, None):
        advance_slots.advance_slots(longs, longs, logits, longs, ids, ids, ids, table)
    for head_dim in (64, 80, 96, 128, 256):
        launch_attention(head_dim, shared_memory_is_large)
    for format_name in ("q4_k", "q5_0", "q6_k", "q8_0"):
        launch_quantized(format_name, shared_memory_is_large)


def launch_quantized(format_name: str, shared_memory_is_large: bool) -> None:
    """One row, 8 and 64 rows with and without gate, and plain rows, of a weight in planes."""
    from kernels.triton_ops.quantized_gemv import quantized_gemv
    from kernels.triton_ops.quantized_planes import pack_weight
    from kernels.triton_ops.quantized_product import quantized_product
    from kernels.triton_ops.quantized_rows import dequantize_rows
    from kernels.triton_ops.quantized_tuning import gemv_shape, product_tiling

    weight = pack_weight(random_weight(format_name, 128, 1024))
    assert isinstance(weight, QuantizedWeight)
    for rows, activation in ((1, ""), (1, "silu"), (8, ""), (64, "silu")):
        x = torch.empty(rows, 1024, dtype=torch.bfloat16)
        features = 64 if activation else 128
        out = torch.empty(rows, features, dtype=torch.bfloat16)
        sizes = (features, 1024, weight.format, bool(activation))
        if rows == 1:
            quantized_gemv(x, weight, out, None, 0.0, None, None, activation, *gemv_shape(*sizes))
        else:
            tiling = product_tiling(rows, *sizes, shared_memory_is_large)
            quantized_product(x, weight, out, None, None, activation, tiling)
    dequantize_rows(weight, torch.empty(128, 1024, dtype=torch.bfloat16))


def launch_attention(head_dim: int, shared_memory_is_large: bool) -> None:
    """Decode with and without rotation, prefill, with and without window, and the rotation kernel."""
    from kernels.triton_ops.decode_attention import Rotation, decode_attention
    from kernels.triton_ops.prefill_attention import prefill_attention, tile_shape
    from kernels.triton_ops.qk_norm_rope_kv_write import qk_norm_rope_kv_split, qk_norm_rope_kv_write

    pool = torch.empty(4, 2, 2, KV_HEADS, 16, head_dim, dtype=torch.bfloat16)
    caches = (pool[:, 0, 0], pool[:, 0, 1], torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    qkv = torch.empty(2, (HEADS + 2 * KV_HEADS) * head_dim, dtype=torch.bfloat16)
    table = torch.empty(64, head_dim)
    positions, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    q = qk_norm_rope_kv_write(
        qkv, None, None, 1e-5, table, positions, caches[0], caches[1], slots, HEADS, KV_HEADS, head_dim
    )
    norm = torch.empty(head_dim)
    qk_norm_rope_kv_write(
        qkv, norm, norm, 1e-5, table, positions, caches[0], caches[1], slots, HEADS, KV_HEADS, head_dim
    )
    qk_norm_rope_kv_split(
        qkv, None, None, 1e-5, table, positions, caches[0], caches[1], slots, HEADS, KV_HEADS, head_dim, 2, 128
    )
    rotation = Rotation(None, None, 1e-5, table, positions, slots)
    for context in (128, 4096):
        decode_attention(qkv, *caches, HEADS, 0.1, None, None, context, rotation, early_loads=True)
    decode_attention(q, *caches, HEADS, 0.1, 32, 30.0, 128)
    cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
    for max_query_len in (16, 128, 2048):
        tile = tile_shape(head_dim, max_query_len, shared_memory_is_large)
        prefill_attention(q, *caches, cu_seqlens, 0.1, None, None, 1, tile)
        prefill_attention(q, *caches, cu_seqlens, 0.1, 32, None, 1, tile)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"sm_{argument}: {compile_for(int(argument))} launches compiled with triton {triton.__version__}")
