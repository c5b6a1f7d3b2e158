"""Tools in the messages of models whose template knows none."""

from __future__ import annotations

from runners.text.template_traits import TemplateTraits
from runners.text.told_tools import tell_tools

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
NOTHING = TemplateTraits()


def test_tools_join_the_system_message() -> None:
    user = {"role": "user", "content": "hi"}
    (system, kept) = tell_tools([user], TOOLS, NOTHING)
    assert (system["role"], kept) == ("system", user)
    assert '{"name": "add", "parameters": {"type": "object"}}' in system["content"]
    first = tell_tools([{"role": "system", "content": "Be kind."}, user], TOOLS, NOTHING)[0]["content"]
    assert first.startswith("Be kind.\n\n")
    parts = tell_tools([{"role": "system", "content": [{"type": "text", "text": "Be kind."}]}], TOOLS, NOTHING)
    assert [part["type"] for part in parts[0]["content"]] == ["text", "text"]


def test_calls_and_results_become_text() -> None:
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "3"}]},
    ]
    told = tell_tools(messages, [], NOTHING)
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert told[1]["content"] == '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]'
    assert told[2]["content"] == "Result of add: 2\nResult of the function: 3"
    assert set(told[2]) == {"role", "content"}


def test_what_a_template_shows_by_itself_stays() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert tell_tools(messages, TOOLS, TemplateTraits(shows_tools=True, shows_calls=True)) == messages
    assert tell_tools(messages, [], TemplateTraits(shows_calls=True)) == messages
