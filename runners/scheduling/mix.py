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

        `start_of` says how many tokens of a cursor need no computing (any more). Every cursor gets all it can use, but
        none joins a step that carries half the budget already: so many tokens keep the device as busy as more would,
        and first tokens leave sooner.
        """
        left = self.token_budget
        for cursor in cursors:
            if 2 * left <= self.token_budget:
                return
            start, total = start_of(cursor), len(cursor.token_ids)
            end = min(self.chunk.end(start, total), start + left)
            if end <= start:
                return
            yield cursor, end
            left -= end - start
