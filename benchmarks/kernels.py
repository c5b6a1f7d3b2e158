"""Time of each kernel on the shapes of Llama-3.1-8B: `python -m benchmarks.kernels [--tune-attention]`.

One line a case: microseconds, bytes or FLOPs over that time, and the fraction of the ceiling measured on the H200
(4.41 TB/s read, 790 TFLOP/s). Small kernels are bound by their launch, not by bytes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.decode_probe import BLOCK_TOKENS, EPS, FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB
from benchmarks.device_timing import PRODUCT_CEILING_FLOP_S, READ_CEILING_BYTES_S, seconds_per_call
from benchmarks.tune_linear import SHAPES
from kernels.sampling import SamplingTensors
from kernels.triton_ops.add_rms_norm import add_rms_norm
from kernels.triton_ops.argmax import argmax
from kernels.triton_ops.decode_attention import DecodeTiling, Rotation, decode_attention
from kernels.triton_ops.embedding import embedding
from kernels.triton_ops.fused_linear import fused_linear
from kernels.triton_ops.gated_activation import gated_activation
from kernels.triton_ops.prefill_attention import prefill_attention
from kernels.triton_ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from kernels.triton_ops.sample import sample

LAYERS = 32
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda").normal_(std=0.02)


def report(name: str, calls: Sequence[Callable[[], object]], num_bytes: float = 0, flops: float = 0) -> float:
    seconds = seconds_per_call(calls)
    text = f"{name:44s} {seconds * 1e6:9.2f} us"
    if num_bytes:
        text += f" {num_bytes / seconds / 1e12:6.2f} TB/s ({num_bytes / seconds / READ_CEILING_BYTES_S:.2f})"
    if flops:
        text += f" {flops / seconds / 1e12:7.1f} TFLOP/s ({flops / seconds / PRODUCT_CEILING_FLOP_S:.2f})"
    print(text, flush=True)
    return seconds


def small_kernels() -> None:
    norm = torch.ones(HIDDEN, device="cuda")
    for rows in (1, 8, 64, 2000):
        x, residual = normal(rows, HIDDEN), normal(rows, HIDDEN)
        report(f"add_rms_norm {rows}", [partial(add_rms_norm, x, residual, norm, EPS)] * 32, 4 * x.nbytes)
        gate_up = normal(rows, 2 * FFN)
        report(f"gated_activation {rows}", [partial(gated_activation, gate_up, "silu")] * 32, 1.5 * gate_up.nbytes)
    weight, ids = normal(VOCAB, HIDDEN), torch.randint(0, VOCAB, (2000,), dtype=torch.int32, device="cuda")
    report("embedding 2000", [partial(embedding, ids, weight)] * 8, 2 * 2000 * HIDDEN * 2)
    for rows in (64, 2000):
        pool, _, _ = pool_of(1, rows, 1)
        slots = torch.arange(rows, device="cuda")
        positions = torch.arange(rows, dtype=torch.int32, device="cuda")
        qkv, table = normal(rows, QKV), normal(4096, HEAD_DIM, dtype=torch.float32)
        arguments = (
            qkv,
            None,
            None,
            EPS,
            table,
            positions,
            pool[:, 0, 0],
            pool[:, 0, 1],
            slots,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
        )
        report(f"qk_norm_rope_kv_write {rows}", [partial(qk_norm_rope_kv_write, *arguments)] * 32, 2 * qkv.nbytes)


def linears() -> None:
    for name, rows in itertools.product(SHAPES, (1, 8, 16, 64)):
        features, in_features, gated, has_norm, has_residual = SHAPES[name]
        stored = 2 * features if gated else features
        weights = [normal(stored, in_features) for _ in range(max(1, round(5e8 / (stored * in_features * 2))))]
        x, norm = normal(rows, in_features), torch.ones(in_features, device="cuda")
        residual = normal(rows, features) if has_residual else None
        call = partial(
            fused_linear, x, norm_weight=norm if has_norm else None, eps=EPS, residual=residual,
            activation="silu" if gated else "", out_dtype=torch.float32 if name == "lm_head" else None,
        )  # fmt: skip
        report(f"fused_linear {name} {rows}", [partial(call, weight=weight) for weight in weights], weights[0].nbytes)


def pool_of(sequences: int, context: int, layers: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks_each = -(-context // BLOCK_TOKENS)
    pool = normal(sequences * blocks_each, layers, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    tables = torch.randperm(sequences * blocks_each, device="cuda").to(torch.int32).view(sequences, blocks_each)
    return pool, tables, torch.full((sequences,), context, dtype=torch.int32, device="cuda")


def decode_calls(
    width: int, context: int, tiling: DecodeTiling | None = None
) -> tuple[list[Callable[[], object]], float]:
    pool, tables, lens = pool_of(width, context, LAYERS)
    last = context - 1
    slots = tables[:, last // BLOCK_TOKENS].long() * BLOCK_TOKENS + last % BLOCK_TOKENS
    rotation = Rotation(None, None, EPS, normal(4096, HEAD_DIM, dtype=torch.float32), lens - 1, slots)
    qkv = normal(width, QKV)
    calls = [
        partial(
            decode_attention, qkv, pool[:, layer, 0], pool[:, layer, 1], tables, lens, HEADS, HEAD_DIM**-0.5, None,
            None, context, rotation, tiling, True,
        )
        for layer in range(LAYERS)
    ]  # fmt: skip
    return calls, width * context * 2 * KV_HEADS * HEAD_DIM * 2


def prefill_calls(sequences: int, length: int, history: int = 0, tile: tuple | None = None) -> tuple[list, float]:
    pool, tables, lens = pool_of(sequences, length + history, LAYERS)
    q = normal(sequences * length, HEADS, HEAD_DIM)
    cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
    calls = [
        partial(
            prefill_attention, q, pool[:, layer, 0], pool[:, layer, 1], tables, lens, cu_seqlens, HEAD_DIM**-0.5, None,
            None, length, tile,
        )
        for layer in range(LAYERS)
    ]  # fmt: skip
    return calls, sequences * (length * history + length * (length + 1) / 2) * 4 * HEADS * HEAD_DIM


def attention() -> None:
    for width, context in itertools.product((1, 8, 64), (190, 2064)):
        calls, num_bytes = decode_calls(width, context)
        report(f"decode_attention {width} x {context}", calls, num_bytes)
    for sequences, length, history in ((1, 2000, 0), (8, 2000, 0), (64, 128, 0), (64, 23, 0), (1, 1024, 7000)):
        calls, flops = prefill_calls(sequences, length, history)
        seconds = report(f"prefill_attention {sequences} x {length} after {history}", calls, flops=flops)
        print(f"    {seconds * LAYERS * 1e3:.2f} ms over {LAYERS} layers")


def sampling() -> None:
    for rows in (1, 64):
        logits = [normal(rows, VOCAB, dtype=torch.float32) * 100 for _ in range(4)]
        report(f"argmax {rows}", [partial(argmax, one) for one in logits], logits[0].nbytes)
        ones, ids = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
        for name, top_k, top_p in (("plain", 0, 1.0), ("top_p 0.9", 0, 0.9), ("top_k 50 top_p 0.9", 50, 0.9)):
            params = SamplingTensors(
                ones * 0.7, (ids * 0 + top_k).int(), ones * top_p, ones * 0, ids, ids + 100, top_k > 0, top_p < 1, False
            )
            calls = [partial(sample, one, argmax(one), params) for one in logits]
            report(f"sample {name} {rows}", calls, logits[0].nbytes)


def tune_attention() -> None:
    for width, context in itertools.product((1, 8, 64), (190, 2064)):
        results = []
        splits = (1, 2, 4) if context == 190 else (1, 2, 4, 8, 16, 32) if width < 64 else (1, 2, 3, 4)
        tiles = (
            (32, 4, 4),
            (32, 6, 4),
            (64, 3, 4),
            (64, 4, 4),
            (64, 5, 4),
            (128, 3, 4),
            (128, 4, 8),
            (32, 5, 2),
            (64, 4, 8),
        )
        for (block_n, stages, num_warps), num_splits in itertools.product(tiles, splits):
            try:
                tiling = DecodeTiling(block_n, stages, num_warps, num_splits)
                calls, num_bytes = decode_calls(width, context, tiling)
                results.append((seconds_per_call(calls, 4), str(tiling)))
            except Exception as error:  # Triton's compiler and driver raise many kinds; try the next
                print(f"decode {block_n} {stages} {num_warps}: {type(error).__name__}")
        for seconds, text in sorted(results)[:5]:
            print(f"decode {width} x {context}: {seconds * 1e6:.2f} us {num_bytes / seconds / 1e12:.2f} TB/s", text)
    for sequences, length in ((1, 2000), (64, 23), (64, 128)):
        results = []
        tiles = ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 4))
        for tile in (*tiles, (64, 128, 4, 3), (64, 32, 4, 4), (128, 128, 8, 2), (64, 64, 4, 4)):
            try:
                calls, flops = prefill_calls(sequences, length, 0, tile)
                results.append((seconds_per_call(calls, 4), tile))
            except Exception as error:  # Triton's compiler and driver raise many kinds; try the next
                print(f"prefill {tile}: {type(error).__name__}")
        for seconds, tile in sorted(results)[:5]:
            print(
                f"prefill {sequences}x{length}: {seconds * 32e3:.2f} ms / 32 layers {flops / seconds / 1e12:.0f} TF/s",
                tile,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune-attention", action="store_true")
    parser.add_argument("--only", default="small_kernels,linears,attention,sampling")
    arguments = parser.parse_args()
    if arguments.tune_attention:
        tune_attention()
        return
    groups = {function.__name__: function for function in (small_kernels, linears, attention, sampling)}
    for name in arguments.only.split(","):
        groups[name]()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
