"""Tools over HTTP: what the model must write, how its calls come back, streamed and not; thoughts split off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_server import Server, finish_reasons, in_process
from tests.support.scripted_engine import Reply
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, EOS, IM_END, write_byte_level

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "add", "arguments": {"a": 12}}'
NAMED = {"type": "function", "function": {"name": "add"}}


def says(text: str, *, ends: bool = True, tokens_per_chunk: int = 1) -> Reply:
    return Reply([*text.encode(), *([EOS] if ends else [])], tokens_per_chunk=tokens_per_chunk)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a one-choice stream add up to; ids checked and left out."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["type"] == "function"
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


async def both(server: Server, **fields: Any) -> tuple[dict[str, Any], str]:
    """Message and finish reason, the same streamed and whole."""
    fields = {"messages": MESSAGES, "max_tokens": 300, **fields}
    choice = (await server.answer(CHAT, **fields))["choices"][0]
    whole = choice["message"]
    ids = [call["id"] for call in whole.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    message = {
        "content": whole["content"] or "",
        "reasoning_content": whole.get("reasoning_content", ""),
        "tool_calls": [call["function"] for call in whole.get("tool_calls", [])],
    }
    assert ("tool_calls" in whole) == bool(message["tool_calls"])
    events = await server.events(CHAT, **fields)
    assert joined(events) == message
    assert finish_reasons(events) == [choice["finish_reason"]]
    assert [event["choices"][0]["delta"].get("role") for event in events][:2] == ["assistant", None]
    return message, choice["finish_reason"]


@pytest.mark.parametrize("tokens_per_chunk", [1, 7])
@pytest.mark.parametrize(
    ("choice", "reason"), [(None, "tool_calls"), ("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
async def test_finish_reason_of_calls(server: Server, choice: Any, reason: str, tokens_per_chunk: int) -> None:
    server.needs_script("a call")
    server.script(says(CALL, tokens_per_chunk=tokens_per_chunk))
    message, finish_reason = await both(server, tools=TOOLS, tool_choice=choice)
    assert message["tool_calls"] == [{"name": "add", "arguments": '{"a": 12}'}]
    assert message["content"] == ""
    assert finish_reason == reason


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_a_call_cut_off_by_max_tokens(server: Server, choice: Any) -> None:
    server.needs_script("a call")
    server.script(says(CALL))
    message, finish_reason = await both(server, tools=TOOLS, tool_choice=choice, max_tokens=len(CALL) - 3)
    assert finish_reason == "length"
    assert message["tool_calls"] == [{"name": "add", "arguments": '{"a": 1'}]


async def test_text_beside_tools_is_text(server: Server) -> None:
    server.needs_script("plain text")
    for text in ("Hello.", '{"a": 1}', "[1]", "  two  "):
        server.script(says(text))
        message, finish_reason = await both(server, tools=TOOLS)
        assert (message["content"], message["tool_calls"], finish_reason) == (text, [], "stop")


async def test_several_calls_and_only_one(server: Server) -> None:
    server.needs_script("two calls")
    server.script(says(f'[{CALL}, {{"name": "now"}}]'))
    message, _ = await both(server, tools=TOOLS)
    assert message["tool_calls"] == [{"name": "add", "arguments": '{"a": 12}'}, {"name": "now", "arguments": "{}"}]
    message, _ = await both(server, tools=TOOLS, parallel_tool_calls=False)
    assert message["tool_calls"] == [{"name": "add", "arguments": '{"a": 12}'}]


async def test_without_tools_calls_are_text(server: Server) -> None:
    server.needs_script("a call")
    server.script(says(CALL))
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message, finish_reason = await both(server, **fields)
        assert (message["content"], message["tool_calls"], finish_reason) == (CALL, [], "stop")


async def test_forced_calls_are_constrained(server: Server) -> None:
    server.needs_script("what reaches the engine")
    assert server.engine is not None
    server.script(says(CALL))
    for choice, names in (("auto", []), ("required", ["add", "now"]), (NAMED, ["add"])):
        await server.answer(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=99)
        grammar = server.engine.submissions[-1].params.grammar
        assert [name for name in ("add", "now") if f'\\"{name}\\"' in grammar] == names
    schema = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}
    await server.answer(CHAT, messages=MESSAGES, tools=TOOLS, response_format=schema, max_tokens=99)
    assert "answer" in server.engine.submissions[-1].params.grammar


@pytest.mark.parametrize("marker", ["<tool_call>", "[TOOL_CALLS]"])
async def test_strict_tools_bind_calls_that_the_model_makes_of_itself(tmp_path: Path, marker: str) -> None:
    folder = write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE + f"{{# {marker} #}}")
    add, now = TOOLS
    strict = [{**add, "function": {**add["function"], "strict": True}}, now]
    async with in_process(folder, eos_token_ids=[EOS]) as server:
        assert server.engine is not None
        server.script(says("Hello."))
        for fields, is_bound in (({"tools": strict}, True), ({"tools": strict, "tool_choice": "none"}, False)):
            answer = await server.answer(CHAT, messages=MESSAGES, max_tokens=99, **fields)
            assert answer["choices"][0]["message"]["content"] == "Hello."
            grammar = server.engine.submissions[-1].params.grammar
            assert ("FREE_TEXT" in grammar and '"required": ["a"]' in grammar) is is_bound
        refused = {**add, "function": {"name": "add", "strict": True, "parameters": {"not": {"type": "string"}}}}
        assert (await server.refusal(CHAT, messages=MESSAGES, tools=[refused]))["param"] == "tools"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools"),
    ({"tools": TOOLS * 100}, "tools"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ({"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_tools_that_cannot_be_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (await server.refusal(CHAT, messages=MESSAGES, **fields))["param"] == param


@pytest.mark.parametrize(
    ("opens", "text", "content"),
    [(False, "<think>\nhm\n</think>\n\nYes.", "Yes."), (True, "hm\n</think>Yes.", "Yes."), (False, "Yes.", "Yes.")],
)
async def test_thoughts_are_split_off(tmp_path: Path, opens: bool, text: str, content: str) -> None:
    opening = "<think>\n" if opens else ""
    template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{opening}{{% endif %}}{{# </think> #}}")
    async with in_process(write_byte_level(tmp_path, chat_template=template), eos_token_ids=[EOS]) as server:
        server.script(says(text))
        message, finish_reason = await both(server)
        assert message["content"] == content
        assert message["reasoning_content"] == ("hm" if "hm" in text else "")
        assert finish_reason == "stop"
        fields = {"messages": MESSAGES, "max_tokens": 9, "response_format": {"type": "json_object"}}
        await server.answer(CHAT, **fields)
        assert server.engine is not None
        assert "think" in server.engine.submissions[-1].params.grammar


async def test_a_marker_that_is_a_special_token_is_seen(tmp_path: Path) -> None:
    """`<|im_end|>` stands for Mistral's `[TOOL_CALLS]`: hidden from readers, not from the parser."""
    folder = write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE + "{# [TOOL_CALLS] #}")
    files = folder / "tokenizer.json"
    files.write_text(files.read_text().replace("<|im_end|>", "[TOOL_CALLS]"))
    async with in_process(folder, eos_token_ids=[EOS]) as server:
        server.script(Reply([*b"Ok", IM_END, *f"[{CALL}]".encode(), EOS]))
        message, _ = await both(server, tools=TOOLS)
        assert message["content"] == "Ok"
        assert message["tool_calls"] == [{"name": "add", "arguments": '{"a": 12}'}]
        await server.answer(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=9)
        assert server.engine is not None
        assert f"<[{IM_END}]>" in server.engine.submissions[-1].params.grammar


@pytest.mark.model
async def test_the_default_model_calls(smollm2: Server) -> None:
    messages = [{"role": "user", "content": "Add twelve to the counter."}]
    for choice in ("required", NAMED):
        fields = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "temperature": 0, "max_tokens": 200}
        message, finish_reason = await both(smollm2, **fields)
        assert finish_reason == ("tool_calls" if choice == "required" else "stop")
        for call in message["tool_calls"]:
            assert call["name"] in ("add", "now")
            assert call["name"] == "now" or isinstance(json.loads(call["arguments"])["a"], int)
        assert message["tool_calls"]
        assert message["content"] == ""
