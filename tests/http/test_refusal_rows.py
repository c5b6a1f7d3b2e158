"""Refusals over HTTP: what is refused, with which status, code and field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http_server import Server, error_object
from tests.support.scripted_engine import Reply

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def _reply(server: Server) -> None:
    server.script(Reply(list(b"fine") * 600))


async def test_a_request_longer_than_the_context_is_refused(server: Server) -> None:
    asked = server.max_context - 8 + 5
    for stream in (False, True):
        error = await server.refusal(COMPLETIONS, prompt=[65] * 8, max_tokens=asked, stream=stream)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "max_tokens"
        for number in (server.max_context, 8, asked):
            assert str(number) in error["message"]
    error = await server.refusal(COMPLETIONS, prompt=[65] * server.max_context)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_a_text_of_megabytes_is_refused_by_its_characters(server: Server) -> None:
    text = "ab " * 200 * server.max_context
    for path, field, prompt in (
        (COMPLETIONS, "prompt", {"prompt": ["fine", text]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = await server.refusal(path, **prompt)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert "characters" in error["message"]


async def test_max_tokens_null_and_negative(server: Server) -> None:
    usage = (await server.complete([65], max_tokens=None, ignore_eos=True))["usage"]
    assert usage["completion_tokens"] == 16
    assert (await server.refusal(COMPLETIONS, prompt=[65], max_tokens=-1))["param"] == "max_tokens"
    error = await server.refusal(CHAT, messages=MESSAGES, max_completion_tokens=-5)
    assert error["param"] == "max_completion_tokens"


async def test_default_length_of_chat_is_what_the_context_leaves(server: Server) -> None:
    server.needs_script("a model that never ends")
    server.script(Reply([65] * 5000))
    answer = await server.answer(CHAT, messages=MESSAGES, max_completion_tokens=None)
    assert answer["usage"]["total_tokens"] == server.max_context
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[65], []], None])
async def test_an_empty_prompt_is_refused(server: Server, prompt: Any) -> None:
    assert (await server.refusal(COMPLETIONS, prompt=prompt))["param"] == "prompt"
    assert (await server.complete([65], max_tokens=1))["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("token_id", ["vocab_size", -1, "x", 10**12])
async def test_logit_bias_outside_the_vocabulary(server: Server, token_id: Any) -> None:
    key = str(server.vocab_size if token_id == "vocab_size" else token_id)
    assert (await server.refusal(COMPLETIONS, prompt=[65], logit_bias={key: 1}))["param"] == "logit_bias"


@pytest.mark.parametrize("token_id", ["vocab_size", -1, 10**30])
async def test_prompt_ids_outside_the_vocabulary(server: Server, token_id: Any) -> None:
    token_id = server.vocab_size if token_id == "vocab_size" else token_id
    for prompt in ([65, token_id], [[65], [token_id]]):
        assert (await server.refusal(COMPLETIONS, prompt=prompt))["param"] == "prompt"
    error = await server.refusal(CHAT, messages=MESSAGES, stop_token_ids=[3, token_id])
    assert error["param"] == "stop_token_ids"
    assert (await server.complete([65], max_tokens=1))["usage"]["completion_tokens"] == 1


BAD_VALUES = [
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 2),
    ("top_k", -2),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", {"5": 1, "6": float("-inf")}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", [5]),
    ("n", 0),
    ("n", 1000),
    ("best_of", 0),
    ("min_tokens", 50),
    ("stop", ["x"] * 17),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("priority", 2**40),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
async def test_values_out_of_range(server: Server, field: str, value: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": [65]}), (CHAT, {"messages": MESSAGES})):
        body = json.dumps({"model": server.model, **prompt, "max_tokens": 4, field: value})
        response = await server.client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert error_object(response)["param"] == field


async def test_stream_options_need_a_stream(server: Server) -> None:
    options = {"include_usage": True}
    for fields in ({}, {"stream": False}, {"stream": None}):
        for path, prompt in ((COMPLETIONS, {"prompt": [65]}), (CHAT, {"messages": MESSAGES})):
            error = await server.refusal(path, **prompt, max_tokens=1, stream_options=options, **fields)
            assert error["param"] == "stream_options"
    assert (await server.complete([65], max_tokens=1, stream_options=None))["usage"]["completion_tokens"] == 1


async def test_more_prompts_than_the_server_could_queue(server: Server) -> None:
    for path, field in ((COMPLETIONS, "prompt"), ("/v1/embeddings", "input")):
        error = await server.refusal(path, **{field: ["a"] * 2049})
        assert error["param"] == field
        assert "2049" in error["message"]


async def test_a_text_too_long_to_be_counted(server: Server) -> None:
    text = "ab " * 400 * server.max_context
    for field, value in (("prompt", text), ("messages", [{"role": "user", "content": text}])):
        assert (await server.refusal("/tokenize", **{field: value}))["param"] == field
    tokens = [65] * (8 * server.max_context + 1)
    assert (await server.refusal("/detokenize", tokens=tokens))["param"] == "tokens"
    ids = (await server.answer("/tokenize", prompt="ab " * 2 * server.max_context))["tokens"]
    assert len(ids) > server.max_context


async def test_a_client_may_stand_back_but_not_push_in(server: Server) -> None:
    server.needs_script("what reaches the engine")
    assert server.engine is not None
    for priority in (3, 0, -5, None):
        await server.complete([65], max_tokens=1, priority=priority)
    assert [submission.priority for submission in server.engine.submissions] == [3, 0, 0, 0]


async def test_values_at_the_edge_are_accepted(server: Server) -> None:
    for fields in ({"top_k": -1}, {"top_k": 0}, {"temperature": 0, "top_p": 0.5}, {"temperature": 2}, {"min_p": 0}):
        assert (await server.complete([65], max_tokens=1, **fields))["usage"]["completion_tokens"] == 1


BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 200_000,
    b'{"zz": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"prompt": "x"} trailing',
    b'{"prompt": NaN}',
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_invalid_json(server: Server, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        response = await server.client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert error_object(response)["type"] == "invalid_request_error"


WRONG_TYPES = [
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("stream", "yes"),
    ("stop", 5),
    ("stop", ["a", 5]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", [1]),
    ("logit_bias", {"5": "x"}),
    ("n", "two"),
    ("stream_options", 1),
    ("stream_options", {"include_usage": "x"}),
    ("user", 5),
    ("seed", "s"),
    ("model", 5),
    ("metadata", []),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
async def test_wrong_types_name_the_field(server: Server, field: str, value: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": [65]}), (CHAT, {"messages": MESSAGES})):
        assert (await server.refusal(path, **{**prompt, field: value}))["param"] == field


@pytest.mark.parametrize("prompt", [5, {"a": 1}, [1, "a"], ["a", [1]], [1.5], [None], [True], [["a"]], [[1, "a"]]])
async def test_wrong_prompts(server: Server, prompt: Any) -> None:
    assert (await server.refusal(COMPLETIONS, prompt=prompt))["param"] == "prompt"


BAD_MESSAGES: list[Any] = [
    None,
    [],
    "hello",
    [5],
    [{}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": 5, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    [{"role": "assistant", "content": None, "tool_calls": "x"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES)
async def test_wrong_messages(server: Server, messages: Any) -> None:
    assert (await server.refusal(CHAT, messages=messages))["param"] == "messages"


async def test_thousands_of_faults_make_a_short_error(server: Server) -> None:
    for body in (
        {"prompt": [1.5] * 5000},
        {"prompt": ["x", 5] * 5000},
        {"prompt": [[-5] * 50] * 200},
        {"prompt": [65], "logit_bias": {f"{'k' * 50}{i}": "x" for i in range(5000)}},
        {"prompt": [65], "logit_bias": {"\u0001" * 3000: 1}},
        {"prompt": [65], "stop": [5] * 5000},
        {"prompt": [65], "model": "\u0001" * 5000},
    ):
        response = await server.client.post(COMPLETIONS, json={"model": server.model, **body})
        assert response.status_code in (400, 404)
        assert error_object(response)["param"] in body
    error = await server.refusal(CHAT, messages=[{"role": 5}] * 5000)
    assert error["param"] == "messages"


async def test_too_many_choices(server: Server) -> None:
    assert (await server.refusal(COMPLETIONS, prompt=[[65]] * 100, n=100))["param"] == "n"
    assert (await server.refusal(COMPLETIONS, prompt=[[65]] * 3000))["param"] == "prompt"


async def test_unknown_model(server: Server) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": [65]}), (CHAT, {"messages": MESSAGES})):
        response = await server.client.post(path, json={"model": "no-such-model", **prompt})
        assert response.status_code == 404
        error = error_object(response)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    response = await server.client.get("/v1/models/no-such-model")
    assert (response.status_code, error_object(response)["param"]) == (404, "model")


UNSUPPORTED = [
    (COMPLETIONS, "suffix", " end"),
]


@pytest.mark.parametrize(("path", "field", "value"), UNSUPPORTED)
async def test_unsupported_fields_say_so(server: Server, path: str, field: str, value: Any) -> None:
    server.needs_script("another server may support more")
    prompt = {"prompt": [65]} if path == COMPLETIONS else {"messages": MESSAGES}
    error = await server.refusal(path, **{**prompt, field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


async def test_unknown_fields_are_ignored_with_a_warning(server: Server) -> None:
    response = await server.post(COMPLETIONS, prompt=[65], max_tokens=1, no_such_field=1, **{'ev"il\r\nx: y': 2})
    assert response.status_code == 200
    assert "no_such_field" in response.headers["warning"]
    assert "x" not in response.headers
    response = await server.post(COMPLETIONS, prompt=[65], max_tokens=1, user="u", metadata={"a": "b"})
    assert "warning" not in response.headers


async def test_unknown_paths_and_methods(server: Server) -> None:
    response = await server.client.get("/v1/no/such/path")
    assert (response.status_code, error_object(response)["code"]) == (404, "unknown_path")
    response = await server.client.get(COMPLETIONS)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_object(response)["type"] == "invalid_request_error"
    assert (await server.client.delete("/v1/models")).status_code == 405


async def test_request_id_is_echoed(server: Server) -> None:
    for headers in ({"X-Request-Id": "my-id.1"}, {}, {"X-Request-Id": "x" * 500}):
        response = await server.client.get("/v1/models", headers=headers)
        echoed = response.headers["x-request-id"]
        assert echoed == "my-id.1" if headers.get("X-Request-Id") == "my-id.1" else 0 < len(echoed) <= 128
