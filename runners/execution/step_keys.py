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
# Padding of a long pass costs its share of the step: 2,176 tokens in place of 2,057 took 13 % longer.
LONG_PASS_STEP = 16
WHOLE_PROMPT_STEP = 128
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
    `whole_prompt`: the only chunk is a long prompt from its first position; `tokens` rounded up for it. Else 0.
    """

    tokens: int
    rows: int
    sequences: int
    max_query: int
    max_context: int
    mode: SampleMode = GREEDY
    samples: bool = True
    whole_prompt: int = 0

    @property
    def first_row(self) -> int:
        """Where the decode rows stand: in front, but behind a whole prompt."""
        return self.tokens - self.rows if self.whole_prompt else 0

    @property
    def first_token(self) -> int:
        """Where the chunks begin."""
        return 0 if self.whole_prompt else self.rows


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
    """What `ops.causal_attention` is given for a pass of so many tokens, 0 for a short one: steps of 128, beyond mixed
    steps of 512. The vendor's library makes a plan for each."""
    step = WHOLE_PROMPT_STEP if num_tokens <= MAX_GRAPH_TOKENS else 4 * WHOLE_PROMPT_STEP
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
    num_sequences = num_rows + len(chunk_lens)
    tokens, rows, in_buckets = num_rows + num_tokens, num_rows, num_rows + num_tokens <= MAX_GRAPH_TOKENS
    if in_buckets:
        rows = -(-num_rows // DECODE_ROWS_STEP) * DECODE_ROWS_STEP
        tokens = rows + token_bucket(num_tokens)
        if tokens > MAX_TOKENS_CAPTURED_AT_ONCE:
            tokens = -(-(rows + num_tokens) // LONG_PASS_STEP) * LONG_PASS_STEP
        num_sequences = rows + next_power_of_two(len(chunk_lens))
        longest = max(16, next_power_of_two(longest))
    whole_prompt = whole_prompt_bucket(tokens) if is_whole_prompt else 0
    context = context_bucket(max_context, limit)
    return PackedKey(tokens, rows, num_sequences, longest, context, mode, samples, whole_prompt), in_buckets


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
