"""OpenAI messages in the form that the chat templates of models were written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from runners.errors import InvalidRequestError
from runners.text.template_traits import TemplateTraits

Message: TypeAlias = dict[str, Any]

_TEXT_PARTS = frozenset(["text", "input_text", "output_text"])
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ToolArguments(dict[str, Any]):
    """Arguments of a tool call: a mapping to templates that walk it, the client's own JSON text to those that print it.

    OpenAI sends a string; most templates expect an object, some add the string to their text.
    """

    def __init__(self, text: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text


def prepare_messages(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> list[Message]:
    """Copies of `messages` with content, tool calls and reasoning as a template with `traits` reads them.

    Keys with null are left out, as templates ask whether a key is there. Raises InvalidRequestError for a content part
    that is not text.
    """
    prepared = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError("a message must be an object", param=f"messages[{index}]")
        copy = {key: value for key, value in message.items() if value is not None}
        copy["content"] = _content(message.get("content"), traits, f"messages[{index}].content")
        if isinstance(calls := copy.get("tool_calls"), Sequence) and not isinstance(calls, str):
            copy["tool_calls"] = [_tool_call(call) for call in calls]
        reasoning = next((copy[field] for field in _REASONING_FIELDS if field in copy), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        prepared.append(copy)
    return prepared


def _content(content: Any, traits: TemplateTraits, param: str) -> str | list[dict[str, Any]] | None:
    if content is None:
        return None if traits.tests_for_none else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if traits.needs_parts else content
    if not isinstance(content, Sequence):
        raise InvalidRequestError("content must be a string or a list of parts", param=param)
    texts = [_part_text(part, f"{param}[{index}]") for index, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if traits.loops_over_parts else "\n".join(texts)


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequestError(f"content parts of type {str(kind)[:64]!r} are not supported, only text", param=param)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError("a text part needs a string in text", param=f"{param}.text")
    return text


def _tool_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return call
    if not isinstance(values, dict):
        return call
    return {**call, "function": {**function, "arguments": ToolArguments(arguments, values)}}
