"""What the KV blocks of several models may take together, and who gives way when it runs out.

Models that share a pool tensor share its blocks; models of different geometry share bytes. Within that, each has its
quota. What nobody depends on is anybody's: a model in need has cached beginnings of all models evicted, then idle
conversations, the least recently used first. What requests hold is never taken from them.

    available to one model = bytes nobody holds + bytes of idle cached blocks, of all models
                             - for a new request: what other models' requests claimed before it

Nobody starves. A request that finds no room claims it; from then on new requests of other models stand behind it, while
those that run go on and end. So it waits at most for the requests that were running when it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runners.kv_cache.cache_manager import CacheManager
    from runners.kv_cache.sessions import Session


class KvBudget:
    """`total_bytes` for the members, each the KV bookkeeping of one model."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._members: list[CacheManager] = []
        self._claims: dict[CacheManager, int] = {}  # bytes that a new request waits for, the oldest claim first

    def join(self, cache: CacheManager) -> None:
        """One more model."""
        self._members.append(cache)
        self._cap(cache)

    def leave(self, cache: CacheManager) -> None:
        """The model is unloaded."""
        self._members.remove(cache)
        self._claims.pop(cache, None)

    def resize(self, total_bytes: int) -> None:
        """Nothing is taken away; as with a lowered quota, nothing is handed out until enough has come back."""
        self.total_bytes = total_bytes
        for cache in self._members:
            self._cap(cache)

    def _cap(self, cache: CacheManager) -> None:
        cache.pool.set_cap(min(budget.total_bytes for budget in cache.budgets) // cache.pool.block_bytes)

    # --- what is there --------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds; negative after the budget has shrunk below what is held."""
        return self.total_bytes - sum(cache.pool.num_out * cache.pool.block_bytes for cache in self._members)

    @property
    def used_bytes(self) -> int:
        """Bytes that requests and sessions hold."""
        return sum(cache.num_used * cache.pool.block_bytes for cache in self._members)

    def num_free(self, block_bytes: int) -> int:
        """Blocks of this size that fit into what nobody holds."""
        return self.free_bytes // block_bytes

    def num_available(self, cache: CacheManager) -> int:
        """Blocks that `cache` could get without touching anyone's conversations."""
        return self._reachable_bytes() // cache.pool.block_bytes

    def others_hold_blocks(self, cache: CacheManager) -> bool:
        """True when another model holds blocks that, once its sessions are reclaimed, its requests will give back."""
        return any(other is not cache and other.num_used > 0 for other in self._members)

    def _reachable_bytes(self) -> int:
        return self.free_bytes + sum(cache.prefix.num_idle * cache.pool.block_bytes for cache in self._members)

    # --- getting it -----------------------------------------------------------------------------------------------

    def could_hold(self, cache: CacheManager, count: int, *, is_new: bool) -> bool:
        """Whether `make_room` may succeed. A new request that is told no has claimed its place."""
        pinned = sum(other.sessions.num_pinned_blocks * other.pool.block_bytes for other in self._members)
        wanted = count * cache.pool.block_bytes
        if wanted <= self._reachable_bytes() + pinned - (self._claimed_before(cache) if is_new else 0):
            return True
        self._refuse(cache, wanted, is_new)
        return False

    def make_room(self, cache: CacheManager, count: int, keep: Session | None, *, is_new: bool) -> bool:
        """Reclaim sessions other than `keep`, of all models, until `count` blocks are available to `cache`."""
        wanted = count * cache.pool.block_bytes
        ahead = self._claimed_before(cache) if is_new else 0
        while self._reachable_bytes() - ahead < wanted:
            if not self._reclaim_session(keep):
                self._refuse(cache, wanted, is_new)
                return False
        if is_new:
            self._claims.pop(cache, None)
        return True

    def take_back(self, cache: CacheManager, count: int) -> None:
        """Evict idle cached blocks until `count` blocks fit, from whoever has most of them."""
        while (missing := count * cache.pool.block_bytes - self.free_bytes) > 0:
            giver = max(self._members, key=lambda other: other.prefix.num_idle * other.pool.block_bytes)
            if giver.prefix.num_idle == 0:
                return
            giver.prefix.evict(-(-missing // giver.pool.block_bytes))

    def withdraw(self, cache: CacheManager) -> None:
        """No request of this model waits for blocks any longer."""
        self._claims.pop(cache, None)

    def _refuse(self, cache: CacheManager, wanted: int, is_new: bool) -> None:
        if is_new:
            self._claims[cache] = max(0, wanted)  # one that is there already keeps its place

    def _claimed_before(self, cache: CacheManager) -> int:
        claimed = 0
        for other, wanted in self._claims.items():
            if other is cache:
                break
            claimed += wanted
        return claimed

    def _reclaim_session(self, keep: Session | None) -> bool:
        found = [
            (since, cache) for cache in self._members if (since := cache.sessions.reclaimable_since(keep)) is not None
        ]
        return bool(found) and min(found, key=lambda entry: entry[0])[1].sessions.reclaim(keep)

    def check_invariants(self) -> None:
        """AssertionError when more is held than there is, or a claim has no owner."""
        assert self._claims.keys() <= set(self._members)
        assert all(cache.num_used >= 0 for cache in self._members)
