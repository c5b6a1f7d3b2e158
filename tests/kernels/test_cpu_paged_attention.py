from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")

DECODE = ((1, 1), (1, 17), (1, 200), (1, 31), (1, 32))  # (query tokens, context tokens) of each sequence
LONG_DECODE = ((1, 1500),)
PREFILL = ((1, 1), (16, 16), (33, 33), (100, 100))
CHUNKS = ((1, 300), (40, 170), (7, 7), (64, 65))


def run_both(
    sequences: tuple[tuple[int, int], ...],
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
    block_tokens: int = 16,
    padding_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, reference) over a pool of random keys, values and block order; unused blocks hold NaN."""
    num_heads, num_kv_heads, head_dim = heads
    blocks_needed = [-(-context // block_tokens) for _, context in sequences]
    num_blocks = sum(blocks_needed) + 3
    pool = torch.randn(num_blocks, 2, 2, num_kv_heads, block_tokens, head_dim)
    order = torch.randperm(num_blocks)
    pool[order[sum(blocks_needed) :]] = float("nan")
    tables = torch.full((len(sequences), max(blocks_needed) + 1), int(order[-1]), dtype=torch.int32)
    taken = 0
    for row, (count, (_, context)) in enumerate(zip(blocks_needed, sequences, strict=True)):
        tables[row, :count] = order[taken : taken + count]
        pool[order[taken + count - 1], :, :, :, context - (count - 1) * block_tokens :] = float("nan")
        taken += count
    pool = pool.to(cache_dtype)
    query_lens = [queries for queries, _ in sequences]
    context_lens = [context for _, context in sequences]
    arguments = (
        torch.randn(sum(query_lens) + padding_rows, num_heads, head_dim).to(dtype),
        pool[:, 1, 0],
        pool[:, 1, 1],
        tables,
        torch.tensor(context_lens, dtype=torch.int32),
        torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        head_dim**-0.5,
        window,
        soft_cap,
        max(query_lens),
        max(context_lens),
    )
    with ops.reference_only():
        expected = ops.paged_attention(*arguments)
    result = ops.paged_attention(*arguments)
    assert result.dtype == dtype
    return result[: sum(query_lens)], expected[: sum(query_lens)]


@pytest.mark.parametrize("sequences", [DECODE, LONG_DECODE, PREFILL, CHUNKS])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 1, 256), (2, 2, 16), (5, 1, 80)])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_float32(sequences: tuple[tuple[int, int], ...], heads: tuple[int, int, int], window: int | None) -> None:
    torch.testing.assert_close(*run_both(sequences, heads, window=window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequences", [DECODE, LONG_DECODE, CHUNKS])
@pytest.mark.parametrize("soft_cap", [5.0, 50.0])
def test_soft_cap(sequences: tuple[tuple[int, int], ...], soft_cap: float) -> None:
    torch.testing.assert_close(*run_both(sequences, (4, 2, 32), soft_cap=soft_cap), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequences", [DECODE, CHUNKS])
def test_bfloat16_cache(sequences: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    result, expected = run_both(sequences, (6, 2, 64), dtype=dtype, cache_dtype=torch.bfloat16)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
    torch.testing.assert_close(result, expected, **tolerance)


@pytest.mark.parametrize("block_tokens", [1, 8, 24, 64])
def test_other_block_sizes(block_tokens: int) -> None:
    torch.testing.assert_close(*run_both(CHUNKS, (3, 3, 32), block_tokens=block_tokens), rtol=1e-4, atol=1e-5)


def test_many_heads_share_a_kv_head() -> None:
    torch.testing.assert_close(*run_both(CHUNKS, (40, 1, 32)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*run_both(CHUNKS, (70, 1, 32)), rtol=1e-4, atol=1e-5)  # beyond the kernel's tile


def test_padding_rows_and_a_head_size_left_to_the_reference() -> None:
    torch.testing.assert_close(*run_both(CHUNKS, (2, 1, 24), padding_rows=5), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*run_both(CHUNKS, (2, 1, 32), padding_rows=5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 13])
def test_a_query_does_not_depend_on_how_it_is_computed(group: int, head_dim: int, window: int | None) -> None:
    """A prompt of 600 tokens in one pass, in chunks, and token by token, alone and with neighbours: equal bits."""
    length, kv_heads = 600, 2
    pool = torch.randn(40, 1, 2, kv_heads, 16, head_dim).to(torch.bfloat16)
    table = torch.randperm(40, dtype=torch.int32)[:38]
    q = torch.randn(length, kv_heads * group, head_dim)

    def attend(*parts: tuple[int, int]) -> torch.Tensor:
        """Queries [start, end) of each part, in one call."""
        lens = [end - start for start, end in parts]
        return ops.paged_attention(
            torch.cat([q[start:end] for start, end in parts]),
            pool[:, 0, 0],
            pool[:, 0, 1],
            table.repeat(len(parts), 1),
            torch.tensor([end for _, end in parts], dtype=torch.int32),
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
            head_dim**-0.5,
            window,
            None,
            max(lens),
            max(end for _, end in parts),
        )

    whole = attend((0, length))
    assert torch.equal(torch.cat([attend((0, 37)), attend((37, 300)), attend((300, length))]), whole)
    positions = (0, 31, 32, 255, 256, 257, 511, 512, 599)
    together = attend(*((position, position + 1) for position in positions), (37, 90), (500, 504))
    threads = torch.get_num_threads()
    for row, position in enumerate(positions):
        assert torch.equal(together[row], whole[position])
        for count in (1, 4):
            torch.set_num_threads(count)
            try:
                alone = attend((position, position + 1))
            finally:
                torch.set_num_threads(threads)
            assert torch.equal(alone[0], whole[position])
    assert torch.equal(together[len(positions) :], torch.cat([whole[37:90], whole[500:504]]))
