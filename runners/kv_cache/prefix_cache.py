"""Which full blocks are known by their content, so that a later prompt with the same beginning need not compute them.

A full block is known by a digest over its tokens and the digest of the block before it; the chain starts from the
request's `cache_salt` and API key, so requests that differ in them never share. BLAKE2b at 128 bits: a collision would
serve one client's KV to another, so a hash that can be steered is no choice here.

    table of a request:   [ d0 ] [ d1 ] [ d2 ] [ partial ]      d1 = digest(d0, tokens 16..31)
    known blocks:          d0 -> 7   d1 -> 3   d2 -> 9

The cache itself holds one reference on each known block; a block that nobody else refers to is idle and may be
evicted, least recently used first. A table is released from its end, so a block becomes idle before its parent does
and is evicted before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from runners.kv_cache.block_pool import BlockPool

DIGEST_BYTES = 16


def root_digest(cache_salt: str = "", key_id: str = "") -> bytes:
    """Where the chain of a request with this salt and API key starts; names of keys have no NUL."""
    text = f"{key_id}\0{cache_salt}"
    return blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"wavelane-root").digest()


def block_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """Digest of a full block: `token_bytes` are its ids as packed int32 (`runners.messages.pack_ids`)."""
    return blake2b(parent + token_bytes, digest_size=DIGEST_BYTES).digest()


class PrefixCache:
    """Digest to block and back, with an LRU order over the blocks that no table uses."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evictions = 0

    @property
    def num_idle(self) -> int:
        """Blocks that could be evicted now."""
        return len(self._idle)

    @property
    def num_known(self) -> int:
        return len(self._digest_of)

    def knows(self, block_id: int) -> bool:
        return block_id in self._digest_of

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning of `digests`. Takes no reference."""
        blocks = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def take(self, block_ids: Sequence[int]) -> None:
        """One reference each, for a table."""
        for block_id in block_ids:
            self._pool.share_one(block_id)
            self._idle.pop(block_id, None)

    def enter(self, block_id: int, digest: bytes) -> None:
        """Make a block known that a table holds and that a committed step has filled.

        Nothing happens when its content is known already (two requests computed it side by side): the second copy
        stays private to its table.
        """
        if digest in self._block_of or block_id in self._digest_of:
            return
        self._pool.share_one(block_id)
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest

    def released(self, block_id: int) -> None:
        """A table has given up its reference and one is left: if that is ours, the block is idle from now on."""
        if block_id in self._digest_of:
            self._idle[block_id] = None

    def forget(self, block_id: int) -> None:
        """Make a block unknown, if it is known; a table goes on holding it."""
        digest = self._digest_of.pop(block_id, None)
        if digest is not None:
            self._idle.pop(block_id, None)
            del self._block_of[digest]
            self._pool.release(block_id)

    def evict(self, count: int) -> None:
        """Forget up to `count` idle blocks, least recently used first; they become free."""
        for _ in range(min(count, len(self._idle))):
            block_id, _ = self._idle.popitem(last=False)
            del self._block_of[self._digest_of.pop(block_id)]
            self._pool.release(block_id)
            self.evictions += 1

    def check_invariants(self) -> None:
        """AssertionError when the maps, the idle order and the reference counts disagree."""
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of
        for block_id in self._digest_of:
            references = self._pool.references(block_id)
            assert references >= 1, f"known block {block_id} is free"
            assert (references == 1) == (block_id in self._idle), f"known block {block_id}: {references} references"
        assert self._idle.keys() <= self._digest_of.keys()
