"""Tune tilings inside the decode step, where neighbours overlap: `python -m benchmarks.tune_decode --widths 1,8,64`.

Coordinate descent over one product at a time, then over attention, on 8 layers of Llama-3.1-8B in one captured graph. A
kernel alone in a chain of itself shows other winners (benchmarks/tune_linear.py). Prints what each change gains.
"""

from __future__ import annotations

import argparse
import itertools
from unittest import mock

import torch

from benchmarks.decode_probe import DecodeState, Weights, decode_state, decode_step, random_weights
from benchmarks.device_timing import graph_of, replay_seconds
from benchmarks.tune_linear import SHAPES, candidates, precompile
from kernels.triton_ops import fused_linear as fused
from kernels.triton_ops import tuning
from kernels.triton_ops.decode_attention import DecodeTiling

LAYERS = 8


class Choice:
    """Tilings in use, by product; stands in for `kernels.triton_ops.tuning` while it is patched in."""

    def __init__(self, width: int) -> None:
        lookup = tuning.gemv_shape if width == 1 else lambda *shape: tuning.thin_tiling(width, *shape)
        self.by_shape = {shape[:3]: lookup(*shape[:3]) for shape in SHAPES.values()}

    def gemv_shape(self, *shape: object) -> object:
        return self.by_shape[shape]

    def thin_tiling(self, num_rows: int, *shape: object) -> object:
        return self.by_shape[shape]


def step_seconds(weights: Weights, state: DecodeState, choice: Choice, attention_options: dict) -> float:
    with (
        mock.patch.object(fused, "gemv_shape", choice.gemv_shape),
        mock.patch.object(fused, "thin_tiling", choice.thin_tiling),
    ):
        graph = graph_of([lambda: decode_step(weights, state, attention_options)])
    return replay_seconds(graph, 9)


def tune_width(weights: Weights, width: int, context: int, skip_products: bool) -> None:
    state = decode_state(width, context, LAYERS)
    choice, options = Choice(width), {"early_loads": True}
    best = step_seconds(weights, state, choice, options)
    print(f"width {width} x {context}: {best * 1e6:.1f} us for {LAYERS} layers as tuned so far", flush=True)
    for name, (features, in_features, gated, _, _) in SHAPES.items():
        shape, results = (features, in_features, gated), []
        before = choice.by_shape[shape]
        for candidate in [] if skip_products else [before, *candidates(name, width), None]:
            if candidate is None and width == 1:
                continue
            choice.by_shape[shape] = candidate
            try:
                results.append((step_seconds(weights, state, choice, options), str(candidate), candidate))
            except Exception as error:  # Triton's compiler and driver raise many kinds; try the next
                print(f"    {candidate}: {type(error).__name__}")
        choice.by_shape[shape] = before
        if results:
            results.sort(key=lambda result: result[0])
            choice.by_shape[shape] = results[0][2]
            for seconds, text, _ in results[:3]:
                print(f"    {name}: {(best - seconds) * 1e6 / LAYERS:+.2f} us a layer {text}", flush=True)
            best = min(best, results[0][0])
    tune_attention(weights, state, choice, best, width)


def tune_attention(weights: Weights, state: DecodeState, choice: Choice, best: float, width: int) -> None:
    results = []
    splits = {1: (2, 3, 4, 8, 16, 32), 8: (1, 2, 3, 4, 8), 64: (1, 2, 3)}.get(width, (1, 2, 4))
    tiles = ((64, 3, 4), (64, 4, 4), (64, 3, 8), (32, 4, 4), (128, 3, 4), (64, 5, 4), (32, 4, 2), (128, 3, 8))
    for tile, num_splits, early in itertools.product(tiles, splits, (False, True) if width < 64 else (False,)):
        options = {"tiling": DecodeTiling(*tile, num_splits), "early_loads": early}
        try:
            results.append((step_seconds(weights, state, choice, options), str(options)))
        except Exception as error:  # Triton's compiler and driver raise many kinds; try the next
            print(f"    {options}: {type(error).__name__}")
    for seconds, text in sorted(results)[:6]:
        print(f"    attention: {(best - seconds) * 1e6 / LAYERS:+.2f} us a layer {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="1x190,8x190,64x190")
    parser.add_argument("--attention-only", default="1x2064,64x2064")
    parser.add_argument("--processes", type=int, default=15)
    arguments = parser.parse_args()
    cases = [tuple(int(part) for part in case.split("x")) for case in arguments.cases.split(",") if case]
    work = [(name, width, candidate) for width, _ in cases for name in SHAPES for candidate in candidates(name, width)]
    if work:
        precompile(work, arguments.processes)
    weights = random_weights(LAYERS)
    for width, context in cases:
        tune_width(weights, width, context, skip_products=False)
    for case in arguments.attention_only.split(","):
        if case:
            tune_width(weights, *(int(part) for part in case.split("x")), skip_products=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
