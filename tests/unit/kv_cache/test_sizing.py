from __future__ import annotations

import pytest

from runners.errors import StartupError
from runners.kv_cache.sizing import DeviceMemory, format_bytes, kv_block_bytes, size_pool
from tests.support.memory_checkpoint import small_config

GIB = 2**30
SHAPE = {"block_bytes": 2**20, "block_tokens": 16, "max_context": 1000}
GPU = DeviceMemory(total_bytes=100 * GIB, used_bytes=40 * GIB)


def test_block_bytes_count_keys_and_values_of_every_layer() -> None:
    assert kv_block_bytes(small_config(), 16, 2) == 2 * 3 * 2 * 16 * 16 * 2


def test_by_blocks() -> None:
    size = size_pool(**SHAPE, blocks=126)
    assert (size.num_blocks, size.num_tokens, size.pool_bytes) == (126, 2016, 126 * 2**20)
    assert size.blocks_per_sequence == 63
    assert size.peak_concurrency == 2.0


def test_by_bytes_rounds_down_to_whole_blocks() -> None:
    assert size_pool(**SHAPE, bytes=5 * 2**20 - 1).num_blocks == 4


def test_by_sequences_of_full_context() -> None:
    assert size_pool(**SHAPE, sequences=3).num_blocks == 3 * 63


def test_by_gpu_fraction_after_what_is_already_used() -> None:
    assert size_pool(**SHAPE, gpu_fraction=0.9, memory=GPU).num_blocks == (90 - 40) * 1024


def test_gpu_fraction_needs_a_gpu() -> None:
    ram = DeviceMemory(total_bytes=100 * GIB, used_bytes=0, is_gpu=False)
    for memory in (None, ram):
        with pytest.raises(StartupError, match=r"gpu_fraction 0\.9 needs a GPU"):
            size_pool(**SHAPE, gpu_fraction=0.9, memory=memory)


def test_no_room_for_one_block_says_how_much_there_is() -> None:
    with pytest.raises(StartupError, match=r"gpu_fraction 0\.3 leaves no room .*1\.0 MiB.*60\.0 GiB of 100\.0 GiB"):
        size_pool(**SHAPE, gpu_fraction=0.3, memory=GPU)
    with pytest.raises(StartupError, match=r"bytes 1000\.0 KiB leaves no room .* 16 tokens takes 1\.0 MiB"):
        size_pool(**SHAPE, bytes=1000 * 1024)


def test_more_than_is_free_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        StartupError, match=r"sequences 1000 of 1000 tokens needs 61\.5 GiB \(63000 blocks\).*60\.0 GiB"
    ):
        size_pool(**SHAPE, sequences=1000, memory=GPU)


def test_exactly_one_way_is_chosen() -> None:
    with pytest.raises(StartupError, match="exactly one of blocks, bytes, sequences, gpu_fraction"):
        size_pool(**SHAPE)
    with pytest.raises(StartupError, match="got 2"):
        size_pool(**SHAPE, blocks=1, sequences=1)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (17, "17 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**44, "16384.0 GiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
