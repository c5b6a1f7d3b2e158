"""Which way and tiling runs for which quantised shape, as `python -m benchmarks.quantized --tune` measures on an H200.

Times in µs of the shapes of Llama-3.1-8B are in benchmarks/RESULTS.md.
"""

from __future__ import annotations

from kernels.triton_ops.quantized_product import QuantizedTiling

# 64 rows with weights extracted for the tensor cores: 7.4 ms a step (Q8_0), in plain bands 12.2; Q4_K_M 11.1 and 11.8.
MAX_PRODUCT_ROWS = 64
# Plain weights of a band of a large product. 2,000 tokens, Q8_0: 54.2 ms with 16 MiB, 52.3 with 32, 51.3 with 64.
BAND_BYTES = 64 << 20
# Whether the one-row product norms its row itself: every program would do it again, 3.00 ms a step against 2.93.
NORM_IN_GEMV = False
WIDE_FEATURES, LONG_FEATURES = 32768, 8192


def gemv_shape(features: int, in_features: int, weight_format: str, gated: bool) -> tuple[int, int, int]:
    """(weight rows a program, bytes of the low plane a step, warps) of the one-row product."""
    if in_features > LONG_FEATURES:
        return (16, 1024, 4) if weight_format.endswith("q6_k") else (4, 2048, 4)
    if gated:
        return (8, 1024, 2) if weight_format.endswith("q8_0") else (8, 1024, 4)
    if features >= WIDE_FEATURES:
        return (8, 1024, 4) if weight_format.endswith("q4_k") else (16, 1024, 4)
    if features <= 4096:
        return (8, 2048, 4) if weight_format.endswith("q8_0") else (4, 2048, 4)
    return (8, 1024, 4) if weight_format.endswith("q8_0") else (8, 1024, 2)


def product_tiling(
    num_rows: int,
    features: int,
    in_features: int,
    weight_format: str,
    gated: bool,
    shared_memory_is_large: bool = True,
) -> QuantizedTiling:
    """Tiling of the product of 2 to 64 rows, as measured at 8; many rows take two stages in a small shared memory."""
    stages = 2 if gated and not weight_format.endswith("q8_0") else 3
    if num_rows > 16 and not shared_memory_is_large:
        stages = 2
    split_k = 1 if gated or features >= WIDE_FEATURES else 4
    return QuantizedTiling(block_n=64, block_bytes=128, split_k=split_k, stages=stages, num_warps=4)
