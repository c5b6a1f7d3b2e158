"""How much of one prompt a single pass computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """`tokens` at a time, 0: whole prompts; never more than `max_rows`, which the executor's workspace is made for."""

    tokens: int
    max_rows: int

    @property
    def limit(self) -> int:
        return min(self.tokens, self.max_rows) if self.tokens else self.max_rows

    def end(self, start: int, num_tokens: int) -> int:
        """Where the chunk ends that begins at `start` of a prompt of `num_tokens`."""
        return min(num_tokens, start + self.limit)
