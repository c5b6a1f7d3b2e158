"""`/v1/responses`: requests become chats, answers become items, the event stream builds the same response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from runners.errors import RequestFailedError
from tests.support.http_server import Server, in_process
from tests.support.scripted_engine import Reply
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, EOS, write_byte_level

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '{"name": "add", "arguments": {"a": 12}}'
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def says(text: str, *, tokens_per_chunk: int = 1) -> Reply:
    return Reply([*text.encode(), EOS], tokens_per_chunk=tokens_per_chunk)


async def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each valid to OpenAI's own models, numbered in order."""
    response = await server.post(RESPONSES, stream=True, **fields)
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        _EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one call to the next."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "output": items}


async def both(server: Server, **fields: Any) -> dict[str, Any]:
    """The response, the same streamed and whole; deltas add up to what the done events say."""
    whole = await server.answer(RESPONSES, **fields)
    Response.model_validate(whole)
    events = await streamed(server, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert plain(events[-1]["response"]) == plain(whole)
    final = events[-1]["response"]
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert (own[-1]["type"], own[-1]["item"]) == ("response.output_item.done", item)
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        expected = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas == expected
    return whole


@pytest.mark.parametrize("tokens_per_chunk", [1, 5])
async def test_text(server: Server, tokens_per_chunk: int) -> None:
    server.script(says("Héllo there", tokens_per_chunk=tokens_per_chunk))
    whole = await both(server, input="Hi", instructions="Be kind.", max_output_tokens=40, temperature=0)
    (item,) = whole["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    if server.engine is not None:
        assert item["content"][0]["text"] == "Héllo there"
        assert whole["usage"]["output_tokens"] == len("Héllo there".encode()) + 1
        assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
        prompt = server.engine.submissions[-1].prompt_ids
        assert bytes(i for i in prompt if i < 256).decode() == "system\nBe kind.\nuser\nHi\nassistant\n"


async def test_cut_off_by_its_limit(server: Server) -> None:
    server.script(says("Hello there"))
    whole = await both(server, input="Hi", max_output_tokens=4, temperature=0)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert whole["usage"]["output_tokens"] == 4


async def test_nothing_generated_is_an_empty_message(server: Server) -> None:
    server.needs_script("an empty reply")
    server.script(Reply([EOS]))
    assert (await both(server, input="Hi"))["output"][0]["content"][0]["text"] == ""


async def test_calls(server: Server) -> None:
    server.needs_script("calls")
    server.script(says(f"[{CALL}, {CALL}]"))
    whole = await both(server, input="Hi", tools=[TOOL])
    assert [(item["type"], item["name"], item["arguments"]) for item in whole["output"]] == [
        ("function_call", "add", '{"a": 12}')
    ] * 2
    assert len({item["call_id"] for item in whole["output"]}) == 2
    assert server.engine is not None
    await server.answer(RESPONSES, input="Hi", tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert "add" in server.engine.submissions[-1].params.grammar


async def test_thoughts(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE + "{# </think> #}")
    async with in_process(folder, eos_token_ids=[EOS]) as server:
        server.script(says("<think>\nhm\n</think>\n\nYes."))
        whole = await both(server, input="Hi")
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
        assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


async def test_a_conversation_with_calls_and_results(server: Server) -> None:
    server.script(says("It is 12."))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 12}'},
        {"type": "function_call_output", "call_id": "c", "output": "12"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12"}]},
        {"role": "user", "content": "Sure?"},
    ]
    await both(server, input=items, tools=[TOOL], max_output_tokens=20, temperature=0)
    if server.engine is not None:
        prompt = bytes(i for i in server.engine.submissions[-1].prompt_ids if i < 256).decode()
        assert '<call>add {"a": 12}\ntool\n12\nassistant\n12\nuser\nSure?' in prompt


async def test_a_format_constrains_and_logprobs_come(server: Server) -> None:
    server.script(says('{"a": 1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await both(server, input="Hi", text=text, temperature=0, max_output_tokens=30, **include)
    part = whole["output"][0]["content"][0]
    assert len(part["logprobs"]) == whole["usage"]["output_tokens"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    if server.engine is not None:
        assert "integer" in server.engine.submissions[-1].params.grammar


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "image", "url": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"content": "no role"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": 10**9}, "max_output_tokens"),
    ({"input": "x", "temperature": 3}, "temperature"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
    ({"input": "x", "text": {"format": 5}}, "text"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (await server.refusal(RESPONSES, **fields))["param"] == param


async def test_an_error_is_the_last_event(server: Server) -> None:
    server.needs_script("a failure")
    server.script(Reply(list(b"ab"), error=RequestFailedError("no")))
    events = await streamed(server, input="Hi")
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"message": "no", "type": "server_error", "param": None, "code": "request_failed"}
    assert (await server.post(RESPONSES, input="Hi")).status_code == 500


@pytest.mark.model
async def test_the_default_model(smollm2: Server) -> None:
    whole = await both(smollm2, input="Say hello.", temperature=0, max_output_tokens=30)
    assert whole["output"][0]["content"][0]["text"]
    whole = await both(smollm2, input="Add 5.", tools=[TOOL], tool_choice="required", temperature=0)
    assert {item["type"] for item in whole["output"]} == {"function_call"}
