"""Streams over HTTP: usage, logprobs, echo, one event a token, errors inside a stream."""

from __future__ import annotations

import json
import math

import pytest

from runners.errors import RequestFailedError
from tests.support.http_server import Server, text_of
from tests.support.scripted_engine import Reply

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_one_event_a_token_even_with_empty_text(server: Server) -> None:
    server.script(Reply(list("a€b".encode())))
    body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        events = await server.events(path, **prompt, **body)
        assert [len(event["choices"][0]["token_ids"]) for event in events] == [1] * 5
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        assert len({event["id"] for event in events}) == 1


async def test_include_usage(server: Server) -> None:
    server.script(Reply(list(b"hello")))
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        events = await server.events(path, **prompt, max_tokens=5, stream_options={"include_usage": True})
        assert [event["choices"] for event in events if event["usage"] is not None] == [[]]
        assert events[-1]["usage"]["total_tokens"] > events[-1]["usage"]["completion_tokens"] > 0
        assert all(event["choices"] for event in events[:-1])
        assert "usage" not in (await server.events(path, **prompt, max_tokens=5))[-1]


@pytest.mark.parametrize("fields", [{}, {"stop": "lo"}, {"n": 2}, {"max_tokens": 3}])
async def test_streamed_usage_equals_whole_usage(server: Server, fields: dict[str, object]) -> None:
    server.script(Reply(list(b"hello world"), cached_tokens=1))
    body = {"max_tokens": 9, "temperature": 0, "seed": 1, **fields}
    for path, prompt in ((COMPLETIONS, {"prompt": "x y"}), (CHAT, {"messages": MESSAGES})):
        first = await server.answer(path, **prompt, **body)
        whole = await server.answer(path, **prompt, **body)
        events = await server.events(path, **prompt, **body, stream_options={"include_usage": True})
        assert events[-1]["usage"] == whole["usage"]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert first["usage"][count] == whole["usage"][count]


async def test_streamed_logprobs_equal_whole_logprobs(server: Server) -> None:
    server.script(Reply(list("a€b".encode())))
    body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = (await server.answer(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=3, **body))["choices"][0]
    events = await server.events(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=3, **body)
    streamed = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert len(streamed) == 5
    assert all(len(entry["top_logprobs"]) == 3 for entry in streamed)

    whole = (await server.complete("x", logprobs=2, **body))["choices"][0]["logprobs"]
    events = await server.events(COMPLETIONS, prompt="x", logprobs=2, **body)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for event in events for item in event["choices"][0]["logprobs"][name]] == whole[name]


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 20])
async def test_logprobs_end_where_a_stop_string_cuts(server: Server, tokens_per_chunk: int) -> None:
    server.needs_script("a stop string of several tokens")
    # "st" may begin the stop string twice; only the second time it does.
    server.script(Reply(list("a€ st. stop".encode()), tokens_per_chunk=tokens_per_chunk))
    for stop, text, count in (("stop", "a€ st. ", 9), ("€", "a", 1), ("zz", "a€ st. stop", 13)):
        body = {"max_tokens": 13, "stop": stop, "return_token_ids": True}
        for include in (False, True):
            wanted = count + (len(stop.encode()) if include and stop != "zz" else 0)
            expected = text + (stop if include and stop != "zz" else "")
            whole = await server.complete("x", **body, logprobs=1, include_stop_str_in_output=include)
            choice = whole["choices"][0]
            assert choice["text"] == expected
            assert len(choice["logprobs"]["tokens"]) == wanted
            assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
            events = await server.events(
                COMPLETIONS, prompt="x", **body, logprobs=1, include_stop_str_in_output=include
            )
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [item for event in events for item in event["choices"][0]["logprobs"][name]]
                assert joined == choice["logprobs"][name]
            chat = await server.events(
                CHAT, messages=MESSAGES, **body, logprobs=True, include_stop_str_in_output=include
            )
            assert sum(len(event["choices"][0]["logprobs"]["content"]) for event in chat) == wanted


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
async def test_infinite_logprobs_stay_json(server: Server, logprob: float) -> None:
    server.needs_script("a token that cannot happen")
    server.script(Reply([65, 66], chosen_logprob=logprob))
    answer = await server.complete("x", max_tokens=2, logprobs=1)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]
    answer = await server.answer(CHAT, messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=1)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    events = await server.events(CHAT, messages=MESSAGES, max_tokens=2, logprobs=True)
    assert json.dumps(events, allow_nan=False)


