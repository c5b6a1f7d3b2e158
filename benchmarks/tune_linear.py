"""Try tilings of the one-row and thin products on the shapes of Llama-3.1-8B: `python -m benchmarks.tune_linear`.

Prints, per shape and row count, the vendor library's time and the best tilings, as fractions of the read ceiling. The
winners go into `kernels/triton_ops/tuning.py` by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
from functools import partial

import torch
from torch.nn import functional

from benchmarks.device_timing import READ_CEILING_BYTES_S, seconds_per_call
from kernels.triton_ops.gemv import gemv
from kernels.triton_ops.thin_product import ThinTiling, thin_product

# name: (out features, in features, gated, has norm, has residual)
SHAPES = {
    "qkv": (6144, 4096, False, True, False),
    "o": (4096, 4096, False, False, True),
    "gate_up": (14336, 4096, True, True, False),
    "down": (4096, 14336, False, False, True),
    "lm_head": (128256, 4096, False, True, False),
}
ROTATED_BYTES = 5e8


def gemv_candidates(gated: bool) -> list[tuple[int, int, int]]:
    """(weight rows a program, warps, programs that prefetch)."""
    shapes = ((1, 4), (2, 4), (2, 8), (4, 8)) if gated else ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8))
    return [(*shape, ahead) for shape in shapes for ahead in (0, 132, 264, 528)]


def thin_candidates(rows: int, gated: bool) -> list[ThinTiling]:
    tiles = [(32, 128, 4, 4), (32, 128, 5, 4), (64, 64, 4, 4), (64, 64, 6, 4), (32, 256, 3, 4), (32, 256, 4, 2)]
    tiles += [(64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (128, 64, 4, 4), (16, 256, 4, 2)]
    tiles += [(128, 128, 4, 8), (16, 128, 6, 4)]
    found = []
    for (block_n, block_k, stages, warps), split_k in itertools.product(tiles, (1, 2) if gated else (1, 2, 4)):
        shared = (block_n * (2 if gated else 1) + max(8, rows)) * block_k * 2 * (stages - 1)
        if shared > 220_000:
            continue
        found += [ThinTiling(block_n, block_k, split_k, stages, warps, prefetch_k) for prefetch_k in (512, 1024)]
        if rows >= 32 and block_n <= 64:
            found.append(dataclasses.replace(found[-1], weights_first=False))
    return found


def tensors(name: str, rows: int, copies: int, device: str) -> tuple:
    features, in_features, gated, has_norm, has_residual = SHAPES[name]
    stored = 2 * features if gated else features
    weights = [
        torch.empty(stored, in_features, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        if device == "cuda"
        else torch.empty(stored, in_features, dtype=torch.bfloat16)
        for _ in range(copies)
    ]
    x = torch.ones(rows, in_features, dtype=torch.bfloat16, device=device)
    out_dtype = torch.float32 if name == "lm_head" else torch.bfloat16
    out = torch.empty(rows, features, dtype=out_dtype, device=device)
    norm = torch.ones(in_features, device=device) if has_norm else None
    residual = torch.ones(rows, features, dtype=torch.bfloat16, device=device) if has_residual else None
    return weights, x, out, norm, residual, "silu" if gated else ""


def launches(name: str, rows: int, candidate: object, device: str, made: tuple | None = None) -> list:
    weights, x, out, norm, residual, activation = made or tensors(name, rows, 1, device)
    if isinstance(candidate, ThinTiling):
        return [partial(thin_product, x, w, out, None, residual, activation, candidate, name == "qkv") for w in weights]
    return [
        partial(gemv, x, w, out, norm, 1e-5, None, residual, activation, *candidate, name == "qkv") for w in weights
    ]


def candidates(name: str, rows: int) -> list:
    gated = SHAPES[name][2]
    return gemv_candidates(gated) if rows == 1 else thin_candidates(rows, gated)


def compile_part(part: list[tuple[str, int, object]]) -> None:
    """Fill Triton's cache in a process of its own, without the GPU."""
    from kernels.triton_ops.ahead_of_time import compile_only

    with compile_only(90):
        for name, rows, candidate in part:
            try:
                launches(name, rows, candidate, "cpu")[0]()
            except Exception as error:  # Triton's compiler and driver raise many kinds; try the next
                print(f"{name} rows={rows} {candidate}: {type(error).__name__}", flush=True)


def precompile(cases: list[tuple[str, int, object]], processes: int) -> None:
    # Shapes of equal specialisation share a binary: the first of each kind is enough.
    kinds = {
        (rows, repr(candidate), SHAPES[name][2:], name in ("lm_head", "qkv"), name == "lm_head"): (
            name,
            rows,
            candidate,
        )
        for name, rows, candidate in cases
    }
    work = list(kinds.values())
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_part, [work[start::processes] for start in range(processes)])


def measure(name: str, rows: int, top: int) -> None:
    features, in_features, gated, _, _ = SHAPES[name]
    weight_bytes = features * in_features * 2 * (2 if gated else 1)
    made = tensors(name, rows, max(1, round(ROTATED_BYTES / weight_bytes)), "cuda")
    vendor = seconds_per_call([partial(functional.linear, made[1], weight) for weight in made[0]])
    results = []
    for candidate in candidates(name, rows):
        try:
            results.append((seconds_per_call(launches(name, rows, candidate, "cuda", made), 5), candidate))
        except Exception as error:  # Triton's compiler and driver raise many kinds; try the next
            print(f"{name} rows={rows} {candidate}: {type(error).__name__}", flush=True)
    results.sort(key=lambda result: result[0])
    if rows > 1 and results:
        best = results[0][1]
        for prefetch_k in (0, 256, 2048):
            candidate = dataclasses.replace(best, prefetch_k=prefetch_k)
            results.append((seconds_per_call(launches(name, rows, candidate, "cuda", made), 5), candidate))
        results.sort(key=lambda result: result[0])
    bound = weight_bytes / READ_CEILING_BYTES_S
    print(f"{name} rows={rows} vendor (product only): {vendor * 1e6:.1f} us, {bound / vendor:.3f} of the ceiling")
    for seconds, candidate in results[:top]:
        print(f"    {seconds * 1e6:.1f} us, {bound / seconds:.3f}: {candidate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    names, row_counts = arguments.shapes.split(","), [int(rows) for rows in arguments.rows.split(",")]
    cases = [(name, rows, candidate) for name in names for rows in row_counts for candidate in candidates(name, rows)]
    precompile(cases, arguments.processes)
    for name, rows in itertools.product(names, row_counts):
        measure(name, rows, arguments.top)


if __name__ == "__main__":
    main()
