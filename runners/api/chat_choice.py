"""A chat choice whose text is parsed: reasoning, content and tool calls apart."""

from __future__ import annotations

from typing import Any

import msgspec

from runners.api.chat_parsing import Parsing
from runners.api.generation import Choice, Delta, TextOptions
from runners.api.interfaces import OutputChunk, RequestStream
from runners.api.logprobs import TokenTexts, chat_logprobs
from runners.api.prompts import Prompt
from runners.api.tools import new_call_id
from runners.request import FinishReason
from runners.text.message_parser import MessageDelta
from runners.text.tool_formats import ToolFormat

_encode = msgspec.json.Encoder().encode


class ChatChoice(Choice):
    """One choice and its parser."""

    __slots__ = ("_parser", "_parsing")

    def __init__(
        self, index: int, prompt: Prompt, stream: RequestStream, options: TextOptions, parsing: Parsing
    ) -> None:
        super().__init__(index, prompt, stream, options)
        self._parsing = parsing
        self._parser = parsing.new_parser()

    @property
    def tool_format(self) -> ToolFormat:
        return self._parsing.tool_format

    def _push(self, chunk: OutputChunk) -> Delta:
        delta = super()._push(chunk)
        delta.message = self._parser.push(delta.text)
        if self.finish_reason is not None:
            delta.message.add(self._parser.finish())
            if self.finish_reason is FinishReason.STOP and self._parsing.calls_end_turn and self._parser.has_calls:
                self.finish_reason = FinishReason.TOOL_CALLS
        return delta


def message_object(choice: Choice, result: Delta) -> dict[str, Any]:
    """The assistant's message of a whole answer."""
    whole: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
    message = result.message
    if message is None or not isinstance(choice, ChatChoice):
        return whole
    whole["content"] = None if message.calls and not message.content else message.content
    if message.reasoning:
        whole["reasoning_content"] = message.reasoning
    if message.calls:
        whole["tool_calls"] = [
            {
                "id": new_call_id(choice.tool_format),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return whole


class MessageEvents:
    """Writes the events of a parsed choice; the same surface as `sse.EventTemplate`.

    `first_head` and `head` end where the delta object begins.
    """

    def __init__(
        self,
        first_head: bytes,
        head: bytes,
        tool_format: ToolFormat,
        *,
        token_texts: TokenTexts | None,
        with_token_ids: bool,
        with_usage: bool,
    ) -> None:
        self._head, self._next_head = first_head, head
        self._tool_format = tool_format
        self._token_texts = token_texts
        self._with_token_ids = with_token_ids
        self._end = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._is_first = True

    def event(self, delta: Delta, finish_reason: str | None) -> bytes:
        head, self._head = self._head, self._next_head
        fields = self._fields(delta.message or MessageDelta())
        if self._is_first:
            fields = {"role": "assistant", **fields}
            self._is_first = False
        parts = [head, _encode(fields)]
        if self._with_token_ids:
            parts += (b',"token_ids":', _encode(delta.token_ids))
        logprobs = None if self._token_texts is None else chat_logprobs(delta.logprobs or (), self._token_texts)
        parts += (b',"logprobs":', _encode(logprobs), b',"finish_reason":', _encode(finish_reason), self._end)
        return b"".join(parts)

    def _fields(self, message: MessageDelta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if message.content:
            fields["content"] = message.content
        if message.reasoning:
            fields["reasoning_content"] = message.reasoning
        if message.calls:
            calls: list[dict[str, Any]] = []
            for call in message.calls:
                if call.name is None:
                    calls.append({"index": call.index, "function": {"arguments": call.arguments}})
                else:
                    function = {"name": call.name, "arguments": call.arguments}
                    call_id = new_call_id(self._tool_format)
                    calls.append({"index": call.index, "id": call_id, "type": "function", "function": function})
            fields["tool_calls"] = calls
        return fields
