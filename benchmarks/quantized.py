"""Quantised weights on a GPU: products by shape, the decode step, a prefill: `python -m benchmarks.quantized`.

Random blocks of Llama-3.1-8B's shape in the mixtures that llama.cpp writes (Q4_K_M: half of the v and down projections
and the head are Q6_K), against bf16 in the same call. --tune tries tilings; --check compares with the decoded blocks.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.decode_probe import BLOCK_TOKENS, DecodeState, decode_state
from benchmarks.device_timing import READ_CEILING_BYTES_S, graph_of, replay_seconds, seconds_per_call
from benchmarks.model_shapes import SHAPES, RandomCheckpoint, llama_shapes
from kernels import ops
from kernels.triton_ops.quantized_gemv import quantized_gemv
from kernels.triton_ops.quantized_linear import quantized_fused_linear
from kernels.triton_ops.quantized_planes import FORMATS, pack_weight
from kernels.triton_ops.quantized_product import QuantizedTiling, quantized_product
from kernels.weights import QuantizedWeight
from runners.execution.input_batch import ForwardBatch
from runners.loading.ggml_types import GGMLType
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.models.fused_forward import choose_forward

CONFIG = SHAPES["llama-3.1-8b"]
# Where a block's float16 scales and minima lie, in bytes.
_SCALES = {
    "q6_k": (208,),
    **{name: (0, 2) if FORMATS[name].has_minimum else (0,) for name in FORMATS if name != "q6_k"},
}
SHAPES_8B = {  # out (of gate and up together), in, gated
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate/up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
# Bytes of weights that a chain of calls rotates over: several times the L2.
ROTATED_BYTES = 400e6


def random_blocks(name: str, out: int, columns: int, seed: int = 0) -> torch.Tensor:
    """uint8 [out, row_bytes] on the GPU: any bits, scales for values of about columns ** -0.5."""
    kind = GGMLType[name.upper()]
    generator = torch.Generator("cuda").manual_seed(seed)
    blocks = torch.randint(
        0,
        256,
        (out, columns // kind.block_elements, kind.block_bytes),
        dtype=torch.uint8,
        device="cuda",
        generator=generator,
    )
    spec = FORMATS[name]
    largest = (1 << spec.bits - 1) * (32 if spec.is_nested else 1)
    for offset in _SCALES[name]:
        scales = torch.rand(blocks.shape[:2], device="cuda", generator=generator).add_(0.2) * (columns**-0.5 / largest)
        blocks[..., offset : offset + 2] = scales.half()[..., None].view(torch.uint8)
    return blocks.view(out, -1)


def packed(name: str, out: int, columns: int, seed: int = 0) -> QuantizedWeight:
    blocks = QuantizedWeight(name, (out, columns), {"blocks": random_blocks(name, out, columns, seed)})
    planes = pack_weight(blocks)
    assert isinstance(planes, QuantizedWeight)
    return planes


@dataclass(frozen=True)
class BlockWeight:
    """A stored weight of random blocks, as a checkpoint would give it."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    seed: int

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.ggml_type.row_bytes(self.shape[1])

    def block_bytes(self) -> torch.Tensor:
        return random_blocks(self.ggml_type.name.lower(), *self.shape, seed=self.seed)

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        raise ValueError("blocks stay as they are")


class QuantizedCheckpoint(RandomCheckpoint):
    """The 8B shape as `mixture` ("q4_k_m" or a type for all matrices); norms are plain."""

    def __init__(self, mixture: str) -> None:
        super().__init__(CONFIG)
        self._mixture = mixture

    def get(self, name: str) -> object:
        shape = llama_shapes(CONFIG)[name]
        if len(shape) == 1:
            return super().get(name)
        return BlockWeight(name, shape, GGMLType[self._type(name).upper()], seed=hash(name) % 1000)

    def _type(self, name: str) -> str:
        if self._mixture != "q4_k_m":
            return self._mixture
        if name == "lm_head":
            return "q6_k"
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        layers = CONFIG.num_layers
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        return "q6_k" if name.endswith(("v_proj", "down_proj")) and more else "q4_k"


