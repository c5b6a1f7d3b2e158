"""The KV pool on the device: one tensor, a view a layer, block copies.

    pool [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim]

A block holds all layers, so one block id serves the whole model, one copy duplicates it, and models whose product of
layers, heads and head size agree can share a pool: each sees the same blocks in its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels import ops
from kernels.host_memory import allocate_host
from runners.kv_cache.sizing import DeviceMemory
from runners.models.config import ModelConfig


class DeviceCache:
    """A pool and its layer views. `layers[i]` is (keys, values), each [num_blocks, Hk, block_tokens, D], strided.

    `storage` is a tensor of such a pool [num_blocks, …] that another model may use too; without one the pool is new.
    ValueError when its blocks have another size.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage: torch.Tensor | None = None,
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_tokens, config.head_dim)
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        if storage is not None and (storage.dtype is not dtype or storage.numel() != math.prod(shape)):
            raise ValueError(f"a pool of {tuple(storage.shape)} {storage.dtype} cannot hold {shape} {dtype}")
        self.pool = _zeros(shape, dtype, torch.device(device)) if storage is None else storage.view(shape)
        self.layers = [(self.pool[:, layer, 0], self.pool[:, layer, 1]) for layer in range(config.num_layers)]

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) block pairs, all layers; every source is read before any target is written."""
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64, device=self.pool.device)
            ops.copy_blocks(self.pool, pairs[:, 0], pairs[:, 1])


def device_memory(device: torch.device | str) -> DeviceMemory | None:
    """Total and used bytes of a CUDA device, or of this machine's RAM where Linux tells; None where nobody does."""
    device = torch.device(device)
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes, total_bytes - free_bytes)
    try:
        with open("/proc/meminfo") as file:
            kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
        used_bytes = (kib["MemTotal"] - kib["MemAvailable"]) * 1024
        return DeviceMemory(kib["MemTotal"] * 1024, used_bytes, is_gpu=False)
    except (OSError, KeyError, ValueError):
        return None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed pool. On a CPU the pages come from the kernel as they are first used, so that a pool for eight full
    contexts costs no start-up time and no memory before somebody needs it (torch.zeros touches every page)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return allocate_host(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
