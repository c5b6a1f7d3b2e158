"""The KV pools of an engine's models: which model shares a pool with which, and how large each is. Torch-free.

Models whose blocks are alike (bytes and element type) share one pool. Others have pools of their own; where memory is
taken only as it is used (a CPU), they share its bytes: each could take all of them, together they may not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runners.errors import StartupError
from runners.kv_cache.block_pool import free_list
from runners.kv_cache.kv_budget import KvBudget
from runners.kv_cache.sizing import PoolSize, format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """What one model needs: `kind` is what blocks must agree in to be shared, `own` the pool it would have alone.

    `counts_for_all`: that pool is for all models together (a number of bytes, a share of the device).
    """

    model: str
    kind: tuple[Any, ...]
    own: PoolSize
    counts_for_all: bool


@dataclass(slots=True)
class Pool:
    """One pool and its users. `storage` is its tensor, set by who makes it."""

    size: PoolSize
    budget: KvBudget
    free: list[int]
    storage: Any = None
    users: list[str] = field(default_factory=list)


class EnginePools:
    """`is_lazy`: memory is taken as it is used. `share` false: every model has its own pool and shares nothing."""

    def __init__(self, *, share: bool, is_lazy: bool) -> None:
        self._share = share
        self._is_lazy = is_lazy
        self._pools: dict[tuple[Any, ...], Pool] = {}
        self._own_bytes: dict[str, int] = {}
        self._common = KvBudget(0)

    def place(self, need: PoolNeed, later: Sequence[PoolNeed] = ()) -> tuple[Pool, Sequence[KvBudget]]:
        """The pool of a model and the budgets it stands under. `later` are the models that come in the same go."""
        key = need.kind if self._share else (*need.kind, need.model)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._make(need, later)
        elif pool.users:
            logger.info("%s shares the KV pool of %s", need.model, ", ".join(pool.users))
        pool.users.append(need.model)
        self._own_bytes[need.model] = 0 if need.counts_for_all else need.own.pool_bytes
        if not (self._share and self._is_lazy):
            return pool, (pool.budget,)
        self._common.resize(need.own.pool_bytes if need.counts_for_all else sum(self._own_bytes.values()))
        return pool, (pool.budget, self._common)

    def leave(self, model: str) -> None:
        """The model is unloaded; a pool that nobody uses any more goes."""
        own_bytes = self._own_bytes.pop(model, 0)
        for key, pool in list(self._pools.items()):
            if model in pool.users:
                pool.users.remove(model)
                if not pool.users:
                    del self._pools[key]
        if own_bytes:
            self._common.resize(sum(self._own_bytes.values()))

    def _make(self, need: PoolNeed, later: Sequence[PoolNeed]) -> Pool:
        alike = [other for other in later if self._share and other.kind == need.kind]
        own = need.own
        if need.counts_for_all and not (self._share and self._is_lazy):
            num_blocks = own.num_blocks * (1 + len(alike)) // (1 + len(later))
        elif need.counts_for_all:
            num_blocks = own.num_blocks
        else:
            num_blocks = own.num_blocks + sum(other.own.num_blocks for other in alike)
            if self._share and self._is_lazy:
                together = sum(self._own_bytes.values()) + sum(other.own.pool_bytes for other in (need, *later))
                num_blocks = max(num_blocks, together // own.block_bytes)
        if num_blocks < 1:
            raise StartupError(f"kv.pool: no room for one block of {format_bytes(own.block_bytes)} for {need.model}")
        size = PoolSize(num_blocks, own.block_bytes, own.block_tokens, own.blocks_per_sequence)
        others = [pool for pool in self._pools.values() if pool.users]
        if others and self._share:
            logger.info(
                "%s has a KV pool of its own: its blocks of %s are not like those of %s (%s); %s",
                *(need.model, format_bytes(own.block_bytes), ", ".join(others[0].users)),
                format_bytes(others[0].size.block_bytes),
                "they share the bytes" if self._is_lazy else "each has its part of the memory",
            )
        return Pool(size, KvBudget(size.pool_bytes), free_list(num_blocks))
