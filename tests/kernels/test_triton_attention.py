"""Paged attention (decode, prefill with history) and the fused rotation, against the references."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import reference
from tests.support.paged import paged_context
from tests.support.tensors import HALF_DTYPE, random_tensor, relative_error, tolerance

# (query heads, KV heads, head size): llama, smollm, phi-like, qwen2-like, gemma3
HEADS = [(8, 2, 128), (9, 3, 64), (4, 4, 80), (7, 1, 96), (4, 1, 256)]
DTYPES = (torch.float32, HALF_DTYPE)


def cu_seqlens(query_lens, device):
    return torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device)


def cos_sin_table(head_dim, device):
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(600)[:, None] * inverse[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_decode(triton_device, heads, num_splits, dtype):
    check_decode(triton_device, heads, num_splits, dtype, None, None)


@pytest.mark.parametrize(("window", "soft_cap"), [(40, None), (None, 5.0), (17, 8.0)])
def test_decode_window_and_cap(triton_device, window, soft_cap):
    for num_splits in (1, 3):
        check_decode(triton_device, (8, 2, 64), num_splits, HALF_DTYPE, window, soft_cap)


def check_decode(device, heads, num_splits, dtype, window, soft_cap):
    from kernels.triton_ops.decode_attention import DecodeTiling, decode_attention

    num_heads, num_kv_heads, head_dim = heads
    lengths = [1, 190, 64, 333]
    context = paged_context(lengths, num_kv_heads, head_dim, dtype, device)
    q = random_tensor(len(lengths), num_heads, head_dim, dtype=dtype, device=device)
    caches = (context.key_cache, context.value_cache, context.block_tables, context.context_lens)
    scale = head_dim**-0.5
    expected = reference.paged_attention(
        q, *caches, cu_seqlens([1] * len(lengths), device), scale, window, soft_cap, 1, max(lengths)
    )
    for _ in range(2):  # the second run finds the arrival counters as the first left them
        actual = decode_attention(
            q, *caches, num_heads, scale, window, soft_cap, max(lengths), tiling=DecodeTiling(32, 3, 4, num_splits)
        )
        assert relative_error(actual, expected) < 2 * tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "early_loads"), [(False, True), (True, False)])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_with_rotation_and_kv_write(triton_device, heads, normed, early_loads, dtype):
    from kernels.triton_ops.decode_attention import DecodeTiling, Rotation, decode_attention

    num_heads, num_kv_heads, head_dim = heads
    lengths = [1, 190, 65, 333]
    context = paged_context(lengths, num_kv_heads, head_dim, dtype, triton_device)
    qkv = random_tensor(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=triton_device)
    norms = [
        random_tensor(head_dim, dtype=torch.float32, device=triton_device, seed=seed) if normed else None
        for seed in (4, 5)
    ]
    positions = context.context_lens - 1
    slots = context.slots([1] * 4)
    table = cos_sin_table(head_dim, triton_device)
    expected_keys, expected_values = context.key_cache.clone(), context.value_cache.clone()
    q = reference.qk_norm_rope_kv_write(
        qkv, *norms, 1e-6, table, positions, expected_keys, expected_values, slots, num_heads, num_kv_heads, head_dim
    )
    tables = (context.block_tables, context.context_lens)
    expected = reference.paged_attention(
        q, expected_keys, expected_values, *tables, cu_seqlens([1] * 4, triton_device), 0.1, None, None, 1, 333
    )
    actual = decode_attention(
        qkv,
        context.key_cache,
        context.value_cache,
        *tables,
        num_heads,
        0.1,
        None,
        None,
        333,
        Rotation(*norms, 1e-6, table, positions, slots),
        tiling=DecodeTiling(32, 3, 4, 4),
        early_loads=early_loads,
    )
    assert relative_error(actual, expected) < 2 * tolerance(dtype)
    written = (
        context.block_tables[torch.arange(4), (positions // 16).long()].long(),
        slice(None),
        (positions % 16).long(),
    )
    for cache, expected_cache in ((context.key_cache, expected_keys), (context.value_cache, expected_values)):
        assert relative_error(cache[written], expected_cache[written]) < tolerance(dtype)
        assert torch.equal(cache.isnan(), expected_cache.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_with_history(triton_device, heads, dtype):
    check_prefill(triton_device, heads, dtype, None, None)


@pytest.mark.parametrize(("window", "soft_cap"), [(24, None), (None, 5.0), (9, 8.0)])
def test_prefill_window_and_cap(triton_device, window, soft_cap):
    check_prefill(triton_device, (4, 2, 64), HALF_DTYPE, window, soft_cap)


def check_prefill(device, heads, dtype, window, soft_cap):
    from kernels.triton_ops.prefill_attention import prefill_attention

    num_heads, num_kv_heads, head_dim = heads
    query_lens, lengths = [1, 70, 5, 33], [40, 70, 133, 33]
    context = paged_context(lengths, num_kv_heads, head_dim, dtype, device)
    q = random_tensor(sum(query_lens), num_heads, head_dim, dtype=dtype, device=device)
    arguments = (
        q,
        context.key_cache,
        context.value_cache,
        context.block_tables,
        context.context_lens,
        cu_seqlens(query_lens, device),
        head_dim**-0.5,
        window,
        soft_cap,
        max(query_lens),
    )
    expected = reference.paged_attention(*arguments, max(lengths))
    actual = prefill_attention(*arguments, tile=(64, 32, 4, 2))
    assert relative_error(actual, expected) < 2 * tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_qk_norm_rope_kv_write(triton_device, heads, normed, dtype):
    from kernels.triton_ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write

    num_heads, num_kv_heads, head_dim = heads
    context = paged_context([50, 20], num_kv_heads, head_dim, dtype, triton_device)
    slots = context.slots([3, 2])
    slots[1] = -1
    positions = torch.tensor([47, 48, 49, 18, 19], dtype=torch.int32, device=triton_device)
    qkv = random_tensor(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=triton_device)
    norms = [
        random_tensor(head_dim, dtype=torch.float32, device=triton_device, seed=seed) if normed else None
        for seed in (4, 5)
    ]
    table = cos_sin_table(head_dim, triton_device)
    sizes = (slots, num_heads, num_kv_heads, head_dim)
    expected_keys, expected_values = context.key_cache.clone(), context.value_cache.clone()
    expected = reference.qk_norm_rope_kv_write(
        qkv, *norms, 1e-6, table, positions, expected_keys, expected_values, *sizes
    )
    actual = qk_norm_rope_kv_write(qkv, *norms, 1e-6, table, positions, context.key_cache, context.value_cache, *sizes)
    assert relative_error(actual, expected) < tolerance(dtype)
    for cache, expected_cache in ((context.key_cache, expected_keys), (context.value_cache, expected_values)):
        assert torch.equal(cache.isnan(), expected_cache.isnan())
        assert relative_error(cache.nan_to_num(), expected_cache.nan_to_num()) < tolerance(dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_qk_norm_rope_kv_split(triton_device, heads, normed):
    from kernels.triton_ops.qk_norm_rope_kv_write import qk_norm_rope_kv_split

    num_heads, num_kv_heads, head_dim = heads
    context = paged_context([20], num_kv_heads, head_dim, HALF_DTYPE, triton_device)
    slots = context.slots([5])
    slots[1] = -1
    positions = torch.arange(15, 20, dtype=torch.int32, device=triton_device)
    qkv = random_tensor(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=HALF_DTYPE, device=triton_device)
    norms = [
        random_tensor(head_dim, dtype=torch.float32, device=triton_device, seed=seed) if normed else None
        for seed in (4, 5)
    ]
    rotation = (*norms, 1e-6, cos_sin_table(head_dim, triton_device), positions)
    sizes = (slots, num_heads, num_kv_heads, head_dim, 3, 8)
    expected_caches = context.key_cache.clone(), context.value_cache.clone()
    expected = reference.qk_norm_rope_kv_split(qkv, *rotation, *expected_caches, *sizes)
    actual = qk_norm_rope_kv_split(qkv, *rotation, context.key_cache, context.value_cache, *sizes)
    for part, expected_part in zip(actual, expected, strict=True):
        assert relative_error(part, expected_part) < tolerance(HALF_DTYPE)
        assert part[:3].any()
        assert not part[5:].any()
    assert not actual[1][3:].any()
    assert not actual[2][3:].any()
    for cache, expected_cache in zip((context.key_cache, context.value_cache), expected_caches, strict=True):
        assert torch.equal(cache.isnan(), expected_cache.isnan())
        assert relative_error(cache.nan_to_num(), expected_cache.nan_to_num()) < tolerance(HALF_DTYPE)
