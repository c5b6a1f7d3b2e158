from __future__ import annotations

import pytest
import torch

from runners.kv_cache.device_cache import DeviceCache, device_memory
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
