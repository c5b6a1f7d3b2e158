from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runners.kv_cache.block_pool import free_list
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.device_cache import DeviceCache, device_memory
from runners.kv_cache.kv_budget import KvBudget
from runners.kv_cache.sizing import kv_block_bytes
from tests.support.memory_checkpoint import small_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_has_the_size_that_sizing_says_and_starts_empty(dtype: torch.dtype) -> None:
    cache = DeviceCache(small_config(), 7, 16, dtype)
    assert cache.pool.shape == (7, 3, 2, 2, 16, 16)
    assert cache.pool.dtype == dtype
    assert cache.nbytes == 7 * kv_block_bytes(small_config(), 16, dtype.itemsize)
    assert not cache.pool.any()


def test_layer_views_write_into_the_pool() -> None:
    cache = DeviceCache(small_config(), 4, 16, torch.float32)
    keys, values = cache.layers[2]
    assert keys.shape == (4, 2, 16, 16)
    keys[3] = 1.0
    values[1] = 2.0
    assert cache.pool[3, 2, 0].eq(1.0).all()
    assert cache.pool[1, 2, 1].eq(2.0).all()
    assert cache.pool.count_nonzero() == 2 * 2 * 16 * 16


def test_a_block_is_copied_with_all_its_layers() -> None:
    cache = DeviceCache(small_config(), 4, 16, torch.float32)
    cache.pool.copy_(torch.randn_like(cache.pool))
    before = cache.pool.clone()
    cache.copy_blocks([(0, 2), (2, 3)])
    assert torch.equal(cache.pool[2], before[0])
    assert torch.equal(cache.pool[3], before[2])
    assert torch.equal(cache.pool[:2], before[:2])


def test_memory_of_this_machine_is_no_gpu() -> None:
    memory = device_memory("cpu")
    assert memory is None or (not memory.is_gpu and 0 < memory.free_bytes <= memory.total_bytes)


def test_a_block_moves_between_models_whose_geometry_agrees() -> None:
    """4 layers of 2 heads and 2 layers of 4 heads: one tensor, one list of free blocks, each model its own view."""
    deep = replace(small_config(), num_layers=4, num_kv_heads=2)
    wide = replace(small_config(), num_layers=2, num_kv_heads=4)
    first = DeviceCache(deep, 3, 16, torch.float32)
    second = DeviceCache(wide, 3, 16, torch.float32, storage=first.pool)
    assert second.pool.data_ptr() == first.pool.data_ptr()
    budget, free = KvBudget(3), free_list(3)
    books = [CacheManager(3, 16, free=free, budgets=[budget]) for _ in range(2)]
    (block_id,) = books[0].pool.allocate(1) or ()
    first.layers[3][1][block_id] = 7.0
    assert books[1].pool.allocate(3) is None
    books[0].pool.release(block_id)
    assert books[1].pool.allocate(1) == [block_id]
    assert (second.layers[1][1][block_id, 2:] == 7.0).all()  # the last quarter of the block, in the other's shape
    second.layers[1][1][block_id] = 5.0
    assert (first.layers[3][1][block_id] == 5.0).all()
    assert not first.pool[[other for other in range(3) if other != block_id]].any()


def test_a_pool_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        DeviceCache(small_config(), 3, 16, torch.float32, storage=torch.zeros(2, 4))
