"""Which tiling runs for which shape, as `python -m benchmarks.tune_decode` measures inside the decode step of an H200.

The choice follows from sizes, not from model names: other shapes take the tiling of the nearest measured one, which are
those of Llama-3.1-8B. Figures: benchmarks/RESULTS.md and NOTES.md.
"""

from __future__ import annotations

from kernels.triton_ops.thin_product import ThinTiling

MAX_THIN_ROWS = 64
WIDE_FEATURES = 32768
LONG_FEATURES = 8192


def gemv_shape(features: int, in_features: int, gated: bool) -> tuple[int, int, int]:
    """(weight rows a program, warps, programs that prefetch) of the one-row product."""
    if in_features > LONG_FEATURES:
        return (1, 8, 0)
    if gated:
        return (2, 8, 132)
    if features <= 4096:
        return (8, 8, 0)
    return (4, 4, 0) if features >= WIDE_FEATURES else (4, 8, 132)


def thin_tiling(num_rows: int, features: int, in_features: int, gated: bool) -> ThinTiling | None:
    """Tiling of the product of `num_rows` rows (measured at 8, 16, 32, 64), None where the vendor library is faster."""
    if num_rows > MAX_THIN_ROWS:
        return None
    if num_rows <= 8:
        return _up_to_8_rows(features, in_features, gated)
    if num_rows <= 48:
        return _up_to_48_rows(num_rows, features, in_features, gated)
    return _up_to_64_rows(features, in_features, gated)


def _up_to_8_rows(features: int, in_features: int, gated: bool) -> ThinTiling:
    if gated:
        return ThinTiling(block_n=64, block_k=256, split_k=1, stages=3, num_warps=4, prefetch_k=256)
    if in_features > LONG_FEATURES:
        return ThinTiling(block_n=64, block_k=128, split_k=4, stages=6, num_warps=4, prefetch_k=256)
    if features >= WIDE_FEATURES:
        return ThinTiling(block_n=64, block_k=128, split_k=1, stages=6, num_warps=4, prefetch_k=512)
    if features <= 4096:
        return ThinTiling(block_n=16, block_k=256, split_k=2, stages=5, num_warps=2, prefetch_k=512)
    return ThinTiling(block_n=32, block_k=256, split_k=2, stages=4, num_warps=2, prefetch_k=512)


def _up_to_48_rows(num_rows: int, features: int, in_features: int, gated: bool) -> ThinTiling:
    if gated and num_rows <= 16:
        return ThinTiling(block_n=64, block_k=256, split_k=1, stages=3, num_warps=4, prefetch_k=256)
    if gated:
        return ThinTiling(block_n=64, block_k=128, split_k=1, stages=3, num_warps=4, prefetch_k=512)
    if in_features > LONG_FEATURES:
        return ThinTiling(block_n=64, block_k=256, split_k=2, stages=3, num_warps=4, prefetch_k=512)
    if features >= WIDE_FEATURES:
        return ThinTiling(block_n=64, block_k=128, split_k=1, stages=4, num_warps=4, prefetch_k=512)
    split_k = 2 if features <= 4096 and num_rows <= 16 else 1
    return ThinTiling(block_n=64, block_k=128, split_k=split_k, stages=6, num_warps=4, prefetch_k=512)


def _up_to_64_rows(features: int, in_features: int, gated: bool) -> ThinTiling:
    if gated:
        return ThinTiling(block_n=64, block_k=64, split_k=1, stages=6, num_warps=4, prefetch_k=512)
    if in_features > LONG_FEATURES:
        return ThinTiling(block_n=64, block_k=128, split_k=2, stages=4, num_warps=4, prefetch_k=512)
    if features >= WIDE_FEATURES:
        return ThinTiling(block_n=128, block_k=64, split_k=1, stages=4, num_warps=4, prefetch_k=512)
    if features <= 4096:
        return ThinTiling(32, 128, split_k=1, stages=5, num_warps=4, prefetch_k=1024, weights_first=False)
    return ThinTiling(64, 128, split_k=1, stages=6, num_warps=4, prefetch_k=1024, weights_first=False)