def decode_batch(state: DecodeState) -> ForwardBatch:
    width = len(state.input_ids)
    return ForwardBatch(
        input_ids=state.input_ids,
        position_ids=state.position_ids,
        slot_mapping=state.slot_mapping,
        block_tables=state.block_tables,
        context_lens=state.context_lens,
        cu_seqlens_q=torch.arange(width + 1, dtype=torch.int32, device="cuda"),
        num_decode_rows=width,
        max_query_len=1,
        max_context_len=state.context,
    )


def prefill_batch(tokens: int) -> tuple[ForwardBatch, DecodeState]:
    """One prompt of `tokens`, alone."""
    state = decode_state(1, tokens, CONFIG.num_layers)
    position = torch.arange(tokens, dtype=torch.int32, device="cuda")
    slots = state.block_tables[0, position.long() // BLOCK_TOKENS].long() * BLOCK_TOKENS + position % BLOCK_TOKENS
    batch = ForwardBatch(
        input_ids=torch.randint(0, CONFIG.vocab_size, (tokens,), dtype=torch.int32, device="cuda"),
        position_ids=position,
        slot_mapping=slots,
        block_tables=state.block_tables,
        context_lens=state.context_lens,
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        num_decode_rows=0,
        max_query_len=tokens,
        max_context_len=tokens,
    )
    return batch, state


def measure_model(name: str, decoder: Decoder, prefill_tokens: int = 2000) -> None:
    """Decode steps at 1, 8 and 64 rows × 190 tokens and one prefill, each a captured graph."""
    forward = choose_forward(decoder)

    def step_seconds(batch: ForwardBatch, state: DecodeState, last_only: bool, replays: int) -> float:
        caches = [(state.pool[:, layer, 0], state.pool[:, layer, 1]) for layer in range(CONFIG.num_layers)]

        def step() -> None:
            hidden = forward.hidden(batch, caches)
            batch.input_ids[-1:].copy_(ops.argmax(forward.logits(hidden[-1:] if last_only else hidden))[-1:])

        return replay_seconds(graph_of([step]), replays)

    parts = [
        f"{name}: {decoder.weight_bytes / 1e9:.2f} GB, bound {1e3 * decoder.weight_bytes / READ_CEILING_BYTES_S:.2f} ms"
    ]
    for width in (1, 8, 64):
        state = decode_state(width, 190, CONFIG.num_layers)
        parts.append(f"{width} rows {1e3 * step_seconds(decode_batch(state), state, False, 20):.3f} ms")
    batch, state = prefill_batch(prefill_tokens)
    parts.append(f"prefill of {prefill_tokens} {1e3 * step_seconds(batch, state, True, 5):.1f} ms")
    print("; ".join(parts), flush=True)


def check(name: str) -> str:
    """Relative errors of a type's products against its decoded blocks on the same activations."""
    blocks = QuantizedWeight(name, (2048, 4096), {"blocks": random_blocks(name, 2048, 4096)})
    planes, exact = pack_weight(blocks), blocks.dequantize(torch.float32)
    assert isinstance(planes, QuantizedWeight)
    errors = []
    for rows in (1, 2, 8, 33, 64, 100):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ exact.double().T
        actual = quantized_fused_linear(x, planes, out_dtype=torch.float32).double()
        errors.append(f"{rows}: {((actual - expected).norm() / expected.norm()).item():.1e}")
    ids = torch.tensor([5, 2047], dtype=torch.int32, device="cuda")
    rows_error = (ops.embedding(ids, planes, 1.0, torch.float32) - exact[ids.long()]).norm() / exact[ids.long()].norm()
    return (
        f"check {name}: {', '.join(errors)}; rows {rows_error.item():.1e}; bytes × {planes.nbytes / blocks.nbytes:.3f}"
    )


# (weight rows a program, bytes a step, warps)
GEMV_SHAPES = [(2, 2048, 4), (4, 2048, 4), (8, 2048, 4), (16, 2048, 8), (8, 1024, 4), (16, 1024, 4), (8, 1024, 2)]
TILINGS = [
    QuantizedTiling(block_n, block_bytes, split_k, stages, warps)
    for block_n, warps in ((64, 4), (128, 8))
    for block_bytes, stages in ((64, 4), (128, 3), (128, 2))
    for split_k in (1, 2, 4)
]


def variants(name: str, shape: str, rows: int) -> Iterable[tuple[str, Callable[[QuantizedWeight], object]]]:
    """(label, call on a weight) of every tiling to try."""
    out, columns, gated = SHAPES_8B[shape]
    features = out // 2 if gated else out
    activation = "silu" if gated else ""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    target = torch.empty(rows, features, device="cuda", dtype=torch.float32 if shape == "head" else torch.bfloat16)
    norm = torch.ones(columns, device="cuda") if shape in ("qkv", "gate/up", "head") else None
    residual = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16) if shape in ("o", "down") else None
    if rows == 1:
        for tile in GEMV_SHAPES:
            yield (
                str(tile),
                lambda w, tile=tile: quantized_gemv(x, w, target, norm, 1e-5, None, residual, activation, *tile),
            )
        return
    for tiling in TILINGS:
        if (tiling.split_k > 1 and (gated or shape == "head")) or (rows == 64 and tiling.block_bytes == 256):
            continue
        label = str((tiling.block_n, tiling.block_bytes, tiling.split_k, tiling.stages, tiling.num_warps))
        yield label, lambda w, tiling=tiling: quantized_product(x, w, target, None, residual, activation, tiling)


