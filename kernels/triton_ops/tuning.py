"""Which tiling runs for which shape, as measured on an H200 (`python -m benchmarks.tune_linear`; see RESULTS.md).

The choice follows from sizes, not from model names: other shapes take the tiling of the nearest measured one.
"""

from __future__ import annotations

from kernels.triton_ops.thin_product import ThinTiling

MAX_THIN_ROWS = 64


def gemv_shape(features: int, in_features: int, gated: bool) -> tuple[int, int, int]:
    """(weight rows a program, warps, programs that prefetch) of the one-row product."""
    if in_features > 8192:
        return (2, 8, 264)
    if gated or features <= 4096:
        return (2, 4, 528)
    return (4, 4, 528) if features >= 32768 else (8, 8, 264)


def thin_tiling(num_rows: int, features: int, in_features: int, gated: bool) -> ThinTiling | None:
    """Tiling of the product of `num_rows` rows, None where the vendor library is faster."""
    if num_rows > MAX_THIN_ROWS:
        return None
    return (
        _up_to_16_rows(features, in_features, gated) if num_rows <= 16 else _up_to_64_rows(features, in_features, gated)
    )


def _up_to_16_rows(features: int, in_features: int, gated: bool) -> ThinTiling:
    if gated:
        return ThinTiling(block_n=64, block_k=256, split_k=1, stages=3, num_warps=4, prefetch_k=256)
    if in_features > 8192:
        return ThinTiling(block_n=64, block_k=128, split_k=4, stages=6, num_warps=4, prefetch_k=256)
    if features >= 32768:
        return ThinTiling(block_n=32, block_k=256, split_k=1, stages=4, num_warps=4, prefetch_k=512)
    if features <= 4096:
        return ThinTiling(block_n=16, block_k=256, split_k=2, stages=5, num_warps=2, prefetch_k=512)
    return ThinTiling(block_n=32, block_k=256, split_k=1, stages=4, num_warps=2, prefetch_k=256)


def _up_to_64_rows(features: int, in_features: int, gated: bool) -> ThinTiling:
    if gated:
        return ThinTiling(block_n=64, block_k=128, split_k=1, stages=4, num_warps=4, prefetch_k=256)
    if in_features > 8192:
        return ThinTiling(block_n=64, block_k=128, split_k=2, stages=6, num_warps=4, prefetch_k=512)
    if features >= 32768:
        return ThinTiling(block_n=128, block_k=128, split_k=1, stages=4, num_warps=8, prefetch_k=256)
    if features <= 4096:
        return ThinTiling(32, 256, split_k=1, stages=4, num_warps=4, prefetch_k=512, weights_first=False)
    return ThinTiling(block_n=64, block_k=128, split_k=1, stages=4, num_warps=4)
