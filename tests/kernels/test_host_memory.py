from __future__ import annotations

import torch

from kernels.host_memory import HostArena, allocate_host


def test_buffers_are_zeroed_and_writable() -> None:
    buffer = allocate_host(5_000_000)
    assert not bool(buffer.any())
    buffer[-1] = 7
    assert int(buffer.sum()) == 7
    assert allocate_host(0).numel() == 0


def test_an_arena_never_hands_out_a_byte_twice() -> None:
    arena = HostArena(buffer_bytes=4096)
    taken = [arena.take(size) for size in (1, 100, 64, 1500, 1500, 1500, 9000, 2048, 63)]
    for number, part in enumerate(taken, start=1):
        assert not bool(part.any())
        assert part.data_ptr() % 64 == 0
        part.fill_(number)
    assert all(bool((part == number).all()) for number, part in enumerate(taken, start=1))


def test_a_slice_outlives_its_arena() -> None:
    part = HostArena(buffer_bytes=1 << 20).take(1000)
    part.fill_(3)
    assert torch.equal(part, torch.full((1000,), 3, dtype=torch.uint8))
