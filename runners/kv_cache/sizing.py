"""How many KV blocks a pool holds: by blocks, by bytes, by sequences or as a share of a GPU. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from runners.errors import StartupError
from runners.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device as its driver reports them; `used_bytes` are taken by weights and everything else."""

    total_bytes: int
    used_bytes: int
    is_gpu: bool = True

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool of `num_blocks` blocks of `block_bytes`; a sequence of full context takes `blocks_per_sequence`."""

    num_blocks: int
    block_bytes: int
    block_tokens: int
    blocks_per_sequence: int

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    @property
    def peak_concurrency(self) -> float:
        """Sequences of full context that fit at once."""
        return self.num_blocks / self.blocks_per_sequence


def kv_block_bytes(config: ModelConfig, block_tokens: int, element_bytes: int) -> int:
    """Bytes of one block: keys and values of `block_tokens` tokens in every layer."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_tokens * element_bytes


def size_pool(
    *,
    block_bytes: int,
    block_tokens: int,
    max_context: int,
    blocks: int | None = None,
    bytes: int | None = None,
    sequences: int | None = None,
    gpu_fraction: float | None = None,
    memory: DeviceMemory | None = None,
) -> PoolSize:
    """The pool that a profile's `kv.pool` asks for; exactly one of the four ways is given.

    `bytes` and `gpu_fraction` round down to whole blocks. `gpu_fraction` is the share of the device's memory that
    weights, workspace and KV may take together, so it needs `memory`. StartupError, with the numbers, when the pool
    would have no block or more bytes than the device has free.
    """
    given = [way for way in (blocks, bytes, sequences, gpu_fraction) if way is not None]
    if len(given) != 1:
        raise StartupError(f"kv.pool: give exactly one of blocks, bytes, sequences, gpu_fraction (got {len(given)})")
    blocks_per_sequence = -(-max_context // block_tokens)
    if blocks is not None:
        num_blocks, asked = blocks, f"blocks {blocks}"
    elif bytes is not None:
        num_blocks, asked = bytes // block_bytes, f"bytes {format_bytes(bytes)}"
    elif sequences is not None:
        num_blocks = sequences * blocks_per_sequence
        asked = f"sequences {sequences} of {max_context} tokens"
    else:
        assert gpu_fraction is not None
        if memory is None or not memory.is_gpu:
            raise StartupError(f"kv.pool: gpu_fraction {gpu_fraction} needs a GPU; use blocks, bytes or sequences")
        available = int(gpu_fraction * memory.total_bytes) - memory.used_bytes
        num_blocks, asked = max(0, available) // block_bytes, f"gpu_fraction {gpu_fraction}"
    size = PoolSize(num_blocks, block_bytes, block_tokens, blocks_per_sequence)
    _check(size, asked, memory)
    return size


def _check(size: PoolSize, asked: str, memory: DeviceMemory | None) -> None:
    block = f"a block of {size.block_tokens} tokens takes {format_bytes(size.block_bytes)}"
    if memory is not None:
        free = f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} are free"
    else:
        free = "free memory is unknown"
    if size.num_blocks < 1:
        raise StartupError(f"kv.pool: {asked} leaves no room for one block; {block}, {free}")
    if memory is not None and size.pool_bytes > memory.free_bytes:
        raise StartupError(
            f"kv.pool: {asked} needs {format_bytes(size.pool_bytes)} ({size.num_blocks} blocks); {block}, {free}"
        )


def format_bytes(count: int) -> str:
    """Bytes for people: `17 B`, `1.5 KiB`, `12.0 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
