"""Which KV blocks are free, and how many hold each of the others.

Block ids run from 0 to `num_blocks - 1`; one id stands for that block in every layer. Free blocks are handed out
last freed first: deterministic, and the one freed last is the likeliest to be in the device's caches still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class FreeBytes(Protocol):
    """What several pools may hold together (`runners.kv_cache.kv_budget`)."""

    def num_free(self, block_bytes: int) -> int:
        """Blocks of this size that fit into what nobody holds; negative while too much is held."""
        ...


def free_list(num_blocks: int) -> list[int]:
    """Every block of a pool, popped from the end: block 0 first."""
    return list(range(num_blocks - 1, -1, -1))


class BlockPool:
    """Reference-counted block ids under a quota. Every operation costs O(1) a block.

    `quota_blocks` bounds the blocks out of the pool (referenced by a table or by the prefix cache). It may be lowered
    below what is out: nothing is taken away, but nothing is handed out either until enough has come back.

    Models of one geometry share a pool: each has its own `BlockPool` with its own references and quota, and they draw
    from one list `free`. `budgets` bound what pools hold together, in bytes; a block of this one has `block_bytes`.
    """

    def __init__(
        self,
        num_blocks: int,
        quota_blocks: int | None = None,
        *,
        free: list[int] | None = None,
        budgets: Sequence[FreeBytes] = (),
        block_bytes: int = 1,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._references = [0] * num_blocks
        self._is_shared = free is not None
        self._free = free_list(num_blocks) if free is None else free
        self._budgets = budgets
        self.num_out = 0
        """Blocks that someone refers to."""
        self._asked_quota = self._cap = self._quota_blocks = num_blocks
        if quota_blocks is not None:
            self.set_quota(quota_blocks)

    @property
    def quota_blocks(self) -> int:
        """The quota, or what the budget can hold at most where that is less."""
        return self._quota_blocks

    def set_quota(self, quota_blocks: int) -> None:
        """Bound the blocks out at once. ValueError outside `1..num_blocks`."""
        if not 1 <= quota_blocks <= self.num_blocks:
            raise ValueError(f"quota of {quota_blocks} blocks outside 1..{self.num_blocks}")
        self._asked_quota = quota_blocks
        self._quota_blocks = min(quota_blocks, self._cap)

    def set_cap(self, cap_blocks: int) -> None:
        """The budget as a whole holds so many: no quota reaches further."""
        self._cap = max(1, cap_blocks)
        self._quota_blocks = min(self._asked_quota, self._cap)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` would hand out now; 0 while more are out than the quota allows."""
        free = self._quota_blocks - self.num_out
        for budget in self._budgets:
            free = min(free, budget.num_free(self.block_bytes))
        return max(0, free)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changed) when there are fewer."""
        if count > self.num_free:
            return None
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        self.num_out += count
        return block_ids

    def share_one(self, block_id: int) -> None:
        """One more reference. ValueError on a free block."""
        if self._references[block_id] == 0:
            raise ValueError(f"block {block_id} is free")
        self._references[block_id] += 1

    def release(self, block_id: int) -> int:
        """One reference less; returns those left, and the block is free at 0. ValueError on a free block."""
        left = self._references[block_id] - 1
        if left < 0:
            raise ValueError(f"block {block_id} is free")
        self._references[block_id] = left
        if left == 0:
            self._free.append(block_id)
            self.num_out -= 1
        return left

    def check_invariants(self) -> None:
        """AssertionError when free list and reference counts disagree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block_id, references in enumerate(self._references):
            is_elsewhere = self._is_shared and references == 0
            is_right = is_elsewhere or (references == 0) == (block_id in free)
            assert is_right, f"block {block_id}: {references} references and free"
        assert sum(map(bool, self._references)) == self.num_out, "the blocks out are miscounted"
