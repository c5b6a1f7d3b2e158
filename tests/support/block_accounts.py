"""Whether every block of a pool that models share is accounted for."""

from __future__ import annotations

from runners.kv_cache.cache_manager import CacheManager


def joint_free_list_is_exact(num_blocks: int, free: list[int], caches: list[CacheManager]) -> bool:
    """Whether every block of a shared pool is in the free list or out of exactly one model's pool."""
    holders = [0] * num_blocks
    for block_id in free:
        holders[block_id] += 1
    for cache in caches:
        for block_id in range(num_blocks):
            holders[block_id] += cache.pool.references(block_id) > 0
    return holders == [1] * num_blocks
