"""The same seeded request alone, among others, after a prefix hit, after preemption: the same text.

Exact with float32 weights and with quantised ones: on a CPU a row's sums have one order, whatever pass it is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu_ops.library import load_library
from tests.support.engine_server import engine_server, server_at
from tests.support.http_server import Server

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(load_library() is None, reason="plain torch rounds a row by the shape of its pass"),
]

COMPLETIONS = "/v1/completions"
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "The history of bread begins", "temperature": 0, "max_tokens": 32},
    {"prompt": "Once upon a time", "temperature": 0.9, "seed": 11, "max_tokens": 32},
    {"prompt": "List of colours: " * 8, "temperature": 1.0, "top_p": 0.8, "seed": 12, "max_tokens": 32},
    {"prompt": "A b c d", "temperature": 0.7, "top_k": 30, "seed": 13, "max_tokens": 32, "presence_penalty": 0.5},
    {"prompt": "Year: ", "temperature": 1.2, "seed": 14, "max_tokens": 32, "guided_regex": "[0-9]{4}(, [0-9]{4}){5}"},
    {"prompt": "My favourite", "temperature": 0.8, "seed": 15, "max_tokens": 32, "logit_bias": {"28": -5}},
    {"prompt": "It was a dark", "temperature": 1.0, "min_p": 0.1, "seed": 16, "max_tokens": 32},
    {"prompt": "JSON: ", "temperature": 1.0, "seed": 17, "max_tokens": 32, "response_format": {"type": "json_object"}},
]
# Flat distributions, where a rounding error changes a draw soonest.
FREE = [
    {"prompt": f"{start} the", "temperature": 1.0, "seed": seed, "max_tokens": 32}
    for seed, start in enumerate(("Under", "After", "Beyond", "In", "Of all", "Through", "With", "Without"))
]

MODELS: dict[str, dict[str, Any]] = {
    "float32": {"quantization": "none", "dtype": "float32", "max_context": 256},
    "quantised": {"max_context": 256},
}


@pytest.fixture(scope="module", params=MODELS)
def url(smollm2_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    # Blocks of 16 tokens: eight requests do not fit, so some are preempted on the way.
    with engine_server(str(smollm2_path), model=MODELS[request.param], kv={"pool": {"blocks": 18}}) as found:
        yield found


async def texts(server: Server, requests: list[dict[str, Any]], salt: str) -> list[str]:
    answers = await asyncio.gather(
        *(server.answer(COMPLETIONS, ignore_eos="guided_regex" not in r, cache_salt=salt, **r) for r in requests)
    )
    return [answer["choices"][0]["text"] for answer in answers]


async def preemptions(server: Server) -> int:
    count: int = (await server.client.get("/health")).json()["engine"]["preemptions"]
    return count


async def test_equal_text_whatever_happens_around_it(url: str) -> None:
    async with server_at(url) as server:
        for requests in (REQUESTS, FREE):
            alone = [(await texts(server, [request], "alone"))[0] for request in requests]
            again = [(await texts(server, [request], "alone"))[0] for request in requests]  # out of the prefix cache
            assert again == alone
            before = await preemptions(server)
            for round_number in range(2):
                assert await texts(server, requests, f"together {round_number}") == alone
            await asyncio.sleep(2)  # the counters come with a beat a second
            assert await preemptions(server) > before
