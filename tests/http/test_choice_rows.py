"""`n` and `best_of`: one prefill, choices of their own, the best by mean log-probability."""

from __future__ import annotations

import asyncio

import pytest

from runners.errors import RequestFailedError
from runners.request import SamplingParams
from tests.support.http_server import Server
from tests.support.scripted_engine import Reply

COMPLETIONS = "/v1/completions"


def by_seed(ids: list[int], params: SamplingParams) -> Reply:
    """Seed k says its digit k times, with a log-probability of its own."""
    logprob = {5: -3.0, 6: -1.0, 7: -2.0, 8: -0.5}[params.seed]
    return Reply([48 + params.seed] * (params.seed - 4), chosen_logprob=logprob)


async def test_the_best_by_mean_log_probability(server: Server) -> None:
    server.needs_script("log-probabilities")
    server.script(by_seed)
    fields = {"prompt": "x", "seed": 5, "temperature": 1, "max_tokens": 9}
    answer = await server.answer(COMPLETIONS, **fields, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == ["8888"]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 1 + 2 + 3 + 4
    two = await server.answer(COMPLETIONS, **fields, n=2, best_of=4, logprobs=1)
    assert [(choice["index"], choice["text"]) for choice in two["choices"]] == [(0, "8888"), (1, "66")]
    assert two["choices"][1]["logprobs"]["token_logprobs"] == [-1.0, -1.0]
    prompts = await server.answer(COMPLETIONS, **{**fields, "prompt": ["x", "y"]}, best_of=2)
    assert [choice["text"] for choice in prompts["choices"]] == ["66", "66"]


async def test_best_of_that_cannot_be(server: Server) -> None:
    assert (await server.refusal(COMPLETIONS, prompt="x", best_of=2, stream=True))["param"] == "best_of"
    assert (await server.refusal(COMPLETIONS, prompt="x", n=3, best_of=2))["param"] == "best_of"
    assert (await server.refusal(COMPLETIONS, prompt=["x"] * 100, best_of=100))["param"] == "best_of"


async def test_choices_of_a_long_prompt_wait_for_the_first_ones_prefill(server: Server) -> None:
    server.needs_script("a prefill that takes its time")
    assert server.engine is not None
    gate = asyncio.Event()
    server.script(Reply(list(b"abc"), gate=gate))
    task = asyncio.ensure_future(server.answer(COMPLETIONS, prompt=[65] * 100, n=4, max_tokens=3))
    await server.engine.submitted.wait()
    await asyncio.sleep(0.05)
    assert len(server.engine.submissions) == 1
    gate.set()
    answer = await task
    assert [choice["text"] for choice in answer["choices"]] == ["abc"] * 4
    assert len(server.engine.submissions) == 4
    # These come when the answer may have begun: no queue may refuse them.
    assert [submission.follows for submission in server.engine.submissions] == [False, True, True, True]
    short = await server.answer(COMPLETIONS, prompt=[65] * 10, n=4, max_tokens=3, stop="c")
    assert [choice["text"] for choice in short["choices"]] == ["ab"] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_choice_that_fails_ends_them_all(server: Server, stream: bool) -> None:
    server.needs_script("a failure")
    assert server.engine is not None
    server.script(Reply(error=RequestFailedError("no")))
    response = await server.post(COMPLETIONS, prompt=[65] * 100, n=3, max_tokens=3, stream=stream)
    assert response.status_code == (200 if stream else 500)
    assert '"no"' in response.text


@pytest.mark.model
async def test_one_prefill_for_all_choices(smollm2: Server) -> None:
    await asyncio.sleep(2)  # the counters come with a beat a second: what other tests did must be in them
    before = (await smollm2.client.get("/health")).json()["engine"]
    prompt = [100 + index for index in range(200)]
    fields = {"prompt": prompt, "max_tokens": 4, "seed": 1, "cache_salt": "choices"}
    answer = await smollm2.answer(COMPLETIONS, **fields, n=3)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    after = before
    async with asyncio.timeout(10):
        while after["prompt_tokens"] - before["prompt_tokens"] < 600 or after["running"]:
            after = (await smollm2.client.get("/health")).json()["engine"]
    assert after["cached_tokens"] - before["cached_tokens"] == 2 * 192
    best = await smollm2.answer(COMPLETIONS, **fields, best_of=3, logprobs=0)
    means = []
    for seed in (1, 2, 3):
        one = await smollm2.answer(COMPLETIONS, **{**fields, "seed": seed}, logprobs=0)
        logprobs = one["choices"][0]["logprobs"]["token_logprobs"]
        means.append((sum(logprobs) / len(logprobs), one["choices"][0]["text"]))
    assert best["choices"][0]["text"] == max(means)[1]
