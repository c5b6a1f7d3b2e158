"""KV bookkeeping of one model (surface)."""

from __future__ import annotations


class CacheManager:
    def __init__(
        self,
        num_blocks: int,
        block_tokens: int = 16,
        *,
        prefix_cache: bool = True,
        session_ttl_s: float = 3600.0,
        quota_blocks: int | None = None,
    ) -> None: ...
