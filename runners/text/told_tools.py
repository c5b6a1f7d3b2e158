"""Tools for models whose chat template knows none: told in the system message, calls and results written as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runners.text.template_traits import TemplateTraits

_INSTRUCTION = (
    "You may call these functions:\n{functions}\n"
    'To call one, answer with nothing but JSON: {{"name": function name, "arguments": object}}. '
    "To call several, answer with a JSON list of such objects. Otherwise answer in plain text."
)


def tell_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], traits: TemplateTraits
) -> list[Mapping[str, Any]]:
    """`messages` as a template with `traits` can show them; those that it shows by itself stay as they are."""
    told = list(messages) if traits.shows_calls or traits.shows_tools else _told_calls(messages)
    return _with_instruction(told, tools) if tools and not traits.shows_tools else told


def _told_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Calls as text of the assistant, results as messages of the user, since templates refuse roles they do not know.

    Results in a row become one message.
    """
    told: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        if message.get("role") == "tool":
            result = _result(message, names)
            if told and told[-1].get("is_result"):
                told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{result}"}
            else:
                told.append({"role": "user", "content": result, "is_result": True})
        elif calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
            told.append({"role": "assistant", "content": _calls(message.get("content"), calls)})
        else:
            told.append(message)
    return [{key: value for key, value in message.items() if key != "is_result"} for message in told]


def _with_instruction(messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(functions=functions)
    first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": instruction}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        return [{**first, "content": [*content, {"type": "text", "text": instruction}]}, *messages[1:]]
    return [{**first, "content": f"{content}\n\n{instruction}" if content else instruction}, *messages[1:]]


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    name = names.get(str(message.get("tool_call_id")), "the function")
    return f"Result of {name}: {content}"


def _calls(content: Any, calls: Sequence[Mapping[str, Any]]) -> str:
    """Text in front of the calls, if any, and the calls as the model was told to write them."""
    written = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        written.append(f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments or "{}"}}}')
    text = written[0] if len(written) == 1 else f"[{', '.join(written)}]"
    return f"{content}\n{text}" if isinstance(content, str) and content else text
