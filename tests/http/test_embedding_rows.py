"""`/v1/embeddings`."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import pytest

from tests.support.engine_server import engine_server, server_at
from tests.support.http_server import Server, in_process

EMBEDDINGS = "/v1/embeddings"


@pytest.mark.parametrize("inputs", ["ab", ["ab", "cd"], [97, 98], [[97, 98], [99, 100]]])
async def test_four_forms_of_an_input(server: Server, inputs: Any) -> None:
    answer = await server.answer(EMBEDDINGS, input=inputs)
    count = 2 if isinstance(inputs, list) and not isinstance(inputs[0], int) else 1
    assert [item["index"] for item in answer["data"]] == list(range(count))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"]
    if server.engine is not None:
        assert [item["embedding"] for item in answer["data"]] == [[2.0, 97.0, 0.5], [2.0, 99.0, 0.5]][:count]
        assert {submission.params.pooling for submission in server.engine.submissions} == {"mean"}


async def test_base64_holds_the_same_numbers(server: Server) -> None:
    plain = (await server.answer(EMBEDDINGS, input="abc"))["data"][0]["embedding"]
    coded = (await server.answer(EMBEDDINGS, input="abc", encoding_format="base64"))["data"][0]["embedding"]
    assert array("f", base64.b64decode(coded)).tolist() == plain
    assert (await server.answer(EMBEDDINGS, input="abc", dimensions=len(plain)))["data"][0]["embedding"] == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": 5}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 1}, "dimensions"),
        ({"input": "a", "priority": 2**40}, "priority"),
    ],
)
async def test_what_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (await server.refusal(EMBEDDINGS, **fields))["param"] == param


async def test_an_input_over_the_context(server: Server) -> None:
    error = await server.refusal(EMBEDDINGS, input=[5] * (server.max_context + 1))
    assert error["code"] == "context_length_exceeded"


async def test_without_a_tokenizer_ids_will_do() -> None:
    async with in_process(None, eos_token_ids=[2]) as server:
        assert (await server.answer(EMBEDDINGS, input=[5, 6]))["data"][0]["embedding"] == [2.0, 5.0, 0.5]
        assert (await server.refusal(EMBEDDINGS, input="x"))["code"] == "no_tokenizer"


TEXTS = ["The cat sits on the mat.", "A kitten is on the rug.", "Quarterly revenue rose by nine percent."]


@pytest.mark.model
async def test_the_default_model_embeds_meaning(smollm2: Server) -> None:
    answer = await smollm2.answer(EMBEDDINGS, input=TEXTS)
    vectors = [item["embedding"] for item in answer["data"]]
    assert {len(vector) for vector in vectors} == {576}
    for vector in vectors:
        assert math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5)

    def likeness(first: int, second: int) -> float:
        return (
            math.sumprod(vectors[first], vectors[second])
            if hasattr(math, "sumprod")
            else sum(a * b for a, b in zip(vectors[first], vectors[second], strict=True))
        )

    assert likeness(0, 1) > max(likeness(0, 2), likeness(1, 2))
    for index, text in enumerate(TEXTS):  # alone as among others, beside requests that decode
        alone = (await smollm2.answer(EMBEDDINGS, input=text))["data"][0]["embedding"]
        assert max(abs(a - b) for a, b in zip(alone, vectors[index], strict=True)) < 1e-5


@pytest.mark.model
async def test_last_token_pooling(smollm2: Server, smollm2_path: Any) -> None:
    with engine_server(str(smollm2_path), model={"pooling": "last"}) as url:
        async with server_at(url) as last:
            ends_alike = await last.answer(EMBEDDINGS, input=[[5, 6, 7], [6, 7]])
            assert ends_alike["data"][0]["embedding"] != ends_alike["data"][1]["embedding"]
            one = (await last.answer(EMBEDDINGS, input=[7]))["data"][0]["embedding"]
            mean = (await smollm2.answer(EMBEDDINGS, input=[7]))["data"][0]["embedding"]
            assert max(abs(a - b) for a, b in zip(one, mean, strict=True)) < 1e-5
