"""A Responses request as the chat request that it amounts to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runners.api.protocol import ChatCompletionRequest, ResponsesRequest
from runners.api.validation import unsupported
from runners.errors import InvalidRequestError

LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")

PARAM_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "include",
}
"""What a chat field at fault is called here."""


class ResponsesChatRequest(ChatCompletionRequest, kw_only=True):
    """The chat request, and the request it was made of."""

    original: ResponsesRequest


def chat_request(request: ResponsesRequest) -> ResponsesChatRequest:
    """InvalidRequestError for what needs a stored state, and for items and tools that are none of ours."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(request, name):
            raise unsupported(name, f"{name} (this server keeps no responses)")
    with_logprobs = LOGPROBS in (request.include or ())
    return ResponsesChatRequest(
        original=request,
        model=request.model,
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        response_format=_response_format(request.text),
        tools=[_tool(tool) for tool in request.tools or ()] or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        stream=request.stream,
        logprobs=with_logprobs or None,
        top_logprobs=request.top_logprobs if with_logprobs else None,
        chat_template_kwargs=request.chat_template_kwargs,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        if not request.input:
            raise InvalidRequestError("Invalid value for 'input': must not be empty.", param="input")
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequestError("Missing required field: 'input' must not be empty.", param="input")
    for index, item in enumerate(request.input):
        kind = item.get("type", "message")
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise _item_error(index, f"has the unknown type {str(kind)[:40]!r}")
        read(index, item, messages)
    return messages


def _read_message(index: int, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    content = item.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") not in _TEXT_PARTS
                or not isinstance(part.get("text"), str)
            ):
                raise _item_error(index, "has a content part that is no text")
            parts.append({"type": "text", "text": part["text"]})
        content = parts
    messages.append({"role": item.get("role"), "content": content})


def _read_call(index: int, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Calls in a row are one message of the assistant, as they were when it made them."""
    call_id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(arguments, str):
        raise _item_error(index, "needs a call_id, a name and arguments that are strings")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _read_output(index: int, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str) or not isinstance(output, str):
        raise _item_error(index, "needs a call_id and an output that are strings")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _read_reasoning(index: int, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Thoughts of earlier turns are not shown to the model again."""


_READERS: dict[str, Callable[[int, dict[str, Any], list[dict[str, Any]]], None]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
}


def _item_error(index: int, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for 'input': item {index} {fault}.", param="input")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported("tools", f"A tool of type {str(tool.get('type'))[:40]!r}")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    wanted = (text or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise InvalidRequestError("Invalid value for 'text': format must be an object.", param="text")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {key: value for key, value in wanted.items() if key != "type"}}
