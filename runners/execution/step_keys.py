"""The shapes that device steps run in: real sizes rounded up to buckets, one captured graph a key.

Padding computes nothing that anyone reads: its rows belong to the padding slot and write no KV.
"""

from __future__ import annotations

from dataclasses import dataclass

# Decode steps run at their exact width up to here, then in steps of 8, from twice as many in steps of 16.
EXACT_WIDTH = 64
SMALLEST_CONTEXT = 256
# Launching a pass of this many tokens takes less time than the pass: a graph would gain nothing (H200, 8B: 512 tokens
# take 11 ms, launching them about 9).
MAX_GRAPH_TOKENS = 1024
DECODE_ROWS_STEP = 8


@dataclass(frozen=True, slots=True)
class SampleMode:
    """What sampling has to do for some row of a step. `num_top`: alternatives reported, None without logprobs."""

    is_drawn: bool = False
    has_top_k: bool = False
    has_top_p: bool = False
    is_adjusted: bool = False
    num_top: int | None = None


GREEDY = SampleMode()


@dataclass(frozen=True, slots=True)
class DecodeKey:
    """`width` rows of contexts up to `max_context` tokens."""

    width: int
    max_context: int
    mode: SampleMode = GREEDY

    @property
    def samples(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class PackedKey:
    """A packed pass: `rows` decode rows, then `sequences - rows` chunks; `tokens` in all.

    `max_query` is the longest chunk, `max_context` the longest context; `samples` says whether logits are wanted.
    """

    tokens: int
    rows: int
    sequences: int
    max_query: int
    max_context: int
    mode: SampleMode = GREEDY
    samples: bool = True


StepKey = DecodeKey | PackedKey


def width_bucket(num_rows: int) -> int:
    if num_rows <= EXACT_WIDTH:
        return num_rows
    step = 8 if num_rows <= 2 * EXACT_WIDTH else 16
    return -(-num_rows // step) * step


def context_bucket(num_tokens: int, limit: int) -> int:
    """A power of two, from 256, at most `limit`."""
    return min(limit, max(SMALLEST_CONTEXT, next_power_of_two(num_tokens)))


def token_bucket(num_tokens: int) -> int:
    """Prefill tokens: 16, 32, 64, 128, then steps of 64, from 512 of 128. Wider steps would cost more than they save:
    from a few hundred tokens on the time of a pass grows with them."""
    if num_tokens <= 128:
        return max(16, next_power_of_two(num_tokens))
    step = 64 if num_tokens <= 512 else 128
    return -(-num_tokens // step) * step


def packed_key(
    num_rows: int,
    chunk_lens: list[int],
    max_context: int,
    limit: int,
    mode: SampleMode,
    samples: bool,
) -> tuple[PackedKey, bool]:
    """The key of a pass, and whether it is in buckets (then it may be captured)."""
    num_tokens, longest = sum(chunk_lens), max(chunk_lens)
    context = context_bucket(max_context, limit)
    if num_rows + num_tokens > MAX_GRAPH_TOKENS:
        return (
            PackedKey(num_rows + num_tokens, num_rows, num_rows + len(chunk_lens), longest, context, mode, samples),
            False,
        )
    rows = -(-num_rows // DECODE_ROWS_STEP) * DECODE_ROWS_STEP
    return (
        PackedKey(
            rows + token_bucket(num_tokens),
            rows,
            rows + next_power_of_two(len(chunk_lens)),
            max(16, next_power_of_two(longest)),
            context,
            mode,
            samples,
        ),
        True,
    )


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
