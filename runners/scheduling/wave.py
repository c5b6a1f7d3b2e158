"""Which short prompts share one packed pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WavePolicy:
    """`enabled` already says whether the executor can pack prompts at all."""

    enabled: bool
    grouping: Literal["varlen", "same_length"]
    max_prompt_tokens: int
    max_rows: int
    sub_wave: int

    def takes(self, num_tokens: int) -> bool:
        """True for a prompt with so many tokens to compute that it may join a wave."""
        return self.enabled and num_tokens <= self.max_prompt_tokens

    def group(self, num_tokens: Sequence[int]) -> list[list[int]]:
        """Split prompts, given by their tokens to compute, into passes; each pass is a list of indices.

        Passes of several prompts come first, in the order of their first prompt, then prompts that are alone: too
        long, or (same_length) the only one of their length. Each pass is at most `sub_wave` prompts and `max_rows`
        tokens, so that first tokens leave pass by pass and not all at the end.
        """
        groups: dict[int, list[int]] = {}
        alone: list[list[int]] = []
        for index, count in enumerate(num_tokens):
            if not self.takes(count):
                alone.append([index])
            else:
                groups.setdefault(count if self.grouping == "same_length" else 0, []).append(index)
        waves: list[list[int]] = []
        for group in groups.values():
            for wave in self._split(group, num_tokens):
                (waves if len(wave) > 1 else alone).append(wave)
        return waves + sorted(alone)

    def _split(self, group: list[int], num_tokens: Sequence[int]) -> list[list[int]]:
        passes: list[list[int]] = []
        rows = 0
        for index in group:
            if not passes or len(passes[-1]) >= self.sub_wave or rows + num_tokens[index] > self.max_rows:
                passes.append([])
                rows = 0
            passes[-1].append(index)
            rows += num_tokens[index]
        return passes