CASES = [
    *itertools.product(("q4_k", "q8_0"), SHAPES_8B, (1, 8, 64)),
    *itertools.product(("q6_k",), ("down", "head"), (1, 8, 64)),
]


def compile_case(case: tuple[str, str, int]) -> None:
    """Fill Triton's cache, from a process of its own."""
    name, shape, rows = case
    out, columns, _ = SHAPES_8B[shape]
    weight = packed(name, out, columns)
    for _, call in variants(name, shape, rows):
        try:
            call(weight)
        except Exception as error:  # a tiling that needs more shared memory than there is
            print(f"{case}: {type(error).__name__}: {str(error)[:80]}", flush=True)
    torch.cuda.synchronize()


def tune(cases: Iterable[tuple[str, str, int]]) -> None:
    """The best tilings of each case, all measured alone."""
    for name, shape, rows in cases:
        out, columns, _ = SHAPES_8B[shape]
        first = packed(name, out, columns)
        weights = [first] + [
            packed(name, out, columns, seed) for seed in range(1, max(2, round(ROTATED_BYTES / first.nbytes)))
        ]
        found = []
        for label, call in variants(name, shape, rows):
            try:
                calls = [lambda weight=weight, call=call: call(weight) for weight in weights]
                found.append((seconds_per_call(calls, 5), label))
            except Exception:  # said by compile_case
                torch.cuda.synchronize()
        found.sort()
        bound = first.nbytes / READ_CEILING_BYTES_S
        best = ", ".join(f"{label} {1e6 * seconds:.1f}" for seconds, label in found[:4])
        print(
            f"tune {name} {shape} × {rows}: bound {1e6 * bound:.1f} µs, {bound / found[0][0]:.2f} of it: {best}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", default="1,8,64", help="of --tune")
    parser.add_argument("--models", default="bf16,q4_k_m,q8_0", help="whole steps of these; nothing: none")
    parser.add_argument("--processes", type=int, default=12, help="that compile ahead of --tune")
    arguments = parser.parse_args()
    cases = [case for case in CASES if str(case[2]) in arguments.rows.split(",")]
    context = multiprocessing.get_context("spawn")
    if arguments.check:
        with context.Pool(len(FORMATS)) as pool:
            for line in pool.imap(check, FORMATS):
                print(line, flush=True)
    if arguments.tune:
        with context.Pool(arguments.processes) as pool:
            pool.map(compile_case, cases, chunksize=1)
        tune(cases)
    for name in filter(None, arguments.models.split(",")):
        source = RandomCheckpoint(CONFIG) if name == "bf16" else QuantizedCheckpoint(name)
        decoder = build_decoder(source, dtype="bfloat16", device="cuda", max_context=4096)
        measure_model(name, decoder)
        del decoder
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
