"""The path for exactly one live request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SeqPolicy:
    """`enabled` already says whether the executor has such a path; a launch of it that fails switches it off."""

    enabled: bool

    def takes(self, *, num_decoding: int, num_live: int) -> bool:
        """True when the one request that decodes is the only one there is: nothing waits, nothing prefills."""
        return self.enabled and num_decoding == 1 and num_live == 1
