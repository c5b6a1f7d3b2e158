"""Attention of a whole prompt over dense K and V: the same as over its pages."""

from __future__ import annotations

import pytest
import torch

from kernels import ops, reference
from tests.support.paged import paged_context
from tests.support.tensors import HALF_DTYPE, random_tensor, relative_error, tolerance

HEADS = [(8, 2, 128), (9, 3, 64), (4, 4, 80)]


@pytest.mark.parametrize("heads", HEADS)
def test_equals_paged_attention_from_the_first_position(heads):
    num_heads, num_kv_heads, head_dim = heads
    length, padded = 37, 48
    context = paged_context([length], num_kv_heads, head_dim, torch.float32, torch.device("cpu"))
    caches = (context.key_cache.zero_(), context.value_cache.zero_())
    qkv = random_tensor(length, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.float32, device="cpu")
    angles = torch.rand(64, head_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.arange(length, dtype=torch.int32)
    norms = (torch.randn(head_dim), torch.randn(head_dim), 1e-6, cos_sin, positions)
    q, k, v = ops.qk_norm_rope_kv_split(
        qkv, *norms, *caches, context.slots([length]), num_heads, num_kv_heads, head_dim, length, padded
    )
    assert q.shape == (padded, num_heads, head_dim)
    assert k.shape == v.shape == (padded, num_kv_heads, head_dim)
    assert not any(part[length:].any() for part in (q, k, v))
    tables = (context.block_tables, context.context_lens, torch.tensor([0, length], dtype=torch.int32))
    expected = reference.paged_attention(q[:length], *caches, *tables, 0.1, None, None, length, length)
    actual = ops.causal_attention(q, k, v, 0.1)
    assert relative_error(actual[:length], expected) < 1e-5


def test_shapes_that_do_not_fit_are_refused():
    q, k = torch.zeros(4, 6, 8), torch.zeros(4, 4, 8)
    with pytest.raises(ops.ShapeError, match="causal_attention"):
        ops.causal_attention(q, k, k, 1.0)
    with pytest.raises(ops.ShapeError, match="3 rows"):
        ops.qk_norm_rope_kv_split(torch.zeros(4, 24), None, None, 0.0, k, k, k, k, k, 1, 1, 8, 2, 3)


def test_a_cpu_keeps_to_paged_attention():
    assert not ops.prefers_causal_attention(torch.device("cpu"), torch.bfloat16, 32, 8, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [512, 640, 2048])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (16, 8, 128)])
def test_the_vendors_kernel_agrees_with_the_reference(heads, length):
    num_heads, num_kv_heads, head_dim = heads
    device = torch.device("cuda")
    if not ops.prefers_causal_attention(device, HALF_DTYPE, *heads):
        pytest.skip("no vendor kernel for these heads")
    q = random_tensor(length, num_heads, head_dim, dtype=HALF_DTYPE, device=device)
    k, v = (random_tensor(length, num_kv_heads, head_dim, dtype=HALF_DTYPE, device=device, seed=s) for s in (4, 5))
    actual = ops.causal_attention(q, k, v, head_dim**-0.5)
    expected = reference.causal_attention(q, k, v, head_dim**-0.5)
    assert relative_error(actual, expected) < 2 * tolerance(HALF_DTYPE)
