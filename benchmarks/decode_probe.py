"""One captured graph of the whole decode step, random Llama-3.1-8B weights: `python -m benchmarks.decode_probe`.

Prints milliseconds a step by width and context, and with --check the error of the logits against the references.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from benchmarks.device_timing import READ_CEILING_BYTES_S, graph_of, replay_seconds
from kernels import reference
from kernels.triton_ops.argmax import argmax
from kernels.triton_ops.decode_attention import Rotation, decode_attention
from kernels.triton_ops.embedding import embedding
from kernels.triton_ops.fused_linear import fused_linear

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 128256, 4096, 32, 32, 8, 128, 14336
BLOCK_TOKENS, EPS = 16, 1e-5
# Beyond the bars of the design: milliseconds a step.
AIMS_MS = {(1, 190): 3.6, (8, 190): 4.08, (64, 190): 4.8, (64, 2064): 9.25}


@dataclass(slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True)
class Weights:
    embed: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor
    cos_sin: torch.Tensor


def random_weights(num_layers: int = LAYERS, device: str = "cuda") -> Weights:
    """Normal bf16 weights, standard deviation in ** -0.5 (so activations keep their size), norms near 1."""

    def matrix(out: int, inner: int) -> torch.Tensor:
        return torch.empty(out, inner, dtype=torch.bfloat16, device=device).normal_(std=inner**-0.5)

    def norm() -> torch.Tensor:
        return torch.empty(HIDDEN, device=device).normal_(mean=1.0, std=0.1)

    layers = [
        Layer(
            norm(),
            matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            matrix(HIDDEN, HEADS * HEAD_DIM),
            norm(),
            matrix(2 * FFN, HIDDEN),
            matrix(HIDDEN, FFN),
        )
        for _ in range(num_layers)
    ]
    inverse = 500000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.arange(4096, device=device)[:, None] * inverse[None, :]
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return Weights(matrix(VOCAB, HIDDEN), layers, norm(), matrix(VOCAB, HIDDEN), cos_sin)


@dataclass(slots=True)
class DecodeState:
    """Rows of one width at one context length, in a pool of their own."""

    pool: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor
    input_ids: torch.Tensor
    context: int


def decode_state(width: int, context: int, num_layers: int) -> DecodeState:
    blocks_each = -(-context // BLOCK_TOKENS)
    num_blocks = width * blocks_each
    pool = torch.empty(
        num_blocks, num_layers, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
    ).normal_()
    tables = torch.randperm(num_blocks, device="cuda").to(torch.int32).view(width, blocks_each)
    last = context - 1
    slots = tables[:, last // BLOCK_TOKENS].long() * BLOCK_TOKENS + last % BLOCK_TOKENS
    lens = torch.full((width,), context, dtype=torch.int32, device="cuda")
    ids = torch.randint(0, VOCAB, (width,), dtype=torch.int32, device="cuda")
    return DecodeState(pool, tables, lens, lens - 1, slots, ids, context)


def decode_step(weights: Weights, state: DecodeState, attention_options: dict | None = None) -> torch.Tensor:
    """Logits [width, V] float32 of one step through the fused kernels."""
    hidden = embedding(state.input_ids, weights.embed)
    rotation = Rotation(None, None, EPS, weights.cos_sin, state.position_ids, state.slot_mapping)
    for index, layer in enumerate(weights.layers):
        qkv = fused_linear(hidden, layer.qkv, None, layer.input_norm, EPS, feeds_attention=True)
        attended = decode_attention(
            qkv,
            state.pool[:, index, 0],
            state.pool[:, index, 1],
            state.block_tables,
            state.context_lens,
            HEADS,
            HEAD_DIM**-0.5,
            None,
            None,
            state.context,
            rotation,
            **(attention_options or {"early_loads": True}),
        )
        hidden = fused_linear(attended.view(-1, HEADS * HEAD_DIM), layer.o, residual=hidden)
        activated = fused_linear(hidden, layer.gate_up, None, layer.ffn_norm, EPS, None, "silu")
        hidden = fused_linear(activated, layer.down, residual=hidden)
    return fused_linear(hidden, weights.head, None, weights.norm, EPS, out_dtype=torch.float32)


def reference_step(weights: Weights, state: DecodeState, dtype: torch.dtype) -> torch.Tensor:
    """The same from the references, activations and KV in `dtype` between ops."""
    hidden = reference.embedding(state.input_ids, weights.embed, 1.0, dtype)
    width = hidden.shape[0]
    cu_seqlens = torch.arange(width + 1, dtype=torch.int32, device=hidden.device)
    for index, layer in enumerate(weights.layers):
        caches = state.pool[:, index, 0].to(dtype), state.pool[:, index, 1].to(dtype)
        qkv = reference.linear(reference.rms_norm(hidden, layer.input_norm, EPS), layer.qkv)
        heads = (HEADS, KV_HEADS, HEAD_DIM)
        rotation = (None, None, EPS, weights.cos_sin, state.position_ids)
        q = reference.qk_norm_rope_kv_write(qkv, *rotation, *caches, state.slot_mapping, *heads)
        attended = reference.paged_attention(
            q, *caches, state.block_tables, state.context_lens, cu_seqlens, HEAD_DIM**-0.5, None, None, 1, state.context
        )
        hidden = hidden + reference.linear(attended.view(width, -1), layer.o)
        gate_up = reference.linear(reference.rms_norm(hidden, layer.ffn_norm, EPS), layer.gate_up)
        hidden = hidden + reference.linear(reference.gated_activation(gate_up, "silu"), layer.down)
    return reference.logits(reference.rms_norm(hidden, weights.norm, EPS), weights.head)


def check(weights: Weights) -> None:
    """Errors against float32 activations: of the kernels, and of bf16 torch, which rounds at the same places."""
    for width, context in ((1, 190), (1, 2064), (8, 190), (64, 190)):
        state = decode_state(width, context, len(weights.layers))
        expected = reference_step(weights, state, torch.float32).double()
        torch_logits = reference_step(weights, state, torch.bfloat16).double()
        logits = decode_step(weights, state).double()
        errors = [((one - expected).norm() / expected.norm()).item() for one in (logits, torch_logits)]
        same = [(one.argmax(-1) == expected.argmax(-1)).float().mean().item() for one in (logits, torch_logits)]
        print(
            f"check {width} x {context}: relative logit error {errors[0]:.2e} (torch in bf16: {errors[1]:.2e}),"
            f" same greedy id in {same[0]:.0%} of rows (torch {same[1]:.0%})"
        )


def measure(weights: Weights, width: int, context: int) -> None:
    state = decode_state(width, context, len(weights.layers))

    def step() -> None:
        logits = decode_step(weights, state)
        state.input_ids.copy_(argmax(logits))

    seconds = replay_seconds(graph_of([step]), 20)
    kv_bytes = width * context * len(weights.layers) * 2 * KV_HEADS * HEAD_DIM * 2
    weight_bytes = sum(w.nbytes for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    bound = (weight_bytes + weights.head.nbytes + kv_bytes) / READ_CEILING_BYTES_S
    aim = AIMS_MS.get((width, context))
    print(
        f"decode {width} x {context}: {seconds * 1e3:.3f} ms a step, {bound / seconds:.3f} of the read ceiling"
        f" ({bound * 1e3:.2f} ms)" + (f", aim {aim} ms" if aim else ""),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="1x190,1x2064,8x190,8x2064,64x190,64x2064")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    weights = random_weights()
    if arguments.check:
        check(weights)
    for case in arguments.cases.split(","):
        measure(weights, *(int(part) for part in case.split("x")))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
