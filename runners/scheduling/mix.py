"""Long prompts beside running requests: which cursors a step carries on, and how far.

A cursor is a long prompt that was given a slot and is computed piece by piece. `merge` packs the pieces and every
decode row into one pass, whose weights are read once for both; `overlap` computes one whole prompt on a second stream
under ordinary decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from runners.request import Request
from runners.scheduling.chunk import ChunkPolicy


@dataclass(frozen=True, slots=True)
class MixPolicy:
    """`mode` is what the executor can do of what the profile asks for."""

    mode: Literal["off", "merge", "overlap"]
    token_budget: int
    min_prompt_tokens: int
    chunk: ChunkPolicy

    def takes(self, num_tokens: int) -> bool:
        """True for a prompt with so many tokens to compute that it becomes a cursor."""
        return self.mode != "off" and num_tokens > self.min_prompt_tokens

    def pieces(self, cursors: Iterable[Request], start_of: Callable[[Request], int]) -> Iterator[tuple[Request, int]]:
        """(cursor, end of its piece) for one step, oldest cursor first, up to the token budget.

        `start_of` says how many tokens of a cursor need no computing (any more). The head gets all it can use.
        Another cursor joins when the budget left over holds all of its rest, or at least a quarter of the whole
        budget: smaller slices would split a prompt that fits one step (2,000 tokens in a budget of 2,048) for nothing.
        """
        left = self.token_budget
        for place, cursor in enumerate(cursors):
            start, total = start_of(cursor), len(cursor.token_ids)
            end = min(self.chunk.end(start, total), start + left)
            if end <= start or (place and end < total and end - start < min(self.chunk.limit, self.token_budget // 4)):
                return
            yield cursor, end
            left -= end - start
