"""How many rows a decode step runs."""

from __future__ import annotations

from typing import Literal


def decode_width(rule: Literal["exact", "pow2"], num_rows: int, slots: int) -> int:
    """`exact`: the live rows. `pow2`: the next power of two, at most `slots`: fewer graphs, up to twice the work."""
    if rule == "exact" or num_rows == 0:
        return num_rows
    return max(num_rows, min(slots, 1 << (num_rows - 1).bit_length()))
