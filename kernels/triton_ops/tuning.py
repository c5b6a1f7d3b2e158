"""Which tiling runs for which shape. Figures: H200, `python -m benchmarks.kernels --tune`; see benchmarks/RESULTS.md."""

from __future__ import annotations

from kernels.triton_ops.thin_product import ThinTiling

MAX_THIN_ROWS = 16


def gemv_shape(in_features: int, gated: bool) -> tuple[int, int]:
    """(weight rows a program, warps) of the one-row product."""
    if in_features > 8192:
        return (2, 8)
    return (2, 4) if gated else (4, 4)


def thin_tiling(num_rows: int, features: int, in_features: int, gated: bool) -> ThinTiling | None:
    """Tiling of the product of `num_rows` rows, None where the vendor library is faster."""
    if num_rows > MAX_THIN_ROWS:
        return None
    if gated:
        return ThinTiling(block_n=32, block_k=128, split_k=1, stages=4, num_warps=4, prefetch_k=512)
    split_k = 4 if in_features > 8192 else 2
    return ThinTiling(block_n=64, block_k=128, split_k=split_k, stages=4, num_warps=4, prefetch_k=512)
