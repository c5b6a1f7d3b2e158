"""Paged attention against a loop over single queries in float64. Unused cache entries are NaN: none may be read."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import ops
from tests.support.paging import PagedKV, make_paged_kv

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def attend_one_by_one(
    q: torch.Tensor, kv: PagedKV, query_lens: list[int], scale: float, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    """[T, Hq, D] float64: every query and head alone."""
    outputs, row = [], 0
    for sequence, query_len in enumerate(query_lens):
        keys, values = kv.keys[sequence].double(), kv.values[sequence].double()
        group = q.shape[1] // keys.shape[1]
        for index in range(query_len):
            position = len(keys) - query_len + index
            first = 0 if window is None else max(0, position - window + 1)
            heads = []
            for head in range(q.shape[1]):
                scores = keys[first : position + 1, head // group] @ q[row, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                heads.append(torch.softmax(scores, 0) @ values[first : position + 1, head // group])
            outputs.append(torch.stack(heads))
            row += 1
    return torch.stack(outputs)


def check(
    context_lens: list[int],
    query_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    dtype: torch.dtype = torch.float32,
    block_tokens: int = 16,
) -> None:
    kv = make_paged_kv(context_lens, num_kv_heads, head_dim, dtype=dtype, block_tokens=block_tokens)
    q = (torch.randn(sum(query_lens), num_heads, head_dim) * 2).to(dtype)
    cu_seqlens_q = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    scale = 1 / math.sqrt(head_dim)
    result = ops.paged_attention(
        q, kv.key_cache, kv.value_cache, kv.block_tables, kv.context_lens, cu_seqlens_q, scale, window, soft_cap,
        max(query_lens), max(context_lens),
    )  # fmt: skip
    assert result.dtype == dtype
    expected = attend_one_by_one(q, kv, query_lens, scale, window, soft_cap)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("context_lens", [[1], [16], [17], [5, 40, 16, 1, 33]])
def test_decode(context_lens: list[int], dtype: torch.dtype) -> None:
    check(context_lens, [1] * len(context_lens), dtype=dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_prefill_of_several_prompts(dtype: torch.dtype) -> None:
    check([1, 23, 64, 5], [1, 23, 64, 5], dtype=dtype)


@pytest.mark.parametrize("query_len", [1, 2, 15, 16, 17, 30])
def test_chunk_with_history_before_it(query_len: int) -> None:
    check([40, 31], [query_len, query_len])


def test_decode_rows_and_chunks_together() -> None:
    check([50, 3, 40, 20, 1], [1, 1, 24, 20, 1])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (3, 3, 10), (8, 1, 128)])
def test_head_layouts(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check([20, 37], [20, 1], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 100])
def test_sliding_window(window: int) -> None:
    check([40, 40, 33, 70], [1, 40, 12, 1], window=window)


@pytest.mark.parametrize("window", [None, 9])
def test_soft_cap(window: int | None) -> None:
    check([30, 21], [1, 21], soft_cap=1.5, window=window)


@pytest.mark.parametrize("block_tokens", [1, 8, 32])
def test_block_sizes(block_tokens: int) -> None:
    check([33, 9], [5, 1], block_tokens=block_tokens)


def test_a_prompt_longer_than_a_query_tile() -> None:
    check([600], [600], num_heads=2, num_kv_heads=1, head_dim=8)
    check([600], [300], num_heads=2, num_kv_heads=1, head_dim=8, window=70)


def test_padding_sequences_and_rows_leave_the_others_alone() -> None:
    kv = make_paged_kv([20, 7], 2, 16)
    q = torch.randn(5, 4, 16)
    cu_seqlens_q = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    context_lens = torch.tensor([20, 7, 0, 0], dtype=torch.int32)
    block_tables = torch.cat((kv.block_tables, torch.zeros_like(kv.block_tables)))
    result = ops.paged_attention(
        q, kv.key_cache, kv.value_cache, block_tables, context_lens, cu_seqlens_q, 0.25, None, None, 1, 20
    )
    expected = attend_one_by_one(q[:2], kv, [1, 1], 0.25, None, None)
    torch.testing.assert_close(result[:2].double(), expected, rtol=5e-6, atol=5e-6)


def test_query_heads_that_are_no_multiple_are_refused() -> None:
    kv = make_paged_kv([4], 2, 16)
    cu_seqlens_q = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ops.ShapeError, match="paged_attention"):
        ops.paged_attention(
            torch.randn(1, 3, 16), kv.key_cache, kv.value_cache, kv.block_tables, kv.context_lens, cu_seqlens_q, 1.0,
            None, None, 1, 4,
        )  # fmt: skip
