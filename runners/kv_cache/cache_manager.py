"""Block tables for requests: what is cached already, what must be allocated, what comes back.

available for a new table = free in the pool + idle in the prefix cache + pinned by sessions
                            (taken in this order; only the last two cost anyone a recomputation)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from runners.kv_cache.block_pool import BlockPool
from runners.kv_cache.kv_budget import KvBudget
from runners.kv_cache.prefix_cache import PrefixCache, block_digest, root_digest
from runners.kv_cache.sessions import BlockTable, Session, SessionStore

_NO_SALT = root_digest()


class CacheManager:
    """KV bookkeeping of one model. Knows tokens and blocks, not requests.

    `prefix_cache` false: nothing is shared between requests; sessions work all the same. `shared_by_keys` true:
    requests of different API keys share too. Several models may hold blocks under common `budgets`, each
    of `block_bytes`; those of one geometry draw them from one list `free` (`runners.kv_cache.block_pool`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int = 16,
        *,
        prefix_cache: bool = True,
        shared_by_keys: bool = False,
        session_ttl_s: float = 3600.0,
        quota_blocks: int | None = None,
        free: list[int] | None = None,
        budgets: Sequence[KvBudget] = (),
        block_bytes: int = 1,
    ) -> None:
        self.block_tokens = block_tokens
        self.budgets = budgets
        self.pool = BlockPool(num_blocks, quota_blocks, free=free, budgets=budgets, block_bytes=block_bytes)
        self.prefix = PrefixCache(self.pool)
        self.prefix_enabled = prefix_cache
        self.shared_by_keys = shared_by_keys
        self.sessions = SessionStore(session_ttl_s, self.release)
        for budget in budgets:
            budget.join(self)

    def close(self) -> int:
        """Give every block back that no request holds; returns how many are still out."""
        self.sessions.clear()
        self.prefix.evict(self.prefix.num_idle)
        for budget in self.budgets:
            budget.leave(self)
        return self.pool.num_out

    # --- sizes ----------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def too_large(self, num_tokens: int) -> str:
        """Why a sequence of so many tokens can never run, in numbers."""
        return (
            f"{num_tokens} tokens need {self.blocks_for(num_tokens)} KV blocks of {self.block_tokens} tokens, "
            f"but the quota is {self.pool.quota_blocks} blocks."
        )

    @property
    def num_available(self) -> int:
        """Blocks that nobody who runs or waits depends on; negative while a lowered quota is exceeded."""
        available = self.num_under_quota
        for budget in self.budgets:
            available = min(available, budget.num_available(self))
        return available

    @property
    def num_under_quota(self) -> int:
        """Blocks that the quota leaves, idle cached ones included."""
        return self.pool.quota_blocks - self.pool.num_out + self.prefix.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that requests and sessions hold."""
        return self.pool.num_out - self.prefix.num_idle

    def set_quota(self, quota_blocks: int) -> None:
        """Lower or raise the quota while running; idle cached blocks beyond it go at once."""
        self.pool.set_quota(quota_blocks)
        self.prefix.evict(max(0, self.pool.num_out - quota_blocks))

    # --- tables ---------------------------------------------------------------------------------------------------

    def root(self, cache_salt: str, key_id: str) -> bytes:
        """What a request must have in common with another to share blocks with it."""
        return root_digest(cache_salt, "" if self.shared_by_keys else key_id)

    def new_table(self, root: bytes = _NO_SALT) -> BlockTable:
        return BlockTable(root)

    def num_cached(
        self, table: BlockTable, token_ids: list[int], session: Session | None = None, shared: int = 0
    ) -> int:
        """Tokens of `token_ids` that need no computing, were the table allocated now; at least one always does.

        `shared` counts the leading tokens that `session` and `token_ids` have in common.
        """
        hits = len(self._hits(table, token_ids)) * self.block_tokens
        if session is not None:
            hits = max(hits, self._session_tokens(session, shared, len(token_ids)))
        return hits

    def allocate(
        self,
        table: BlockTable,
        token_ids: list[int],
        *,
        headroom_blocks: int = 0,
        session: Session | None = None,
        shared: int = 0,
        use_prefix: bool = True,
    ) -> tuple[BlockTable, int] | None:
        """A table with room for all of `token_ids`, and how many of them are cached; None when blocks do not suffice.

        All or nothing. `headroom_blocks` more must remain available, so that those who run can go on. A session's own
        table is used where it reaches further than the prefix cache. `use_prefix` false computes everything.
        """
        hits = self._hits(table, token_ids) if use_prefix else []
        from_session = (
            self._session_tokens(session, shared, len(token_ids)) if session is not None and use_prefix else 0
        )
        if session is not None and from_session >= max(1, len(hits) * self.block_tokens):
            return self._allocate_after_session(session, from_session, token_ids, headroom_blocks)
        needed = self.blocks_for(len(token_ids)) - len(hits)
        self.prefix.take(hits)  # first: what follows may evict, and may make blocks idle that are hits
        given_up = session.table.block_ids if session is not None else []
        if not self._make_room(needed + headroom_blocks - self._num_gained(given_up), session, is_new=True):
            self._release_blocks(hits)
            return None
        if session is not None and given_up:
            self.release(self.sessions.take_table(session))
        table.block_ids = hits + self._new_blocks(needed)
        table.num_entered = len(hits)
        return table, len(hits) * self.block_tokens

    def _allocate_after_session(
        self, session: Session, num_kept: int, token_ids: list[int], headroom_blocks: int
    ) -> tuple[BlockTable, int] | None:
        kept_blocks = self.blocks_for(num_kept)
        needed = self.blocks_for(len(token_ids)) - kept_blocks
        gained = self._num_gained(session.table.block_ids[kept_blocks:])
        if not self._make_room(needed + headroom_blocks - gained, session, is_new=True):
            return None
        table = self.sessions.take_table(session)
        self.trim(table, num_kept)
        table.block_ids += self._new_blocks(needed)
        return table, num_kept

    def extend(self, tables: Sequence[BlockTable]) -> bool:
        """One more block at the end of each; False, and nothing done, when there are not enough."""
        count = len(tables)
        if self.pool.num_free < count and not self._make_room(count, None):
            return False
        for table, block_id in zip(tables, self._new_blocks(count), strict=True):
            table.block_ids.append(block_id)
        return True

    def commit(self, table: BlockTable, token_ids: list[int], num_computed: int) -> None:
        """The KV of the first `num_computed` tokens is certain: make the blocks they fill known to the prefix cache."""
        if not self.prefix_enabled:
            return
        num_full = num_computed // self.block_tokens
        if num_full <= table.num_entered:
            return
        self._extend_digests(table, token_ids, num_full)
        for index in range(table.num_entered, num_full):
            self.prefix.enter(table.block_ids[index], table.digests[index])
        table.num_entered = num_full

    def forget(self, table: BlockTable) -> None:
        """The KV of this table may be wrong: no later prompt may find its blocks, except those that others read."""
        for block_id in table.block_ids:
            if self.pool.references(block_id) == 2:
                self.prefix.forget(block_id)
        table.num_entered = len(table.block_ids)

    def trim(self, table: BlockTable, num_tokens: int) -> int:
        """Give back what lies beyond `num_tokens`; returns how many keep their KV.

        That is fewer when the last block is not the table's alone to write: it goes too, and is computed again.
        """
        kept = self._writable_from(table, num_tokens)
        blocks = self.blocks_for(kept)
        self._release_blocks(table.block_ids[blocks:])
        del table.block_ids[blocks:]
        full = kept // self.block_tokens
        del table.digests[full:]
        table.num_entered = min(table.num_entered, full)
        return kept

    def trim_ended_turn(self, request_id: str, keep_tokens: int) -> None:
        """Shorten the session whose last turn was this request's to `keep_tokens` generated tokens, if there is one."""
        session = self.sessions.ended_turn(request_id)
        if session is not None:
            self.sessions.shorten(session, session.last_prompt_tokens + keep_tokens, self.trim)

    def release(self, table: BlockTable) -> None:
        """All blocks of the table come back; known ones stay in the prefix cache until they are evicted."""
        self._release_blocks(table.block_ids)
        table.block_ids = []
        table.num_entered = 0

    # --- inside ---------------------------------------------------------------------------------------------------

    def _hits(self, table: BlockTable, token_ids: list[int]) -> list[int]:
        if not self.prefix_enabled or self.prefix.num_known == 0:
            return []
        # The last token is never taken from the cache: its logits are wanted.
        num_full = (len(token_ids) - 1) // self.block_tokens
        hits: list[int] = []
        ahead = 1
        # A beginning that is not known needs no further digests before its blocks are computed: 64 new prompts of
        # 2,000 tokens kept the first step of a burst waiting for 8.6 ms.
        while len(hits) < num_full:
            end = min(num_full, len(hits) + ahead)
            self._extend_digests(table, token_ids, end)
            hits += self.prefix.match(table.digests[len(hits) : end])
            if len(hits) < end:
                break
            ahead *= 2
        return hits

    def _extend_digests(self, table: BlockTable, token_ids: list[int], num_full: int) -> None:
        digests, size = table.digests, self.block_tokens
        known = len(digests)
        if known >= num_full:
            return
        parent = digests[-1] if digests else table.root
        packed = array("i", token_ids[known * size : num_full * size]).tobytes()
        width = 4 * size
        for start in range(0, len(packed), width):
            parent = block_digest(parent, packed[start : start + width])
            digests.append(parent)

    def _session_tokens(self, session: Session, shared: int, num_tokens: int) -> int:
        return self._writable_from(session.table, min(shared, session.num_computed, num_tokens - 1))

    def _writable_from(self, table: BlockTable, num_tokens: int) -> int:
        """`num_tokens`, or the start of its block when writing on from there would alter a block others may read."""
        block, offset = divmod(num_tokens, self.block_tokens)
        if offset and block < len(table.block_ids):
            block_id = table.block_ids[block]
            if self.prefix.knows(block_id) or self.pool.references(block_id) > 1:
                return num_tokens - offset
        return num_tokens

    def _num_gained(self, block_ids: list[int]) -> int:
        """How many blocks become available when a table gives these up."""
        return sum(1 for block_id in block_ids if self.pool.references(block_id) == 1 + self.prefix.knows(block_id))

    def _make_room(self, count: int, keep: Session | None, *, is_new: bool = False) -> bool:
        """Reclaim from sessions other than `keep` until `count` blocks are available; False when they never will be.

        `is_new`: for a request that starts; under a budget it stands behind those of other models that wait longer.
        """
        missing = count - self.num_under_quota
        if missing > self.sessions.num_pinned_blocks:
            return False
        if not all(budget.could_hold(self, count, is_new=is_new) for budget in self.budgets):
            return False
        while self.num_under_quota < count:
            if not self.sessions.reclaim(keep):
                return False
        return all(budget.make_room(self, count, keep, is_new=is_new) for budget in self.budgets)

    def _new_blocks(self, count: int) -> list[int]:
        """`count` blocks after `_make_room` has said yes."""
        if count > self.pool.num_free:
            self.prefix.evict(count - (self.pool.quota_blocks - self.pool.num_out))
            for budget in self.budgets:
                budget.take_back(self, count)
        block_ids = self.pool.allocate(count)
        assert block_ids is not None, "room was made for these blocks"
        return block_ids

    def _release_blocks(self, block_ids: list[int]) -> None:
        # From the end: a block is to become idle, and be evicted, before its parent.
        for block_id in reversed(block_ids):
            if self.pool.release(block_id) == 1:
                self.prefix.released(block_id)

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """AssertionError unless `tables`, sessions and prefix cache account for every reference to every block."""
        self.pool.check_invariants()
        self.prefix.check_invariants()
        holders = [0] * self.pool.num_blocks
        for table in [*tables, *self.sessions.tables()]:
            assert len(set(table.block_ids)) == len(table.block_ids), "a block is twice in one table"
            for block_id in table.block_ids:
                holders[block_id] += 1
        for block_id, count in enumerate(holders):
            known = self.prefix.knows(block_id)
            assert self.pool.references(block_id) == count + known, f"block {block_id}: references and holders differ"
            assert count <= 1 or known, f"block {block_id} is in {count} tables without the prefix cache"
