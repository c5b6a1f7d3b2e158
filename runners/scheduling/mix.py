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

    def pieces(
        self, cursors: Iterable[Request], start_of: Callable[[Request], int], num_rows: int
    ) -> Iterator[tuple[Request, int]]:
        """(cursor, end of its piece) for one step that carries `num_rows` decode rows, oldest cursor first.

        `start_of` says how many tokens of a cursor need no computing (any more). The head gets all it can use of the
        token budget. Others fill the step, decode rows counted, up to half the budget: so many tokens keep the device
        as busy as more would, first tokens leave sooner, and a few tokens beyond would cost a tile of products. A
        prompt that does not fit as a whole joins with at least half of its rest: a sliver gains nothing.
        """
        room = self.token_budget
        for place, cursor in enumerate(cursors):
            start, total = start_of(cursor), len(cursor.token_ids)
            end = self.chunk.end(start, total)
            if end - start > room:
                if place and 2 * room < total - start:
                    return
                end = start + room
            if end <= start:
                return
            yield cursor, end
            if not place:
                room = self.token_budget // 2 - num_rows
            room = max(0, room - (end - start))
