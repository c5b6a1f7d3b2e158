"""Copy whole KV blocks, all layers at once: the copy of copy-on-write."""

from __future__ import annotations

import torch


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """pool[targets] = pool[sources] for block ids [n] int64; every source is read before any target is written."""
    pool.index_copy_(0, targets, pool.index_select(0, sources))
