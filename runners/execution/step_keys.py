"""The shapes that device steps run in: real sizes rounded up to buckets, one captured graph a key.

Padding computes nothing that anyone reads: its rows belong to the padding slot and write no KV.
"""

from __future__ import annotations

from dataclasses import dataclass

# Decode steps run at their exact width up to here, then in steps of 8, from twice as many in steps of 16.
EXACT_WIDTH = 64
SMALLEST_CONTEXT = 256
# Passes up to here run in buckets, from graphs: a mixed step of the default budget is among them. Launching one call by
# call takes the host 15 to 18 ms, and whoever waits for the step before is read that much later.
MAX_GRAPH_TOKENS = 2304
# A longer pass is captured only while the engine is idle: it hides its own launch, but not the 20 ms of a capture.
MAX_TOKENS_CAPTURED_AT_ONCE = 1024
DECODE_ROWS_STEP = 8
# The library's products work in tiles of so many rows.
TILE_TOKENS = 128
# Shorter prompts gain nothing from attention over dense keys.
MIN_WHOLE_PROMPT = 512


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
    `whole_prompt`: the only chunk is a long prompt from its first position, of so many tokens at most; else 0.
    """

    tokens: int
    rows: int
    sequences: int
    max_query: int
    max_context: int
    mode: SampleMode = GREEDY
    samples: bool = True
    whole_prompt: int = 0


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


def whole_prompt_bucket(num_tokens: int) -> int:
    """Tokens of a prompt that takes `ops.causal_attention`, 0 for a short one: steps of 128, from 2048 of 512. The
    vendor's library makes a plan for each."""
    step = TILE_TOKENS if num_tokens <= 2048 else 4 * TILE_TOKENS
    rounded = -(-num_tokens // step) * step
    return rounded if rounded >= MIN_WHOLE_PROMPT else 0


def packed_key(
    num_rows: int,
    chunk_lens: list[int],
    max_context: int,
    limit: int,
    mode: SampleMode = GREEDY,
    samples: bool = True,
    *,
    is_whole_prompt: bool = False,
) -> tuple[PackedKey, bool]:
    """The key of a pass, and whether it is in buckets (then it may be captured).

    `is_whole_prompt`: its only chunk starts at its sequence's first position, and such chunks are to be told apart.
    """
    num_tokens, longest = sum(chunk_lens), max(chunk_lens)
    context = context_bucket(max_context, limit)
    whole_prompt = whole_prompt_bucket(num_tokens) if is_whole_prompt else 0
    common = (context, mode, samples, whole_prompt)
    if num_rows + num_tokens > MAX_GRAPH_TOKENS:
        return PackedKey(num_rows + num_tokens, num_rows, num_rows + len(chunk_lens), longest, *common), False
    rows = -(-num_rows // DECODE_ROWS_STEP) * DECODE_ROWS_STEP
    tokens = rows + token_bucket(num_tokens)
    if tokens > MAX_TOKENS_CAPTURED_AT_ONCE:
        # Rows and prompts together fill whole tiles: rows beside a full bucket of prompts would open another one.
        tokens = -(-(rows + num_tokens) // TILE_TOKENS) * TILE_TOKENS
    sequences = rows + next_power_of_two(len(chunk_lens))
    return PackedKey(tokens, rows, sequences, max(16, next_power_of_two(longest)), *common), True


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
