from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")


@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (2, 2, 20), (3, 1, 96)])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_against_the_reference(
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norms: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    block_tokens, num_blocks = 16, 12
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if has_norms else (None, None)
    cos_sin = torch.rand(500, head_dim) * 2 - 1
    positions = torch.randint(0, 500, (tokens,), dtype=torch.int32)
    slots = torch.randperm(num_blocks * block_tokens)[:tokens]
    slots[tokens // 2] = -1
    pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_tokens, head_dim), 7.0, dtype=cache_dtype)
    expected_pool = pool.clone()

    def run(target: torch.Tensor) -> torch.Tensor:
        caches = target[:, 1, 0], target[:, 1, 1]
        return ops.qk_norm_rope_kv_write(
            qkv, *norms, 1e-6, cos_sin, positions, *caches, slots, num_heads, num_kv_heads, head_dim
        )

    with ops.reference_only():
        expected = run(expected_pool)
    result = run(pool)
    exact = dtype == cache_dtype == torch.float32
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 2**-6, "atol": 2**-7}
    torch.testing.assert_close(result, expected, **tolerance)
    torch.testing.assert_close(pool, expected_pool, **tolerance)
    assert bool((pool[:, 0] == 7.0).all())  # the other layer
