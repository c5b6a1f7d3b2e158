"""The prefix cache over HTTP: what it gives is what the model would have computed."""

from __future__ import annotations

import pytest

from tests.support.http_server import Server

BLOCK_TOKENS = 16


@pytest.mark.model
@pytest.mark.parametrize("length", [BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS])
async def test_a_prompt_at_the_edge_of_a_block_four_times(smollm2: Server, length: int) -> None:
    prompt = [50 + 11 * index % 1000 for index in range(length)]
    body = {"temperature": 0, "max_tokens": 8, "return_token_ids": True, "cache_salt": f"edge {length}"}
    answers = [await smollm2.complete(prompt, **body) for _ in range(4)]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    # The last token is always computed: its logits are wanted.
    assert cached == [0] + [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS] * 3
