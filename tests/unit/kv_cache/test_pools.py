"""Which model shares a pool with which, and how large pools and budgets become."""

from __future__ import annotations

import pytest

from runners.errors import StartupError
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.pools import EnginePools, PoolNeed
from runners.kv_cache.sizing import PoolSize


def need(model: str, blocks: int, block_bytes: int = 10, *, counts_for_all: bool = False, kind: str = "") -> PoolNeed:
    own = PoolSize(blocks, block_bytes, 16, 4)
    return PoolNeed(model, (kind or block_bytes,), own, counts_for_all)


def cache_in(pools: EnginePools, wanted: PoolNeed, *later: PoolNeed) -> CacheManager:
    pool, budgets = pools.place(wanted, later)
    size = pool.size
    return CacheManager(size.num_blocks, free=pool.free, budgets=budgets, block_bytes=size.block_bytes)


@pytest.mark.parametrize("is_lazy", [True, False])
def test_models_of_one_kind_share_what_each_would_have(is_lazy: bool) -> None:
    pools = EnginePools(share=True, is_lazy=is_lazy)
    first = cache_in(pools, need("a", 30), need("b", 20))
    second = cache_in(pools, need("b", 20))
    assert first.pool.num_blocks == second.pool.num_blocks == 50
    assert first.pool.allocate(45) is not None
    assert second.num_available == 5


def test_other_kinds_share_bytes_where_memory_is_taken_as_it_is_used() -> None:
    pools = EnginePools(share=True, is_lazy=True)
    small = cache_in(pools, need("a", 30, 10), need("b", 15, 20))
    large = cache_in(pools, need("b", 15, 20))
    assert (small.num_available, large.num_available) == (60, 30)
    assert small.pool.allocate(40) is not None
    assert (small.num_available, large.num_available) == (20, 10)


def test_elsewhere_each_has_its_own_part() -> None:
    pools = EnginePools(share=True, is_lazy=False)
    small = cache_in(pools, need("a", 30, 10), need("b", 15, 20))
    large = cache_in(pools, need("b", 15, 20))
    assert (small.num_available, large.num_available) == (30, 15)
    assert small.pool.allocate(30) is not None
    assert large.num_available == 15


def test_bytes_for_all_are_cut_by_the_models_that_still_come() -> None:
    """As on a GPU: each sizes its pool from what is left when it is its turn."""
    pools = EnginePools(share=True, is_lazy=False)
    a, b, c = (need(name, 90, counts_for_all=True, kind=kind) for name, kind in (("a", "x"), ("b", "x"), ("c", "y")))
    assert pools.place(a, [b, c])[0].size.num_blocks == 60
    assert pools.place(b, [c])[0].size.num_blocks == 60
    assert pools.place(need("c", 30, counts_for_all=True, kind="y"))[0].size.num_blocks == 30


def test_bytes_for_all_are_everyones_on_a_cpu() -> None:
    pools = EnginePools(share=True, is_lazy=True)
    first = cache_in(pools, need("a", 90, 10, counts_for_all=True), need("b", 45, 20, counts_for_all=True))
    second = cache_in(pools, need("b", 45, 20, counts_for_all=True))
    assert (first.num_available, second.num_available) == (90, 45)
    assert second.pool.allocate(40) is not None
    assert first.num_available == 10


def test_without_sharing_nobody_takes_from_anybody() -> None:
    pools = EnginePools(share=False, is_lazy=True)
    first, second = cache_in(pools, need("a", 30), need("b", 30)), cache_in(pools, need("b", 30))
    assert first.pool.allocate(30) is not None
    assert second.num_available == 30


def test_a_model_that_leaves_takes_its_part_along_and_the_last_one_the_pool() -> None:
    pools = EnginePools(share=True, is_lazy=True)
    first = cache_in(pools, need("a", 30, 10), need("b", 15, 20))
    second = cache_in(pools, need("b", 15, 20))
    assert second.close() == 0
    pools.leave("b")
    assert first.num_available == 30
    assert cache_in(pools, need("b", 15, 20)).pool.num_blocks == 30
    pools.leave("a")
    pools.leave("b")
    assert pools.place(need("a", 7))[0].size.num_blocks == 7


def test_no_room_for_a_block_is_said_in_one_line() -> None:
    pools = EnginePools(share=True, is_lazy=False)
    with pytest.raises(StartupError, match="no room for one block"):
        pools.place(need("a", 1, counts_for_all=True), [need("b", 1, kind="other", counts_for_all=True)])