async def test_echo_with_logprobs(server: Server) -> None:
    server.script(Reply(list(b"XY")))
    ids = await server.tokenize("hello there", add_special_tokens=True)
    body = {"prompt": "hello there", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    choice = (await server.answer(COMPLETIONS, **body))["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("hello there")
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(logprobs[name]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    events = await server.events(COMPLETIONS, **body)
    assert text_of(events) == choice["text"]
    assert [t for e in events for t in e["choices"][0]["logprobs"]["token_logprobs"]] == logprobs["token_logprobs"]


async def test_echo_of_ids_and_of_nothing_generated(server: Server) -> None:
    ids = await server.tokenize("hello there")
    server.script(Reply([]))
    choice = (await server.complete(ids, max_tokens=0, echo=True))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello there", "length")


async def test_prompt_logprobs(server: Server) -> None:
    server.script(Reply([65]))
    choice = (await server.complete([72, 73, 74], max_tokens=1, prompt_logprobs=1))["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert [set(entry) >= {token} for entry, token in zip(choice["prompt_logprobs"][1:], ("73", "74"), strict=True)]


async def test_error_inside_a_stream(server: Server) -> None:
    server.needs_script("an engine failure")
    server.script(Reply(list(b"ab"), error=RequestFailedError("The logits of this request are not numbers.")))
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        events = await server.events(path, **prompt, max_tokens=9)
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None]
        assert events[-1]["error"]["code"] == "request_failed"
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        response = await server.post(path, **prompt, max_tokens=9)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "request_failed"


async def test_error_in_one_of_several_choices_ends_the_stream(server: Server) -> None:
    server.needs_script("an engine failure")
    failing = Reply(list(b"a"), error=RequestFailedError("no"))
    server.script(lambda ids, params: failing if ids == [66] else Reply(list(b"fine") * 100))
    events = await server.events(COMPLETIONS, prompt=[[65], [66]], max_tokens=200)
    assert events[-1]["error"]["message"] == "no"
    assert server.engine is not None
    assert server.engine.submissions[0].is_aborted


@pytest.mark.parametrize("stream", [False, True])
async def test_list_of_prompts_and_n(server: Server, stream: bool) -> None:
    server.script(lambda ids, params: Reply([*ids, 48 + params.seed % 10]))
    body = {"prompt": [[65, 65], [66, 66], [67, 67]], "n": 2, "max_tokens": 3, "seed": 4, "temperature": 1}
    if stream:
        texts = dict.fromkeys(range(6), "")
        for event in await server.events(COMPLETIONS, **body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        texts = {choice["index"]: choice["text"] for choice in (await server.answer(COMPLETIONS, **body))["choices"]}
    assert sorted(texts) == list(range(6))
    if server.engine is not None:
        assert list(texts.values()) == ["AA4", "AA5", "BB4", "BB5", "CC4", "CC5"]


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [97, 98], [[97, 98], [99, 100]]])
async def test_four_forms_of_a_prompt(server: Server, prompt: object) -> None:
    server.script(lambda ids, params: Reply([ids[-1]]))
    answer = await server.complete(prompt, max_tokens=1, return_token_ids=True)
    count = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    if server.engine is not None:
        assert [choice["text"] for choice in answer["choices"]] == ["b", "d"][:count]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97, 98], [99, 100]][:count]
        assert answer["usage"]["prompt_tokens"] == 2 * count


async def test_prompt_ids_come_with_the_first_event(server: Server) -> None:
    server.script(Reply(list(b"abc")))
    events = await server.events(COMPLETIONS, prompt=[72, 73], max_tokens=3, return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == [72, 73]
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    events = await server.events(CHAT, messages=MESSAGES, max_tokens=3, return_token_ids=True)
    assert len(events[0]["prompt_token_ids"]) > 2
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])
